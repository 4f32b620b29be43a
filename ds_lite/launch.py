"""Start local processes, watch them, and say who stopped whom (§9.10).

`run_script` is what `ds-lite lab` uses, `run` what the chapters use. Both give every process the same file
store (no port) and one trace folder. When a process dies, the others cannot finish: they get a short grace to
write their row, then they are ended, and the hang table is printed.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ds_lite import comm, trace

GRACE_S = 3.0  # for survivors to notice and write their row
_POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """What every process is told: who it is, where they meet, what to run."""

    rank: int
    world_size: int
    folder: str
    limit_s: float


class JobFailed(RuntimeError):
    """A process of the job failed, died or got stuck; the message holds the hang table."""


def run(function: Callable[..., Any], nproc: int, *args: Any, limit_s: float = 120.0) -> list[Any]:
    """Call `function(*args)` in `nproc` processes of one job; what each rank returned, by rank.

    `function` must be at the top level of its file. Each process has joined the job already.

    Raises: JobFailed with the hang table if a process fails, dies, or is over `limit_s` in one instruction.
    """
    with tempfile.TemporaryDirectory(prefix="ds_lite-") as folder:
        call = Path(folder) / "call.pickle"
        call.write_bytes(pickle.dumps((_importable(function), args)))
        codes = _watch(_start(nproc, Path(folder), limit_s, ["call", str(call)]))
        _raise_if_failed(codes, Path(folder))
        return [pickle.loads((Path(folder) / f"result{rank}.pickle").read_bytes()) for rank in range(nproc)]


def run_script(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    nproc: int,
    trace_dir: str | os.PathLike[str] | None = None,
    limit_s: float = 300.0,
) -> int:
    """Run a Python script in `nproc` processes of one job; 0, or 1 after printing the hang table.

    The script joins with `ds_lite.init_distributed()`, as under torchrun; its trace goes to `trace_dir`.
    """
    with tempfile.TemporaryDirectory(prefix="ds_lite-") as meeting_place:
        folder = Path(trace_dir if trace_dir is not None else meeting_place)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.trace"):
            old.unlink()
        processes = _start(
            nproc, Path(meeting_place), limit_s, ["script", str(script), *args], trace_dir=folder
        )
        codes = _watch(processes)
        try:
            _raise_if_failed(codes, folder)
        except JobFailed as failure:
            print(failure, file=sys.stderr, flush=True)
            return 1
    return 0


def _start(
    nproc: int, folder: Path, limit_s: float, what: list[str], trace_dir: Path | None = None
) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])
    processes = []
    for rank in range(nproc):
        job = [str(rank), str(nproc), str(folder), str(trace_dir or folder), str(limit_s)]
        command = [sys.executable, "-m", "ds_lite.launch", *job, *what]
        processes.append(subprocess.Popen(command, env=environment, start_new_session=False))
    return processes


def _watch(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all; from the first bad end on the rest have `GRACE_S` seconds. Exit codes, by rank."""
    deadline = None
    try:
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.poll() not in (None, 0) for process in processes):
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return [code if (code := process.poll()) is not None else -signal.SIGTERM for process in processes]
    finally:
        for process in processes:  # also when this process is interrupted: leave nothing behind
            if process.poll() is None:
                process.kill()
            process.wait()


def _raise_if_failed(codes: list[int], folder: Path) -> None:
    if not any(codes):
        return
    ends = ", ".join(f"rank {rank}: {_how_it_ended(code)}" for rank, code in enumerate(codes) if code)
    raise JobFailed(f"the job failed ({ends})\n\n{trace.table(trace.read_rows(folder))}")


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGTERM:
        return "ended by the launcher, it was waiting"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "stuck" if code == trace.EXIT_STUCK else f"exit code {code}"


def _importable(function: Callable[..., Any]) -> tuple[str, str]:
    """The file and the name of a top-level function, which a fresh process can load by itself."""
    if function.__qualname__ != function.__name__:
        raise ValueError(f"{function.__qualname__} is not at the top level of its file; move it there (§9.2)")
    return function.__code__.co_filename, function.__name__


def _main(argv: list[str]) -> None:
    rank, world_size, folder, trace_dir, limit_s, kind, target, *rest = argv
    comm.init_distributed(
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=float(limit_s) * 2),
        verbose=False,
        trace_dir=trace_dir,
        trace_limit=float(limit_s),
    )
    if kind == "script":
        sys.argv = [target, *rest]
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    else:
        (file, name), args = pickle.loads(Path(target).read_bytes())
        result = runpy.run_path(file, run_name="ds_lite_job")[name](*args)
        (Path(folder) / f"result{rank}.pickle").write_bytes(pickle.dumps(result))
    comm.destroy_process_group()
    trace.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
