"""How much of the machine other programs take beside a measurement (Linux; elsewhere it is not known)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Reading:
    """The clocks at one moment, in seconds: the wall's, all cores' busy time, and the share of `pids`."""

    wall: float
    busy: float
    ours: float

    @classmethod
    def now(cls, pids: Iterable[int]) -> Reading:
        return cls(perf_counter(), _busy_time(), sum(_time_of(pid) for pid in pids))


def foreign_cores(before: Reading, after: Reading) -> float:
    """Cores that were busy with something else, on average between two readings; 0.0 where not known."""
    foreign = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, foreign / (after.wall - before.wall))


def wait_until_quiet(pids: Iterable[int], *, limit_cores: float, deadline: float) -> None:
    """Return when other programs left the machine alone for half a second, or at the deadline."""
    pids = list(pids)
    while perf_counter() < deadline:
        before = Reading.now(pids)
        sleep(0.5)
        if foreign_cores(before, Reading.now(pids)) < limit_cores:
            return


def _busy_time() -> float:
    """Of all cores: everything but idle and waiting for disks; what a hypervisor took counts as busy."""
    try:
        times = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    _, _, _, idle, waiting, *_ = numbers = [int(time) for time in times]
    return (sum(numbers) - idle - waiting) / _TICKS_PER_S


def _time_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # user and system time
