"""The section map. Guards against: a page, a command or a message that points to a missing file."""

from pathlib import Path

import pytest

from ds_lite.sections import SECTIONS, find

ROOT = Path(__file__).resolve().parents[1]


def paths(section):
    chapter_and_lab = [path for path in (section.chapter, section.lab) if path]
    return [*section.modules, *chapter_and_lab, *section.tests]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.number)
def test_every_named_file_exists(section):
    missing = [path for path in paths(section) if not list(ROOT.glob(path))]
    assert not missing


def test_a_path_that_is_not_there_would_be_noticed():
    assert not list(ROOT.glob("tests/test_s09_8_*.py"))


def test_the_chapter_has_fifteen_sections_and_no_9_8():
    assert [section.number for section in SECTIONS] == [f"9.{n}" for n in range(1, 17) if n != 8]
    assert all(section.title and section.chinese_title for section in SECTIONS)


@pytest.mark.parametrize("number", ["9.2", "9.9", "9.10", "9.11"])
def test_a_finished_section_has_all_its_parts(number):
    section = find(number)
    assert section.modules and section.chapter and section.tests and section.lab and section.deepspeed


@pytest.mark.parametrize(
    "asked,number", [("9.10", "9.10"), ("9.10.2", "9.10"), ("9.1", "9.1"), ("§9.9.3", "9.9")]
)
def test_a_subsection_is_found_in_its_section(asked, number):
    assert find(asked).number == number


@pytest.mark.parametrize("asked", ["9.8", "9.17", "9", "", "ten"])
def test_an_unknown_number_lists_the_known_ones(asked):
    with pytest.raises(ValueError, match=r"9\.1, 9\.2, .*9\.16"):
        find(asked)
