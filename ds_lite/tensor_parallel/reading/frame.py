"""One function's code followed from statement to statement, on values that are only partly known (§9.13).

Both ways of a condition are followed unless its truth is known, as it is for settings of the model; a loop
over known items is followed item by item, any other one twice.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ds_lite.tensor_parallel.reading.expressions import Expressions
from ds_lite.tensor_parallel.reading.values import UNKNOWN, Known, Value, either, items_of, union

_WITHOUT_EFFECT = (
    *(ast.Pass, ast.Assert, ast.Delete, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.AnnAssign),
)


class Frame(Expressions):
    """One call: its variables, and what it has returned so far."""

    returned: Value | None = None

    def body(self, statements: Sequence[ast.stmt]) -> bool:
        """Follow statements in turn; whether the code goes on behind them."""
        return all(self._statement(statement) for statement in statements)

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Return):
            value = Known(None) if node.value is None else self.value(node.value)
            self.returned = value if self.returned is None else either(self.returned, value)
            return False
        if isinstance(node, (ast.Raise, ast.Continue, ast.Break)):
            return not isinstance(node, ast.Raise)
        if isinstance(node, ast.If):
            return self._branches(node)
        if isinstance(node, (ast.For, ast.While)):
            self._loop(node)
        elif isinstance(node, ast.With):
            for item in node.items:
                self.value(item.context_expr)
            return self.body(node.body)
        elif isinstance(node, ast.Try):
            return self._attempt(node)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            self._assign(
                node.target, self._combined(node.op, self.value(node.target), self.value(node.value))
            )
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.variables[node.name] = UNKNOWN  # what it does is not known where it is called
        elif not isinstance(node, _WITHOUT_EFFECT):
            self.caller.give_up(
                list(self.variables.values()), f"{type(node).__name__} is code that is not followed"
            )
        return True

    def _attempt(self, node: ast.Try) -> bool:
        """All of it may run: the body, then what follows it, and each handler."""
        before = {**self.variables}
        goes_on = self.body(node.body) and self.body(node.orelse)
        ways = [self.variables] if goes_on else []
        for handler in node.handlers:
            self.variables = {**before}
            if self.body(handler.body):
                ways.append(self.variables)
        self.variables = ways[0] if ways else before
        for other in ways[1:]:
            self._join(other)
        return self.body(node.finalbody) and bool(ways)

    def _branches(self, node: ast.If) -> bool:
        decided = self._truth(node.test)
        if decided is not None:
            return self.body(node.body if decided else node.orelse)
        before = self.variables
        self.variables = {**before}
        goes_on, after = self.body(node.body), self.variables
        self.variables = {**before}
        goes_on_otherwise = self.body(node.orelse)
        if goes_on and goes_on_otherwise:
            self._join(after)
        elif goes_on:
            self.variables = after
        return goes_on or goes_on_otherwise

    def _join(self, other: Mapping[str, Value]) -> None:
        """The variables after two ways through the code."""
        here = self.variables
        self.variables = {
            name: either(other[name], here[name])
            if name in other and name in here
            else other.get(name, here.get(name))
            for name in {**other, **here}
        }

    def _loop(self, node: ast.For | ast.While) -> None:
        if isinstance(node, ast.While):
            for _ in range(2):
                self._truth(node.test)
                self.body(node.body)
            self.body(node.orelse)
            return
        over = self.value(node.iter)
        items = items_of(over)
        for item in [union((over,))] * 2 if items is None else items:
            self._assign(node.target, item)
            self.body(node.body)
        self.body(node.orelse)
