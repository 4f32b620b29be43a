"""What every rank is doing now, kept where it survives the rank (§9.10).

Each process owns one small memory-mapped file. The engine writes into it which instruction runs, on
which micro-batch, with which peer, since when; a watcher thread knows the time limit. A killed process
cannot speak, but its row stays readable: `read_rows` and `table` turn a folder of rows into the hang
table, `read_spans` into a timeline of the real run. Without a folder the same map lives in memory only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

EXIT_FAILED = 1
EXIT_STUCK = 75  # a rank that stayed too long in one instruction

_MAGIC = b"DSLITE2\0"
_IDENTITY = struct.Struct("<8siiii32s48s")  # magic, rank, world, pid, stage, node, place
_STATE = struct.Struct("<16s400s")  # status, note
_NOW = struct.Struct("<24siiiiiiiid")  # instruction, micro-batch, peer, ndim, four dims, step, since
_COUNT = struct.Struct("<Q")
_EVENT = struct.Struct("<24sidd")  # instruction, micro-batch, start, end
_CAPACITY = 4096  # the newest events that are kept

_AT_STATE = _IDENTITY.size
_AT_NOW = _AT_STATE + _STATE.size
_AT_COUNT = _AT_NOW + _NOW.size
_AT_EVENTS = _AT_COUNT + _COUNT.size
_SIZE = _AT_EVENTS + _CAPACITY * _EVENT.size


@dataclass(frozen=True)
class Row:
    """One line of the hang table. `since` is wall-clock seconds; `shape` has at most four dims."""

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


class Trace:
    """The row of this process: `begin` and `end` around each instruction, `fail` when it dies."""

    def __init__(
        self, path: Path | None, rank: int, world_size: int, *, limit_s: float | None = None
    ) -> None:
        self.path, self.rank, self.world_size, self.limit_s = path, rank, world_size, limit_s
        self.instruction, self.step = "", 0
        self._name, self._micro_batch, self._since, self._count = b"", -1, 0.0, 0
        self._map = _new_map(path)
        self.detail(-1)
        self.place(-1, "")
        self.status("running")
        self._closed = threading.Event()
        if limit_s is not None:
            threading.Thread(target=self._watch, name="ds_lite-watcher", daemon=True).start()

    def place(self, stage_id: int, place: str) -> None:
        """Say where in the mesh this rank stands, e.g. stage 1, "pipe=1 data=0"."""
        node = platform.node().encode()[:32]
        _IDENTITY.pack_into(
            self._map, 0, _MAGIC, self.rank, self.world_size, os.getpid(), stage_id, node, place.encode()[:48]
        )

    def status(self, status: str, note: str = "") -> None:
        """running, failed, stuck or done; `note` is one line of explanation."""
        _STATE.pack_into(self._map, _AT_STATE, status.encode()[:16], note.encode()[:400])

    def begin(
        self, instruction: str, micro_batch_id: int = -1, peer: int = -1, shape: Iterable[int] = ()
    ) -> None:
        """An instruction starts now."""
        self.instruction = instruction
        self._name, self._micro_batch, self._since = instruction.encode()[:24], micro_batch_id, time.time()
        self.detail(peer, shape)

    def detail(self, peer: int, shape: Iterable[int] = ()) -> None:
        """Fill in the peer and the shape once they are known; the clock goes on."""
        dims = tuple(shape)[:4]
        padded = (*dims, 0, 0, 0, 0)[:4]
        _NOW.pack_into(
            self._map,
            _AT_NOW,
            self._name,
            self._micro_batch,
            peer,
            len(dims),
            *padded,
            self.step,
            self._since,
        )

    def end(self) -> None:
        """The instruction is over: it becomes an event; the row says that the caller's code runs."""
        slot = _AT_EVENTS + (self._count % _CAPACITY) * _EVENT.size
        _EVENT.pack_into(self._map, slot, self._name, self._micro_batch, self._since, time.time())
        self._count += 1
        _COUNT.pack_into(self._map, _AT_COUNT, self._count)
        self.instruction, self._name = "", b""
        self.detail(-1)

    @contextlib.contextmanager
    def span(self, instruction: str) -> Iterator[None]:
        """`begin` and `end` around a block; after an exception the row keeps the instruction."""
        self.begin(instruction)
        yield
        self.end()

    def events(self) -> list[Event]:
        """The finished instructions of this process that are still kept, oldest first."""
        return _events_of(memoryview(self._map))

    def forget_events(self) -> None:
        """Start the timeline anew, e.g. before the step that is to be drawn."""
        self._count = 0
        _COUNT.pack_into(self._map, _AT_COUNT, 0)

    def fail(self, error: BaseException) -> None:
        """Write the last words of this rank and, with a folder, the hang table."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self.status("failed", text)
        self._leave_table()

    def close(self) -> None:
        """The process is done with its job; the file stays for the reader."""
        self._closed.set()
        if self.instruction == "":
            self.status("done")

    def _watch(self) -> None:
        assert self.limit_s is not None
        while not self._closed.wait(min(0.5, self.limit_s / 4)):
            waited = time.time() - self._since
            if self._name and waited > self.limit_s:
                self.status("stuck", f"more than the limit of {self.limit_s:g} s in one instruction")
                self._leave_table()
                print(f"ds_lite: rank {self.rank} is stuck; see the hang table", file=sys.stderr, flush=True)
                os._exit(EXIT_STUCK)

    def _leave_table(self) -> None:
        if self.path is None:
            return
        folder = self.path.parent
        draft = folder / f"hang_table.{self.rank}.tmp"
        draft.write_text(table(read_rows(folder)) + "\n")
        draft.replace(folder / "hang_table.txt")


def _new_map(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, _SIZE)
    with open(path, "w+b") as file:
        file.truncate(_SIZE)
        return mmap.mmap(file.fileno(), _SIZE)


_current: Trace | None = None  # a process does one thing at a time, whichever engine asks for it


def current() -> Trace:
    """The trace of this process; one in memory if none was opened."""
    global _current
    if _current is None:
        _current = Trace(None, rank=-1, world_size=0)
    return _current


def open_trace(
    folder: str | os.PathLike[str], rank: int, world_size: int, *, limit_s: float | None = None
) -> Trace:
    """Keep this rank's row in `folder`; an uncaught exception from now on is written there and ends at once.

    Leaving at once (`os._exit`) matters: a normal exit may wait for peers that wait for this rank.
    """
    global _current
    close()
    Path(folder).mkdir(parents=True, exist_ok=True)
    _current = Trace(Path(folder) / f"rank{rank:05d}.trace", rank, world_size, limit_s=limit_s)
    if sys.excepthook is not _last_words:
        sys.excepthook = _last_words
    return _current


def close() -> None:
    """Forget the trace of this process; its file stays."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def _last_words(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    traceback.print_exception(kind, error, tb)
    if _current is None or _current.path is None:
        return
    _current.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


