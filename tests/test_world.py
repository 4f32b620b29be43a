"""The harness itself. Guards against: lost results, a fault put on the wrong rank, hangs, processes left."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from world import World, WorldAssertionError, WorldError

from ds_lite import comm, trace


def _echo(rank, word):
    return rank, comm.get_world_size(), word, torch.full((rank + 1,), float(rank), requires_grad=True)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_each_rank_returns_its_result(world, nprocs):
    results = world(_echo, nprocs, "word")
    assert [result[:3] for result in results] == [(rank, nprocs, "word") for rank in range(nprocs)]
    assert all(
        torch.equal(result[3], torch.full((rank + 1,), float(rank))) for rank, result in enumerate(results)
    )


def _sum(rank):
    x = torch.tensor([1.0 + rank])
    comm.all_reduce(x)
    return x.item()


def test_ranks_talk_and_processes_are_reused(world):
    assert world(_sum, 2) == [3.0, 3.0]
    pids = world.pids()
    assert world(_sum, 2) == [3.0, 3.0]
    assert world.pids() == pids


def _disturb(rank):
    drawn = torch.rand(1).item()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["DISTURBED"] = "1"
    os.chdir("/")
    return drawn


def _look_around(rank):
    state = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        os.environ.get("DISTURBED"),
        os.getcwd() != "/",
    )
    return (*state, torch.rand(1).item(), torch.get_num_threads())


def test_every_body_starts_alike(world):
    drawn = world(_disturb, 2)
    assert world(_look_around, 2) == [(torch.float32, True, None, True, value, 1) for value in drawn]


def _raise_on_one(rank):
    with trace.current().span("ForwardPass"):
        if rank == 1:
            raise KeyError("only here")
    with trace.current().span("WaitForOthers"):
        _sum(rank)


def test_a_rank_that_raises_is_reported_while_another_waits(world):
    world(_sum, 2)
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world(_raise_on_one, 2)
    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert not isinstance(caught.value, AssertionError)
    assert re.search(
        r"rank 1 raised KeyError\nTraceback .*in _raise_on_one.*KeyError: 'only here'", text, re.DOTALL
    )
    assert re.search(r"rank 0 still ran 2 s after.*in _sum", text, re.DOTALL)
    assert re.search(r"^0 .*running +WaitForOthers", text, re.MULTILINE)
    assert re.search(r"^1 .*failed +ForwardPass .*only here", text, re.MULTILINE)
    assert "_listen" not in text
    assert world(_sum, 2) == [3.0, 3.0]


def _late_failure(rank):
    time.sleep(0.0 if rank == 2 else 0.4)
    raise ValueError(f"number {rank}")


def test_the_first_failure_is_shown_first(world):
    with pytest.raises(WorldError) as caught:
        world(_late_failure, 3)
    assert re.findall(r"ValueError: number (\d)", str(caught.value).split("--- ", 1)[1])[0] == "2"


def _assert_on_one(rank):
    assert rank == 0, "an assertion"
    _sum(rank)


def test_a_failed_assertion_is_an_assertion_error(world):
    with pytest.raises(AssertionError, match="an assertion"):
        world(_assert_on_one, 2)


def _hang_on_one(rank):
    if rank == 1:
        with trace.current().span("RecvGrad"):
            comm.recv(torch.empty(1), src=0)


def test_the_deadline_names_the_rank_and_what_it_did(world):
    with pytest.raises(WorldError) as caught:
        world(_hang_on_one, 2, deadline=1.0)
    text = str(caught.value)
    assert "rank 0 returned" in text
    assert "rank 1 did not finish within the deadline of 1 s" in text
    assert re.search(r"^1 .*running +RecvGrad", text, re.MULTILINE)
    assert re.search(r'File ".*test_world.py", line \d+ in _hang_on_one', text)


def _kill_one(rank, victim):
    with trace.current().span("BackwardPass"):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    _sum(rank)


def test_a_killed_rank_is_named_and_the_pool_recovers(world):
    world(_sum, 2)
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world(_kill_one, 2, 1)
    assert time.monotonic() - start < 10
    failures = str(caught.value).split("--- ")
    assert failures[1].startswith("rank 1 was killed by SIGKILL")
    assert re.search(r"^1 .*vanished +BackwardPass", failures[0], re.MULTILINE)
    assert world(_sum, 2) == [3.0, 3.0]


def _exit_on_one(rank):
    if rank == 0:
        print("last words")
        os._exit(75)
    time.sleep(60)


def test_a_rank_that_leaves_is_reported_with_its_output(world):
    with pytest.raises(WorldError, match=r"(?s)rank 0 left with exit code 75\n.*last words"):
        world(_exit_on_one, 2)


def _refuse(rank, refusing):
    if rank in refusing:
        raise ValueError(f"rank {rank} refuses")


def test_raises_wants_the_message_from_every_rank(world):
    world(_sum, 2)
    pids = world.pids()
    assert world.raises(ValueError, "refuses", _refuse, 2, (0, 1)) == ["rank 0 refuses", "rank 1 refuses"]
    assert world.raises((TypeError, Exception), "refuses", _refuse, 2, (0, 1))
    assert world.pids() == pids
    with pytest.raises(WorldAssertionError, match="1 of 2 ranks raised ValueError matching 'refuses'"):
        world.raises(ValueError, "refuses", _refuse, 2, (1,))
    with pytest.raises(WorldAssertionError, match="0 of 2 ranks raised TypeError"):
        world.raises(TypeError, "refuses", _refuse, 2, (0, 1))
    with pytest.raises(WorldAssertionError, match="1 of 2 ranks raised ValueError matching 'rank 0'"):
        world.raises(ValueError, "rank 0", _refuse, 2, (0, 1))


def test_raises_does_not_accept_a_rank_that_waits(world):
    with pytest.raises(WorldAssertionError, match="rank 0 still ran"):
        world.raises((KeyError, AssertionError), "", _raise_on_one, 2)


def _leave_thread(rank):
    threading.Thread(target=time.sleep, args=(30,), name="forgotten", daemon=True).start()


def _leave_process(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn that a process with threads forks
        multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(5,), name="child", daemon=True
        ).start()


@pytest.mark.parametrize(
    "body,left", [(_leave_thread, "thread 'forgotten'"), (_leave_process, "process 'child'")]
)
def test_what_a_body_leaves_behind_is_a_failure(world, body, left):
    with pytest.raises(WorldError, match=f"left behind: the {left}"):
        world(body, 1)
    assert world(_sum, 1) == [1.0]


@contextmanager
def _tripled():
    right = comm.all_reduce
    comm.all_reduce = lambda x: right(x.mul_(3))
    try:
        yield
    finally:
        comm.all_reduce = right


def test_a_mutant_lives_for_one_call(world):
    assert world(_sum, 2, mutant=_tripled) == [9.0, 9.0]
    assert world(_sum, 2) == [3.0, 3.0]


def test_what_cannot_travel_is_an_error(world):
    with pytest.raises(WorldError, match="pickle"):
        world(_return_a_function, 1)
    with pytest.raises(ValueError, match="nprocs=0"):
        world(_sum, 0)


def _return_a_function(rank):
    return lambda: rank


def _gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="not proved: no process is left (needs /proc)"
)


@needs_proc
def test_no_process_is_left_after_close(tmp_path):
    world = World(tmp_path)
    world(_sum, 2)
    pids = world.pids()
    assert len(pids) == 2 and not _gone(pids)
    world.close()
    assert _gone(pids) and not list(tmp_path.iterdir())


def _sleep(rank, marker):
    Path(f"{marker}{rank}").write_text(str(os.getpid()))
    time.sleep(120)


_OWNER = """
import sys
sys.path[:0] = {path!r}
from test_world import _sleep
from world import World
World()(_sleep, 2, {marker!r}, deadline=100)
"""


@needs_proc
def test_no_process_is_left_when_the_owner_is_killed(tmp_path):
    """The processes are in the middle of a body, so they read no message: the closed connection must do."""
    script = _OWNER.format(path=sys.path, marker=str(tmp_path / "pid"))
    markers = [tmp_path / "pid0", tmp_path / "pid1"]
    # The killed owner cannot clear away its folder. A short one: sockets are made in it, and the path of a
    # socket ends at 108 bytes; tmp_path is longer where the user's name or the temporary folder's is.
    with tempfile.TemporaryDirectory(prefix="") as folder:
        env = {**os.environ, "TMPDIR": folder}
        owner = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
        try:
            _until(lambda: owner.poll() is not None or all(m.exists() and m.read_text() for m in markers), 99)
            assert owner.poll() is None, owner.stderr.read()
        finally:
            owner.kill()
            owner.wait()
            owner.stderr.close()
        _until(lambda: _gone([marker.read_text() for marker in markers]), 15)


def _until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.05)
