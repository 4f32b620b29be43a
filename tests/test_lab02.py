"""Lab 2. Guards against: a lab that rots, one that passes wrong code, a hint that points elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rings import everyday

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "labs/lab02_pipeline"
SCRIPT = FOLDER / "lab.py"
WRONG = ROOT / "tests/labs/wrong"

HINTS = {
    "backward_tick_off_by_one": "the backward tick is 1 too late",
    "warm_up_too_deep": "the warm-up of stage 0 is 5 forwards deep",
    "forward_on_every_tick": "a forward on every tick",
    "no_send_grad": "stage 1 never does SendGrad: stage 0 then waits in RecvGrad",
    "send_before_receive": "in another order .* this stands still",
    "loss_not_divided": "5 times too large.*divide the loss by m",
    "divided_on_every_stage": "on the last stage alone",
    "gradients_overwritten": "do not overwrite them",
    "one_buffer": "one entry per micro-batch",
    "send_grad_ignored": "stage 1 waits in RecvGrad for micro-batch 0.*every SendGrad",
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lab_code_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checks(monkeypatch):
    """The lab's own checks of parts A and B, without processes."""
    for folder in (FOLDER, ROOT / "labs"):
        monkeypatch.syspath_prepend(str(folder))
    import stage_run
    import stream_check

    def run(code: ModuleType) -> None:
        stream_check.check_stream(code.stream)
        stage_run.rehearse(code)

    return run


def test_there_is_a_hint_for_each_kept_mistake():
    assert {path.stem.removeprefix("lab02_") for path in WRONG.glob("lab02_*.py")} == set(HINTS)
    assert len(set(HINTS.values())) == len(HINTS)


def test_the_solution_passes_the_checks(checks):
    checks(load(FOLDER / "solution.py"))


@pytest.mark.parametrize("mistake", HINTS)
def test_a_mistake_gets_its_own_hint(checks, mistake):
    from _lab import Hint

    with pytest.raises(Hint, match=f"(?s){HINTS[mistake]}"):
        checks(load(WRONG / f"lab02_{mistake}.py"))


def test_the_streams_of_the_solution_are_the_recorded_ones_in_the_words_of_the_contract(impl):
    """With --impl labs/lab02_pipeline/student.py it judges the learner's stream, by itself the solution's."""
    train_steps = load(FOLDER / "solution.py").train_steps if impl.name == "ds_lite" else impl.train_steps
    golden = json.loads((ROOT / "tests/golden/schedules.json").read_text())["cases"]
    cases = [case for case in golden if case["schedule"] == "TrainSchedule"]
    assert cases
    for case in cases:
        steps = train_steps(case["micro_batches"], case["stages"], case["stage_id"])
        assert [" ".join(step) for step in steps] == case["steps"], case


def test_the_stub_and_the_solution_are_one_frame():
    """Same names, same predictions to make; all of them open in the one and filled in the other."""
    stub, solution = load(FOLDER / "student.py"), load(FOLDER / "solution.py")
    assert set(stub.PREDICTIONS) == set(solution.PREDICTIONS)
    assert all(value is None for value in stub.PREDICTIONS.values())
    assert None not in solution.PREDICTIONS.values()
    assert stub.stream.__annotations__ == solution.stream.__annotations__
    assert stub.run_stage.__annotations__ == solution.run_stage.__annotations__


@pytest.mark.parametrize(
    ("words", "said"),
    everyday(
        [
            ([], "step 1: PREDICTIONS in student.py still holds None for ticks"),
            (["--skip-predictions"], "Lab 2, step 5a: write stream()"),
            (
                ["--impl", str(WRONG / "lab02_loss_not_divided.py")],
                "Lab 2, step 5b: not yet.\nHint: the gradients",
            ),
            (["--impl", "nobody.py"], "nobody.py is not a file"),
            (["--impl", "solution"], "lab 2 goes on with 2 or 4"),
        ],
        lambda case: case[1].startswith(("step 1", "Lab 2, step 5b")),
    ),
)
def test_the_script_alone_says_what_is_missing(words, said, tmp_path):
    """One process is enough for the first steps; the exit status is not 0 before every row passes."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_lab_passes_with_the_solution_on_four_processes(tmp_path, capfd):
    from ds_lite.launch import run_script

    words = ["--impl", "solution", "--quick", "--out", str(tmp_path)]
    assert run_script(SCRIPT, words, nproc=4) == 0
    printed = capfd.readouterr().out
    assert "verdict: pass" in printed and "FAIL" not in printed
    report = json.loads((tmp_path / "lab02.json").read_text())
    assert report["verdict"] == "pass" and report["processes"] == 4
    assert all(row["agrees"] for row in report["rows"]), "the solution's predictions are right"
    measured = {row["quantity"]: row["measured"] for row in report["rows"]}
    assert measured["ticks (S=4, m=8)"] == "22"
    assert measured["peak buffers, stage 0..3"] == "4,3,2,1"
    assert sum(row["passed"] is None for row in report["rows"]) == 2, (
        "only loss and wall time are not promised"
    )
    picture = (tmp_path / "timeline.svg").read_text()
    assert "Measured" in picture and "Simulated" in picture


@pytest.mark.full
def test_the_lab_runs_on_two_processes(tmp_path):
    from ds_lite.launch import run_script

    assert run_script(SCRIPT, ["--impl", "solution", "--quick", "--out", str(tmp_path)], nproc=2) == 0


def test_a_wrong_answer_fails_on_several_processes_without_a_hang(tmp_path, capfd):
    from ds_lite.launch import run_script

    wrong = WRONG / "lab02_send_grad_ignored.py"
    assert run_script(SCRIPT, ["--impl", str(wrong), "--out", str(tmp_path)], nproc=2) == 1
    assert "Hint: stage 1 waits in RecvGrad" in capfd.readouterr().err
