"""Lab 1, parts B and C: six collectives over the learner's groups. What arrives, what leaves, how long?

Legend: n ranks in a group, X bytes in a message; `place` is a rank's place in its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_lite import comm, trace
from ds_lite.conformance import bandwidth
from ds_lite.conformance.bandwidth import FACTORS, Rate, Sample

EVERYBODY = "all"
COUNTED_BYTES = 1 << 20  # X of part B; the same everywhere, so that it can be predicted
# GB/s on GPUs, wide: from the slowest bus to more than any; an axis inside a node, and one across nodes
BANDS = {False: (5.0, 2000.0), True: (0.5, 1000.0)}


@dataclass(frozen=True)
class Line:
    """One axis as this rank sees it: its group, formed from the learner's lists."""

    axis: str
    mesh: dict[str, int]
    ranks: list[int]
    group: comm.ProcessGroup

    @property
    def place(self) -> int:
        return self.ranks.index(comm.get_rank())


def make_lines(code: Any, mesh: dict[str, int]) -> list[Line]:
    """All groups of all axes, in one order on every rank; with several axes also one group of everybody."""
    world = comm.get_world_size()
    wanted = [(axis, mesh) for axis in mesh]
    if len(mesh) > 1:
        wanted.append((EVERYBODY, {EVERYBODY: world}))
    lines = []
    for axis, of in wanted:
        for ranks in code.comm_lists(list(of), list(of.values()), axis):
            group = comm.new_group(ranks, axis)
            if comm.get_rank() in ranks:
                lines.append(Line(axis, of, ranks, group))
    return lines


# ------------------------------------------------------------------------------------- B: what arrives


def wrong_values(code: Any, line: Line) -> list[str]:
    """Operations after which this rank holds something else than the ranks of its group say. Exact."""
    me, ranks, group, place = comm.get_rank(), line.ranks, line.group, line.place
    n, device = len(ranks), comm.device_of_this_rank()

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    summed, one, many, swapped = tensor([me]), tensor([0]), tensor([0] * n), tensor([0] * n)
    mine = tensor([100 * me + j for j in range(n)])
    last = tensor([me])
    comm.all_reduce(summed, group=group)
    comm.reduce_scatter_tensor(one, mine.clone(), group=group)
    comm.all_gather_into_tensor(many, tensor([me]), group=group)
    comm.all_to_all_single(swapped, mine, group=group)
    comm.broadcast(last, ranks[-1], group)
    found = {
        "all_reduce": (summed, [sum(ranks)]),
        "reduce_scatter": (one, [sum(100 * rank + place for rank in ranks)]),
        "all_gather": (many, ranks),
        "all_to_all": (swapped, [100 * rank + place for rank in ranks]),
        "broadcast": (last, [ranks[-1]]),
        "send_recv": (_from_the_one_before(code, line, tensor), [ranks[place - 1]]),
    }
    return [name for name, (have, want) in found.items() if have.tolist() != want]


def _from_the_one_before(code: Any, line: Line, tensor: Callable[[list[int]], Tensor]) -> Tensor:
    """Round the ring once, by the learner's neighbour(): every second place receives before it sends."""
    axes, dims, me = list(line.mesh), list(line.mesh.values()), comm.get_rank()
    after, before = (code.neighbour(axes, dims, me, line.axis, step) for step in (1, -1))
    landing = tensor([-1])
    if line.place % 2:
        comm.recv(landing, before, line.group)
        comm.send(tensor([me]), after, line.group)
    else:
        comm.send(tensor([me]), after, line.group)
        comm.recv(landing, before, line.group)
    return landing


@dataclass(frozen=True)
class Sent:
    """What the ledger of one rank says of one call, and what the formula of the chapter says."""

    axis: str
    ranks: int
    operation: str
    calls: int
    sent: int
    formula: float


def count(lines: list[Line], size: int = COUNTED_BYTES) -> list[Sent]:
    """Each operation once on each axis, under the ledger."""
    found = []
    for line in lines:
        n = len(line.ranks)
        for operation, call in bandwidth._calls(line.group, size, comm.device_of_this_rank()).items():
            with trace.current().span(f"{operation} {line.axis}"), comm.record() as ledger:
                call()
            seen = ledger.total(axis=line.axis)
            sends = operation not in ("broadcast", "send_recv") or _is_a_source(operation, line.place)
            formula = FACTORS[operation](n) * size if sends else 0.0
            found.append(Sent(line.axis, n, operation, seen.calls, seen.sent, formula))
    return found


def _is_a_source(operation: str, place: int) -> bool:
    """The first place broadcasts; every second one sends to the next."""
    return place == 0 if operation == "broadcast" else place % 2 == 0


# -------------------------------------------------------------------------------------- C: how long it takes


def measure(lines: list[Line], *, quick: bool) -> list[Rate]:
    """Seconds and bus bandwidth of each operation on each axis, all groups of an axis at the same time.

    Sizes are those that mean something on this device. The same list on every rank.
    """
    device = comm.device_of_this_rank()
    sizes = bandwidth.SIZES[device.type][:1] if quick else bandwidth.SIZES[device.type]
    samples = []
    for line in lines:
        for size in sizes:
            calls = max(1, min(bandwidth.MOST_CALLS, bandwidth.BYTES_A_REPEAT // size))
            for operation, call in bandwidth._calls(line.group, size, device).items():
                with trace.current().span(f"{operation} {line.axis}"):
                    times = bandwidth._times(call, 1 if quick else bandwidth.REPEATS, calls, device)
                samples.append(Sample(line.axis, len(line.ranks), operation, device.type, size, times))
    everyone: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(everyone, samples)
    return [bandwidth._slowest(of_all) for of_all in zip(*everyone)]


def rates_text(rates: list[Rate]) -> str:
    """A block for each size: a row an operation, a column an axis."""
    axes = list(dict.fromkeys(rate.axis for rate in rates))
    found = {(rate.size, rate.operation, rate.axis): rate for rate in rates}
    lines = []
    for size in sorted({rate.size for rate in rates}):
        of = {rate.axis: rate.ranks for rate in rates}
        lines.append(f"{in_words(size):<16}" + "".join(f"{f'{axis}, {of[axis]} ranks':>24}" for axis in axes))
        for operation in FACTORS:
            cells = [found[size, operation, axis] for axis in axes]
            row = "".join(f"{f'{1e3 * one.seconds:.3g} ms  {one.bus:.3f} GB/s':>24}" for one in cells)
            lines.append(f"  {operation:<14}{row}")
    return "\n".join(lines)


def in_words(size: int) -> str:
    """A number of bytes in powers of two.

    >>> in_words(1 << 16), in_words(1 << 24)
    ('64 KiB', '16 MiB')
    """
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
