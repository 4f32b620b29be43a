"""§9.10 A rank that dies, fails or gets stuck in mid-step. Guards against: a job that waits for ever, a table
that blames the wrong rank, an exit code of zero, processes that stay behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hang_job
import pytest
from world import WorldError

from ds_lite import launch

SOON_S = 10.0
SCRIPT = Path(hang_job.__file__)
LOOPBACK = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
DEVICE = {"GLOO_SOCKET_IFNAME": LOOPBACK[0]} if LOOPBACK else {}

needs_proc = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="not proved: no process is left (needs /proc)"
)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where the ranks leave their process ids and the faulty one the moment of its fault."""
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def over_soon_and_nothing_left(marks: Path, num_ranks: int, patience_s: float = SOON_S) -> None:
    """The fault struck, the job ended within `patience_s` seconds of it, and no process of it runs."""
    assert time.time() - float((marks / "struck").read_text()) < patience_s
    pids = [int((marks / f"pid{rank}").read_text()) for rank in range(num_ranks)]
    until(lambda: not any(map(runs, pids)), 2.0)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.05)


def line_of(rank: int, text: str) -> str:
    """This rank's line in the hang table."""
    (line,) = re.findall(rf"^{rank}  +[-\d].*$", text, re.MULTILINE)
    return line


def arguments(marks: Path, *, stages: int, faulty_rank: int, fault: str) -> list[str]:
    words = {"stages": stages, "faulty-rank": faulty_rank, "fault": fault, "marks": marks}
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


DIED = r"1 +pipe=1 data=[01] +vanished +ForwardPass +2 "
FAILED = r"1 +pipe=1 data=0 +failed +ForwardPass +2 .*KeyError: 'a fault in a layer'"


# ------------------------------------------------------------------------------------------- the harness


def test_the_same_job_without_a_fault(world: Any, marks: Path) -> None:
    assert world(hang_job.body, 4, 2, 3, "", str(marks)) == [2, 2, 2, 2]
    assert (marks / "struck").exists()


def test_an_exception_on_one_rank_ends_a_world(world: Any, marks: Path) -> None:
    with pytest.raises(WorldError) as caught:
        world(hang_job.body, 2, 2, 1, "raise", str(marks))
    assert time.time() - float((marks / "struck").read_text()) < SOON_S
    assert re.search(FAILED, line_of(1, str(caught.value)))
    assert "KeyError: 'a fault in a layer'" in line_of(0, str(caught.value))


@needs_proc
def test_a_killed_rank_ends_a_world(world: Any, marks: Path) -> None:
    with pytest.raises(WorldError) as caught:
        world(hang_job.body, 4, 2, 3, "kill", str(marks))
    over_soon_and_nothing_left(marks, 4)
    assert re.search(DIED, line_of(3, str(caught.value)))
    assert "rank 3 was killed by SIGKILL" in str(caught.value)
    assert all("vanished" not in line_of(rank, str(caught.value)) for rank in (0, 1, 2))


# ------------------------------------------------------------------------------------------- the launcher


@needs_proc
def test_a_killed_rank_ends_a_run(marks: Path) -> None:
    with pytest.raises(launch.JobFailed) as caught:
        launch.run(hang_job.train, 4, 2, 3, "kill", str(marks))
    over_soon_and_nothing_left(marks, 4)
    text = str(caught.value)
    assert text.startswith("the job failed (rank 3: killed by SIGKILL, ")
    assert re.search(DIED, line_of(3, text))
    assert all("vanished" not in line_of(rank, text) for rank in (0, 1, 2))


@needs_proc
def test_an_exception_on_one_rank_ends_a_run(marks: Path, capfd: Any) -> None:
    with pytest.raises(launch.JobFailed) as caught:
        launch.run(hang_job.train, 2, 2, 1, "raise", str(marks))
    over_soon_and_nothing_left(marks, 2)
    assert re.search(FAILED, line_of(1, str(caught.value)))
    said = capfd.readouterr().err
    assert all(line.startswith("[rank ") for line in said.splitlines())
    assert "[rank 1] KeyError: 'a fault in a layer'" in said and "in forward" in said


@needs_proc
def test_a_killed_rank_ends_a_script(marks: Path, tmp_path: Path, capfd: Any) -> None:
    words = arguments(marks, stages=2, faulty_rank=1, fault="kill")
    assert launch.run_script(SCRIPT, words, nproc=2, trace_dir=tmp_path / "trace") == 1
    over_soon_and_nothing_left(marks, 2)
    table = (tmp_path / "trace" / "hang_table.txt").read_text()
    assert table.strip() in capfd.readouterr().err
    assert re.search(DIED, line_of(1, table))
    assert "vanished" not in line_of(0, table)


@needs_proc
def test_a_stuck_rank_ends_a_script(marks: Path, tmp_path: Path, capfd: Any) -> None:
    words, limit_s = arguments(marks, stages=2, faulty_rank=1, fault="sleep"), 4.0
    assert launch.run_script(SCRIPT, words, nproc=2, trace_dir=tmp_path / "trace", limit_s=limit_s) == 1
    over_soon_and_nothing_left(marks, 2, patience_s=limit_s + SOON_S)
    table = (tmp_path / "trace" / "hang_table.txt").read_text()
    assert re.search(r"ForwardPass +2 .*limit of 4 s .* at hang_job.py:\d+", line_of(1, table))
    assert re.search(r"0 +pipe=0 data=0 +\w+ +RecvGrad", line_of(0, table))
    assert "stuck" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------ plain torchrun


@needs_proc
def test_a_killed_rank_ends_a_torchrun(marks: Path, tmp_path: Path) -> None:
    words = arguments(marks, stages=2, faulty_rank=1, fault="kill")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    done = subprocess.run(
        [*torchrun, *meeting, str(SCRIPT), *words, "--trace", str(tmp_path / "trace")],
        env={**os.environ, **DEVICE, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode != 0
    over_soon_and_nothing_left(marks, 2)
    table = (tmp_path / "trace" / "hang_table.txt").read_text()
    assert re.search(DIED, line_of(1, table)), f"{table}\n{done.stderr}"


# --------------------------------------------------------------------------------- the launcher goes first

OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have been told to ignore it
sys.path[:] = {path!r}
from ds_lite import launch
launch.run_script({script!r}, {words!r}, nproc={nproc})
"""


@needs_proc
@pytest.mark.parametrize("number,nproc", [(signal.SIGINT, 2), (signal.SIGKILL, 1)])
def test_no_process_is_left_when_the_launcher_goes(
    marks: Path, tmp_path: Path, number: signal.Signals, nproc: int
) -> None:
    """Ctrl-C reaches the whole group; of a kill the processes hear nothing but the end of their pipe."""
    words = arguments(marks, stages=nproc, faulty_rank=nproc - 1, fault="sleep")
    code = OWNER.format(path=sys.path, script=str(SCRIPT), words=words, nproc=nproc)
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed launcher cannot clear its folder away
    owner = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        until(lambda: (marks / "struck").exists(), 120)
        (os.killpg if number == signal.SIGINT else os.kill)(owner.pid, number)
        _, said = owner.communicate(timeout=SOON_S)
    finally:
        owner.kill()
    over_soon_and_nothing_left(marks, nproc)
    assert owner.returncode == -number
    assert said.count("Traceback") == (number == signal.SIGINT) and "[rank" not in said
