"""Who waits for whom in a job that hangs, read from its trace files (§9.10).

A row says in which instruction a rank stands and, for a message, with which peer. What it waits for follows:

    message   the instruction names a peer: that rank, and no other
    meeting   a collective that the rank's row shows: every rank of its group that has not come to it
    layers    a pass, or an exchange of tokens: it may hide a collective with ranks that are not there yet

Waiting-for is a graph. A circle in it never ends; without one, the ranks at its ends hold up all others.
Pure reading: no process group, no torch, and the job notices nothing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_lite import trace_file
from ds_lite.trace_file import Event, Row

MESSAGE, MEETING, LAYERS = "message", "meeting", "layers"

# Which axes a collective spans; None: all ranks. The first two begin with an agreement of all of them.
_SPANS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "LoadData": (MEETING, None),
    "ReduceTiedGrads": (MEETING, None),
    "ReduceGrads": (MEETING, ("data", "seq", "model")),
    "OptimizerStep": (MEETING, None),
    "FinishBatch": (MEETING, None),
    "SaveCheckpoint": (MEETING, None),
    "LoadCheckpoint": (MEETING, None),
    "SaveModel": (MEETING, None),
    "AnnounceTokens": (LAYERS, ("data", "seq")),
    "ExchangeTokens": (LAYERS, ("data", "seq")),
    "AgreeOnCapacity": (LAYERS, ("data", "seq")),
    "ForwardPass": (LAYERS, ("seq", "model")),
    "BackwardPass": (LAYERS, ("seq", "model")),
    "LoadMicroBatch": (LAYERS, ()),
}
_UNKNOWN = (LAYERS, None)  # an instruction of the reader's own


@dataclass(frozen=True)
class Job:
    """All rows and finished instructions of one job, by rank, as they were at `now` (wall-clock seconds)."""

    rows: dict[int, Row]
    events: dict[int, list[Event]]
    now: float

    @property
    def world_size(self) -> int:
        return max(*(row.world_size for row in self.rows.values()), *(rank + 1 for rank in self.rows))

    @property
    def is_running(self) -> bool:
        """Whether any process of it still runs."""
        return any(row.status == "running" for row in self.rows.values())

    def batch(self, rank: int) -> list[Event]:
        """What a rank has finished since the last LoadData, with which every batch begins."""
        events = self.events.get(rank, [])
        begins = [place for place, event in enumerate(events) if event.instruction == "LoadData"]
        return events[begins[-1] + 1 :] if begins else events

    def mates(self, row: Row, free: Sequence[str] | None) -> tuple[int, ...]:
        """The ranks whose coordinates are those of `row` on all axes but the free ones; None: all ranks."""
        own = coordinates(row)
        if free is None or not own:
            return tuple(range(self.world_size))
        fixed = {axis: at for axis, at in own.items() if axis not in free}
        others = {rank: coordinates(other) for rank, other in self.rows.items()}
        return tuple(
            rank
            for rank, at in sorted(others.items())
            if at.keys() == own.keys() and all(at[axis] == index for axis, index in fixed.items())
        )


@dataclass(frozen=True)
class Wait:
    """A rank stands in an instruction until `peers` have come; `group` are all that meet there, it included.

    Without peers, all of the group are in the instruction and none of them comes out.
    """

    rank: int
    kind: str
    peers: tuple[int, ...]
    group: tuple[int, ...]


def read_job(folder: str | os.PathLike[str]) -> Job:
    """What the trace files in `folder` say now; of a job that is over, as of the moment of its table.

    Raises: ValueError if `folder` is no folder, or holds no trace file.
    """
    path = Path(folder)
    words = "give the folder that init_distributed(trace_dir=...) got, or runs/labNN/trace of a lab (§9.10)"
    if not path.is_dir():
        raise ValueError(f"{os.fspath(folder)!r} is not a folder; {words}")
    rows = {row.rank: row for row in trace_file.read_rows(path)}
    if not rows:
        raise ValueError(f"{os.fspath(folder)!r} holds no trace file; {words}")
    events: dict[int, list[Event]] = {rank: [] for rank in rows}
    for event in trace_file.read_events(path):
        events.setdefault(event.rank, []).append(event)
    job, table = Job(rows, events, time.time()), path / trace_file.TABLE
    if not job.is_running and table.is_file():
        return Job(rows, events, table.stat().st_mtime)
    return job


def coordinates(row: Row) -> dict[str, int]:
    """The axes of a row's place.

    >>> from ds_lite.trace_file import Row
    >>> coordinates(Row(5, 8, 1, 1, "pipe=1 data=0 model=1", "running", "", -1, -1, (), 0, 0.0, ""))
    {'pipe': 1, 'data': 0, 'model': 1}
    """
    words = (word.partition("=") for word in row.place.split())
    return {axis: int(index) for axis, _, index in words if index.isdecimal()}


def moved(before: Job, after: Job) -> list[int]:
    """The ranks that did something between two looks: began or finished an instruction, or ended well."""
    return [
        rank
        for rank, row in after.rows.items()
        if _position(before, rank) != _position(after, rank)
        or (row.status == "done" and rank in before.rows and before.rows[rank].status == "running")
    ]


def _position(job: Job, rank: int) -> tuple[object, ...] | None:
    row = job.rows.get(rank)
    if row is None:
        return None
    newest = job.events[rank][-1] if job.events.get(rank) else None
    return row.instruction, row.micro_batch_id, row.peer, row.step, row.since, newest


# ------------------------------------------------------------------------------------------ the graph


def waits(job: Job) -> dict[int, Wait]:
    """What each rank waits for, of those that stand in an instruction in which one can wait."""
    found = (_wait_of(job, row) for _, row in sorted(job.rows.items()))
    return {wait.rank: wait for wait in found if wait is not None}


def _wait_of(job: Job, row: Row) -> Wait | None:
    if not row.instruction or row.status in ("done", "vanished"):
        return None
    kind, free = _SPANS.get(row.instruction, _UNKNOWN)
    group = job.mates(row, free)
    if row.peer >= 0:
        kind, group = MESSAGE, (row.rank, row.peer)
    elif row.instruction == "ShareLoss":  # the last stage's mean, handed to the first from one to the next
        line = [rank for rank in job.mates(row, ("pipe",)) if rank in job.rows]
        after = [rank for rank in line if job.rows[rank].stage_id == row.stage_id + 1]
        kind, group = MEETING, (row.rank, *after) if after else job.mates(row, ("data",))
    others = [rank for rank in group if rank != row.rank]
    late = [rank for rank in others if kind == MESSAGE or not _has_come(job, rank, row)]
    if row.status != "running":  # it failed or was ended: nobody who lives on is to blame
        late = [rank for rank in late if rank in job.rows and job.rows[rank].status != "running"]
    if not late and (kind != MEETING or len(group) == 1):
        return None
    return Wait(row.rank, kind, tuple(late), group)


def _has_come(job: Job, rank: int, row: Row) -> bool:
    """Whether `rank` is in the instruction of `row` too, or was there with it and is past it."""
    other = job.rows.get(rank)
    if other is None:
        return False
    key = (row.instruction, row.micro_batch_id)
    for event in reversed(job.events.get(rank, [])):
        if event.end < row.since:  # nobody leaves a collective before the last one has come
            break
        if (event.instruction, event.micro_batch_id) == key:
            return True
    is_there = (other.instruction, other.micro_batch_id) == key
    return is_there and (other.status == "running" or row.status != "running")


def cycles(found: Mapping[int, Wait]) -> list[list[int]]:
    """A shortest circle for each knot of ranks that wait for each other, closed: [0, 1, 0].

    What only may be (`layers`) makes no circle, unless nothing else explains the hang.
    """
    sure = {rank: wait.peers for rank, wait in found.items() if wait.kind != LAYERS}
    circles = _circles(sure)
    if not circles and not roots(found):
        circles = _circles({rank: wait.peers for rank, wait in found.items()})
    return circles


def roots(found: Mapping[int, Wait]) -> dict[int, list[int]]:
    """The ranks that others wait for and that wait for none; with each, all that it holds up."""
    edges = {rank: wait.peers for rank, wait in found.items() if wait.peers}
    held_up: dict[int, list[int]] = {}
    for rank in edges:
        for end in _reached(edges, rank):
            if end not in edges:
                held_up.setdefault(end, []).append(rank)
    return dict(sorted(held_up.items()))


def _circles(edges: Mapping[int, Sequence[int]]) -> list[list[int]]:
    circles: list[list[int]] = []
    reached = {rank: _reached(edges, rank) for rank in edges}
    for rank in edges:
        is_known = any(rank in reached[circle[0]] and circle[0] in reached[rank] for circle in circles)
        if rank in reached[rank] and not is_known:
            circles.append(_shortest_way_back(edges, rank))
    return circles


def _reached(edges: Mapping[int, Sequence[int]], start: int) -> dict[int, int]:
    """All ranks that `start` waits for, directly or not, each with the one before it on a shortest way."""
    before: dict[int, int] = {}
    todo = deque([start])
    while todo:
        rank = todo.popleft()
        for peer in edges.get(rank, ()):
            if peer not in before:
                before[peer] = rank
                todo.append(peer)
    return before


def _shortest_way_back(edges: Mapping[int, Sequence[int]], start: int) -> list[int]:
    before, way = _reached(edges, start), [start]
    while len(way) == 1 or way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]
