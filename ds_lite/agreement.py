"""One rank's failure raised on every rank, instead of a hang (§9.10).

A rank that raises alone leaves its peers waiting in the next collective, and the reader sees a hang
where a message should be. So what may differ between ranks is agreed before anything else moves.
"""

from __future__ import annotations

import torch

from ds_lite import comm
from ds_lite.comm import ProcessGroup

_TEXT_BYTES = 2048


class RemoteError(RuntimeError):
    """What another rank raised, where it was neither a ValueError nor a TypeError."""


def error_to_ints(error: BaseException) -> list[int]:
    """An exception as plain numbers, so that it can travel where a tensor's description would."""
    return list(f"{type(error).__name__}\n{error}".encode()[:_TEXT_BYTES])


def error_from_ints(numbers: list[int]) -> Exception:
    """The exception that `error_to_ints` described; a ValueError or TypeError keeps its class."""
    name, _, text = bytes(numbers).decode(errors="replace").partition("\n")
    if name in ("ValueError", "TypeError"):
        return {"ValueError": ValueError, "TypeError": TypeError}[name](text)
    return RemoteError(text if name == "RemoteError" else f"{name}: {text}")


def raise_together(
    error: BaseException | None,
    group: ProcessGroup | None = None,
    *,
    anyone: bool = False,
    **must_match: int,
) -> bool:
    """Raise the lowest rank's error on all ranks of the group; without one, say whether any said `anyone`.

    `must_match` are numbers that have to be equal on all ranks, e.g. the number of micro-batches.

    Communication: one all-reduce of a few integers; one all-gather more when there is an error.
    Raises: the error itself on the rank that brought it, its copy elsewhere; ValueError on a mismatch.
    """
    if comm.get_world_size(group) == 1:
        if error is not None:
            raise error
        return anyone
    device = comm.control_device()
    values = list(must_match.values())
    flags = [int(error is not None), int(anyone)]
    report = torch.tensor([*flags, *values, *(-value for value in values)], device=device)
    comm.all_reduce(report, op=comm.ReduceOp.MAX, group=group)
    failed, said, *extremes = report.tolist()
    if failed:
        first = _lowest_rank_error(error, group, device)
        raise error if error is not None else first
    highest, negated_lowest = extremes[: len(values)], extremes[len(values) :]
    for name, high, low in zip(must_match, highest, negated_lowest, strict=True):
        if high != -low:
            raise ValueError(
                f"{name} differs between ranks: {must_match[name]} here, from {-low} to {high} over all; "
                f"every rank makes the same call with the same settings (§9.2)"
            )
    return bool(said)


def _lowest_rank_error(
    error: BaseException | None, group: ProcessGroup | None, device: torch.device
) -> Exception:
    """All-gather what each rank has to say (nothing is an empty text) and pick the first."""
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    if error is not None:
        numbers = error_to_ints(error)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.uint8)
    everyone = torch.empty(comm.get_world_size(group) * _TEXT_BYTES, dtype=torch.uint8, device=device)
    comm.all_gather_into_tensor(everyone, mine.to(device), group=group)
    texts = (row[row != 0].tolist() for row in everyone.view(-1, _TEXT_BYTES))
    return error_from_ints(next(text for text in texts if text))
