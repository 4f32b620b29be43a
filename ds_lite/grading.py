"""Run the labs on the files of a class and say in one table how far everybody has come.

A student's file is `labNN_name/student.py`, or `labNN.py` with whatever follows the number. Below the folder
that is graded each student has a folder; what lies in the folder itself has no name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"lab(\d\d)(?!\d)")


@dataclass(frozen=True)
class Submission:
    """One file of one student; `student` is "-" for a file without a folder of its own."""

    student: str
    lab: int
    path: Path


@dataclass(frozen=True)
class Grade:
    """How far a file came. `step` is the first that is not done, "" if all are; `hint` what the lab said."""

    student: str
    lab: int
    file: str
    passed: bool
    step: str
    hint: str
    seconds: float


def find(folder: Path) -> list[Submission]:
    """The student files below a folder, by student and lab.

    Raises: ValueError if there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that holds the students' files")
    files = [*folder.rglob("lab[0-9][0-9]*/student.py"), *folder.rglob("lab[0-9][0-9]*.py")]
    found = [one for path in files if (one := _submission(folder, path)) is not None]
    if not found:
        raise ValueError(f"{folder} holds no labNN_name/student.py and no labNN.py; nothing to grade")
    return sorted(found, key=lambda one: (one.student, one.lab, str(one.path)))


def _submission(folder: Path, path: Path) -> Submission | None:
    place = path.relative_to(folder)
    named = place.name if _NUMBER.match(place.name) else place.parent.name
    match = _NUMBER.match(named)
    if match is None:  # lab123
        return None
    first = place.parts[0]
    student = "-" if len(place.parts) == 1 or _NUMBER.match(first) else first
    return Submission(student, int(match.group(1)), path)


def grade(one: Submission, *, nproc: int, limit_s: float, skip_predictions: bool = False) -> Grade:
    """Run the lab, `--quick`, on this file. Units: limit_s in seconds, for the whole run."""
    with tempfile.TemporaryDirectory(prefix="ds_lite-") as name:
        words = [
            "lab",
            str(one.lab),
            "--impl",
            str(one.path),
            "--nproc",
            str(nproc),
            "--quick",
            "--out",
            name,
        ]
        command = [sys.executable, "-m", "ds_lite", *words]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command + (["--skip-predictions"] if skip_predictions else []),
                capture_output=True,
                text=True,
                timeout=limit_s,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            step, hint = "run", f"it did not end within {limit_s:g} s"
        else:
            step, hint = verdict(_report(Path(name), one.lab), done.returncode, done.stderr)
        seconds = round(time.monotonic() - start, 1)
        return Grade(one.student, one.lab, str(one.path), not step, step, hint, seconds)


def _report(folder: Path, lab: int) -> dict[str, Any]:
    path = folder / f"lab{lab:02d}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content


def verdict(report: dict[str, Any], status: int, said: str) -> tuple[str, str]:
    """The step that is not done and the hint; both empty for a lab that is passed.

    >>> verdict({"verdict": "pass"}, 0, "")
    ('', '')
    >>> verdict({"verdict": "fail", "step": "5a", "hint": "one tick late"}, 1, "")
    ('5a', 'one tick late')
    """
    if report.get("verdict") == "pass" and status == 0:
        return "", ""
    if report.get("step"):
        return report["step"], report.get("hint", "")
    for row in report.get("rows", []):
        if row["passed"] is False:
            return "table", f"{row['quantity']}: {row['measured']}, not {row['target']}"
    lines = [
        line for line in said.splitlines() if re.match(r"(\[rank \d+\] )?\w*(Error|Exception)\b|error:", line)
    ]
    return "run", (lines or said.strip().splitlines() or [f"exit status {status}"])[-1]


def grade_all(folder: Path, *, nproc: int, limit_s: float, skip_predictions: bool = False) -> Iterator[Grade]:
    """Each file's grade as soon as it is known.

    Raises: ValueError if there is no file.
    """
    for one in find(folder):
        yield grade(one, nproc=nproc, limit_s=limit_s, skip_predictions=skip_predictions)


def write(grades: list[Grade], path: Path) -> None:
    """All grades as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(one) for one in grades], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
