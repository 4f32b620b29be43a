"""A function's source text as a tree, and its arguments by name (§9.13)."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ds_lite.tensor_parallel.reading.values import UNKNOWN, Known, Value, union


def bound(
    parameters: Mapping[str, inspect.Parameter], positional: Sequence[Value], named: Mapping[str, Value]
) -> dict[str, Value]:
    """Arguments by the name of their parameter; defaults for what is not given, if all of that is known."""
    values: dict[str, Value] = {}
    left, more = list(positional), dict(named)
    is_spread = any(name.startswith("*") for name in named)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            values[name], left = tuple(left), []
        elif parameter.kind is parameter.VAR_KEYWORD:
            values[name] = union(more.values())
        elif left and parameter.kind is not parameter.KEYWORD_ONLY:
            values[name] = left.pop(0)
        elif name in more:
            values[name] = more.pop(name)
        else:
            is_known = parameter.default is not parameter.empty and not is_spread
            values[name] = Known(parameter.default) if is_known else UNKNOWN
    return values


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without the decorators of libraries, which keep what it computes; others are read."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "site-packages" not in code.co_filename:
            return function
        function = inner
    return function


@cache
def tree_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None if there is no source text to read, as for a lambda."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def is_worth_reading(function: Callable[..., Any]) -> bool:
    """A helper of the model's own; what torch does is known by its name."""
    return function.__module__ is not None and not function.__module__.startswith(("torch", "einops"))
