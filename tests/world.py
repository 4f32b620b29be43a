"""Worlds for tests: `world(body, nprocs, *args)` runs `body(rank, *args)` in that many joined processes.

The processes start once and are reused, because importing torch takes seconds; the process group is new
for each call and meets through a file, so no ports are used and several worlds may run side by side.
A rank that raises, dies or hangs ends the call soon, with every rank's traceback and last instruction.

`body` is a module-level function (the processes import it by name) and its arguments and result are
pickled. Inside it, `ds_lite.comm` is initialised. A mutant is a module-level function that returns a
context manager; it is entered in every process, around the start of the group and the body.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

import measured
from world_report import Outcome, WorldAssertionError, WorldError, message
from world_worker import Order, serve

GRACE_S = 2.0  # after the first failure the others may still report theirs
START_S = 180.0
CLEAR_S = 10.0

Body = Callable[..., Any]
Mutant = Callable[[], AbstractContextManager[Any]]


class World:
    """A pool of processes, started on demand; `close` ends them. They also end when this process does."""

    def __init__(
        self,
        folder: Path | None = None,
        backend: str = "gloo",
        at_most: Mapping[str, int] | None = None,
        *,
        loopback: bool = True,
    ) -> None:
        """`backend` as for `comm.init_distributed`. A test whose world is larger than one of the numbers in
        `at_most`, such as {"ranks": 2, "GPUs": 1}, is skipped. `loopback`: all ranks are on this machine."""
        prepare_environment(loopback=loopback)
        self.backend, self.at_most = backend, dict(at_most or {})
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=folder))
        self._workers: list[Worker] = []
        atexit.register(self.close)  # before multiprocessing's own exit, which would wait for the workers
        self._calls = 0

    def __call__(
        self, body: Body, nprocs: int, *args: Any, deadline: float = 60.0, mutant: Mutant | None = None
    ) -> list[Any]:
        """Run `body(rank, *args)` on `nprocs` ranks and return what each rank returned.

        Units: deadline in seconds, without the start of new processes.
        Raises: WorldAssertionError if all ranks that failed did so by an assertion, else WorldError.
        """
        __tracebackhide__ = True
        outcomes, table = self._run(body, nprocs, args, deadline, mutant)
        failed = [outcome for outcome in outcomes if not outcome.returned]
        if failed or any(outcome.left_behind for outcome in outcomes):
            own = [outcome for outcome in failed if not outcome.stuck]
            asserted = own and all(
                o.raised("builtins.AssertionError", "_pytest.outcomes.Failed") for o in own
            )
            text = f"{len(failed)} of {nprocs} ranks failed in {_name(body)}"
            raise (WorldAssertionError if asserted else WorldError)(message(text, outcomes, table))
        return [outcome.result() for outcome in outcomes]

    def raises(
        self,
        exceptions: type[BaseException] | tuple[type[BaseException], ...],
        match: str,
        body: Body,
        nprocs: int,
        *args: Any,
        deadline: float = 60.0,
        mutant: Mutant | None = None,
    ) -> list[str]:
        """Demand that every rank raises one of `exceptions` with a message in which `match` is found.

        Returns the messages by rank. A rank that returns, raises something else, dies, or still waits
        a moment after the first one raised, fails the test.
        """
        __tracebackhide__ = True
        wanted = exceptions if isinstance(exceptions, tuple) else (exceptions,)
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in wanted]
        outcomes, table = self._run(body, nprocs, args, deadline, mutant)
        reports = [outcome.report for outcome in outcomes if outcome.raised(*kinds)]
        messages = [report.message for report in reports if report and re.search(match, report.message)]
        if len(messages) < nprocs or any(outcome.left_behind for outcome in outcomes):
            names = " or ".join(kind.__name__ for kind in wanted)
            text = f"{len(messages)} of {nprocs} ranks raised {names} matching {match!r} in {_name(body)}"
            raise WorldAssertionError(message(text, outcomes, table))
        return messages

    def pids(self) -> list[int]:
        """The processes of the pool that run now."""
        return [worker.process.pid for worker in self._workers if worker.exit_code is None]

    def close(self) -> None:
        """End all processes and wait for them."""
        for worker in self._workers:
            worker.connection.close()  # a process whose parent has hung up leaves
        for worker in self._workers:
            worker.end(patience_s=5.0)
        self._workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(
        self, body: Body, nprocs: int, args: tuple[Any, ...], deadline: float, mutant: Mutant | None
    ) -> tuple[list[Outcome], str]:
        if nprocs < 1:
            raise ValueError(f"nprocs={nprocs}: a world has at least one process")
        skip_if_larger(nprocs, self.at_most)
        call = pickle.dumps((body, args, mutant))
        self._calls += 1
        folder = self.folder / f"call{self._calls}"
        folder.mkdir(parents=True)
        workers = self._ready_workers(nprocs)
        path = [entry or os.getcwd() for entry in sys.path]
        try:
            for rank, worker in enumerate(workers):
                worker.send(pickle.dumps(self._order(call, rank, nprocs, str(folder), deadline + 60.0, path)))
            outcomes = _collect(workers, deadline)
            good = all(outcome.returned for outcome in outcomes)
            table = "" if good else self._hang_table(folder, workers)
            _settle(workers, outcomes)
        except BaseException:  # Ctrl-C, or a fault of the harness: do not keep processes in unknown state
            for worker in workers:
                worker.end()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        measured.add(measured.Measured(ranks=nprocs))
        for outcome in outcomes:
            if outcome.report is not None:
                measured.add(outcome.report.seen)
        return outcomes, table

    def _order(self, *args: Any) -> Order:
        return Order(*args, backend=self.backend)

    def _rows(self, folder: Path, workers: list[Worker]) -> list[Any]:
        from ds_lite import trace

        return trace.read_rows(folder / "trace")

    def _hang_table(self, folder: Path, workers: list[Worker]) -> str:
        """Read before any process is ended: a rank that is gone now went by itself."""
        try:
            from ds_lite import trace

            return trace.table(self._rows(folder, workers))
        except Exception as error:  # the tracebacks below matter more
            return f"(no hang table: {type(error).__name__}: {error})"

    def _ready_workers(self, nprocs: int) -> list[Worker]:
        alive = [worker for worker in self._workers if worker.exit_code is None]
        for worker in self._workers:
            if worker not in alive:
                worker.end()
        self._workers = alive
        fresh = [Worker(self.folder) for _ in range(nprocs - len(alive))]
        self._workers += fresh
        for worker in fresh:  # all were started before the first is waited for
            if not worker.connection.poll(START_S) or worker.receive() != b"ready":
                output = worker.new_output()
                self.close()
                raise WorldError(f"a test process did not start within {START_S:.0f} s\n{output}")
        return self._workers[:nprocs]


# Importing torch takes seconds. On Linux one server imports it and forks the workers, so that a fresh one
# costs little; elsewhere forking after such imports is not safe, and every worker imports for itself.
_CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "ds_lite.initialize"]
_CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(module: str) -> None:
    """Import `module` once for all processes too; before the first of them starts."""
    _PRELOADED.append(module)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


class Worker:
    """One child process, the connection to it, and the file its output goes to."""

    is_local, lost, place = True, "", ""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="output-", dir=folder)
        os.close(handle)
        self.log, self._read = Path(name), 0
        self.connection, theirs = Pipe()
        self.process = _CONTEXT.Process(target=serve, args=(theirs, name))
        self.process.start()
        theirs.close()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -9 is signal 9."""
        return self.process.exitcode

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it died; its exit code will be seen
            self.connection.send_bytes(message)

    def poll(self, timeout: float) -> bool:
        return self.connection.poll(timeout)

    def receive(self) -> bytes | None:
        """The next message, or None when the process is gone."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def new_output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        return data.decode(errors="replace")

    def say_where(self) -> None:
        """Its stack goes to its output."""
        os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()

    def end(self, patience_s: float = 0.0) -> None:
        self.process.join(patience_s)
        if self.exit_code is None:
            self.process.kill()
            self.process.join()
        self.connection.close()


def skip_if_larger(nprocs: int, at_most: Mapping[str, int]) -> None:
    """Skip the test, loudly, if a job of so many processes is not wanted or not possible here."""
    import pytest

    for what, number in at_most.items():
        if nprocs > number:
            pytest.skip(f"not proved here: needs {nprocs} {what}")


def prepare_environment(*, loopback: bool = True) -> None:
    """One thread a process; the loopback device, since the name of a laptop may not resolve."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    for _, device in socket.if_nameindex():
        if device in ("lo", "lo0") and loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", device)


