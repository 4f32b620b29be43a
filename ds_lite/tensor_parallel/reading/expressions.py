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
    size_of,
    union,
)


class Caller(Protocol):
    """Who knows what calls and meetings of values mean."""

    def call(self, what: Value, args: Sequence[Value], named: Mapping[str, Value], text: str) -> Value: ...

    def met(self, values: Sequence[Value]) -> Flowing: ...

    def operation(self, name: str, args: Sequence[Value], named: Mapping[str, Value]) -> Flowing: ...

    def index(self, x: Flowing, index: Sequence[tuple[str, Value]]) -> Flowing: ...

    def computed(self, values: Sequence[Value]) -> Flowing: ...

    def sized(self, values: Sequence[Value]) -> None: ...

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
            if _is_size(value):
                items = [UNKNOWN] * (len(target.elts) - 1) + [value]  # columns are the last dimension
            elif items is None or len(items) != len(target.elts):
                items = [union((value,))] * len(target.elts)
            for part, item in zip(target.elts, items, strict=True):
                self._assign(part, item)
        elif isinstance(target, ast.Subscript):  # x[...] = value
            base = self.value(target.value)
            index = self._indices(base, target.slice)
            if isinstance(base, Flowing) and self.caller.index(base, index) != base:
                self.caller.give_up([base, value], "some of its columns are written by themselves")
            if isinstance(target.value, ast.Name):
                self.variables[target.value.id] = self.caller.met([base, value])
        elif isinstance(target, ast.Attribute):
            self.caller.give_up([value], "it is kept on an object, where it may be used by anybody")

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
            if _is_size(base):
                return base if self._is_last(node.slice) else UNKNOWN
            if isinstance(base, Flowing):
                return self.caller.index(base, self._indices(base, node.slice))
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

    def _is_last(self, node: ast.expr) -> bool:
        """Whether an index into a shape may be that of the columns."""
        place = node.upper if isinstance(node, ast.Slice) else node
        if place is None:
            return True
        value = self.value(place)
        number = value.object if isinstance(value, Known) else None
        return number not in (0, 1, -2, -3) and not (isinstance(node, ast.Slice) and number == -1)

    def _indices(self, base: Value, node: ast.expr) -> list[tuple[str, Value]]:
        """The parts of an index; what it takes of a head's width is no size that a cut changes."""
        parts = [self._index(part) for part in _parts(node)]
        is_of_last = len(parts) > 3 or any(kind == "..." for kind, _ in parts[:-1])
        is_of_width = isinstance(base, Flowing) and base.has_heads and is_of_last
        for part in _parts(node)[: -1 if is_of_width else None]:
            if isinstance(part, ast.Slice):
                self.caller.sized([self.value(end) for end in (part.lower, part.upper) if end is not None])
        return parts

    def _index(self, node: ast.expr) -> tuple[str, Value]:
        """One part of an index: all of a dimension, part of it, every so many, one, a new one, the rest."""
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
            for condition in node.generators[0].ifs:
                self._truth(condition)
            results.append(self.value(node.elt))
        return union(results) if items is None else tuple(results)

    def _combined(self, op: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
            return left + right
        if isinstance(op, ast.Add) and isinstance(right, tuple) and left == UNKNOWN:
            return (UNKNOWN, *right)  # x.size()[:-1] + (heads, width)
        if isinstance(op, ast.MatMult):
            return self.caller.operation("matmul", [left, right], {})
        known = [one for one in (left, right) if isinstance(one, Known)]
        numbers = [one.object for one in known if type(one.object) is int]
        if len(numbers) == 2 and type(op) in _ARITHMETIC and (numbers[1] or type(op) is not ast.FloorDiv):
            made_of = known[0].made_of | known[1].made_of
            return Known(_ARITHMETIC[type(op)](*numbers), made_of=made_of)
        sizes = [one for one in (left, right) if isinstance(one, Known) or _is_size(one) or one == UNKNOWN]
        if isinstance(op, ast.FloorDiv) and _is_size(left) and known:
            self.caller.computed(known)  # the width of the stream by the heads: not of this rank's
        if len(sizes) == 2 and type(op) in _ARITHMETIC:
            return union((left, right))  # of sizes: a size
        return self.caller.computed([left, right])

    def _call(self, node: ast.Call) -> Value:
        args = list(self._listed(node.args))
        named = {word.arg or f"**{i}": self.value(word.value) for i, word in enumerate(node.keywords)}
        if any(isinstance(arg, ast.Starred) and items_of(self.value(arg.value)) is None for arg in node.args):
            named["*"] = UNKNOWN  # how many there are is not known
        text = ast.unparse(node.func)
        if text == "super" and not args and self.owner is not None and "__class__" in self.outside:
            return Known(super(self.outside["__class__"], self.owner.object), owner=self.owner)
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if isinstance(base, (Flowing, tuple)):
                return self._method(node.func, base, args, named, node.args)
        what = self.value(node.func)
        if isinstance(what, Known) and what.object is isinstance and args and isinstance(args[0], Known):
            if isinstance(args[0].object, nn.Module):  # another class stands there after the cut
                self.caller.met([Flowing(weights=frozenset([f"{args[0].name}.weight"]))])
        if isinstance(what, Known) and what.object in BUILTINS:
            return of_builtin(what.object, args)
        return self.caller.call(what, args, named, text)

    def _method(
        self,
        node: ast.Attribute,
        base: Value,
        args: Sequence[Value],
        named: Mapping[str, Value],
        node_args: Sequence[ast.expr],
    ) -> Value:
        """A tensor's method: what it is made of, together; one that ends in _ changes the tensor."""
        if node.attr in WITHOUT_HISTORY:
            is_whole = not node_args or self._is_last(node_args[0])
            return size_of(base, node.attr) if is_whole else UNKNOWN
        if isinstance(base, tuple) and isinstance(node.value, ast.Name) and node.attr in ("append", "extend"):
            more = args if node.attr == "append" else items_of(args[0]) if args else ()
            self.variables[node.value.id] = (*base, *(more if more is not None else args))
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
        self.caller.give_up([value], "a condition depends on it, and may hold on some ranks only")
        return None

    def _comparison(self, node: ast.Compare) -> bool | None:
        left, right = self.value(node.left), self.value(node.comparators[0])
        if not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            self.caller.give_up([left, right], "a condition depends on it, and may hold on some ranks only")
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


def _is_size(value: Value) -> bool:
    return isinstance(value, Flowing) and bool(value.size_of) and not value.open


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
