"""Where a pipeline stands: the last passes of each stage, and the instruction it does not leave (§9.10).

The text has a row for each rank and columns as a schedule's picture has them (§9.2): a pass stands right of
the one whose output it needs. The picture takes the recorded times.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_lite.hang import Job, coordinates
from ds_lite.pipe.timeline import Span, kind_of, timeline_svg
from ds_lite.trace_file import Row

COLUMNS = 24  # older ones are cut
CAPTION = (
    "[ ] where each rank stands: [F3] in the pass, [?F3] waiting for its input, [F3>] sending its output"
)
_LETTERS = {"ForwardPass": "F", "BackwardPass": "B"}
_STANDS = {
    "ForwardPass": "F{}",
    "BackwardPass": "B{}",
    "RecvActivation": "?F{}",
    "RecvGrad": "?B{}",
    "SendActivation": "F{}>",
    "SendGrad": "B{}>",
}
_LONGEST = 1 / 3  # of the picture's width: what stands for minutes would hide what went before


def is_pipeline(job: Job) -> bool:
    """Whether some rank has run a pass, or is in one."""
    rows = job.rows.values()
    return any(row.instruction in _STANDS for row in rows) or any(
        event.instruction in _LETTERS for events in job.events.values() for event in events
    )


def text(job: Job) -> str:
    """One row a rank, pipeline by pipeline, with the passes of the batch and where the rank stands now.

    Of a job without pipeline: the empty text.
    """
    if not is_pipeline(job):
        return ""
    rows = sorted(job.rows.values(), key=lambda row: (_pipeline(row), row.stage_id, row.rank))
    cells = _columns(job, rows)
    last = max((column for row_cells in cells.values() for column in row_cells), default=-1)
    first = max(0, last + 1 - COLUMNS)
    width = max((len(cell) for row_cells in cells.values() for cell in row_cells.values()), default=1)
    lines = []
    for row in rows:
        passes = [cells[row.rank].get(column, ".") for column in range(first, last + 1)]
        words = "".join(f" {cell:>{width}}" for cell in passes)
        ended = "" if row.status == "running" else f"  {row.status}"
        lines.append(f"{_name(row, rows)} |{' ...' if first else ''}{words} {_stand(row)}{ended}".rstrip())
    return "\n".join([*lines, CAPTION])


def svg(job: Job, *, title: str) -> str:
    """The picture of `spans`; what a rank stands in is marked.

    Raises: ValueError if no rank finished an instruction or is in one.
    """
    drawn = spans(job)
    if not drawn:
        raise ValueError(
            "the trace files hold no instruction, so there is nothing to draw; a plain engine traces only "
            "checkpoints and experts (§9.10)"
        )
    start, end = _window(job)
    is_cut = start + end < job.now and any(row.instruction for row in job.rows.values())
    return timeline_svg(
        drawn,
        title=title + (" (red boxes go on beyond the edge)" if is_cut else ""),
        unit="s",
        row_name="rank",
        description=f"{len(job.rows)} ranks in their newest batch. A red box is the instruction in which a "
        f"rank stands, and for how long; one that is very long is drawn shorter.",
    )


def spans(job: Job) -> list[Span]:
    """What each rank did in this batch, and what it is in now up to now, in seconds since the batch began.

    What has stood very long is cut, to leave room for what went before; its label says how long it stands.
    """
    start, end = _window(job)
    drawn = [
        Span(
            event.rank,
            event.instruction,
            kind_of(event.instruction),
            event.micro_batch_id if event.micro_batch_id >= 0 else None,
            event.start - start,
            event.end - start,
        )
        for rank in job.rows
        for event in job.batch(rank)
    ]
    return drawn + [
        Span(
            row.rank,
            f"{_stand(row)} {job.now - row.since:.1f} s",
            "stuck",
            row.micro_batch_id if row.micro_batch_id >= 0 else None,
            row.since - start,
            max(end, row.since - start),
        )
        for row in job.rows.values()
        if row.instruction
    ]


def _window(job: Job) -> tuple[float, float]:
    """When the picture begins, in wall-clock seconds, and how many seconds it shows."""
    done = [event for rank in job.rows for event in job.batch(rank)]
    began = [row.since for row in job.rows.values() if row.instruction]
    start = min([event.start for event in done] + began, default=job.now)
    busy = max([event.end for event in done] + began, default=job.now) - start
    return start, min(max(job.now - start, busy), busy / (1 - _LONGEST) if busy else job.now - start)


def _columns(job: Job, rows: list[Row]) -> dict[int, dict[int, str]]:
    """By rank, the cell of each column: right of the rank's last one and of the one whose output it needs."""
    cells: dict[int, dict[int, str]] = {row.rank: {} for row in rows}
    place = {row.rank: (_pipeline(row), row.stage_id) for row in rows}
    columns: dict[tuple[object, int, str, int], int] = {}
    passes = [event for row in rows for event in job.batch(row.rank) if event.instruction in _LETTERS]
    for event in sorted(passes, key=lambda one: one.start):
        pipeline, stage = place[event.rank]
        needed = stage - 1 if event.instruction == "ForwardPass" else stage + 1
        mine = cells[event.rank]
        column = max(
            max(mine, default=-1),
            columns.get((pipeline, needed, event.instruction, event.micro_batch_id), -1),
        )
        mine[column + 1] = _LETTERS[event.instruction] + _number(event.micro_batch_id)
        columns[pipeline, stage, event.instruction, event.micro_batch_id] = column + 1
    return cells


def _stand(row: Row) -> str:
    if not row.instruction:
        return "done" if row.status == "done" else "[caller's code]"
    words = _STANDS.get(row.instruction)
    return f"[{row.instruction if words is None else words.format(_number(row.micro_batch_id))}]"


def _number(micro_batch_id: int) -> str:
    return str(micro_batch_id) if micro_batch_id >= 0 else ""


def _pipeline(row: Row) -> tuple[tuple[str, int], ...]:
    """What the ranks of one pipeline have in common."""
    return tuple((axis, at) for axis, at in coordinates(row).items() if axis != "pipe")


def _name(row: Row, rows: list[Row]) -> str:
    stages, ranks = [len(str(max(numbers))) for numbers in _numbers(rows)]
    name = f"stage {row.stage_id:>{stages}}"
    alone = len({other.stage_id for other in rows}) == len(rows)
    return name if alone else f"{name} rank {row.rank:>{ranks}}"


def _numbers(rows: list[Row]) -> Iterator[list[int]]:
    yield [row.stage_id for row in rows]
    yield [row.rank for row in rows]