def _collect(workers: list[Worker], deadline: float) -> list[Outcome]:
    """Wait for every rank; after the first failure only a grace longer."""
    outcomes: dict[int, Outcome] = {}
    end = time.monotonic() + deadline
    stuck = f"did not finish within the deadline of {deadline:g} s"
    while len(outcomes) < len(workers) and (left := end - time.monotonic()) > 0:
        missing = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
        for connection in wait(list(missing), timeout=min(left, 0.1)):
            rank = missing[connection]
            data = workers[rank].receive()
            if data is not None:
                report = pickle.loads(data)
                when = report.when if workers[rank].is_local else time.monotonic()  # another clock
                outcomes[rank] = Outcome(rank, report, when=when)
            else:
                workers[rank].end(patience_s=5.0)
                outcomes[rank] = _ended(rank, workers[rank])
        for rank in set(missing.values()) - set(outcomes):  # a grandchild may hold a dead rank's connection
            if workers[rank].exit_code is not None and not workers[rank].poll(0.0):
                outcomes[rank] = _ended(rank, workers[rank])
        if not all(outcome.returned for outcome in outcomes.values()) and end > time.monotonic() + GRACE_S:
            end = time.monotonic() + GRACE_S
            stuck = f"still ran {GRACE_S:g} s after the first failure and was ended"
    for rank in range(len(workers)):
        outcomes.setdefault(rank, Outcome(rank, stuck=stuck))
        outcomes[rank].place = workers[rank].place
    return [outcomes[rank] for rank in range(len(workers))]


