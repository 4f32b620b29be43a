"""What is known of a value while code is read and not run: the values of `block.py` (§9.13).

A value is one of: `Flowing`, some tensor, of which only its history matters; `Known`, an object that the
reader can look at, such as a module or a setting; a tuple of values; `OneOf`, some child of a list of
modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Flowing:
    """A tensor, or anything that the reader does not look into.

    `open` names the linear layers whose cut output it is made of. `is_stream` says that it comes from the
    block's input and is whole. `attended`: a softmax or an attention made it. `has_heads`: its columns have
    been folded into heads. `is_moved`: its columns may not be the last dimension. `is_picked`: they have been
    taken apart, as those of a fused weight. `was_folded`: into heads, at some time. `weights` are parameters
    that the code uses by itself, beside those of layers; `arguments` those of the block that it was made of.
    `size_of` says that it is no tensor but a size, of what these layers made.
    """

    open: frozenset[str] = frozenset()
    is_stream: bool = False
    attended: bool = False
    has_heads: bool = False
    is_moved: bool = False
    is_picked: bool = False
    was_folded: bool = False
    weights: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    size_of: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Known:
    """An object that can be looked at; `name` is its path from the block if it is a module in it.

    A method is a plain function with the module it is bound to in `owner`; so is what `super()` gives. A
    whole number knows the attributes it was made of in `made_of`, as paths from the block.
    """

    object: Any
    name: str = ""
    owner: Known | None = None
    made_of: frozenset[str] = frozenset()

    @property
    def is_constant(self) -> bool:
        return self.object is None or isinstance(self.object, (bool, int, float, str))


@dataclass(frozen=True, eq=False)
class OneOf:
    """Some item of a list of modules: what it does may be done by each."""

    choices: tuple[Any, ...]


Value = Any  # Flowing | Known | OneOf | tuple[Value, ...]

UNKNOWN, STREAM = Flowing(), Flowing(is_stream=True)


def flows(values: Iterable[Value]) -> list[Flowing]:
    """The tensors among values, out of tuples."""
    found: list[Flowing] = []
    for value in values:
        if isinstance(value, Flowing):
            found.append(value)
        elif isinstance(value, tuple):
            found += flows(value)
    return found


def union(values: Iterable[Value]) -> Flowing:
    """All histories in one; open before stream."""
    parts = flows(values)

    def of_all(sets: Iterable[frozenset[str]]) -> frozenset[str]:
        return frozenset[str]().union(*sets)

    opened = of_all(part.open for part in parts)
    return Flowing(
        opened,
        is_stream=not opened and any(part.is_stream for part in parts),
        attended=any(part.attended for part in parts),
        has_heads=any(part.has_heads for part in parts),
        is_moved=any(part.is_moved for part in parts),
        is_picked=any(part.is_picked for part in parts),
        was_folded=any(part.was_folded for part in parts),
        weights=of_all(part.weights for part in parts),
        arguments=of_all(part.arguments for part in parts),
        size_of=of_all(part.size_of for part in parts),
    )


def either(first: Value, second: Value) -> Value:
    """What a variable is after one of two ways through the code."""
    if first is second:
        return first
    if isinstance(first, tuple) and isinstance(second, tuple):
        short, long = sorted((first, second), key=len)
        return (*(either(a, b) for a, b in zip(short, long, strict=False)), *long[len(short) :])
    if isinstance(first, Known) and isinstance(second, Known) and first.object is second.object:
        return first
    things = [*_choices(first), *_choices(second)]
    if things and all(isinstance(one, Known) and callable(one.object) for one in things):
        return OneOf(tuple(things))
    if isinstance(first, Known) and first.is_constant and isinstance(second, tuple):
        return second  # None until it is a tuple
    if isinstance(second, Known) and second.is_constant and isinstance(first, tuple):
        return first
    return union((first, second))


def _choices(value: Value) -> tuple[Value, ...]:
    return value.choices if isinstance(value, OneOf) else (value,)


def items_of(value: Value) -> list[Value] | None:
    """The items that a loop over the value takes; None if that is not known."""
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, Known):
        return None
    thing = value.object
    if isinstance(thing, (nn.ModuleList, nn.Sequential)):
        return [Known(child, f"{value.name}.{key}".lstrip(".")) for key, child in thing.named_children()]
    if isinstance(thing, (list, tuple, range)) and len(thing) <= 64:
        return [Known(item) for item in thing]
    return None


def item_of(value: Value, index: Value) -> Value:
    """value[index]: one item of what is listed, else the value's own history."""
    thing = value.object if isinstance(value, Known) else None
    if isinstance(thing, (nn.ParameterList, nn.ParameterDict)) and isinstance(value, Known):
        return Flowing(weights=frozenset([value.name]))
    if isinstance(thing, (nn.ModuleDict, dict)) and isinstance(value, Known):
        return _entry_of(value, index)
    items = items_of(value)
    if items is None:
        return union((value,))
    if isinstance(index, Known) and isinstance(index.object, int):
        return items[index.object] if -len(items) <= index.object < len(items) else UNKNOWN
    if all(isinstance(item, Known) and isinstance(item.object, nn.Module) for item in items) and items:
        return OneOf(tuple(items))
    return union(items)


def _entry_of(value: Known, index: Value) -> Value:
    """An entry of a dictionary: the one with a known key, or any."""
    entries = {
        key: Known(child, f"{value.name}.{key}".strip(".") if isinstance(child, nn.Module) else "")
        for key, child in value.object.items()
    }
    if isinstance(index, Known) and index.is_constant:
        return entries.get(index.object, UNKNOWN)
    return OneOf(tuple(entries.values())) if entries else UNKNOWN


def attribute_of(value: Value, name: str) -> Value:
    """value.name: looked up on objects; a tensor's parts share its history, its shape has none."""
    if isinstance(value, OneOf):
        return OneOf(tuple(attribute_of(choice, name) for choice in value.choices))
    if not isinstance(value, Known):
        return size_of(value, name) if name in WITHOUT_HISTORY else union((value,))
    found = getattr(value.object, name, _ABSENT)
    if found is _ABSENT or (name == "training" and isinstance(value.object, nn.Module)):
        return UNKNOWN  # a plan has to hold in both modes
    if isinstance(value.object, super) and hasattr(found, "__func__"):
        return Known(found.__func__, owner=value.owner)
    if isinstance(found, nn.Module):
        return Known(found, f"{value.name}.{name}".lstrip("."))
    if isinstance(value.object, nn.Module) and hasattr(found, "__func__"):
        return Known(found.__func__, owner=value)
    path = f"{value.name}.{name}".lstrip(".")
    if isinstance(found, Tensor):
        return Flowing(weights=frozenset([path])) if found.requires_grad else UNKNOWN
    is_count = type(found) is int and (isinstance(value.object, nn.Module) or bool(value.name))
    return Known(found, path, made_of=frozenset([path]) if is_count else frozenset())


_ABSENT = object()


OF_THE_STREAM = "the stream"  # in place of the layers that made a value


def size_of(value: Value, name: str) -> Value:
    """What a tensor tells of itself; widths of columns that will be cut are remembered, and of the stream."""
    x = union((value,))
    if name not in ("shape", "size", "numel") or x.has_heads:
        return UNKNOWN
    if x.weights:
        return Flowing(weights=x.weights)
    return Flowing(size_of=x.open or (frozenset([OF_THE_STREAM]) if x.is_stream else frozenset()))


# What a tensor tells of itself beside its values.
WITHOUT_HISTORY = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "get_seq_length", "is_cuda"}
