"""The file of one rank: its layout, and how a folder of them becomes the hang table (§9.10).

A file holds one row, which says what the rank does now, and the newest finished instructions. It can be read
while its rank writes, hangs, or is long dead. Whoever reads needs nothing from the writing process.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"DSLITE2\0"
IDENTITY = struct.Struct("<8siiii32s48s")  # magic, rank, world, pid, stage, node, place
STATE = struct.Struct("<16s400s")  # status, note
NOW = struct.Struct("<24siiiiiiiid")  # instruction, micro-batch, peer, ndim, four dims, step, since
COUNT = struct.Struct("<Q")
EVENT = struct.Struct("<24sidd")  # instruction, micro-batch, start, end
CAPACITY = 4096  # the newest events that are kept

AT_STATE = IDENTITY.size
AT_NOW = AT_STATE + STATE.size
AT_COUNT = AT_NOW + NOW.size
AT_EVENTS = AT_COUNT + COUNT.size
SIZE = AT_EVENTS + CAPACITY * EVENT.size

TABLE = "hang_table.txt"
_FILES = "rank*.trace"
_NOTE_WIDTH = 120  # in the table; the file keeps more
_READS = 5  # a row that changes this often while it is read belongs to a rank that is well


@dataclass(frozen=True)
class Row:
    """One line of the hang table. `since` is wall-clock seconds; `shape` has at most four dims.

    `status` is what the rank wrote (running, failed, stuck, done), or vanished: it runs no more and did not
    say why.
    """

    rank: int
    world_size: int
    pid: int
    stage_id: int
    place: str
    status: str
    instruction: str
    micro_batch_id: int
    peer: int
    shape: tuple[int, ...]
    step: int
    since: float
    note: str


@dataclass(frozen=True)
class Event:
    """One finished instruction of one rank; times are wall-clock seconds."""

    rank: int
    stage_id: int
    instruction: str
    micro_batch_id: int
    start: float
    end: float


def file_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank keeps its row."""
    return Path(folder) / f"rank{rank:05d}.trace"


def read_rows(folder: str | os.PathLike[str]) -> list[Row]:
    """The rows of all ranks that ever wrote into `folder`, by rank; works on running and dead jobs alike."""
    rows = [_row_of(head) for _, head in _heads(folder)]
    return sorted((row for row in rows if row is not None), key=lambda row: row.rank)


def read_events(folder: str | os.PathLike[str]) -> list[Event]:
    """The finished instructions of all ranks, by rank and then by time."""
    events: list[Event] = []
    for path, _ in _heads(folder):
        data = path.read_bytes()
        if len(data) == SIZE and data[: len(MAGIC)] == MAGIC:
            events += events_of(memoryview(data))
    return events


def events_of(data: memoryview) -> list[Event]:
    """The finished instructions that one file holds, oldest first."""
    _, rank, _, _, stage_id, _, _ = IDENTITY.unpack_from(data, 0)
    (count,) = COUNT.unpack_from(data, AT_COUNT)
    events = []
    for index in range(max(0, count - CAPACITY), count):
        at = AT_EVENTS + (index % CAPACITY) * EVENT.size
        name, micro_batch_id, start, end = EVENT.unpack_from(data, at)
        events.append(Event(rank, stage_id, _text(name), micro_batch_id, start, end))
    return events


def clear(folder: str | os.PathLike[str], *, from_rank: int = 0, before: float | None = None) -> None:
    """Remove what an earlier job left: rows of `from_rank` and above, and a table written before `before`."""
    for path in Path(folder).glob(_FILES):
        if path.stem[4:].isdecimal() and int(path.stem[4:]) >= from_rank:
            path.unlink(missing_ok=True)
    for path in Path(folder).glob(f"{TABLE}*"):
        with suppress(FileNotFoundError):  # another rank's draft, which becomes the table meanwhile
            if before is None or path.stat().st_mtime < before:
                path.unlink()


def write_table(folder: str | os.PathLike[str], text: str) -> None:
    """Put the hang table into the folder, whole; ranks that fail together may all do so."""
    draft = Path(folder) / f"{TABLE}.{os.getpid()}"
    try:
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(Path(folder) / TABLE)
    except OSError:  # no half of a table, and no litter
        draft.unlink(missing_ok=True)
        raise


def _heads(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, bytes]]:
    """Each file with its row, read until two readings agree: then no write lay between their fields."""
    for path in sorted(Path(folder).glob(_FILES)):
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(AT_EVENTS)
                for _ in range(_READS):
                    file.seek(0)
                    before, head = head, file.read(AT_EVENTS)
                    if head == before:
                        break
        except FileNotFoundError:  # another job has just cleared the folder
            continue
        yield path, head


def _row_of(head: bytes) -> Row | None:
    if len(head) < AT_EVENTS or head[: len(MAGIC)] != MAGIC:
        return None  # not a file of ours, or of another version
    _, rank, world_size, pid, stage_id, node, place = IDENTITY.unpack_from(head, 0)
    status, note = map(_text, STATE.unpack_from(head, AT_STATE))
    name, micro_batch_id, peer, ndim, *rest = NOW.unpack_from(head, AT_NOW)
    if status == "running" and node == cut(platform.node(), 32).ljust(32, b"\0") and not _is_alive(pid):
        status = "vanished"
    return Row(
        rank=rank,
        world_size=world_size,
        pid=pid,
        stage_id=stage_id,
        place=_text(place),
        status=status,
        instruction=_text(name),
        micro_batch_id=micro_batch_id,
        peer=peer,
        shape=tuple(rest[:ndim]),
        step=rest[4],
        since=rest[5],
        note=note,
    )


def cut(text: str, size: int) -> bytes:
    """One line of at most `size` bytes, never ending inside a character.

    >>> cut("§9.10 and\\nmore", 8).decode()
    '§9.10 a'
    """
    return " ".join(text.split()).encode()[:size].decode(errors="ignore").encode()


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a zombie still answers the signal
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def table(rows: Iterable[Row], now: float | None = None) -> str:
    """The hang table: one line a rank; look first for the rank whose line differs from its peers'."""
    now = time.time() if now is None else now
    lines = [
        ("rank", "stage", "place", "status", "instruction", "micro-batch", "peer", "shape", "for", "note")
    ]
    for row in rows:
        inside = row.instruction != ""
        lines.append(
            (
                str(row.rank),
                str(row.stage_id) if row.stage_id >= 0 else "-",
                row.place or "-",
                row.status,
                row.instruction or "(caller's code)",
                str(row.micro_batch_id) if row.micro_batch_id >= 0 and inside else "-",
                str(row.peer) if row.peer >= 0 else "-",
                "x".join(map(str, row.shape)) or "-",
                f"{now - row.since:.1f} s" if inside else "-",
                row.note if len(row.note) <= _NOTE_WIDTH else f"{row.note[:_NOTE_WIDTH]}...",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
