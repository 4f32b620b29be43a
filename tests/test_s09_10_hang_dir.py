"""§9.10 `ds-lite hang`: who waits for whom in a job that stands. Guards against: an innocent rank blamed, a
circle overlooked, a slow job called stuck, a dead one called alive, a rank that waits in silence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import stuck_job
from rings import everyday
from test_s09_10_hang import needs_proc, runs, until

from ds_lite import cli, hang, hang_picture, hang_words, trace_file
from ds_lite.hang import Job
from ds_lite.trace import Trace
from ds_lite.trace_file import Event, Row

NOW = 1000.0


def row(rank: int, instruction: str = "", micro_batch_id: int = -1, peer: int = -1, **changes: Any) -> Row:
    """A rank of a job of one pipeline that stands in `instruction` for ten seconds."""
    fixed = {"world_size": 2, "pid": 100 + rank, "stage_id": rank, "place": f"pipe={rank} data=0"}
    now = {"status": "running", "shape": (), "step": 1, "since": NOW - 10.0, "note": ""}
    what = {"instruction": instruction, "micro_batch_id": micro_batch_id, "peer": peer}
    return Row(**{"rank": rank, **fixed, **now, **what, **changes})


def did(rank: int, instruction: str, micro_batch_id: int, start: float, stage_id: int | None = None) -> Event:
    """What took a tenth of a second, `start` seconds before now."""
    stage = rank if stage_id is None else stage_id
    return Event(rank, stage, instruction, micro_batch_id, NOW - start, NOW - start + 0.1)


def job(*rows: Row, events: tuple[Event, ...] = (), now: float = NOW) -> Job:
    by_rank: dict[int, list[Event]] = {one.rank: [] for one in rows}
    for event in events:
        by_rank[event.rank].append(event)
    return Job({one.rank: one for one in rows}, by_rank, now)


def said(*rows: Row, events: tuple[Event, ...] = ()) -> list[str]:
    """The report on a job that did nothing for a second."""
    return hang_words.report(job(*rows, events=events, now=NOW - 1.0), job(*rows, events=events))


def only(start: str, lines: list[str]) -> str:
    """The one line that starts so."""
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def none(start: str, lines: list[str]) -> bool:
    return not any(line.startswith(start) for line in lines)


# ----------------------------------------------------------------------------------------- two neighbours


def test_both_receive() -> None:
    lines = said(row(0, "RecvGrad", 2, 1), row(1, "RecvActivation", 3, 0, since=NOW - 9.0))
    assert lines[0] == "stuck: no rank moved within 1.0 s"
    assert lines[1:3] == [
        "rank 0 (stage 0) waits 10.0 s in RecvGrad of micro-batch 2 for rank 1 (stage 1), "
        "which is in RecvActivation of micro-batch 3 (9.0 s)",
        "rank 1 (stage 1) waits 9.0 s in RecvActivation of micro-batch 3 for rank 0 (stage 0), "
        "which is in RecvGrad of micro-batch 2 (10.0 s)",
    ]
    assert "0 -> 1 -> 0;" in only("cycle", lines)
    assert "both receive from each other: rank 0 is in RecvGrad" in only("mismatch", lines)
    assert only("mismatch", lines).endswith("one of them has to send first")
    assert none("root", lines)


def test_both_receive_and_one_keeps_what_the_other_needs() -> None:
    ends = row(0, "RecvGrad", 2, 1), row(1, "RecvActivation", 3, 0)
    made = did(0, "ForwardPass", 3, 12.0)
    line = only("mismatch", said(*ends, events=(made, did(1, "BackwardPass", 1, 12.0))))
    assert line.endswith("; rank 0 has done ForwardPass of micro-batch 3, but not SendActivation")
    line = only("mismatch", said(*ends, events=(did(1, "BackwardPass", 2, 12.0),)))
    assert line.endswith("; rank 1 has done BackwardPass of micro-batch 2, but not SendGrad")
    for events in ((made, did(0, "SendActivation", 3, 11.0)), (made, did(0, "LoadData", -1, 11.0))):
        assert "but not" not in only("mismatch", said(*ends, events=events))


def test_both_send() -> None:
    lines = said(row(0, "SendActivation", 2, 1), row(1, "SendGrad", 1, 0))
    assert "0 -> 1 -> 0;" in only("cycle", lines)
    assert "both send to each other" in only("mismatch", lines)
    assert "one of them has to receive first" in only("mismatch", lines)


def test_another_micro_batch() -> None:
    lines = said(row(0, "SendActivation", 3, 1), row(1, "RecvActivation", 2, 0))
    assert re.search("another micro-batch: .* micro-batch 3, .* micro-batch 2;", only("mismatch", lines))


def test_another_shape() -> None:
    ends = row(0, "SendActivation", 3, 1, shape=(3, 5, 6)), row(1, "RecvActivation", 3, 0, shape=(3, 5, 7))
    lines = said(*ends)
    assert only("rank 0", lines).endswith("shape 3x5x6 here, 3x5x7 there")
    assert "another shape" in only("mismatch", lines) and "3x5x6 and 3x5x7" in only("mismatch", lines)


def test_another_kind_of_message() -> None:
    lines = said(row(0, "SendGrad", 3, 1), row(1, "RecvActivation", 3, 0))
    assert "another kind of message" in only("mismatch", lines)


def test_ends_that_fit_are_no_mismatch_of_theirs() -> None:
    """The control of the five above: nothing is wrong with two ends of one message."""
    ends = row(0, "SendActivation", 3, 1, shape=(3, 5)), row(1, "RecvActivation", 3, 0, shape=(3, 5))
    line = only("mismatch", said(*ends))
    assert line.startswith("mismatch: none that the rows know") and "look at the network" in line


def test_a_shape_that_only_one_end_knows() -> None:
    lines = said(row(0, "BackwardPass", 1, 1, shape=(3, 4)), row(1, "ForwardPass", 2))
    assert only("rank 0", lines).endswith("shape 3x4 here, not announced there")


def test_a_message_that_was_sent_and_never_came() -> None:
    waiting = row(0, "LoadData"), row(1, "RecvActivation", 3, 0)
    sent = did(0, "SendActivation", 3, 12.0)
    assert "rank 0 finished SendActivation of micro-batch 3 11.9 s ago" in only(
        "mismatch", said(*waiting, events=(sent,))
    )
    came = did(1, "RecvActivation", 3, 11.95)  # that was the one of the step before
    assert none("mismatch", said(*waiting, events=(sent, came)))
    assert none("mismatch", said(*waiting, events=(did(0, "SendActivation", 2, 12.0),)))


# ------------------------------------------------------------------------------------ circles and their ends


def test_a_circle_of_three() -> None:
    lines = said(row(0, "RecvGrad", 1, 1), row(1, "RecvGrad", 1, 2), row(2, "SendActivation", 0, 0))
    assert "0 -> 1 -> 2 -> 0;" in only("cycle", lines)
    assert none("root", lines) and none("mismatch", lines)


def test_a_circle_holds_up_those_behind_it() -> None:
    ring = row(0, "RecvGrad", 0, 1), row(1, "RecvActivation", 1, 0)
    lines = said(*ring, row(2, "RecvActivation", 1, 1), row(3, "RecvActivation", 1, 2))
    assert "0 -> 1 -> 0;" in only("cycle", lines)
    assert "for rank 2 (stage 2)" in only("rank 3", lines)


def test_one_that_computes_holds_up_all() -> None:
    rows = [row(rank, "RecvGrad", 0, rank + 1) for rank in range(3)]
    past = did(3, "ForwardPass", 0, 30.0)
    lines = said(*rows, row(3, "ForwardPass", 1, since=NOW - 12.0, pid=4711), events=(past,))
    root = only("root", lines)
    assert root.startswith("root: rank 3 (stage 3), which is in ForwardPass of micro-batch 1 (12.0 s)")
    assert "earlier ones took at most 0.1 s; holds up ranks 0, 1 and 2; look at pid 4711" in root
    assert none("cycle", lines) and none("mismatch", lines)


def test_two_pieces_of_one_layer_hold_up_together() -> None:
    def piece(rank: int, stage: int, model: int, *words: Any) -> Row:
        return row(rank, *words, stage_id=stage, place=f"pipe={stage} data=0 model={model}")

    first = piece(0, 0, 0, "RecvGrad", 1, 2), piece(1, 0, 1, "RecvGrad", 1, 3)
    lines = said(*first, piece(2, 1, 0, "ForwardPass", 2), piece(3, 1, 1, "ForwardPass", 2))
    roots = [line for line in lines if line.startswith("root")]
    assert all("ForwardPass of micro-batch 2" in line for line in roots) and len(roots) == 2
    behind = said(*first, piece(2, 1, 0, "ForwardPass", 2), piece(3, 1, 1, "RecvActivation", 2, 1))
    assert "rank 2 (stage 1) may wait 10.0 s in ForwardPass of micro-batch 2 for rank 3" in "\n".join(behind)
    assert "1 -> 3 -> 1;" in only("cycle", behind)


def test_what_may_be_a_circle_is_told_as_that() -> None:
    def piece(model: int, *words: Any) -> Row:
        return row(model, *words, world_size=3, stage_id=0, place=f"pipe=0 data=0 model={model}")

    ahead = piece(0, "ForwardPass", 2), piece(1, "ReduceGrads")
    assert only("cycle", said(*ahead, piece(2, "ReduceGrads"))).endswith(
        ", unless one that may wait still computes"
    )
    lines = said(*ahead, piece(2))  # here a rank explains the hang that waits for none
    assert none("cycle", lines) and only("root", lines).startswith("root: rank 2, which is in the caller's")


def test_none_waits_for_another() -> None:
    line = said(row(0), row(1), events=(did(0, "SaveCheckpoint", -1, 20.0),))[-1]
    assert line.startswith("none waits for another that the rows know of: ranks 0 and 1, ")
    assert "in the caller's code (19.9 s, since SaveCheckpoint); look at pids 100, 101" in line


# --------------------------------------------------------------------------------------------- collectives


def place(rank: int) -> dict[str, Any]:
    """Rank of a 2x2 grid of stages and replicas."""
    return {"world_size": 4, "stage_id": rank // 2, "place": f"pipe={rank // 2} data={rank % 2}"}


def test_a_collective_that_one_rank_never_entered() -> None:
    here = [row(rank, "LoadData", **place(rank)) for rank in (0, 1, 3)]
    last = did(2, "ShareLoss", -1, 12.1, stage_id=1)
    lines = said(*here, row(2, **place(2)), events=(last,))
    assert only("ranks 0, 1 and 3 wait", lines) == (
        "ranks 0, 1 and 3 wait 10.0 s in LoadData for rank 2 (stage 1), "
        "which is in the caller's code (12.0 s, since ShareLoss)"
    )
    assert "holds up ranks 0, 1 and 3" in only("root: rank 2 (stage 1), ", lines)


def test_a_collective_of_one_axis_names_its_own_ranks_only() -> None:
    """Stage 0 has reduced; on stage 1 a replica is missing."""
    rows = [row(rank, **place(rank)) for rank in (0, 1)]
    rows += [row(2, "ReduceGrads", **place(2)), row(3, "ForwardPass", 3, **place(3))]
    lines = said(*rows)
    assert "waits 10.0 s in ReduceGrads for rank 3 (stage 1), which is in ForwardPass" in only(
        "rank 2", lines
    )
    assert only("root", lines).startswith("root: rank 3")


def test_ranks_that_have_left_the_collective_are_not_waited_for() -> None:
    rows = [row(rank, "ReduceTiedGrads", **place(rank)) for rank in (0, 1)]
    rows += [row(rank, "ReduceGrads", **place(rank)) for rank in (2, 3)]
    left = tuple(did(rank, "ReduceTiedGrads", -1, 9.0, stage_id=1) for rank in (2, 3))
    lines = said(*rows, events=left)
    assert none("root", lines) and none("cycle", lines)
    assert "ranks 0 and 1 (stage 0) wait 10.0 s in ReduceTiedGrads: all that meet there" in "\n".join(lines)
    rows[0] = row(0, "ForwardPass", 3, **place(0))
    assert (
        "for rank 0 (stage 0), which is in ForwardPass of micro-batch 3 (10.0 s); ranks 1, 2 and 3 came"
        in only("rank 1 (stage 0) waits", said(*rows, events=left))
    )
    rows[0] = row(0, "ReduceTiedGrads", **place(0))
    early = tuple(did(rank, "ReduceTiedGrads", -1, 90.0, stage_id=1) for rank in (2, 3))  # a step before
    assert "for ranks 2 and 3 (stage 1), which are in ReduceGrads" in "\n".join(said(*rows, events=early))


def test_two_collectives_that_wait_for_each_other() -> None:
    lines = said(row(0, "SaveCheckpoint"), row(1, "LoadData"))
    assert "0 -> 1 -> 0;" in only("cycle", lines)


def test_the_loss_is_handed_up_from_stage_to_stage() -> None:
    rows = [row(0, "ShareLoss", world_size=3), row(1, "ShareLoss", world_size=3)]
    lines = said(*rows, row(2, "OptimizerStep", world_size=3))
    assert "for rank 2 (stage 2), which is in OptimizerStep" in only("rank 1 (stage 1) waits", lines)


# ------------------------------------------------------------------------------- ranks that are no more


def test_a_vanished_rank_is_the_root() -> None:
    lines = said(row(0, "RecvGrad", 1, 1), row(1, "RecvActivation", 2, 0, status="vanished"))
    assert only("root", lines) == (
        "root: rank 1 (stage 1), which vanished in RecvActivation of micro-batch 2; holds up rank 0"
    )
    assert none("cycle", lines)


def test_a_rank_that_died_in_a_collective_has_not_come() -> None:
    lines = said(row(0, "LoadData"), row(1, "LoadData", status="vanished"))
    assert only("root", lines) == "root: rank 1 (stage 1), which vanished in LoadData; holds up rank 0"
    failed = row(0, "RecvGrad", 1, 1, status="failed")
    lines = said(failed, row(1, "RecvActivation", 2, 0, status="vanished"))
    assert none("cycle", lines) and only("root", lines).startswith("root: rank 1")


def test_a_finished_rank_is_the_root() -> None:
    lines = said(row(0, "LoadData"), row(1, status="done"))
    assert only("root", lines) == "root: rank 1 (stage 1), which has finished; holds up rank 0"


def test_a_rank_without_a_file_is_the_root() -> None:
    lines = said(row(0, "LoadData", world_size=3), row(1, "LoadData", world_size=3))
    assert only("root", lines) == (
        "root: rank 2, of which the folder has no trace file; holds up ranks 0 and 1"
    )


def test_a_job_that_is_over() -> None:
    lines = said(
        row(0, "RecvGrad", 1, 1, status="failed", note="RuntimeError: Connection closed by peer"),
        row(1, "ForwardPass", 2, status="vanished"),
    )
    assert lines[0] == "over: no rank runs any more"
    assert only("rank 0", lines).startswith(
        "rank 0 (stage 0) failed in RecvGrad of micro-batch 1, waiting for rank 1 (stage 1), which vanished"
    )
    assert only("root", lines).startswith("root: rank 1")


def test_one_that_failed_does_not_blame_one_that_lives() -> None:
    failed = row(0, "SendActivation", 1, 1, status="failed", note="ValueError: mine")
    lines = said(failed, row(1, "RecvActivation", 1, 0))
    root = "root: rank 0 (stage 0), which failed in SendActivation of micro-batch 1 (ValueError: mine)"
    assert only("root", lines).startswith(root) and none("cycle", lines)


# ----------------------------------------------------------------------------------------- jobs that are well


def test_a_job_that_moves_is_not_stuck() -> None:
    rows = row(0, "RecvGrad", 1, 1), row(1, "ForwardPass", 2)
    before = job(*rows, events=(did(1, "ForwardPass", 0, 20.0),), now=NOW - 1.0)
    later = job(*rows, events=(did(1, "ForwardPass", 0, 20.0), did(1, "ForwardPass", 1, 10.5)))
    assert hang_words.report(before, later) == ["not stuck: rank 1 moved on within 1.0 s"]
    lost = job(rows[0], row(1, "ForwardPass", 3, status="vanished"), now=NOW - 1.0)
    began = job(row(0, "RecvGrad", 2, 1), row(1, "ForwardPass", 3, status="vanished"))
    assert hang_words.report(lost, began) == [
        "not stuck: rank 0 moved on within 1.0 s; no more: rank 1 (stage 1), which vanished in ForwardPass "
        "of micro-batch 3"
    ]


def test_a_job_that_is_done() -> None:
    assert said(row(0, status="done"), row(1, status="done")) == ["not stuck: ranks 0 and 1 finished"]


# ------------------------------------------------------------------------------------------- the picture


def a_batch(*more: Event) -> tuple[Event, ...]:
    loads = [did(rank, "LoadData", -1, 20.0) for rank in (0, 1)]
    old = did(0, "ForwardPass", 7, 25.0)
    passes = [
        did(0, "ForwardPass", 0, 19.0),
        did(0, "ForwardPass", 1, 18.8),
        did(1, "ForwardPass", 0, 18.8),
        did(1, "BackwardPass", 0, 18.6),
    ]
    return old, *loads, *passes, *more


def test_the_picture_marks_where_each_stage_stands() -> None:
    standing = row(0, "RecvGrad", 0, 1), row(1, "ForwardPass", 1)
    assert hang_picture.text(job(*standing, events=a_batch())).splitlines() == [
        "stage 0 | F0 F1  . [?B0]",
        "stage 1 |  . F0 B0 [F1]",
        hang_picture.CAPTION,
    ]
    others = row(0, "SendActivation", 1, 1), row(1, status="done")
    first, second, _ = hang_picture.text(job(*others, events=a_batch())).splitlines()
    assert first.endswith("[F1>]") and second.endswith("done  done")


def test_the_picture_shows_pipeline_by_pipeline_and_the_newest_columns() -> None:
    rows = [row(rank, "ReduceGrads", **place(rank)) for rank in range(4)]
    events = tuple(did(0, "ForwardPass", number, 50.0 - number, stage_id=0) for number in range(40))
    lines = hang_picture.text(job(*rows, events=events)).splitlines()
    names = [line.partition(" |")[0] for line in lines[:4]]
    assert names == ["stage 0 rank 0", "stage 1 rank 2", "stage 0 rank 1", "stage 1 rank 3"]
    assert lines[0].startswith("stage 0 rank 0 | ... F16 F17") and lines[0].endswith("F39 [ReduceGrads]")
    assert len({line.index("[") for line in lines[:4]}) == 1


def test_a_job_without_a_pipeline_has_no_text_picture() -> None:
    assert hang_picture.text(job(row(0, "SaveCheckpoint"), row(1))) == ""
    with pytest.raises(ValueError, match="nothing to draw"):
        hang_picture.svg(job(row(0), row(1)), title="t")


def test_the_svg_marks_what_stands_and_leaves_room_for_the_rest() -> None:
    standing = row(0, "RecvGrad", 0, 1, since=NOW - 18.0), row(1, "ForwardPass", 1, since=NOW - 18.2)
    drawn = hang_picture.spans(job(*standing, events=a_batch()))
    stuck = [span for span in drawn if span.kind == "stuck"]
    assert [span.label for span in stuck] == ["[?B0] 18.0 s", "[F1] 18.2 s"]
    end, begun = max(span.end for span in drawn), max(span.start for span in stuck)
    assert (end - begun) / end == pytest.approx(1 / 3)  # ten times as long as the batch, drawn as a third
    picture = hang_picture.svg(job(*standing, events=a_batch()), title="t")
    root = ElementTree.fromstring(picture)
    assert "t (red boxes go on beyond the edge)" in picture
    soon = row(0, "RecvGrad", 0, 1, since=NOW - 18.0)
    assert "beyond" not in hang_picture.svg(job(soon, events=a_batch()[:1], now=NOW - 17.9), title="t")
    rects = [rect.get("class") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert rects.count("tl-stuck") == 2 + 1 and rects.count("tl-forward") == 3 + 1
    assert "[?B0] 18.0 s" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


# -------------------------------------------------------------------------------------- the command, on files


def run(capsys: Any, folder: Path, *words: str) -> str:
    """What `ds-lite hang` prints; its status is 0."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["hang", str(folder), "--pause", "0.4", *words])
    out, err = capsys.readouterr()
    assert not stopped.value.code and err == "", err
    return str(out)


