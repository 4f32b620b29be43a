"""Bus bandwidth of each collective of the chapter along each axis of a small grid (§9.11).

All groups of an axis work at the same time, as in training. What is measured is the time until the last rank
is done; the median of a few repeats counts. The bus bandwidth multiplies size / time by a factor that makes
groups of different sizes comparable with each other and with the wire.

Source: §9.11; the factors are those of NVIDIA/nccl-tests `doc/PERFORMANCE.md` @ 03a204a1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ds_lite import launch
from ds_lite.topology import ProcessTopology

SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 24, 1 << 28)}  # bytes
REPEATS = 5
BYTES_A_REPEAT = 1 << 22  # small messages are repeated until so many bytes have moved
MOST_CALLS = 10
FILE = "bandwidth.json"

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


@dataclass(frozen=True)
class Rate:
    """One measurement. `size` in bytes: the whole input, for all_gather the whole output; `bus` in GB/s."""

    axis: str
    ranks: int  # in a group of this axis
    operation: str
    device: str
    size: int
    seconds: float
    bus: float


@dataclass(frozen=True)
class Sample:
    """What one rank says: the seconds of one call, once for each repeat."""

    axis: str
    ranks: int
    operation: str
    device: str
    size: int
    seconds: list[float]


def grid_of(nproc: int) -> dict[str, int]:
    """The axes of the largest grid of twos that has no more than `nproc` ranks.

    >>> grid_of(4), grid_of(9)
    ({'data': 2, 'model': 2}, {'pipe': 2, 'data': 2, 'model': 2})
    """
    axes = ["pipe", "data", "model"] if nproc >= 8 else ["data", "model"] if nproc >= 4 else ["data"]
    return {axis: 2 for axis in axes} if nproc >= 2 else {}


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Units: bytes and seconds in, GB/s out.

    >>> bus_bandwidth("all_reduce", 4, 2_000_000_000, 1.0)
    3.0
    """
    return size / seconds * FACTORS[operation](ranks) / 1e9


def measure(
    nproc: int,
    *,
    on_cpu: bool,
    sizes: tuple[int, ...] | None = None,
    repeats: int = REPEATS,
    run: Callable[..., list[list[Sample]]] = launch.run,
) -> list[Rate]:
    """Along each axis of `grid_of(nproc)` and over all its ranks; nothing for fewer than two ranks.

    `run(function, nproc, *args)` calls a function on that many ranks.

    Raises: launch.JobFailed if a rank fails or is stuck.
    """
    grid = grid_of(nproc)
    if not grid:
        return []
    world = 2 ** len(grid)
    by_rank = run(_on_each_rank, world, grid, on_cpu, sizes, repeats)
    return [_slowest(samples) for samples in zip(*by_rank, strict=True)]


def body(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """A call as the worlds of the tests make it, with the rank in front."""
    return function(*args)


def write(folder: Path, rates: list[Rate]) -> None:
    """For `read`, in another process."""
    (folder / FILE).write_text(json.dumps([asdict(rate) for rate in rates]), encoding="utf-8")


def read(folder: Path) -> list[Rate]:
    """What `write` left in the folder.

    Raises: OSError if it left nothing.
    """
    return [Rate(**fields) for fields in json.loads((folder / FILE).read_text(encoding="utf-8"))]


def _slowest(samples: tuple[Sample, ...]) -> Rate:
    """From what all ranks say of one measurement: a repeat is over when its last rank is."""
    one = samples[0]
    seconds = median(max(times) for times in zip(*(sample.seconds for sample in samples), strict=True))
    bus = bus_bandwidth(one.operation, one.ranks, one.size, seconds)
    return Rate(one.axis, one.ranks, one.operation, one.device, one.size, seconds, bus)


# ------------------------------------------------------------------------------------- on each rank


def _on_each_rank(
    grid: dict[str, int], on_cpu: bool, sizes: tuple[int, ...] | None, repeats: int
) -> list[Sample]:
    import torch

    from ds_lite import comm

    device = torch.device("cpu") if on_cpu else comm.device_of_this_rank()
    topology = ProcessTopology(axes=list(grid), dims=list(grid.values()))
    groups: dict[str, Any] = {}
    for axis in grid:
        for ranks in topology.get_axis_comm_lists(axis):
            group = comm.new_group(ranks, axis)
            if comm.get_rank() in ranks:
                groups[axis] = group
    if len(grid) > 1:
        groups["all ranks"] = comm.new_group(list(range(topology.world_size())), "all ranks")
    return [
        Sample(axis, n, operation, device.type, size, _times(call, repeats, calls, device))
        for axis, group in groups.items()
        for n in [comm.get_world_size(group)]
        for size in (sizes or SIZES[device.type])
        for operation, call in _calls(group, size, device).items()
        for calls in [max(1, min(MOST_CALLS, BYTES_A_REPEAT // size))]
    ]


def _calls(group: Any, size: int, device: Any) -> dict[str, Callable[[], Any]]:
    """Each operation on float32 tensors of `size` bytes; the size is a multiple of 4n."""
    import torch

    from ds_lite import comm

    n = comm.get_world_size(group)
    whole, other = (torch.zeros(size // 4, device=device) for _ in range(2))
    part = torch.zeros(size // 4 // n, device=device)
    ranks = comm.ranks_of(group)
    place = ranks.index(comm.get_rank())

    def send_recv() -> None:
        """Even places send to the next one."""
        if place % 2 == 0 and place + 1 < n:
            comm.send(whole, ranks[place + 1], group)
        elif place % 2:
            comm.recv(other, ranks[place - 1], group)

    return {
        "all_reduce": lambda: comm.all_reduce(whole, group=group),
        "reduce_scatter": lambda: comm.reduce_scatter_tensor(part, whole, group=group),
        "all_gather": lambda: comm.all_gather_into_tensor(whole, part, group=group),
        "all_to_all": lambda: comm.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: comm.broadcast(whole, ranks[0], group),
        "send_recv": send_recv,
    }


def _times(call: Callable[[], Any], repeats: int, calls: int, device: Any) -> list[float]:
    """Seconds of one call: all ranks begin together, the first round is for warming up."""
    import torch

    from ds_lite import comm

    flag = torch.zeros(1)
    seconds = []
    for _ in range(repeats + 1):
        comm.all_reduce(flag)  # on the CPU of every backend
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds[1:]
