"""Start pytest on the files of some sections and pass on, one by one, the events that its plugin writes.

pytest runs in a session of its own, so that Ctrl-C reaches this process only, which then asks it to stop and
ends whatever is left. It holds one end of a pipe: when this process is gone, however it ended, it stops too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from ds_lite.conformance import in_a_job
from ds_lite.conformance.asked import Asked

POLL_S = 0.1
PATIENCE_S = 10.0  # for pytest to end its workers and their worlds after it was asked to stop

Event = dict[str, Any]


def words(asked: Asked, folder: Path, lifeline: int) -> list[str]:
    """The command line of pytest; it is to be run in the root of the suite."""
    options = [
        *("--rootdir", str(asked.root), "-p", "ds_lite.conformance.plugin", "-p", "no:cacheprovider"),
        *("--conformance-events", str(folder / "events.jsonl"), "--conformance-lifeline", str(lifeline)),
        *("--junitxml", str(folder / "junit.xml"), "--color", "no", "-ra"),
        *_meaning(asked),
    ]
    if in_a_job.ranks() > 1:
        options += ["--bandwidth-to", str(folder)]
    if asked.jobs != 0:
        options += ["-n", "auto" if asked.jobs is None else str(asked.jobs), "--dist", "loadgroup"]
    return [sys.executable, "-m", "pytest", *options, *asked.files()]


def again(asked: Asked) -> str:
    """How to run one of the tests by hand; its name is to follow."""
    return " ".join(["python -m pytest", *_meaning(asked)])


def _meaning(asked: Asked) -> list[str]:
    """The options that change what is tested."""
    options = ["--backend", asked.backend, "--impl", _impl(asked.impl)]
    if asked.nproc is not None:
        options += ["--nproc", str(asked.nproc)]
    return [*options, "--full"] if asked.full else options


def events(asked: Asked, folder: Path) -> Generator[Event]:
    """What happens in the run, until pytest has ended; then `ended` with its exit status.

    The folder gets events.jsonl, junit.xml and what pytest prints, pytest.txt. To close the generator, or an
    exception thrown into it, ends pytest and all that it started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "events.jsonl"
    path.write_bytes(b"")
    theirs, ours = os.pipe()
    with (folder / "pytest.txt").open("wb") as log, path.open("rb") as file:
        process = subprocess.Popen(
            words(asked, folder, theirs),
            cwd=asked.root,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        try:
            is_over = False
            while not is_over:
                is_over = process.poll() is not None  # before reading: what was written until then is read
                yield from _new_lines(file)
                time.sleep(0 if is_over else POLL_S)
            yield {"event": "ended", "status": process.returncode}
        finally:
            _end(process)
            os.close(ours)


def _new_lines(file: Any) -> Iterator[Event]:
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):  # nothing, or half a line
            file.seek(start)
            return
        yield json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask pytest to stop; a moment later end its whole session."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody of the session is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    """As it is, with this package found first, also where it is not installed."""
    package = str(Path(__file__).resolve().parents[2])
    found = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": found}


def _impl(impl: str) -> str:
    """A file is meant from where the user stands, not from the root of the suite."""
    return str(Path(impl).resolve()) if impl.endswith(".py") else impl
