"""Start local processes, watch them, and say who stopped whom (§9.10).

`run_script` is what `ds-lite lab` uses, `run` what the chapters use. Both give every process the same file
store (no port) and one trace folder. When a process dies, the others cannot finish: they get a short grace to
write their row, the rows are read, then the rest is ended, and the hang table is printed. The processes hold
one end of a pipe: when the launcher is gone, however it ended, so are they.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_lite import trace, trace_file
from ds_lite.forking import CAN_FORK, ForkedRank, fork_ranks, serve

GRACE_S = 3.0  # for survivors to notice and write their row
_POLL_S = 0.05
_START_S = 120.0  # processes may reach the meeting point this far apart: importing torch takes its time
# Ctrl-C reaches all processes of a terminal; the launcher decides, from before the long import on.
_START = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from ds_lite.launch import "
_START_ONE, _START_ALL = _START + "_one; _one(*sys.argv[1:])", _START + "_all; _all(*sys.argv[1:])"
_CALL, _RESULT = "call.pickle", "result{}.pickle"


_HEAVY = re.compile(r"transformers\.models\.\w+\.modeling_\w+")


@dataclass(frozen=True)
class Job:
    """What a process is told: who it is, where they meet, what to run. No script: the call in `folder`."""

    rank: int
    world_size: int
    folder: str
    trace_dir: str
    limit_s: float
    lifeline: int  # a file descriptor that ends when the launcher does
    script: str | None = None
    args: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()  # heavy modules that the launcher has loaded, so the ranks will want them


class JobFailed(RuntimeError):
    """A process of the job failed, died or got stuck; the message holds the hang table."""


def run(function: Callable[..., Any], nproc: int, *args: Any, limit_s: float = 120.0) -> list[Any]:
    """Call `function(*args)` in `nproc` processes of one job; what each rank returned, by rank.

    `function` must be at the top level of its file. Each process has joined the job already. In a script the
    call of `run` stands below `if __name__ == "__main__":`, because the processes load the script too.

    Raises: JobFailed with the hang table if a process fails, dies, or is over `limit_s` in one instruction;
    ValueError for `nproc` < 1 and for what cannot be pickled; RuntimeError inside a process of a job.
    """
    if _inside_a_job:
        raise RuntimeError(
            "run() was called again while a process of its job loaded the script; put the call below "
            'if __name__ == "__main__": (§9.2)'
        )
    with tempfile.TemporaryDirectory(prefix="ds_lite-") as name:
        folder = Path(name)
        (folder / _CALL).write_bytes(_pickled_call(function, args))
        ends = _run_job(nproc, folder, folder, limit_s)
        if any(ends.codes):
            raise JobFailed(ends.message(trace.table(ends.rows)))
        return [pickle.loads((folder / _RESULT.format(rank)).read_bytes()) for rank in range(nproc)]


def run_script(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    nproc: int,
    trace_dir: str | os.PathLike[str] | None = None,
    limit_s: float = 300.0,
) -> int:
    """Run a Python script in `nproc` processes of one job; the exit status is 0 if all of them ended well.

    The script joins with `ds_lite.init_distributed()`, as under torchrun; its trace goes to `trace_dir`.
    If all processes leave with one status of their own, as from a lab that is not passed, that status is
    returned; otherwise the hang table is printed and the status is 1.

    Raises: ValueError for `nproc` < 1 and for a script that is not there.
    """
    if not Path(script).is_file():
        raise ValueError(
            f"script {os.fspath(script)!r} is not a file; give the path of a Python script (§9.2)"
        )
    with tempfile.TemporaryDirectory(prefix="ds_lite-") as meeting_place:
        folder = Path(trace_dir if trace_dir is not None else meeting_place)
        folder.mkdir(parents=True, exist_ok=True)
        trace_file.clear(folder)
        ends = _run_job(nproc, Path(meeting_place), folder, limit_s, str(script), tuple(args))
        if not any(ends.codes):
            return 0
        if (status := ends.own_status()) is not None:
            return status
        table = trace.table(ends.rows)  # once: it says how long ago
        trace_file.write_table(folder, table)
        print(ends.message(table), file=sys.stderr, flush=True)
    return 1


@dataclass(frozen=True)
class _Ends:
    """How the processes ended: exit codes by rank, None for one that the launcher ended; the ranks in the
    order in which they ended; the rows as they were before the launcher ended any."""

    codes: list[int | None]
    order: list[int]
    rows: list[trace.Row]

    def own_status(self) -> int | None:
        """The one positive exit code with which all ranks left by themselves, if it was so."""
        first = self.codes[0]
        by_themselves = len(self.rows) == len(self.codes) and all(row.status == "done" for row in self.rows)
        same = first is not None and first > 0 and set(self.codes) == {first}
        return first if same and by_themselves else None

    def message(self, table: str) -> str:
        bad = [rank for rank in self.order if self.codes[rank] != 0]
        waiting = [rank for rank, code in enumerate(self.codes) if code is None]
        ends = [f"rank {rank}: {_how_it_ended(self.codes[rank])}" for rank in [*bad, *waiting]]
        return f"the job failed ({', '.join(ends)})\n\n{table}"


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "ended by the launcher, it still ran"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return "stuck" if code == trace.EXIT_STUCK else f"exit code {code}"


def _run_job(
    nproc: int,
    folder: Path,
    trace_dir: Path,
    limit_s: float,
    script: str | None = None,
    args: tuple[str, ...] = (),
) -> _Ends:
    if nproc < 1:
        raise ValueError(f"nproc={nproc} is not a number of processes; choose nproc >= 1 (§9.2)")
    theirs, ours = os.pipe()
    heavy = tuple(name for name in sys.modules if _HEAVY.fullmatch(name))
    jobs = [
        Job(i, nproc, str(folder), str(trace_dir), limit_s, theirs, script, args, heavy) for i in range(nproc)
    ]
    processes: list[subprocess.Popen[bytes] | ForkedRank] = []
    try:
        if CAN_FORK:
            command = [sys.executable, "-c", _START_ALL, json.dumps(asdict(jobs[0]))]
            processes += fork_ranks(command, _environment(), nproc, [theirs])
        else:
            for job in jobs:
                command = [sys.executable, "-c", _START_ONE, json.dumps(asdict(job))]
                processes.append(subprocess.Popen(command, env=_environment(), pass_fds=[theirs]))
        return _watch(processes, trace_dir)
    finally:  # also when this process is interrupted: leave nothing behind
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        os.close(theirs)
        os.close(ours)


def _environment() -> dict[str, str]:
    """One thread a process, and the loopback device: a laptop's own name may not resolve."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    for _, device in socket.if_nameindex():
        if device in ("lo", "lo0"):
            environment.setdefault("GLOO_SOCKET_IFNAME", device)
    package = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return environment


