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
    """Arguments by the name of their parameter; defaults where nothing is given."""
    values: dict[str, Value] = {}
    left, more = list(positional), dict(named)
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
            values[name] = UNKNOWN if parameter.default is parameter.empty else Known(parameter.default)
    return values


@cache
def tree_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None if there is no source text to read, as for a lambda."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def is_worth_reading(function: Callable[..., Any]) -> bool:
    """A helper of the model's own; what torch does is known by its name."""
    return function.__module__ is not None and not function.__module__.startswith(("torch", "einops"))
