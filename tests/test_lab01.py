"""Lab 1. Guards against: a lab that rots, one that passes wrong code, a hint that points elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "labs/lab01_ranks"
SCRIPT = FOLDER / "lab.py"
WRONG = ROOT / "tests/labs/wrong"
FUNCTIONS = ("coordinate", "comm_lists", "neighbour", "shared_links")

HINTS = {
    "first_axis_fastest": "your first axis is the fastest.*row-major",
    "own_size_in_stride": "counts its own size into its stride",
    "only_the_next_size": "only the size of the next one.*multiply all",
    "no_modulo": "coordinates grow beyond the size of their axis",
    "any_rank_has_a_place": "rank 24 gets the place .* must raise ValueError",
    "one_flat_list": "one list of ranks, .0, 2, 4., and 8 groups",
    "members_agree": "agree on the axis and differ on the others; it is the other way",
    "consecutive_ranks": "runs of consecutive ranks.*innermost axis only",
    "another_order": "the groups are right, their order is not",
    "place_for_rank": "the place inside the group, and .* want the global rank",
    "next_rank": "you count in ranks, and the axis counts in strides",
    "no_ring": "only the ends of the axis are wrong.*ring",
    "node_by_modulo": "place of a rank inside its node",
    "judged_by_distance": "look at the nodes of all members, not at the distance",
    "counted_by_members": "stands more than once on a link",
    "consecutive_nodes_only": "every pair of them counts",
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lab_code_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checks(monkeypatch):
    """The lab's own checks of part A, without processes."""
    for folder in (FOLDER, ROOT / "labs"):
        monkeypatch.syspath_prepend(str(folder))
    import peer_check
    import rank_check

    def run(code: ModuleType) -> None:
        assert rank_check.check_coordinate(code.coordinate) > 300
        assert rank_check.check_comm_lists(code.comm_lists) > 400
        assert peer_check.check_neighbour(code.neighbour) > 2000
        assert peer_check.check_shared_links(code.shared_links) > 400

    return run


def test_there_is_a_hint_for_each_kept_mistake():
    assert {path.stem.removeprefix("lab01_") for path in WRONG.glob("lab01_*.py")} == set(HINTS)
    assert len(set(HINTS.values())) == len(HINTS)


def test_the_solution_passes_the_checks(checks):
    checks(load(FOLDER / "solution.py"))


@pytest.mark.parametrize("mistake", HINTS)
def test_a_mistake_gets_its_own_hint(checks, mistake):
    from _lab import Hint

    with pytest.raises(Hint, match=f"(?s){HINTS[mistake]}"):
        checks(load(WRONG / f"lab01_{mistake}.py"))


def test_coordinates_and_groups_of_the_solution_are_the_recorded_ones(impl):
    """With --impl labs/lab01_ranks/student.py it judges the learner's functions, else the solution's."""
    code = load(FOLDER / "solution.py") if impl.name == "ds_lite" else impl
    golden = json.loads((ROOT / "tests/golden/topology.json").read_text())["cases"]
    assert golden
    for case in golden:
        axes, dims = case["axes"], case["dims"]
        places = [code.coordinate(axes, dims, rank) for rank in range(case["world_size"])]
        assert places == [dict(zip(axes, coords, strict=True)) for coords in case["coords"]], case
        assert {axis: code.comm_lists(axes, dims, axis) for axis in axes} == case["comm_lists"]
        assert code.comm_lists(axes, dims, "nowhere") == case["missing_axis_comm_lists"]


def test_the_stub_and_the_solution_are_one_frame():
    """Same names, same predictions to make; all of them open in the one and filled in the other."""
    stub, solution = load(FOLDER / "student.py"), load(FOLDER / "solution.py")
    assert set(stub.PREDICTIONS) == set(solution.PREDICTIONS)
    assert all(value is None for value in stub.PREDICTIONS.values())
    assert None not in solution.PREDICTIONS.values()
    for name in FUNCTIONS:
        assert getattr(stub, name).__annotations__ == getattr(solution, name).__annotations__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "step 1: PREDICTIONS in student.py still holds None for coordinates_of_5"),
        (["--skip-predictions"], "Lab 1, step 5a: write coordinate()"),
        (["--impl", str(WRONG / "lab01_place_for_rank.py")], "Lab 1, step 5c: not yet.\nHint: you return"),
        (["--impl", "solution"], "lab 1 goes on with 2, 4 or 8"),
    ],
)
def test_the_script_alone_says_what_is_missing(words, said, tmp_path):
    """One process is enough for the functions; the exit status is not 0 before every row passes."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "ranks.svg").exists() == ("solution" in words)


def test_the_lab_passes_with_the_solution_on_four_processes(tmp_path, capfd):
    from ds_lite.launch import run_script

    words = ["--impl", "solution", "--quick", "--out", str(tmp_path)]
    assert run_script(SCRIPT, words, nproc=4) == 0
    printed = capfd.readouterr().out
    assert "verdict: pass" in printed and "FAIL" not in printed
    report = json.loads((tmp_path / "lab01.json").read_text())
    assert report["verdict"] == "pass" and report["processes"] == 4
    assert all(row["agrees"] for row in report["rows"]), "the solution's predictions are right"
    guessed = sum(row["predicted"] != "-" for row in report["rows"])
    assert guessed == len(load(FOLDER / "solution.py").PREDICTIONS), "each prediction meets its row"
    measured = {row["quantity"]: row["measured"] for row in report["rows"]}
    assert measured["coordinates of rank 5"] == "1,0,1"
    assert measured["bytes of all_reduce, n=2,4"].split() == ["1,048,576", "1,572,864"]
    assert sum(row["passed"] is None for row in report["rows"]) == 3, "only the times are not promised"
    assert len(report["settings"]["rates"]) == 3 * 6, "three groups of ranks, six collectives, one size"
    assert "node 1" in (tmp_path / "ranks.svg").read_text()
    assert "all_to_all" in (tmp_path / "bandwidth.svg").read_text()


def test_a_wrong_answer_fails_on_several_processes_without_a_hang(tmp_path, capfd):
    """Here the mistake shows on one of the two only, as with an order that comes out of a set of strings."""
    from ds_lite.launch import run_script

    wrong = tmp_path / "wrong.py"
    text = (FOLDER / "solution.py").read_text(encoding="utf-8")
    right = "return list(groups.values())"
    assert right in text
    by_rank = 'return list(groups.values())[:: -1 if __import__("os").environ["RANK"] == "1" else 1]'
    wrong.write_text(text.replace(right, by_rank), encoding="utf-8")
    assert run_script(SCRIPT, ["--impl", str(wrong), "--out", str(tmp_path)], nproc=2) == 1
    assert "Hint: the groups are right, their order is not" in capfd.readouterr().err
