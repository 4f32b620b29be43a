"""Python's own functions on values that are only partly known (§9.13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_lite.tensor_parallel.reading.values import (
    UNKNOWN,
    Known,
    Value,
    attribute_of,
    items_of,
    union,
)

BUILTINS = (
    *(getattr, hasattr, enumerate, zip, list, tuple, reversed, len, range, isinstance),
    *(int, float, bool, str, max, min, abs, sum, type),
)


def of_builtin(function: Any, args: Sequence[Value]) -> Value:
    """What one of `BUILTINS` returns."""
    first = args[0] if args else UNKNOWN
    if function in (getattr, hasattr) and isinstance(first, Known) and len(args) > 1:
        name = args[1].object if isinstance(args[1], Known) else ""
        if function is hasattr:
            return Known(hasattr(first.object, name)) if name else UNKNOWN
        if len(args) > 2 and not hasattr(first.object, name):
            return args[2]
        return attribute_of(first, name)
    lists = [items_of(arg) for arg in args]
    if function is enumerate and lists and lists[0] is not None:
        return tuple((Known(i), item) for i, item in enumerate(lists[0]))
    if function is zip and lists and any(one is not None for one in lists):
        length = min(len(one) for one in lists if one is not None)
        columns = [
            [union((arg,))] * length if one is None else one[:length]
            for arg, one in zip(args, lists, strict=True)
        ]
        return tuple(zip(*columns, strict=True))
    if function in (list, tuple, reversed) and lists and lists[0] is not None:
        return tuple(lists[0][::-1] if function is reversed else lists[0])
    if function is len and lists and lists[0] is not None:
        return Known(len(lists[0]))
    if function is range and all(isinstance(a, Known) and isinstance(a.object, int) for a in args):
        return Known(range(*(a.object for a in args)))
    return UNKNOWN if function in (len, isinstance, range, hasattr) else union(args)