def _ended(rank: int, worker: Worker) -> Outcome:
    return Outcome(rank, stuck=worker.lost) if worker.lost else Outcome(rank, death=worker.exit_code)


def _settle(workers: list[Worker], outcomes: list[Outcome]) -> None:
    """Bring the processes back to where they began, or end them where that is not possible."""
    if all(outcome.report is not None for outcome in outcomes):
        for worker in workers:
            worker.send(b"clear")
        end = time.monotonic() + CLEAR_S
        for worker, outcome in zip(workers, outcomes, strict=True):
            answered = worker.poll(max(0.0, end - time.monotonic()))
            data = worker.receive() if answered else None
            outcome.left_behind = pickle.loads(data) if data else ["a process group that does not close"]
            if outcome.left_behind:
                worker.end()
    else:
        stuck = [worker for worker, outcome in zip(workers, outcomes, strict=True) if outcome.stuck]
        for worker in stuck:
            worker.say_where()
        time.sleep(0.3 if stuck else 0.0)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.end()
    good = all(outcome.returned for outcome in outcomes)
    for worker, outcome in zip(workers, outcomes, strict=True):
        outcome.output = worker.new_output()
        if good and outcome.output:  # pytest shows it when the test fails later
            print("".join(f"[rank {outcome.rank}] {line}\n" for line in outcome.output.splitlines()), end="")


def _name(body: Body) -> str:
    return f"{body.__module__}.{body.__qualname__}"
