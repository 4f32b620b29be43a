"""The suite in a job that runs already. Guards against: verdicts that differ from those of one machine, a
rank whose fault is not named, a run that ends with the first rank that dies, processes that wait for ever.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_conformance import make_suite
from world_job import Job, leave_the_job

FAKE = """
        import os, signal, time
        import pytest, torch
        from tolerance import LAW, assert_close
        from ds_lite import comm, launch

        def _sum(rank, expected):
            x = torch.ones(1, dtype=torch.float64)
            comm.all_reduce(x)
            assert_close(x, torch.tensor([float(expected)], dtype=torch.float64), LAW)
            return os.environ.get("WHOSE", "rank 0's")

        def _die(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        def _refuse(rank):
            raise ValueError(f"not on rank {rank}")

        def _sleep(rank):
            comm.barrier()
            time.sleep(100 * rank)

        def test_a_sum(world):
            world(_sum, 2, 2)

        def test_dies(world):
            world(_die, 2)

        def test_the_next_one_is_right(world):
            assert world(_sum, 2, 2) and world(_sum, 1, 1)

        def test_all_refuse(world):
            assert world.raises(ValueError, "not on rank", _refuse, 2)[1] == "not on rank 1"

        def test_is_wrong(world):
            world(_sum, 2, 3)

        def test_hangs(world):
            world(_sleep, 2, deadline=2.0)

        def test_a_job_of_its_own():
            assert launch.run(os.getenv, 2, "WORLD_SIZE") == ["2", "2"]

        def test_needs_more(world):
            world(_sum, 3, 3)
        """
VERDICTS = {
    "a sum": "passed",
    "dies": "failed",
    "the next one is right": "passed",
    "all refuse": "passed",
    "is wrong": "failed",
    "hangs": "failed",
    "a job of its own": "passed",
    "needs more": "not proved",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_suite(tmp_path_factory.mktemp("suite"), {"test_s09_10_fake.py": FAKE})


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


@contextmanager
def started(command: list[str], cwd: Path, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the job; it is ended with all it started."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **changes}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.communicate()


def variables(rank: int, port: int) -> dict[str, str]:
    """What a launcher without a store of its own tells rank `rank` of two nodes with one process each."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def rules_of(report: Path, number: str = "9.10") -> dict[str, Any]:
    content = json.loads((report / "report.json").read_text(encoding="utf-8"))
    (section,) = [one for one in content["sections"] if one["number"] == number]
    return {rule["title"]: rule for rule in section["rules"]}


def conformance(root: Path, report: Path) -> str:
    """A script that runs the command on the suite at `root`."""
    return (
        "import sys; from pathlib import Path; from ds_lite.conformance import command, in_a_job\n"
        "from test_conformance import request\n"
        f"root, report = Path({str(root)!r}), Path({str(report)!r})\n"
        "if in_a_job.serves(): sys.exit(in_a_job.serve(root))\n"
        "sys.exit(command.run(request(root, sections='9.10'), report))\n"
    )


# ------------------------------------------------------------------------------------------ two processes


@pytest.mark.full
def test_verdicts_of_two_processes_that_somebody_started(suite: Path, tmp_path: Path) -> None:
    """Rank 0 keeps the store here, as under srun."""
    port, code = free_port(), conformance(suite, tmp_path)
    words = [sys.executable, "-c", code]
    with started(words, suite, **variables(1, port)) as host:
        with started(words, suite, **variables(0, port)) as rank_0:
            said, _ = rank_0.communicate(timeout=120)
        assert rank_0.returncode == 1 and host.wait(20) == 0, said
    verdicts_are_right(tmp_path, said)


def verdicts_are_right(report: Path, said: str) -> None:
    """Each rule's, and each fault with the rank that had it."""
    rules = rules_of(report)
    assert {title: rule["verdict"] for title, rule in rules.items()} == VERDICTS, said
    assert set(rules["a sum"]["differences"]) == {"LAW"} and rules["a sum"]["ranks"] == 2
    text = (report / "pytest.txt").read_text(encoding="utf-8")
    place = "(rank 1 of the job, node 1, local rank 0)"
    assert f"rank 1 {place} was killed by SIGKILL" in text
    assert f"rank 1 {place} raised AssertionError" in text and "LAW allows" in text
    assert f"rank 1 {place} did not finish within the deadline of 2 s" in text
    assert re.search(r"in _sleep", text), "the stack of a rank that hangs"
    content = json.loads((report / "report.json").read_text(encoding="utf-8"))
    assert {rate["axis"] for rate in content["bandwidth"]} == {"data"}
    assert content["machine"]["job"].startswith("2 processes on ")


def test_a_process_of_the_job_that_dies_is_named_and_missed(suite: Path, tmp_path: Path) -> None:
    """Without it the tests of one rank go on; those of two are not proved."""
    port = free_port()
    words = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", "--rootdir", str(suite)]
    host_words = [sys.executable, str(suite / "tests" / "world_job.py")]
    order = """
        import os, signal, pathlib
        import pytest
        def _one(rank): return rank
        def _end_the_host(rank):
            if rank == 1: os.kill(int(pathlib.Path({pid!r}).read_text()), signal.SIGKILL)
        def test_before(world): assert world(_one, 2) == [0, 1]
        def test_lost(world): world(_end_the_host, 2, deadline=20)
        def test_alone(world): assert world(_one, 1) == [0]
        def test_both(world): world(_one, 2)
        """
    file = suite / "tests" / "test_lost.py"
    file.write_text(re.sub("(?m)^        ", "", order.format(pid=str(tmp_path / "pid"))))
    with started(host_words, suite, **variables(1, port)) as host:
        (tmp_path / "pid").write_text(str(host.pid))
        with started([*words, str(file)], suite, **variables(0, port)) as rank_0:
            said, _ = rank_0.communicate(timeout=120)
    assert "1 failed, 2 passed, 1 skipped" in said, said
    assert "FAILED tests/test_lost.py::test_lost" in said
    assert "rank 1 (rank 1 of the job, node 1, local rank 0) cannot be reached any more" in said
    assert "needs 2 ranks, and of the job's 2 only 1 can be reached" in said


@pytest.mark.full
def test_without_a_test_for_them_the_others_leave_too(suite: Path, tmp_path: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(suite)]
    with started([*words, "tests"], suite, **variables(1, port)) as host:
        nothing = [*words, "-k", "job_of_its_own", "tests/test_s09_10_fake.py"]
        with started(nothing, suite, **variables(0, port)) as rank_0:
            said, _ = rank_0.communicate(timeout=60)
        assert "1 passed" in said and rank_0.returncode == 0, said
        assert host.wait(20) == 0


# ------------------------------------------------------------------------------------------- two torchruns


def two_agents(words: list[str], cwd: Path, processes: int, timeout: float) -> tuple[str, list[int]]:
    """Two torchruns of `processes` each that meet on this machine; what rank 0's said, and how both ended."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "suite"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--local-addr", "localhost"]
    command = [*agent, *meeting, "--nproc-per-node", str(processes), *words]
    with started(command, cwd) as one, started(command, cwd) as other:
        end = time.monotonic() + timeout
        said = "".join(process.communicate(timeout=end - time.monotonic())[0] for process in (one, other))
        return said, [one.returncode, other.returncode]


def test_two_agents_give_the_verdicts_of_one_machine(suite: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(conformance(suite, tmp_path / "report"))
    said, statuses = two_agents([str(script)], suite, 1, 120)
    assert 1 in statuses, said
    verdicts_are_right(tmp_path / "report", said)


@pytest.mark.full
def test_four_ranks_on_two_agents_pass_what_one_machine_passes(tmp_path: Path) -> None:
    """Engine, grid, gates and sequences over both."""
    root = Path(__file__).resolve().parents[1]
    words = ["-m", "ds_lite", "conformance", "--backend", "gloo", "--sections", "9.10,9.11,9.15"]
    said, statuses = two_agents([*words, "--report", str(tmp_path)], root, 2, 500)
    assert statuses == [0, 0], said
    content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert content["exit_status"] == 0 and "failed" not in {
        rule["verdict"] for section in content["sections"] for rule in section["rules"]
    }


# ------------------------------------------------------------------------------------------------- the job


def test_a_process_leaves_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert leave_the_job() is None
    for name, value in {**variables(1, 7), "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert leave_the_job() == Job(1, 2, 0, 1, "1", "localhost", 7, True)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "GROUP_RANK"} & set(os.environ)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, but RANK, MASTER_ADDR.* is not set; use torchrun"):
        leave_the_job()


def test_the_batch_script_starts_it_on_every_node(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: what it would run."""
    for name, text in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo first; echo second"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": str(tmp_path), "JOB_NODELIST": "x", "JOB_ID": "41", "JOB_NUM_NODES": "2"}
    env = {f"SLURM_{name}": value for name, value in {**slurm, "GPUS_ON_NODE": "8"}.items()}
    script = Path(__file__).resolve().parents[1] / "labs" / "slurm" / "conformance.sbatch"
    said = subprocess.run(
        ["bash", str(script), "--sections", "9.10"],
        env={**os.environ, **env, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[1:4] == ["python", "-m", "torch.distributed.run"]
    for name, value in {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-endpoint": "first:20041",
        "--report": "runs/conformance-41",
        "--sections": "9.10",
    }.items():
        assert said[said.index(name) + 1] == value
