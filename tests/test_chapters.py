"""§9.2 §9.9 §9.10 §9.11 The chapters run, and print what they promise.

`chapters/expected/NAME.txt` holds counts, shapes and digits that do not depend on the machine. A line `...`
stands for any lines. To renew one, run the chapter and cut out what changes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_prints_what_is_stored(chapter, tmp_path):
    done = subprocess.run(
        [sys.executable, str(chapter)], capture_output=True, text=True, timeout=150, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    expected = (ROOT / "chapters/expected" / f"{chapter.stem}.txt").read_text(encoding="utf-8")
    assert is_as_expected(done.stdout, expected), done.stdout
    assert "Lab" in done.stdout.strip().splitlines()[-1] or "lab" in done.stdout.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir()), "a chapter leaves nothing behind"
    if chapter.stem == "ch10_schedules":
        the_hang_table_shows_both_ranks(done.stdout)


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
