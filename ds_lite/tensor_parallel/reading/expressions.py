"""The expressions of one function, on values that are only partly known (§9.13)."""

from __future__ import annotations

import ast
import builtins
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import CellType
from typing import Any, Protocol

from torch import nn

from ds_lite.tensor_parallel.reading.builtin import BUILTINS, of_builtin
from ds_lite.tensor_parallel.reading.values import (
    UNKNOWN,
    WITHOUT_HISTORY,
    Flowing,
    Known,
    Value,
    attribute_of,
    either,
    flows,
    item_of,
    items_of,
    union,
)


class Caller(Protocol):
    """Who knows what calls and meetings of values mean."""

    def call(self, what: Value, args: Sequence[Value], named: Mapping[str, Value], text: str) -> Value: ...

    def met(self, values: Sequence[Value]) -> Flowing: ...

    def operation(self, name: str, args: Sequence[Value], named: Mapping[str, Value]) -> Flowing: ...

    def index(self, x: Flowing, index: Sequence[tuple[str, Value]]) -> Flowing: ...

    def give_up(self, values: Sequence[Value], why: str) -> None: ...


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class Expressions:
    """The variables of one call, and what expressions of them are."""

    def __init__(
        self, caller: Caller, variables: dict[str, Value], function: Callable[..., Any], owner: Known | None
    ) -> None:
        self.caller, self.variables, self.owner = caller, variables, owner
        self.outside = ChainMap(_closed_over(function), function.__globals__)

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = items_of(value)
            if items is None or len(items) != len(target.elts):
                items = [union((value,))] * len(target.elts)
            for part, item in zip(target.elts, items, strict=True):
                self._assign(part, item)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):  # x[...] = value
            self.variables[target.value.id] = self.caller.met([self.value(target.value), value])

    def value(self, node: ast.expr) -> Value:
        """What an expression is."""
        if isinstance(node, ast.Constant):
            return Known(node.value)
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Attribute):
            return attribute_of(self.value(node.value), node.attr)
        if isinstance(node, (ast.Tuple, ast.List)):
            return self._listed(node.elts)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            base = self.value(node.value)
            if isinstance(base, Flowing):
                return self.caller.index(base, [self._index(part) for part in _parts(node.slice)])
            return item_of(base, self.value(node.slice))
        if isinstance(node, ast.BinOp):
            return self._combined(node.op, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.IfExp):
            decided = self._truth(node.test)
            if decided is None:
                return either(self.value(node.body), self.value(node.orelse))
            return self.value(node.body if decided else node.orelse)
        if isinstance(node, (ast.Compare, ast.BoolOp)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            decided = self._truth(node)
            if decided is None and isinstance(node, ast.BoolOp):
                return union(self.value(part) for part in node.values)
            return UNKNOWN if decided is None else Known(decided)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand)
            is_number = isinstance(value, Known) and isinstance(value.object, (int, float))
            return Known(-value.object) if is_number and isinstance(node.op, ast.USub) else union((value,))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self._comprehension(node)
        if isinstance(node, ast.NamedExpr):
            value = self.value(node.value)
            self._assign(node.target, value)
            return value
        return union(self.value(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))

    def _index(self, node: ast.expr) -> tuple[str, Value]:
        """One part of an index: all of a dimension, part of it, every so many, one, a new one, or the "
        "rest."""
        if isinstance(node, ast.Slice):
            if node.step is not None:
                return "stepped", UNKNOWN
            return ("all" if node.lower is None and node.upper is None else "part"), UNKNOWN
        value = self.value(node)
        if isinstance(value, Known) and value.object is None:
            return "new", value
        if isinstance(value, Known) and value.object is Ellipsis:
            return "...", value
        return "one", value

    def _variable(self, name: str) -> Value:
        if name in self.variables:
            return self.variables[name]
        if name in self.outside:
            return Known(self.outside[name])
        return Known(getattr(builtins, name)) if hasattr(builtins, name) else UNKNOWN

    def _listed(self, nodes: Sequence[ast.expr]) -> tuple[Value, ...]:
        values: list[Value] = []
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node)
            items = items_of(value) if isinstance(node, ast.Starred) else None
            values += [value] if items is None else items
        return tuple(values)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        over = self.value(node.generators[0].iter)
        items = items_of(over)
        results = []
        for item in [union((over,))] if items is None else items:
            self._assign(node.generators[0].target, item)
            results.append(self.value(node.elt))
        return union(results) if items is None else tuple(results)

    def _combined(self, op: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
            return left + right
        if isinstance(op, ast.Add) and isinstance(right, tuple) and left == UNKNOWN:
            return (UNKNOWN, *right)  # x.size()[:-1] + (heads, width)
        if isinstance(op, ast.MatMult):
            return self.caller.operation("matmul", [left, right], {})
        numbers = [one.object for one in (left, right) if isinstance(one, Known) and type(one.object) is int]
        if len(numbers) == 2 and type(op) in _ARITHMETIC and (numbers[1] or type(op) is not ast.FloorDiv):
            return Known(_ARITHMETIC[type(op)](*numbers))
        return self.caller.met([left, right])

    def _call(self, node: ast.Call) -> Value:
        args = list(self._listed(node.args))
        named = {word.arg or f"**{i}": self.value(word.value) for i, word in enumerate(node.keywords)}
        text = ast.unparse(node.func)
        if text == "super" and not args and self.owner is not None and "__class__" in self.outside:
            return Known(super(self.outside["__class__"], self.owner.object), owner=self.owner)
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if isinstance(base, (Flowing, tuple)):
                return self._method(node.func, base, args, named)
        what = self.value(node.func)
        if isinstance(what, Known) and what.object in BUILTINS:
            return of_builtin(what.object, args)
        return self.caller.call(what, args, named, text)

    def _method(
        self, node: ast.Attribute, base: Value, args: Sequence[Value], named: Mapping[str, Value]
    ) -> Value:
        """A tensor's method: what it is made of, together; one that ends in _ changes the tensor."""
        if node.attr in WITHOUT_HISTORY:
            return UNKNOWN
        result = self.caller.operation(node.attr.rstrip("_"), [base, *args], named)
        if node.attr.endswith("_") and isinstance(node.value, ast.Name):
            self.variables[node.value.id] = result
        return result

    # ------------------------------------------------------------------------------------------ conditions

    def _truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds; None if that is not known."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(part) for part in node.values]
            decisive = isinstance(node.op, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        value = self.value(node)
        if isinstance(value, Known):
            has_length = isinstance(value.object, (list, dict, set, nn.ModuleList, nn.ModuleDict))
            return bool(value.object) if value.is_constant or has_length else True
        return None

    def _comparison(self, node: ast.Compare) -> bool | None:
        left, right = self.value(node.left), self.value(node.comparators[0])
        if len(node.ops) > 1 or not isinstance(right, Known):
            return None
        if isinstance(left, Known):
            try:
                return bool(_COMPARE[type(node.ops[0])](left.object, right.object))
            except TypeError:
                return None
        is_there = isinstance(left, tuple) or any(one.open or one.is_stream for one in flows([left]))
        if right.object is None and is_there:  # a tensor with a history is not None
            return (
                isinstance(node.ops[0], ast.IsNot) if isinstance(node.ops[0], (ast.Is, ast.IsNot)) else None
            )
        return None


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses, and `__class__` if it calls super()."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
