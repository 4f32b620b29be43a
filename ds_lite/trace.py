"""What every rank is doing now, kept where it survives the rank (§9.10).

Each process owns one small memory-mapped file. The engine writes into it which instruction runs, on
which micro-batch, with which peer, since when; a watcher thread knows the time limit. A killed process
cannot speak, but its row stays readable: `read_rows` and `table` turn a folder of rows into the hang
table, `read_events` into a timeline of the real run. Without a folder the same map lives in memory only.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from ds_lite import trace_file
from ds_lite.trace_file import Event, Row, cut, events_of, read_events, read_rows, table

__all__ = [
    "EXIT_FAILED",
    "EXIT_STUCK",
    "Event",
    "Row",
    "Trace",
    "close",
    "current",
    "open_trace",
    "read_events",
    "read_rows",
    "table",
]

EXIT_FAILED = 1
EXIT_STUCK = 75  # a rank that stayed too long in one instruction

_LARGEST = 2**31 - 1  # what a number in a row can hold
_PLACE_IN_C = re.compile(r"^\[[^\]\s]+:\d+\] ")  # where in its own source a backend failed
_MOMENT_S = 0.05  # a peer that is dying has closed its connections but may still look alive
_started = time.time()  # before any rank of this job can have met another


class Trace:
    """The row of this process: `begin` and `end` around each instruction, `fail` when it dies."""

    def __init__(
        self, path: Path | None, rank: int, world_size: int, *, limit_s: float | None = None
    ) -> None:
        self.path, self.rank, self.world_size, self.limit_s = path, rank, world_size, limit_s
        self.instruction, self.step = "", 0
        self._name, self._micro_batch, self._since, self._count = b"", -1, 0.0, 0
        self._clock: float | None = None  # monotonic time of `begin`, as long as the limit counts
        self._is_span, self._trouble = False, ""
        self._map = mmap.mmap(-1, trace_file.SIZE) if path is None else _map_of(path)
        self.detail(-1)
        self.status("running")
        self.place(-1, "")
        self._closed = threading.Event()
        if limit_s is not None:
            threading.Thread(target=self._watch, name="ds_lite-watcher", daemon=True).start()

    def place(self, stage_id: int, place: str) -> None:
        """Say where in the mesh this rank stands, e.g. stage 1, "pipe=1 data=0"."""
        trace_file.IDENTITY.pack_into(
            self._map,
            0,
            trace_file.MAGIC,
            self.rank,
            self.world_size,
            os.getpid(),
            stage_id,
            cut(platform.node(), 32),
            cut(place, 48),
        )

    def status(self, status: str, note: str = "") -> None:
        """running, failed, stuck, ended or done; `note` is one line of explanation."""
        trace_file.STATE.pack_into(self._map, trace_file.AT_STATE, cut(status, 16), cut(note, 400))

    def begin(
        self, instruction: str, micro_batch_id: int = -1, peer: int = -1, shape: Iterable[int] = ()
    ) -> None:
        """An instruction starts now."""
        self.instruction, self._name, self._is_span = instruction, instruction.encode()[:24], False
        self._micro_batch, self._since = micro_batch_id, time.time()
        self.detail(peer, shape)
        self._clock = time.monotonic()  # stands still while a laptop sleeps

    def detail(self, peer: int, shape: Iterable[int] = ()) -> None:
        """Fill in the peer and the shape once they are known; the clock goes on."""
        dims = tuple(min(dim, _LARGEST) for dim in shape)[:4]
        trace_file.NOW.pack_into(
            self._map,
            trace_file.AT_NOW,
            self._name,
            self._micro_batch,
            peer,
            len(dims),
            *(*dims, 0, 0, 0, 0)[:4],
            self.step,
            self._since,
        )

    def end(self) -> None:
        """The instruction is over: it becomes an event; the row says that the caller's code runs."""
        self._clock = None
        slot = trace_file.AT_EVENTS + (self._count % trace_file.CAPACITY) * trace_file.EVENT.size
        trace_file.EVENT.pack_into(self._map, slot, self._name, self._micro_batch, self._since, time.time())
        self._count += 1
        trace_file.COUNT.pack_into(self._map, trace_file.AT_COUNT, self._count)
        self.instruction, self._name = "", b""
        self.detail(-1)

    def abandon(self) -> None:
        """An exception leaves the instruction: the row keeps it, the time limit no longer counts."""
        self._clock = None

    @contextlib.contextmanager
    def limited(self, error: BaseException) -> Iterator[None]:
        """After an error the row stays as it is, but what the block still waits for has the time limit."""
        self._trouble, self._clock = _in_one_line(error), time.monotonic()
        try:
            yield
        finally:
            self.abandon()
            self._trouble = ""

    @contextlib.contextmanager
    def span_if_idle(self, instruction: str, micro_batch_id: int = -1) -> Iterator[None]:
        """A `span` where no schedule is in an instruction of its own, which says more."""
        is_busy = self._clock is not None and not self._is_span
        with contextlib.nullcontext() if is_busy else self.span(instruction, micro_batch_id):
            yield

    @contextlib.contextmanager
    def span(self, instruction: str, micro_batch_id: int = -1) -> Iterator[None]:
        """`begin` and `end` around a block; after an exception the row keeps the instruction.

        Inside another one it stands in the row meanwhile, on the same micro-batch; then that one goes on.
        """
        outer = self.instruction, self._name, self._micro_batch, self._since, self._clock, self._is_span
        is_inside = self._clock is not None
        self.begin(instruction, self._micro_batch if is_inside and micro_batch_id < 0 else micro_batch_id)
        self._is_span = True
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()
        if is_inside:
            self.instruction, self._name, self._micro_batch, self._since, self._clock, self._is_span = outer
            self.detail(-1)

    def events(self) -> list[Event]:
        """The finished instructions of this process that are still kept, oldest first."""
        return events_of(memoryview(self._map))

    def forget_events(self) -> None:
        """Start the timeline anew, e.g. before the step that is to be drawn."""
        self._count = 0
        trace_file.COUNT.pack_into(self._map, trace_file.AT_COUNT, 0)

    def fail(self, error: BaseException) -> None:
        """Write the last words of this rank and, with a folder, the hang table."""
        self.abandon()
        self.status("failed", _in_one_line(error))
        self._leave_table()

    def end_by(self, reason: str) -> None:
        """Write that somebody else ends this rank and, with a folder, the hang table."""
        self.status("ended", reason)
        self._leave_table()

    def close(self) -> None:
        """The process is done with its job; the file stays for the reader."""
        self._closed.set()
        if self._clock is None and _text_of(self._map, trace_file.AT_STATE) == "running":
            self.status("done")

    def _watch(self) -> None:
        assert self.limit_s is not None
        while not self._closed.wait(min(0.5, self.limit_s / 4)):
            clock = self._clock
            if clock is not None and time.monotonic() - clock > self.limit_s:
                self._give_up()

    def _give_up(self) -> None:
        """Write down where the main thread is, and leave; whatever it waits for is not to be waited for."""
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        at = f"{Path(stack[-1].filename).name}:{stack[-1].lineno}"
        after = f", after {self._trouble}" if self._trouble else ""
        self.status("stuck", f"more than the limit of {self.limit_s:g} s in one instruction, at {at}{after}")
        try:
            self._leave_table()
            _say(self.rank, [f"stuck in {self.instruction}{after}:\n", *stack.format()])
        finally:  # a full disk keeps nobody here
            os._exit(EXIT_STUCK)

    def _leave_table(self) -> None:
        """Where the disk is full, another rank or the launcher may have room for the table."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                trace_file.write_table(self.path.parent, table(read_rows(self.path.parent)))


def _in_one_line(error: BaseException) -> str:
    lines = _PLACE_IN_C.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _map_of(path: Path) -> mmap.mmap:
    """A new file, complete before it gets its name, so that nobody reads half of it or maps it twice."""
    draft = path.with_suffix(f".{os.getpid()}")
    with open(draft, "w+b") as file:
        file.write(bytes(trace_file.SIZE))  # not a hole: a full disk shows here, and not in mid-step
        file.flush()
        mapped = mmap.mmap(file.fileno(), trace_file.SIZE)
    draft.replace(path)
    return mapped


def _text_of(mapped: mmap.mmap, at: int) -> str:
    return trace_file.STATE.unpack_from(mapped, at)[0].rstrip(b"\0").decode()


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

    Leaving at once (`os._exit`) matters: a normal exit may wait for peers that wait for this rank. What an
    earlier job left in the folder goes.
    """
    global _current
    close()
    folder = Path(folder).absolute()  # the caller's code may change its directory
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        trace_file.clear(folder, from_rank=world_size, before=_started)
    _current = Trace(trace_file.file_of(folder, rank), rank, world_size, limit_s=limit_s)
    if sys.excepthook is not _last_words:
        sys.excepthook = _last_words
        atexit.register(close)
        _mind_sigterm()
    return _current


