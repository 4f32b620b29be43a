"""What the ranks of a job do together while they save and load: fail alike, agree, tell each other (§9.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.trace import Trace

T = TypeVar("T")


@contextmanager
def in_the_trace(trace: Trace, what: str) -> Iterator[None]:
    """Show in the hang table what this rank does. The time limit does not count: a disk takes its time."""
    with trace.span(what):
        trace.abandon()  # which keeps the row
        yield


def together(work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on any, raise on all. It must not communicate.

    Communication: one all-reduce of a few numbers.
    """
    result: T
    error: Exception | None = None
    try:
        result = work()
    except Exception as failure:
        error = failure
    raise_together(error)
    return result


def from_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give its result to all; if it fails there, raise on all.

    Communication: one all-reduce of a few numbers, one broadcast of the pickled result.
    """
    mine = together(lambda: work() if comm.get_rank() == 0 else None)
    box = [mine]
    if comm.get_world_size() > 1:
        comm.broadcast_object_list(box, src=0)
    result: Any = box[0]
    return result  # type: ignore[no-any-return]


def gathered(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank. Between ranks of one job only: what is on the disk is never unpickled.

    Communication: one all-gather of the pickled values.
    """
    if comm.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * comm.get_world_size(group)
    comm.all_gather_object(values, value, group=group)
    return values


def agree(call: str, **values: Any) -> None:
    """Raise, on every rank, if the ranks called with different values.

    Communication: one all-gather of the pickled values.
    """
    for name, said in _by_name(gathered(values)).items():
        if any(value != said[0] for value in said):
            words = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(said[:8]))
            raise ValueError(
                f"{call}: {name} differs between ranks: {words}; every rank makes the same call (§9.1)"
            )


def _by_name(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def some(names: list[str]) -> str:
    """The first names of a list in words, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"
