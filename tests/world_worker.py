"""The child side of `world.py`: a process that runs one test body after another.

Each call has two phases. *Run*: join a fresh process group, run the body, report. *Clear*: only when every
rank has reported, leave the group and say what the body left behind. Between the phases a rank keeps
its connections, so one that is early or has failed does not disturb those that still compute.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import measured
import numpy as np
import torch
import torch.distributed as dist

SETTLE_S = 1.0  # a thread that is about to end may take this long


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a call meet if not in a file: a TCP store, and a prefix of its keys."""

    address: str
    port: int
    prefix: str


@dataclass(frozen=True)
class Order:
    """What the parent asks of one rank. `call` is pickled (body, args, mutant); `local` is this rank's number
    on its node, and how many there are."""

    call: bytes
    rank: int
    world_size: int
    folder: str
    timeout_s: float
    path: list[str]
    backend: str = "gloo"
    meeting: Meeting | None = None
    local: tuple[int, int] | None = None


@dataclass(frozen=True)
class Report:
    """How the body ended on one rank; `when` is `time.monotonic()`, one clock for the whole machine."""

    when: float
    result: bytes | None = None  # pickled; None: the body raised
    kinds: tuple[str, ...] = ()  # the exception's class and its bases, by full name
    message: str = ""
    trace: str = ""
    seen: measured.Measured = field(default_factory=measured.Measured)


def serve(connection: Connection, log: str) -> None:
    """Answer orders from the connection until the other end is closed; what is printed goes to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.close(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    before = _Surroundings()
    gc.collect()
    gc.freeze()  # what torch brought along need not be searched again after each body
    connection.send_bytes(b"ready")
    while True:
        order = pickle.loads(inbox.get())
        with measured.record() as seen:
            report = _run(order)
        if report.result is not None:
            seen.refused.clear()  # by a control
        connection.send_bytes(pickle.dumps(replace(report, seen=seen)))
        inbox.get()  # every rank has reported
        connection.send_bytes(pickle.dumps(before.restore()))


def _listen(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Pass orders on; when the parent is gone, however it ended, so is this process."""
    while True:
        try:
            inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _run(order: Order) -> Report:
    sys.path += [entry for entry in order.path if entry not in sys.path]
    _same_start()
    try:
        body, args, mutant = pickle.loads(order.call)
        with mutant() if mutant else contextlib.nullcontext():
            _join(order)
            result = pickle.dumps(body(order.rank, *args))  # by value: no shared memory, no open files
    except BaseException as error:  # also SystemExit and pytest.fail
        return _report(error)
    return Report(time.monotonic(), result)


def _same_start() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _join(order: Order) -> None:
    from ds_lite import comm

    backend = order.backend
    if order.backend != "gloo":  # as a launcher would say; by these comm finds the GPU of this rank
        local_rank, local_world_size = order.local or (order.rank, order.world_size)
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world_size))
        if order.backend == "auto":
            cards = torch.cuda.device_count()
            backend = "nccl" if cards >= local_world_size else "staged" if cards else "gloo"
    store, file = None, f"file://{order.folder}/store"
    if order.meeting is not None:
        shared = dist.TCPStore(order.meeting.address, order.meeting.port, wait_for_workers=False)
        store, file = dist.PrefixStore(order.meeting.prefix, shared), None
    comm.init_distributed(
        dist_backend=backend,
        init_method=file,
        store=store,
        rank=order.rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=order.timeout_s),
        trace_dir=f"{order.folder}/trace",
        verbose=False,
    )


def _report(error: BaseException) -> Report:
    when = time.monotonic()
    if "ds_lite.trace" in sys.modules:
        sys.modules["ds_lite.trace"].current().fail(error)
    frames = error.__traceback__
    while (
        frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None
    ):
        frames = frames.tb_next
    kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Report(when, None, kinds, str(error), text)


class _Surroundings:
    """What a body must leave as it was: threads and children; and what is put back: folder, environment."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.folder = os.getcwd()
        self.environment = dict(os.environ)

    def restore(self) -> list[str]:
        """Leave the process group; the list says what the body left behind."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if "ds_lite.trace" in sys.modules:
            sys.modules["ds_lite.trace"].close()
        gc.collect()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        left = ["a process group"] if dist.is_initialized() else []
        end = time.monotonic() + SETTLE_S
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                left.append(f"the thread {thread.name!r}")
        return left + [f"the process {child.name!r}" for child in multiprocessing.active_children()]
