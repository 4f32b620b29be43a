"""A world whose ranks are the processes of a job that runs already: torchrun on one node or several.

Rank 0 runs pytest; every other process of the job is a *host*: it keeps one child, `world_worker.py`, starts
it again when it dies, and passes its messages on. So a body that kills its rank does not end the job.

    rank 0   pytest - JobWorld --+-- pipe ---------- child
                                 |
    rank 5   host --------------(TCP)--- pipe ------ child       the children form the groups of the tests

A world of n ranks takes every (job / n)-th process, so that it spans the nodes. The processes meet through
the job's own store; rank 0 writes down there where it listens, and a key without which it hears nobody.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from world import START_S, Worker, World, WorldError, prepare_environment, skip_if_larger
from world_worker import Meeting, Order

from ds_lite import trace

MEET_S = 300.0  # for all hosts to say that they are there
ANSWER_S = 60.0  # for a host to answer; its child may take longer, and then no answer is due
LOST = "cannot be reached any more"
_OURS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_S = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Job:
    """What torchrun, or a script under srun, has told this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    address: str
    port: int
    has_store: bool  # torchrun's agent keeps one; else rank 0 does

    @property
    def place(self) -> str:
        return f"rank {self.rank} of the job, node {self.node}, local rank {self.local_rank}"

    def store(self) -> dist.Store:
        """The store of the whole job; rank 0 keeps it alive where nobody else does."""
        return dist.TCPStore(
            self.address,
            self.port,
            is_master=self.rank == 0 and not self.has_store,
            timeout=timedelta(seconds=MEET_S),
            wait_for_workers=False,
        )