def standing(folder: Path, rank: int, *words: Any) -> Trace:
    made = Trace(trace_file.file_of(folder, rank), rank, 2)
    made.place(rank, f"pipe={rank} data=0")
    if words:
        made.begin(*words)
    return made


def test_the_command_prints_table_sentences_and_picture(capsys: Any, tmp_path: Path) -> None:
    ranks = [standing(tmp_path, 0, "RecvGrad", 1, 1), standing(tmp_path, 1, "RecvActivation", 2, 0)]
    shown = run(capsys, tmp_path, "--svg", str(tmp_path / "new" / "hang.svg"))
    table, lines, picture = shown.rstrip().split("\n\n")
    ids = re.compile(r"\d+\.\d s")  # seconds, which go on
    assert ids.sub("", table) == ids.sub("", trace_file.table(trace_file.read_rows(tmp_path)))
    assert "cycle: 0 -> 1 -> 0;" in lines and lines.startswith("stuck: no rank moved within 0.4 s")
    assert picture.startswith("stage 0 | [?B1]\nstage 1 | [?F2]\n")
    assert (tmp_path / "new" / "hang.svg").read_text(encoding="utf-8").startswith("<svg")
    assert len(ranks) == 2


def test_the_command_on_a_job_that_moves(capsys: Any, tmp_path: Path) -> None:
    ranks = [standing(tmp_path, 0, "RecvGrad", 1, 1), standing(tmp_path, 1)]
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.01):
            with ranks[1].span("ForwardPass"):
                pass

    worker = threading.Thread(target=work)
    worker.start()
    try:
        shown = run(capsys, tmp_path)
    finally:
        over.set()
        worker.join()
    assert "not stuck: rank 1 moved on" in shown and "waits" not in shown


