"""Few tokens, whole and spread, before the first micro-batch: does the model work on parts at all? (§9.14)

A model that numbers its tokens itself, or mixes them in code that no route reaches, gives numbers on each
rank, and wrong ones. So the first forward runs a few tokens of the batch twice, without gradients: as one
process does, and spread over the ranks. It costs two small forwards, once.

Legend: B micro-batch, T tokens; sp ranks in the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.sequence.data import Part
from ds_lite.sequence.whole import gather_tokens

TOKENS_PER_RANK = 8


def few_tokens(given: Mapping[str, Any], total: int, samples: int, group: ProcessGroup) -> dict[str, Any]:
    """The beginning of a whole batch of `samples` x `total` tokens, without labels; its first sample if
    `total` is 0, because the model makes its tokens itself.

    Shapes: (B, T, ...) -> (B, 8 sp, ...), masks (..., T, T) in both dimensions.
    """
    few = min(total, TOKENS_PER_RANK * comm.get_world_size(group))

    def beginning(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        if not total:
            return x[:1]
        is_square = "mask" in name and x.shape[-2:] == (total, total) and (x.dim() > 2 or samples != total)
        for dim in (x.dim() - 2, x.dim() - 1) if x.dim() > 3 or is_square else (1,):
            x = x.narrow(dim, 0, few) if x.shape[dim] == total else x
        return x

    return {name: beginning(name, x) for name, x in given.items() if "labels" not in name}


def few_tokens_of_all(given: Mapping[str, Any], part: Part, group: ProcessGroup) -> dict[str, Any]:
    """The beginning of each rank's tokens, one after another, of a batch that the loader has cut.

    Communication: one all-gather for each tensor.
    """
    few = min(TOKENS_PER_RANK, *part.lengths)
    small = Part((few,) * len(part.lengths), part.rank)
    return {
        name: gather_tokens(x[:, :few].contiguous(), small, group)
        for name, x in given.items()
        if isinstance(x, Tensor) and name in ("input_ids", "inputs_embeds", "token_type_ids")
    }


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradients; afterwards every module and the random numbers are as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def fault_of(
    model: nn.Module, whole: Any, spread: Any, part: Part | None, *, is_strict: bool
) -> tuple[ValueError | None, list[bool]]:
    """The error to raise if this rank's outputs are not its tokens of the whole ones, None if they are; and
    which of them are parts, in order.

    Compared to half of the digits that the dtype has; `is_strict` as for `tensors_of`.
    """
    ones, others = (list(tensors_of(x, is_strict=is_strict)) for x in (whole, spread))
    parts: list[bool] = []
    for one, mine in zip(ones, others, strict=len(ones) == len(others)):
        is_part = part is not None and one.shape != mine.shape
        parts.append(is_part)
        if one.dim() == 0 and one.is_floating_point() and not _is_close(one, mine):
            error = ValueError(
                f"{type(model).__name__} gives one number, made of this rank's tokens alone; return its "
                "outputs and compute the loss of them, or let the model be one of transformers' (§9.14)"
            )
            return error, parts
        if part is not None and is_part and one.dim() >= 2 and one.shape[1] == part.total:
            one = part.of(one)
        if one.shape != mine.shape or not _is_close(one, mine):
            error = ValueError(
                f"outputs of {type(model).__name__} for a few tokens, spread over the ranks, are not those "
                f"of one process: {_difference(one, mine)}. It numbers each rank's tokens from 0, or looks "
                "at other tokens in code that exchanges nothing. Give it positions, begin at "
                "ds_lite.sequence.context.first_token(), attend by F.scaled_dot_product_attention, or "
                "remove sequence_parallel_size (§9.14)"
            )
            return error, parts
    return None, parts


def _is_close(one: Tensor, mine: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, mine)
    largest = one.nan_to_num(posinf=0, neginf=0).abs().max().item() if one.numel() else 0.0
    return torch.allclose(one, mine, rtol=0, atol=torch.finfo(one.dtype).eps ** 0.5 * largest, equal_nan=True)


def _difference(one: Tensor, mine: Tensor) -> str:
    if one.shape != mine.shape:
        return f"shape {tuple(mine.shape)} instead of {tuple(one.shape)}"
    one, mine = one.double(), mine.double()
    return f"{(one - mine).abs().max().item():.2g} apart, of at most {one.abs().max().item():.2g}"


def tensors_of(value: Any, *, is_strict: bool = True) -> Iterator[Tensor]:
    """The tensors of a nested output, in order.

    Raises: ValueError for an object in which nobody can look for tensors, unless it may be passed over.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item, is_strict=is_strict)
    elif is_strict and not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError(
            f"a model on parts of a sequence gave a {type(value).__name__}, in which tokens cannot be found; "
            "let it give tensors, tuples, lists or dicts of them (§9.14)"
        )
