"""The ds-lite command. Guards against: tracebacks for mistakes, a wrong status, wrapped pictures."""

import sys
import types

import pytest
from typer.testing import CliRunner

from ds_lite import cli


def run(*words):
    return CliRunner().invoke(cli.app, list(words), prog_name="ds-lite")


def fails(capsys, *words):
    """What a mistake prints: one line on stderr, nothing on stdout, status 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("error: ")
    return err


def test_where_prints_module_commands_and_symbol():
    result = run("where", "9.10.2")
    assert result.exit_code == 0
    for word in (
        "ds_lite/pipe/schedule.py",
        "python chapters/ch10_schedules.py",
        "python -m pytest tests/test_s09_10_*.py",
        "ds-lite lab 2 --nproc 4",
        "deepspeed/runtime/pipe/schedule.py::TrainSchedule",
    ):
        assert word in result.output


def test_where_says_what_is_not_there_yet():
    assert "not yet" in run("where", "9.12").output


def test_schedule_draws_the_pipeline_and_measures_it():
    lines = run("schedule", "--stages", "4", "--micro-batches", "8").output.splitlines()
    assert lines[0] == "stage 0 | F0  . F1  . F2  . F3 B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7"
    assert any("0.273 of the total time, 0.375 of the ideal" in line for line in lines)
    assert "peak live micro-batches  4 3 2 1" in lines


def test_a_wide_picture_is_never_wrapped():
    lines = run("schedule", "--stages", "2", "--micro-batches", "64").output.splitlines()
    assert lines[0].startswith("stage 0 |") and len(lines[0]) > 300 and lines[1].startswith("stage 1 |")


@pytest.mark.parametrize("kind,ticks", [("train", 10), ("gpipe", 10), ("inference", 5), ("data-parallel", 4)])
def test_every_kind_of_schedule_can_be_drawn(kind, ticks):
    output = run("schedule", "--stages", "2", "--micro-batches", "4", "--kind", kind).output
    assert f"ticks {ticks} " in output and "deadlock                 none" in output


def test_costs_reach_the_clock():
    costs = ("--forward", "2", "--backward", "4", "--transfer", "0.5")
    output = run("schedule", "--stages", "1", "--micro-batches", "3", *costs).output
    assert "end time                 18 " in output


def test_schedule_writes_its_picture(tmp_path):
    path = tmp_path / "new" / "timeline.svg"
    result = run("schedule", "--stages", "2", "--micro-batches", "2", "--svg", str(path))
    assert result.exit_code == 0 and path.read_text(encoding="utf-8").startswith("<svg")


def test_topology_lists_the_groups_of_every_axis():
    output = run("topology", "pipe=4", "data=3", "model=2").output
    assert "pipe   [0, 6, 12, 18] [1, 7, 13, 19]" in output
    assert "data   [0, 2, 4] [1, 3, 5] [6, 8, 10]" in output
    assert "12 groups in all" in output


def test_topology_places_one_rank():
    lines = run("topology", "pipe=4", "data=3", "model=2", "--rank", "14").output.splitlines()
    assert lines == [
        "rank 14 of 24",
        "pipe   2 of 4, in group [2, 8, 14, 20]",
        "data   1 of 3, in group [12, 14, 16]",
        "model  0 of 2, in group [14, 15]",
    ]


@pytest.mark.parametrize(
    "words,message",
    [
        (["where", "9.8"], "choose one of 9.1"),
        (["schedule", "--stages", "2"], "--micro-batches"),
        (["schedule", "--stages", "0", "--micro-batches", "2"], "--stages"),
        (["schedule", "--stages", "2", "--micro-batches", "2", "--kind", "zigzag"], "gpipe"),
        (["schedule", "--stages", "2", "--micro-batches", "2", "--forward", "-1"], "negative cost"),
        (["topology", "pipe"], "write name=size"),
        (["topology", "pipe=two"], "write name=size"),
        (["topology", "pipe=2", "pipe=2"], "repeats a name"),
        (["topology", "pipe=2", "--rank", "2"], "from 0 to 1"),
        (["lab", "99"], "lab 99 is not there"),
        (["fly"], "fly"),
    ],
)
def test_a_mistake_is_answered_by_one_line_and_status_two(capsys, words, message):
    assert message in fails(capsys, *words)


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("where", "schedule", "topology", "lab"))


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """A folder with lab 42, and what the launcher was asked to do."""
    calls = []

    def run_script(path, arguments, *, nproc, trace_dir):
        calls.append((path, arguments, nproc, trace_dir))
        return 3

    monkeypatch.setitem(sys.modules, "ds_lite.launch", types.SimpleNamespace(run_script=run_script))
    script = tmp_path / "labs" / "lab42_answer" / "lab.py"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.chdir(tmp_path)
    return calls


def test_lab_runs_the_script_and_passes_its_status_on(launched, tmp_path):
    words = ["42", "--nproc", "2", "--impl", "solution", "--quick", "--out", str(tmp_path / "here")]
    assert run("lab", *words).exit_code == 3
    ((path, arguments, nproc, trace_dir),) = launched
    assert path.parts[-3:] == ("labs", "lab42_answer", "lab.py") and nproc == 2
    assert arguments == ["--impl", "solution", "--out", str(tmp_path / "here"), "--quick"]
    assert trace_dir == tmp_path / "here" / "trace"


def test_main_exits_with_the_status_of_the_lab(launched):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["lab", "42"])
    assert stopped.value.code == 3
    assert launched[0][1] == ["--impl", "student", "--out", "runs/lab42"]