def _watch(processes: Sequence[subprocess.Popen[bytes] | ForkedRank], trace_dir: Path) -> _Ends:
    """Wait for all; from the first bad end on the rest have `GRACE_S` seconds."""
    order: list[int] = []
    deadline = math.inf
    while len(order) < len(processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for rank, process in enumerate(processes):
            if rank not in order and process.poll() is not None:
                order.append(rank)
                if process.returncode != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    codes = [process.returncode if rank in order else None for rank, process in enumerate(processes)]
    return _Ends(codes, order, trace.read_rows(trace_dir))


def _pickled_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call, and what a fresh process needs to load it: where to look, and the script we are in."""
    try:
        call = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{getattr(function, '__qualname__', function)} cannot be handed to other processes: {error}; "
            f"define it at the top level of a file and pass plain values (§9.2)"
        ) from None
    script = getattr(sys.modules["__main__"], "__file__", None) if b"__main__" in call else ""
    if script is None:
        raise ValueError("run() needs functions and classes from a file; there is none at a prompt (§9.2)")
    return pickle.dumps((sys.path, script, call))


# ------------------------------------------------------------------------------- in a process of the job

_inside_a_job = False


def _one(text: str) -> None:
    """This process is one rank."""
    fields = json.loads(text)
    _main(Job(**{**fields, "args": tuple(fields["args"])}))


def _all(text: str, tell: str) -> None:
    """This process becomes all ranks."""
    fields = json.loads(text)
    job = Job(**{**fields, "args": tuple(fields["args"])})
    for name in ("ds_lite.initialize", "torch._dynamo", *job.imports):  # optimizers need the second
        importlib.import_module(name)
    serve(int(tell), job.world_size, lambda rank: _main(replace(job, rank=rank)))


def _main(job: Job) -> None:
    from ds_lite import comm  # torch: the launcher itself does without it

    global _inside_a_job
    _inside_a_job = True
    for name, value in (("RANK", job.rank), ("WORLD_SIZE", job.world_size)):  # as torchrun would say
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    threading.Thread(target=_leave_with_the_launcher, args=(job.lifeline,), daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        _write_whole_lines(stream)
    comm.init_distributed(
        init_method=f"file://{job.folder}/store",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.limit_s + _START_S),
        verbose=False,
        trace_dir=job.trace_dir,
        trace_limit=job.limit_s,
    )
    if job.script is None:
        result = _call(Path(job.folder) / _CALL)
        (Path(job.folder) / _RESULT.format(job.rank)).write_bytes(pickle.dumps(result))
    else:
        sys.argv = [job.script, *job.args]
        sys.path[0] = str(Path(job.script).resolve().parent)
        runpy.run_path(job.script, run_name="__main__")
    if comm.is_initialized():
        comm.destroy_process_group()
    trace.close()


def _leave_with_the_launcher(lifeline: int) -> None:
    os.read(lifeline, 1)  # nobody writes: this returns when the other end is closed
    os._exit(trace.EXIT_FAILED)


def _write_whole_lines(stream: Any) -> None:
    """So that the lines of several ranks come out one after another, and none is lost in a killed process."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(line_buffering=True)


def _call(path: Path) -> Any:
    sys.path[:], script, call = pickle.loads(path.read_bytes())
    if script:  # as multiprocessing does it: loaded under another name, found under both
        module = ModuleType("__mp_main__")
        module.__dict__.update(runpy.run_path(script, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    function, args = pickle.loads(call)
    return function(*args)