# ------------------------------------------------------------------------------------------ reading


def read_rows(folder: str | os.PathLike[str]) -> list[Row]:
    """The rows of all ranks that ever wrote into `folder`, by rank; works on running and dead jobs alike."""
    rows = [_row_of(path.read_bytes()) for path in sorted(Path(folder).glob("rank*.trace"))]
    return sorted((row for row in rows if row is not None), key=lambda row: row.rank)


def read_events(folder: str | os.PathLike[str]) -> list[Event]:
    """The finished instructions of all ranks, by rank and then by time."""
    events: list[Event] = []
    for path in sorted(Path(folder).glob("rank*.trace")):
        data = path.read_bytes()
        if data[:8] == _MAGIC:
            events += _events_of(memoryview(data))
    return events


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _row_of(data: bytes) -> Row | None:
    if len(data) < _SIZE or data[:8] != _MAGIC:
        return None  # a rank that was killed before it wrote anything
    _, rank, world_size, pid, stage_id, node, place = _IDENTITY.unpack_from(data, 0)
    status, note = map(_text, _STATE.unpack_from(data, _AT_STATE))
    name, micro_batch_id, peer, ndim, *rest = _NOW.unpack_from(data, _AT_NOW)
    if status == "running" and _text(node) == platform.node()[:32] and not _is_alive(pid):
        status = "vanished"
    dims, step, since = tuple(rest[:ndim]), rest[4], rest[5]
    instruction = _text(name)
    return Row(
        rank,
        world_size,
        pid,
        stage_id,
        _text(place),
        status,
        instruction,
        micro_batch_id,
        peer,
        dims,
        step,
        since,
        note,
    )


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


def _events_of(data: memoryview) -> list[Event]:
    _, rank, _, _, stage_id, _, _ = _IDENTITY.unpack_from(data, 0)
    (count,) = _COUNT.unpack_from(data, _AT_COUNT)
    events = []
    for index in range(max(0, count - _CAPACITY), count):
        name, micro_batch_id, start, end = _EVENT.unpack_from(
            data, _AT_EVENTS + (index % _CAPACITY) * _EVENT.size
        )
        events.append(Event(rank, stage_id, _text(name), micro_batch_id, start, end))
    return events


def table(rows: list[Row], now: float | None = None) -> str:
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
                row.note,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
