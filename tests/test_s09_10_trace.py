"""§9.10 The row that every rank keeps, the table read from it, and what the launcher promises beside. Guards
against: a row that cannot be read after its rank died, an innocent rank called vanished, rows of an earlier
job, a long name that stops training, a trace that costs more than it tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ds_lite import comm, launch, trace, trace_file
from ds_lite.trace import Event, Row, Trace


@pytest.fixture
def row(tmp_path: Path) -> Trace:
    return Trace(trace_file.file_of(tmp_path, 3), 3, 4)


def test_a_row_is_read_as_it_was_written(row: Trace, tmp_path: Path) -> None:
    row.place(1, "pipe=1 data=1")
    row.step = 7
    before = time.time()
    row.begin("RecvActivation", 2, peer=1, shape=(3, 5, 6))
    (read,) = trace.read_rows(tmp_path)
    assert before <= read.since <= time.time()
    want = Row(
        rank=3,
        world_size=4,
        pid=os.getpid(),
        stage_id=1,
        place="pipe=1 data=1",
        status="running",
        instruction="RecvActivation",
        micro_batch_id=2,
        peer=1,
        shape=(3, 5, 6),
        step=7,
        since=read.since,
        note="",
    )
    assert read == want
    row.end()
    assert trace.read_rows(tmp_path)[0].instruction == ""


def test_the_row_keeps_the_instruction_that_failed(row: Trace, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), row.span("ForwardPass"):
        _ = 1 / 0
    row.fail(ValueError("one line\nand another"))
    (read,) = trace.read_rows(tmp_path)
    assert (read.status, read.instruction, read.note) == ("failed", "ForwardPass", "ValueError: one line")
    assert "ValueError: one line" in (tmp_path / "hang_table.txt").read_text()
    row.fail(RuntimeError("[/a/b/pair.cc:553] Connection closed by peer"))
    row.fail(AssertionError())
    assert trace.read_rows(tmp_path)[0].note == "AssertionError"


def test_a_backend_does_not_fill_the_note_with_its_own_source(row: Trace, tmp_path: Path) -> None:
    row.fail(RuntimeError("[/a/b/pair.cc:553] Connection closed by peer"))
    assert trace.read_rows(tmp_path)[0].note == "RuntimeError: Connection closed by peer"


def test_events_tell_who_did_what_and_when(row: Trace, tmp_path: Path) -> None:
    row.place(1, "")
    for micro_batch_id in range(2):
        row.begin("ForwardPass", micro_batch_id)
        row.end()
    first, second = row.events()
    assert [first, second] == trace.read_events(tmp_path)
    assert first == Event(3, 1, "ForwardPass", 0, first.start, first.end)
    assert first.start <= first.end <= second.start <= second.end
    row.forget_events()
    assert row.events() == trace.read_events(tmp_path) == []


def test_the_newest_events_are_kept(row: Trace) -> None:
    for micro_batch_id in range(trace_file.CAPACITY + 10):
        row.begin("ForwardPass", micro_batch_id)
        row.end()
    kept = [event.micro_batch_id for event in row.events()]
    assert kept == list(range(10, trace_file.CAPACITY + 10))


def test_what_is_too_long_is_cut(row: Trace, tmp_path: Path) -> None:
    row.place(0, "§" * 100)
    row.begin("An instruction of a user" * 3, 0, shape=(2**40, 1, 2, 3, 4, 5))
    row.status("running", "line\none\n" + "note " * 500)
    (read,) = trace.read_rows(tmp_path)
    assert read.instruction == "An instruction of a user" and read.place == "§" * 24
    assert read.shape == (2**31 - 1, 1, 2, 3) and read.note.startswith("line one note")
    row.end()
    assert row.events()[0].instruction == "An instruction of a user"
    assert max(map(len, trace.table([read]).splitlines())) < 300


CHILD = """
import os, sys, types
sys.modules["ds_lite"] = package = types.ModuleType("ds_lite")  # trace needs no torch
package.__path__ = [sys.argv[1]]
from ds_lite import trace
row = trace.open_trace(sys.argv[2], int(sys.argv[3]), 3)
row.begin("BackwardPass", 1)
if row.rank == 0:
    os.kill(os.getpid(), 9)
row.end()
if row.rank == 1:
    trace.close()
