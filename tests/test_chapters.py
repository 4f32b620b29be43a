"""§9.2 §9.9 §9.10 §9.11 The chapters run, and print what they promise.

`chapters/expected/NAME.txt` holds counts, shapes and digits that do not depend on the machine. A line `...`
stands for any lines. To renew one, run the chapter and cut out what changes.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_lite import comm

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "chapters").glob("ch*.py"))


def pattern_of(expected: str) -> str:
    """The stored text as a regular expression, `...` for any lines."""
    lines = [re.escape(line.rstrip()) for line in expected.strip().splitlines()]
    return "\n".join(".*" if line == re.escape("...") else line for line in lines)


def is_as_expected(printed: str, expected: str) -> bool:
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return re.fullmatch(pattern_of(expected), lines, re.DOTALL) is not None


def test_another_number_is_noticed():
    assert is_as_expected("a 1 \nb\nc 2\n", "a 1\n...\nc 2")
    assert not is_as_expected("a 1\nb\nc 3\n", "a 1\n...\nc 2")


def by_hand(chapter):
    """Those that need the real launcher, or leave with the process, are always started as a reader does."""
    text = chapter.read_text(encoding="utf-8")
    return "JobFailed" in text or "from ds_lite.launch import run" not in text


def check(chapter, printed, folder):
    expected = (ROOT / "chapters/expected" / f"{chapter.stem}.txt").read_text(encoding="utf-8")
    assert is_as_expected(printed, expected), printed
    assert "Lab" in printed.strip().splitlines()[-1] or "lab" in printed.strip().splitlines()[-1]
    assert not list(folder.iterdir()), "a chapter leaves nothing behind"
    if chapter.stem == "ch10_schedules":
        the_hang_table_shows_both_ranks(printed)


@pytest.mark.parametrize(
    "chapter",
    [one if by_hand(one) else pytest.param(one, marks=pytest.mark.full) for one in CHAPTERS],
    ids=lambda path: path.stem,
)
def test_a_chapter_started_by_hand_prints_what_is_stored(chapter, tmp_path):
    done = subprocess.run(
        [sys.executable, str(chapter)], capture_output=True, text=True, timeout=150, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    check(chapter, done.stdout, tmp_path)


def without_rank(rank, function, *args):
    return function(*args)


@pytest.mark.parametrize("chapter", [one for one in CHAPTERS if not by_hand(one)], ids=lambda path: path.stem)
def test_a_chapter_prints_what_is_stored(chapter, world, tmp_path, monkeypatch, capsys):
    """Here its jobs run in processes that have started already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(chapter.parent))
    module = importlib.import_module(chapter.stem)

    def run(function, nproc, *args, limit_s=120.0):
        return world(without_rank, nproc, function, *args, deadline=limit_s)

    monkeypatch.setattr(module, "run", run)
    try:
        module.main()
    finally:
        if comm.is_initialized():
            comm.destroy_process_group()
    check(chapter, re.sub(r"(?m)^\[rank \d+\] ", "", capsys.readouterr().out), tmp_path)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_short_and_imports_ds_lite_only(chapter):
    text = chapter.read_text(encoding="utf-8")
    assert 60 <= len(text.splitlines()) <= 150
    tree = ast.parse(text)
    assert re.search(r"§9\.\d+ .*Run time", ast.get_docstring(tree) or "", re.DOTALL)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    others = {str(name).split(".")[0] for name in imported} - {
        "ds_lite",
        "torch",
        "transformers",
        "__future__",
    }
    assert others <= set(sys.stdlib_module_names)
    assert "argv" not in text and "argparse" not in text, "a chapter takes no arguments"


def the_hang_table_shows_both_ranks(printed: str) -> None:
    """The one that waits names its peer; the one that stopped names its instruction and micro-batch."""
    rows = [line.split() for line in printed.splitlines() if re.match(r"^[01]  ", line)]
    assert len(rows) == 2, printed
    assert "RecvGrad" in rows[0] and rows[0][rows[0].index("RecvGrad") + 2] == "1", "waits for rank 1"
    assert "ForwardPass" in rows[1] and rows[1][rows[1].index("ForwardPass") + 1] == "2", "stopped at 2"


def test_the_readme_lists_every_section_with_what_is_built_of_it():
    from ds_lite.sections import SECTIONS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("| 9.")}
    assert set(rows) == {section.number for section in SECTIONS}
    for section in SECTIONS:
        paths = [*section.modules, *([section.chapter] if section.chapter else [])]
        assert section.title in rows[section.number]
        assert all(f"({path})" in rows[section.number] for path in paths), section.number
    before = text.split("## Sections")[0]
    words = [word for line in before.splitlines() if not line.startswith("    ") for word in line.split()]
    assert len(words) < 400