def leave_the_job() -> Job | None:
    """The job that this process was started in, if any; from now on it looks as if started by hand, so that a
    test may start jobs of its own.

    Raises: ValueError if the variables of a job are there in part.
    """
    words = os.environ
    if int(words.get("WORLD_SIZE", "1")) < 2:
        return None
    missing = [name for name in (*_OURS, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in words]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={words['WORLD_SIZE']}, but {', '.join(missing)} is not set; use torchrun"
        )
    job = Job(
        rank=int(words["RANK"]),
        world_size=int(words["WORLD_SIZE"]),
        local_rank=int(words["LOCAL_RANK"]),
        local_world_size=int(words["LOCAL_WORLD_SIZE"]),
        node=words.get("GROUP_RANK", words.get("SLURM_NODEID", "0")),
        address=words["MASTER_ADDR"],
        port=int(words["MASTER_PORT"]),
        has_store=words.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    for name in list(words):
        if name in _OURS or name.startswith(_LAUNCHER_S):
            del words[name]
    return job


def is_loopback(address: str) -> bool:
    try:
        return socket.gethostbyname(address).startswith("127.")
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------- rank 0


class Remote:
    """The child of another process of the job, seen from rank 0; as `world._Worker`."""

    is_local = False

    def __init__(self, connection: Connection, place: str) -> None:
        self.connection, self.place = connection, place
        self.exit_code: int | None = 0  # no child yet
        self.lost = ""
        self._messages: deque[bytes | None] = deque()

    def start(self) -> None:
        """Ask for a child; "ready" is its first message."""
        self.exit_code = None
        self._tell("start")

    def send(self, message: bytes) -> None:
        self._tell("send", message)

    def poll(self, timeout: float) -> bool:
        return bool(self._messages) or self.connection.poll(timeout)

    def receive(self) -> bytes | None:
        """The child's next message, or None when it is gone."""
        if not self._messages:
            self._read_one()
        return self._messages.popleft() if self._messages else None

    def new_output(self) -> str:
        return str(self._ask("output") or "")

    def rows(self, call: str) -> list[Any]:
        """What this rank has written into the trace folder of a call."""
        return list(self._ask("rows", call) or [])

    def say_where(self) -> None:
        self._tell("say where")

    def kill(self) -> None:
        self._tell("kill")

    def end(self, patience_s: float = 0.0) -> None:
        if self.exit_code is None:
            code = self._ask("end", patience_s)
            self.exit_code = 0 if code is None else int(code)
        self._messages.clear()

    def leave(self) -> None:
        """The host may go."""
        self._tell("over")
        self.connection.close()

    def _tell(self, verb: str, payload: Any = None) -> None:
        try:
            self.connection.send((verb, payload))
        except OSError:
            self._lose()

    def _lose(self) -> None:
        self.lost, self.exit_code = LOST, -1

    def _read_one(self) -> tuple[str, Any] | None:
        """The next thing the host says, if it is not the child's."""
        try:
            kind, payload = self.connection.recv()
        except (EOFError, OSError):
            self._lose()
            self._messages.append(None)
            return None
        if kind == "message":
            self._messages.append(payload)
        elif kind == "gone":
            self.exit_code = payload
            self._messages.append(None)
        return (kind, payload)

    def _ask(self, verb: str, payload: Any = None) -> Any:
        self._tell(verb, payload)
        end = time.monotonic() + ANSWER_S
        while not self.lost:
            if not self.connection.poll(max(0.0, end - time.monotonic())):
                self._lose()
            elif (said := self._read_one()) is not None and said[0] == verb:
                return said[1]
        return None


class JobWorld(World):
    """A world whose ranks are processes of a job; see `World`."""

    were_made = 0  # by this process

    def __init__(
        self,
        job: Job,
        folder: Path | None = None,
        backend: str = "gloo",
        at_most: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(folder, backend, at_most, loopback=is_loopback(job.address))
        self.job, self._store = job, job.store()  # which lives as long as this object
        self._remotes = meet(job, self._store)
        JobWorld.were_made += 1
        self._prefix = secrets.token_hex(8)

    def close(self) -> None:
        super().close()
        for remote in self._remotes:
            remote.leave()
        self._remotes.clear()

    def _ready_workers(self, nprocs: int) -> list[Any]:
        ranks = [0, *(rank for rank, remote in enumerate(self._remotes, 1) if not remote.lost)]
        left = f"ranks, and of the job's {self.job.world_size} only {len(ranks)} can be reached"
        skip_if_larger(nprocs, {left: len(ranks)})
        chosen = [ranks[place * len(ranks) // nprocs] for place in range(nprocs)]
        (first,) = super()._ready_workers(1)
        first.place = self.job.place
        remotes = [self._remotes[rank - 1] for rank in chosen[1:]]
        fresh = [remote for remote in remotes if remote.exit_code is not None]
        for remote in fresh:
            remote.start()
        for remote in fresh:
            if not remote.poll(START_S) or remote.receive() != b"ready":
                raise WorldError(f"the {remote.place} has no process for this test\n{remote.new_output()}")
        return [first, *remotes]

    def _order(self, *args: Any) -> Order:
        meeting = Meeting(self.job.address, self.job.port, f"{self._prefix}/{self._calls}")
        local = (self.job.local_rank, self.job.local_world_size)
        return replace(super()._order(*args), meeting=meeting, local=local)

    def _rows(self, folder: Path, workers: list[Any]) -> list[trace.Row]:
        here = super()._rows(folder, workers)
        return here + [row for worker in workers[1:] for row in worker.rows(folder.name)]


def meet(job: Job, store: dist.Store) -> list[Remote]:
    """Wait for all hosts: their children by rank of the job, from 1 on.

    Raises: TimeoutError if one of them does not come.
    """
    key = secrets.token_bytes(32)
    found: dict[int, Remote] = {}
    with Listener(("" if not is_loopback(job.address) else job.address, 0), authkey=key) as listener:
        store.set("ds_lite/suite", pickle.dumps((listener.address[1], key)))
        thread = threading.Thread(target=_welcome, args=(listener, job.world_size - 1, found), daemon=True)
        thread.start()
        thread.join(MEET_S)
        if thread.is_alive():
            missing = sorted(set(range(1, job.world_size)) - set(found))
            raise TimeoutError(f"ranks {missing} of the job did not come within {MEET_S:.0f} s")
    return [found[rank] for rank in sorted(found)]


def _welcome(listener: Listener, count: int, found: dict[int, Remote]) -> None:
    while len(found) < count:
        with contextlib.suppress(OSError, EOFError):
            connection = listener.accept()
            rank, place = connection.recv()
            found[rank] = Remote(connection, place)


# --------------------------------------------------------------------------------------------------- hosts


def host(job: Job) -> int:
    """Serve rank 0 until it says that all is over; the exit status of this process."""
    prepare_environment(loopback=is_loopback(job.address))
    store = job.store()
    port, key = pickle.loads(store.get("ds_lite/suite"))
    with Client((job.address, port), authkey=key) as connection:
        connection.send((job.rank, job.place))
        with tempfile.TemporaryDirectory(prefix="world-") as folder:
            served = _Host(job, connection, Path(folder))
            try:
                return served.serve()
            finally:
                served.end(0.0)


class _Host:
    def __init__(self, job: Job, connection: Connection, folder: Path) -> None:
        self.job, self.connection, self.folder = job, connection, folder
        self.child: Worker | None = None
        self.said = ""  # by a child that is gone

    def serve(self) -> int:
        while True:
            watched = [self.connection]
            if self.child is not None:
                watched += [self.child.connection, self.child.process.sentinel]
            ready = wait(watched)
            if self.child is not None and (set(ready) - {self.connection}):
                self._pass_on()
            if self.connection in ready:
                try:
                    verb, payload = self.connection.recv()
                except (EOFError, OSError):
                    return 1  # rank 0 is gone
                if verb == "over":
                    return 0
                self._do(verb, payload)

    def _pass_on(self) -> None:
        """One message of the child, or that it is gone."""
        data = self.child.receive() if self.child.connection.poll() else None
        if data is not None:
            self.connection.send(("message", data))
        else:
            self.connection.send(("gone", self.end(5.0)))

    def _do(self, verb: str, payload: Any) -> None:
        if verb == "start":
            self.end(0.0)
            self.child, self.said = Worker(self.folder), ""
        elif verb == "send":
            if self.child is not None:
                self.child.send(self._here(payload))
        elif verb == "output":
            said, self.said = self.said, ""
            self.connection.send((verb, self.child.new_output() if self.child is not None else said))
        elif verb == "rows":
            self.connection.send((verb, trace.read_rows(self.folder / payload / "trace")))
        elif verb == "say where" and self.child is not None:
            self.child.say_where()
        elif verb == "kill" and self.child is not None:
            self.child.kill()
        elif verb == "end":
            self.connection.send((verb, self.end(payload)))

    def end(self, patience_s: float) -> int:
        """End the child, if there is one; its exit code."""
        if self.child is None:
            return 0
        self.child.end(patience_s)
        code, self.said = self.child.exit_code, self.child.new_output()
        self.child = None
        return int(code)

    def _here(self, message: bytes) -> bytes:
        """An order with folders and devices of this node."""
        if message == b"clear":
            return message
        order: Order = pickle.loads(message)
        for earlier in self.folder.glob("call*"):
            shutil.rmtree(earlier, ignore_errors=True)
        folder = self.folder / Path(order.folder).name
        folder.mkdir()
        local = (self.job.local_rank, self.job.local_world_size)
        return pickle.dumps(replace(order, folder=str(folder), local=local))


if __name__ == "__main__":
    given = leave_the_job()
    if given is None or given.rank == 0:
        sys.exit("a host is a process of a job that is not its rank 0; start it with torchrun")
    sys.exit(host(given))