def test_the_command_on_a_job_that_died_long_ago(capsys: Any, tmp_path: Path) -> None:
    """Seconds are counted up to the moment of the table in the folder."""
    ranks = [standing(tmp_path, 0, "RecvGrad", 1, 1), standing(tmp_path, 1, "ForwardPass", 2)]
    for one in ranks:
        one._since -= 3600.0
        one.detail(1 - one.rank if one.rank == 0 else -1)
        one.fail(RuntimeError("no more"))
    moment = (tmp_path / trace_file.TABLE).stat().st_mtime - 3590.0
    os.utime(tmp_path / trace_file.TABLE, (moment, moment))
    shown = run(capsys, tmp_path)
    assert "over: no rank runs any more" in shown and re.search(r" (9\.9|10\.\d) s ", shown)


@pytest.mark.parametrize("name,message", [("empty", "holds no trace file"), ("none", "is not a folder")])
def test_other_folders_are_refused_in_one_line(capsys: Any, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "rank00000.trace").write_bytes(b"another file")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["hang", str(tmp_path / name)])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and len(err.splitlines()) == 1
    assert message in err and "trace_dir" in err


# ------------------------------------------------------------------------------------------- jobs that hang

OWNER = """
import sys
sys.path[:] = {path!r}
from ds_lite import launch
launch.run_script(*{words!r}, **{more!r})
"""