def close() -> None:
    """Forget the trace of this process; its file stays."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def _mind_sigterm() -> None:
    """Leave row and table on SIGTERM too: torchrun sends it to all ranks as soon as one has failed.

    The main thread may be inside a collective, where no Python handler runs; the wake-up byte comes all the
    same. A handler of the caller's own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_leave_on_sigterm, args=(reader,), name="ds_lite-sigterm", daemon=True).start()


def _leave_on_sigterm(reader: int) -> None:
    while os.read(reader, 1) != bytes([signal.SIGTERM]):
        continue  # another signal of the caller's
    if _current is not None:
        _current.end_by("ended by SIGTERM; another rank may have failed first")
    os._exit(128 + signal.SIGTERM)


def _last_words(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    if _current is None or _current.path is None:
        traceback.print_exception(kind, error, tb)
        return
    try:
        time.sleep(_MOMENT_S)
        _current.fail(error)
        _say(_current.rank, traceback.format_exception(kind, error, tb))
    finally:
        os._exit(EXIT_FAILED)


def _say(rank: int, parts: Iterable[str]) -> None:
    """All at once and with the rank in front: other ranks may speak at the same time."""
    sys.stdout.flush()
    lines = "".join(parts).rstrip().splitlines()
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
    sys.stderr.flush()