"""


def test_a_process_that_is_gone_has_vanished(tmp_path: Path) -> None:
    """Killed in an instruction; a finished one is done, and so is one that leaves without a word."""
    package = str(Path(trace.__file__).parent)
    words = [[sys.executable, "-c", CHILD, package, str(tmp_path), str(rank)] for rank in range(3)]
    children = [subprocess.Popen(command) for command in words]
    codes = [child.wait(120) for child in children]
    assert codes == [-9, 0, 0]
    rows = trace.read_rows(tmp_path)
    assert [row.status for row in rows] == ["vanished", "done", "done"]
    assert [row.instruction for row in rows] == ["BackwardPass", "", ""]


def test_a_zombie_has_vanished(row: Trace, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    if not Path(f"/proc/{child.pid}").exists():
        pytest.skip("not proved: a zombie is seen (needs /proc)")
    path = trace_file.file_of(tmp_path, 3)
    data = bytearray(path.read_bytes())
    trace_file.IDENTITY.pack_into(
        data, 0, trace_file.MAGIC, 3, 4, child.pid, 0, trace_file.cut(os.uname().nodename, 32), b""
    )
    path.write_bytes(data)
    end = time.monotonic() + 20
    while trace.read_rows(tmp_path)[0].status == "running":  # nobody has waited for it
        assert time.monotonic() < end
        time.sleep(0.02)
    assert trace.read_rows(tmp_path)[0].status == "vanished"
    child.wait()


def test_the_table_is_aligned() -> None:
    def line(rank: int, **changes: Any) -> Row:
        fixed = {"world_size": 12, "pid": 1, "stage_id": 0, "place": "pipe=0", "status": "running"}
        now = {"instruction": "", "micro_batch_id": -1, "peer": -1, "shape": (), "step": 0, "since": 0.0}
        return Row(rank=rank, **{**fixed, **now, "note": "", **changes})

    inside = {"instruction": "RecvGrad", "micro_batch_id": 2, "peer": 11, "shape": (3, 5), "since": 8.5}
    text = trace.table([line(0), line(11, **inside, status="vanished"), line(2, stage_id=-1)], now=10.0)
    head, first, second, third = text.splitlines()
    for column in ("stage", "place", "status", "instruction", "micro-batch", "peer", "shape", "for"):
        at = head.index(column)
        assert all(cells[at - 1] == " " != cells[at] for cells in (head, first, second, third)), column
    assert second.split() == ["11", "0", "pipe=0", "vanished", "RecvGrad", "2", "11", "3x5", "1.5", "s"]
    assert "(caller's code)" in first and third.split()[1] == "-"
    assert trace.table([]).split()[0] == "rank"


def test_what_an_earlier_job_left_goes(tmp_path: Path) -> None:
    for rank in range(4):
        Trace(trace_file.file_of(tmp_path, rank), rank, 4)
    (tmp_path / "hang_table.txt").write_text("of an earlier job\n")
    os.utime(tmp_path / "hang_table.txt", (1, 1))
    (tmp_path / "mine.txt").write_text("not ours")
    try:
        trace.open_trace(tmp_path, 0, 2)
        assert [row.rank for row in trace.read_rows(tmp_path)] == [0, 1]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "mine.txt",
            "rank00000.trace",
            "rank00001.trace",
        ]
    finally:
        trace.close()


def test_a_folder_is_read_while_ranks_write(row: Trace, tmp_path: Path) -> None:
    """Fields that belong together are read together; foreign and half-written files are passed over."""
    (tmp_path / "rank00009.trace").write_bytes(b"half")
    (tmp_path / "rankle.trace").write_bytes(bytes(trace_file.SIZE))
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number = (number + 1) % 1000
            row.begin(f"Instruction{number}", number, peer=number, shape=(number,))
            row.end()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            (read,) = trace.read_rows(tmp_path)
            if read.instruction:
                number = int(read.instruction.removeprefix("Instruction"))
                assert (read.micro_batch_id, read.peer, read.shape) == (number, number, (number,))
    finally:
        done.set()
        writer.join()


def test_one_instruction_costs_less_than_ten_microseconds(row: Trace) -> None:
    rounds, best = 2000, float("inf")
    for _ in range(10):  # a busy machine gets more tries
        start = time.perf_counter()
        for _ in range(rounds):
            row.begin("ForwardPass", 1, 2)
            row.end()
        best = min(best, (time.perf_counter() - start) / rounds)
    assert best < 10e-6


# -------------------------------------------------------------------------------------------- the launcher


def tell(factor: int) -> tuple[int, dict[str, str | None]]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return factor * comm.get_rank(), {name: os.environ.get(name) for name in names}


def test_run_returns_what_each_rank_returned() -> None:
    results = launch.run(tell, 2, 10)
    assert [result[0] for result in results] == [0, 10]
    for rank, (_, said) in enumerate(results):
        assert said == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be handed to other processes.*top level of a file"):
        launch.run(lambda: None, 2)
    with pytest.raises(ValueError, match="nproc=0 is not a number of processes"):
        launch.run(tell, 0, 1)
    with pytest.raises(ValueError, match=r"no\.py' is not a file"):
        launch.run_script(tmp_path / "no.py", [], nproc=2)


def test_a_script_leaves_with_its_own_status(tmp_path: Path, capfd: Any) -> None:
    """A lab that is not passed is no failed job: no table. Its folder holds nothing of an earlier job."""
    script, out = tmp_path / "lab.py", tmp_path / "trace"
    lines = (
        "import json, sys, ds_lite",
        "ds_lite.init_distributed()",
        "print(json.dumps(sys.argv[1:]))",
        "sys.exit(3)",
    )
    script.write_text("\n".join(lines))
    out.mkdir()
    Trace(trace_file.file_of(out, 7), 7, 8)
    (out / "hang_table.txt").write_text("of an earlier job\n")
    assert launch.run_script(script, ["--words", "two words"], nproc=2, trace_dir=out) == 3
    said = capfd.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [["--words", "two words"]] * 2
    assert "rank" not in said.err
    assert [row.status for row in trace.read_rows(out)] == ["done", "done"]
    assert not (out / "hang_table.txt").exists()


def test_a_draft_that_vanishes_while_the_folder_is_cleared(tmp_path, monkeypatch):
    """Ranks that fail early may write the hang table while another one begins."""
    draft, old = (tmp_path / f"{trace_file.TABLE}{ending}" for ending in (".4711", ""))
    draft.write_text("half")
    old.write_text("of an earlier job")
    listed = [draft, old]
    draft.unlink()
    monkeypatch.setattr(type(tmp_path), "glob", lambda self, words: iter(listed))
    trace_file.clear(tmp_path, before=1e12)
    assert not old.exists(), "the table after it is looked at all the same"
    trace_file.clear(tmp_path)