class Running:
    """A job of `stuck_job.py` under way, which enters one phase after another."""

    def __init__(self, folder: Path, nproc: int, stages: int) -> None:
        self.nproc, self.marks, self.trace = nproc, folder / "marks", folder / "trace"
        self.marks.mkdir()
        self.number = -1
        call = str(stuck_job.__file__), ["--stages", str(stages), "--marks", str(self.marks)]
        code = OWNER.format(path=sys.path, words=call, more={"nproc": nproc, "trace_dir": str(self.trace)})
        env = {**os.environ, "TMPDIR": str(folder)}  # an ended launcher cannot clear its folder away
        self.owner = subprocess.Popen([sys.executable, "-c", code], env=env)

    def ready(self) -> Running:
        """Wait until all ranks have joined: importing torch takes its time."""
        until(lambda: len(list(self.marks.glob("pid*"))) == self.nproc, 60)
        return self

    def close(self) -> None:
        """End the launcher; the ranks leave with it."""
        self.owner.kill()
        self.owner.wait(20)
        pids = [int(mark.read_text()) for mark in self.marks.glob("pid*")]
        until(lambda: not any(map(runs, pids)), 5)

    def enter(self, phase: str) -> None:
        """Leave the phase before and enter this one; returns when the fault has struck."""
        (self.marks / f"over{self.number}").touch()
        self.number += 1
        (self.marks / "draft").write_text(phase)
        (self.marks / "draft").replace(self.marks / f"phase{self.number}")
        until((self.marks / f"struck{self.number}").exists, 60)

    def stands(self) -> bool:
        before = hang.read_job(self.trace)
        time.sleep(0.3)
        return not hang.moved(before, hang.read_job(self.trace))

    def seen(self, capsys: Any, phase: str) -> list[str]:
        """What the command says once the job stands in this phase."""
        self.enter(phase)
        until(self.stands, 60)
        lines = run(capsys, self.trace, "--svg", str(self.marks / f"{phase}.svg")).splitlines()
        print("\n".join(lines))
        (verdict,) = [line for line in lines if line.startswith("stuck")]
        assert re.fullmatch(r"stuck: no rank moved within \d\.\d s", verdict)
        return lines


