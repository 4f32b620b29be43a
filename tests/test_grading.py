"""A class is graded. Guards against: a file that is not found or counted twice, a failure called a pass, a
step or hint of somebody else, one student's crash that ends the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_lite import cli, grading
from ds_lite.grading import Grade, Submission, find, verdict

ROOT = Path(__file__).resolve().parents[1]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_files_are_found_with_their_student_and_lab(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "ada/lab02_pipeline/student.py",
        "ada/lab02_pipeline/lab.py",
        "ada/lab02_pipeline/solution.py",
        "ada/lab05.py",
        "bo/week3/lab02_second_try.py",
        "lab01_ranks/student.py",
        "lab07.py",
        "notes/lab2.py",
        "bo/lab123.py",
    )
    assert [(one.student, one.lab, one.path.relative_to(tmp_path).as_posix()) for one in find(tmp_path)] == [
        ("-", 1, "lab01_ranks/student.py"),
        ("-", 7, "lab07.py"),
        ("ada", 2, "ada/lab02_pipeline/student.py"),
        ("ada", 5, "ada/lab05.py"),
        ("bo", 2, "bo/week3/lab02_second_try.py"),
    ]


def test_the_labs_own_students_are_a_class() -> None:
    assert Submission("-", 2, ROOT / "labs/lab02_pipeline/student.py") in find(ROOT / "labs")


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "nothing to grade"), (tmp_path / "no", "is not a folder")):
        with pytest.raises(ValueError, match=words):
            find(folder)


@pytest.mark.parametrize(
    "report,status,said,wanted",
    [
        ({"verdict": "pass"}, 0, "", ("", "")),
        (
            {"verdict": "pass"},
            1,
            "[rank 1] ValueError: at the end",
            ("run", "[rank 1] ValueError: at the end"),
        ),
        ({"verdict": "unfinished", "step": "1", "hint": "no prediction"}, 1, "x", ("1", "no prediction")),
        (
            {
                "verdict": "fail",
                "rows": [{"passed": None}, row := {"passed": False, "quantity": "q", "measured": "3"}],
            },
            1,
            "",
            ("table", "q: 3, not = 4"),
        ),
        ({}, 1, "Traceback\n  File\nNameError: name 'x'\nlast words", ("run", "NameError: name 'x'")),
        ({}, -9, "", ("run", "exit status -9")),
    ],
)
def test_verdicts(report: dict[str, Any], status: int, said: str, wanted: tuple[str, str]) -> None:
    row["target"] = "= 4"
    assert verdict(report, status, said) == wanted


def test_a_class_is_graded_file_by_file(tmp_path: Path) -> None:
    """Real runs of lab 2 on two processes, which end at different steps."""
    for student in ("ada", "bo", "cy"):
        (tmp_path / "class" / student).mkdir(parents=True)
    right = (ROOT / "labs/lab02_pipeline/solution.py").read_text(encoding="utf-8")
    wrong = right.replace("y / num_micro_batches if is_last else y", "y")
    assert wrong != right
    (tmp_path / "class/ada/lab02.py").write_text(wrong, encoding="utf-8")
    shutil.copy(ROOT / "labs/lab02_pipeline/student.py", tmp_path / "class/bo/lab02.py")
    (tmp_path / "class/cy/lab02.py").write_text("import nothing_like_this\n")
    words = [
        "grade",
        str(tmp_path / "class"),
        "--nproc",
        "2",
        "--json",
        str(tmp_path / "out" / "grades.json"),
    ]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 1 and "0 of 3 pass" in done.output
    grades = {
        fields["student"]: Grade(**fields)
        for fields in json.loads((tmp_path / "out/grades.json").read_text())
    }
    assert grades["ada"].step == "5b" and "divide the loss by m" in grades["ada"].hint
    assert grades["bo"].step == "1" and "no prediction of ticks" in grades["bo"].hint
    assert grades["cy"].step == "run" and "nothing_like_this" in grades["cy"].hint
    assert not any(one.passed for one in grades.values())


def test_a_file_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "lab02.py").write_text("import time\ntime.sleep(60)\n")
    (one,) = find(tmp_path)
    done = grading.grade(one, nproc=1, limit_s=4.0)
    assert (done.step, done.hint, done.passed) == ("run", "it did not end within 4 s", False)
