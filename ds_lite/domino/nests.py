"""The arguments and results of a block, nested as they are, for parts of a batch (§9.15).

Legend: B samples in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def is_of_batch(x: Tensor, samples: int) -> bool:
    """Whether a tensor (B, ...) of two dimensions or more is cut; what else there is belongs to all parts."""
    return x.dim() >= 2 and x.shape[0] == samples


def opaque(value: Any, name: str = "an argument") -> str | None:
    """What may hold something of the batch and cannot be cut, such as a cache of keys and values."""
    if isinstance(value, dict):
        found = (opaque(item, str(key)) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        found = (opaque(item, name) for item in value)
    elif value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype)):
        return None
    else:
        return f"{name} is a {type(value).__name__}, which cannot be cut; a cache goes with use_cache=False"
    return next((reason for reason in found if reason is not None), None)


def split(value: Any, samples: int, sizes: Sequence[int]) -> list[Any]:
    """The same nest for each part."""
    if isinstance(value, Tensor) and is_of_batch(value, samples):
        return list(value.split(list(sizes)))
    if isinstance(value, dict):
        columns = {key: split(item, samples, sizes) for key, item in value.items()}
        return [{key: pieces[part] for key, pieces in columns.items()} for part in range(len(sizes))]
    if isinstance(value, (tuple, list)):
        rows = [split(item, samples, sizes) for item in value]
        return [like(value, [pieces[part] for pieces in rows]) for part in range(len(sizes))]
    return [value] * len(sizes)


def joined(results: Sequence[Any], are_of_batch: Iterator[bool]) -> Any:
    """The whole result from those of the parts; `are_of_batch` says it of each tensor, in order."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(list(results)) if next(are_of_batch) else first
    if isinstance(first, dict):
        items = {key: joined([one[key] for one in results], are_of_batch) for key in first}
        return items if type(first) is dict else type(first)(**items)
    if isinstance(first, (tuple, list)):
        return like(first, [joined(column, are_of_batch) for column in zip(*results, strict=True)])
    return first


def like(row: Any, items: list[Any]) -> Any:
    """A tuple, named or not, or a list of these items."""
    return type(row)(*items) if hasattr(row, "_fields") else type(row)(items)


def copied(value: Any) -> Any:
    """The same tensors in containers of their own: what somebody writes into these stays there."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return like(value, [copied(item) for item in value])
    return value


def is_same(one: Any, other: Any, close: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two nests have the same form, and tensors that are close."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and close(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(is_same(one[key], other[key], close) for key in one)
        )
    if isinstance(one, (tuple, list)):
        is_row = isinstance(other, (tuple, list)) and len(one) == len(other)
        return is_row and all(is_same(a, b, close) for a, b in zip(one, other, strict=True))
    return True


def to_half_of_the_digits(one: Tensor, other: Tensor) -> bool:
    """Equal, or for floats as near as half of the digits that their dtype has."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(one.nan_to_num().abs().max()) if one.numel() else 0.0
    slack = torch.finfo(one.dtype).eps ** 0.5 * largest
    return torch.allclose(one, other, rtol=0, atol=slack, equal_nan=True)