@pytest.fixture(scope="module", params=everyday([2, 4], lambda nproc: nproc == 4))
def two_stages(request: Any, tmp_path_factory: Any) -> Iterator[Running]:
    """One or two replicas of two stages, for faults from which a job comes back."""
    running = Running(tmp_path_factory.mktemp("hang"), request.param, 2)
    try:
        yield running.ready()
    finally:
        running.close()


@needs_proc
def test_a_layer_that_sleeps(capsys: Any, two_stages: Running) -> None:
    lines, last = two_stages.seen(capsys, "sleep"), two_stages.nproc - 1
    assert only("root", lines).startswith(
        f"root: rank {last} (stage 1), which is in ForwardPass of micro-batch 2 ("
    )
    peer = last - two_stages.nproc // 2
    assert f"for rank {last} (stage 1)" in only(f"rank {peer} (stage 0) waits", lines)
    assert none("cycle", lines) and none("mismatch", lines)
    assert any(re.search(r"^stage 1.*\[F2\]$", line) for line in lines)
    assert ">[F2] " in (two_stages.marks / "sleep.svg").read_text(encoding="utf-8")


@needs_proc
@pytest.mark.parametrize("phase", ["absent", "save"])
def test_a_collective_that_some_ranks_enter(capsys: Any, two_stages: Running, phase: str) -> None:
    lines, nproc = two_stages.seen(capsys, phase), two_stages.nproc
    here = list(range(nproc - 1)) if phase == "absent" else [0]
    missing = [rank for rank in range(nproc) if rank not in here]
    instruction = "LoadData" if phase == "absent" else "SaveCheckpoint"
    (waiting,) = [line for line in lines if f" in {instruction} for rank" in line]
    assert waiting.startswith("rank 0 (stage 0) waits" if len(here) == 1 else "ranks 0, 1 and 2 wait")
    roots = " ".join(line for line in lines if line.startswith("root"))
    assert "which is in the caller's code" in roots or "which are in the caller's code" in roots
    assert all(str(rank) in roots.partition("caller's code")[0] for rank in missing)
    assert f"; hold{'s' if len(missing) == 1 else ''} up rank" in roots
    assert none("cycle", lines) and none("mismatch", lines)


@needs_proc
def test_a_job_that_trains_slowly_is_not_stuck(capsys: Any, two_stages: Running) -> None:
    """The control of all the others."""
    two_stages.enter("slow")
    shown = run(capsys, two_stages.trace)
    assert re.search("^not stuck: ranks 0.* moved on within", shown, re.MULTILINE)
    assert "root" not in shown and "cycle" not in shown


@needs_proc
@pytest.mark.parametrize("stages", everyday([2, 4], lambda stages: stages == 2))
def test_a_swapped_send_and_receive(capsys: Any, tmp_path: Path, stages: int) -> None:
    running = Running(tmp_path, stages, stages)
    try:
        lines = running.ready().seen(capsys, "swapped")
    finally:
        running.close()
    assert "cycle: 0 -> 1 -> 0;" in only("cycle", lines)
    wrong = only("mismatch", lines)
    assert "both receive from each other: rank 0 is in RecvGrad of micro-batch " in wrong
    assert "rank 1 in RecvActivation of micro-batch 2; " in wrong
    assert wrong.endswith("; rank 0 has done ForwardPass of micro-batch 2, but not SendActivation")
    for rank in range(2, stages):
        assert "in RecvActivation of micro-batch 2" in only(f"rank {rank} (stage {rank}) waits", lines)
