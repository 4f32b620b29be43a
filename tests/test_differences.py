"""How a run against DeepSpeed is judged. Guards against: a difference that vanishes unseen, a failure for
another reason than the listed one, a row that no test has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adapters import judging
from adapters.differences import TABLE, Difference

ROW = Difference("test_x.py::test_a*[zero=2]", "refuses", "ZeRO-. ", "it takes 0 and 1", "SEMANTICS 6")


def judged(monkeypatch: Any, name: str, outcome: str, text: str = "", when: str = "call") -> Any:
    monkeypatch.setattr(judging, "TABLE", (ROW,))
    monkeypatch.setattr(judging.metadata, "version", lambda name: "9.9.9")
    item = SimpleNamespace(path=Path("somewhere/test_x.py"), nodeid=f"tests/test_x.py::{name}")
    kinds = {"passed": outcome == "passed", "failed": outcome == "failed"}
    report = SimpleNamespace(outcome=outcome, when=when, longrepr=text, sections=[], **kinds)
    judging.judge(item, report)
    return report


def test_a_listed_test_that_fails_in_its_words_is_an_expected_difference(monkeypatch: Any) -> None:
    report = judged(monkeypatch, "test_a_b[zero=2]", "failed", "ZeRO-2 with a pipeline")
    assert report.outcome == "skipped" and report.wasxfail == "refuses: it takes 0 and 1 (SEMANTICS 6)"


def test_a_listed_test_that_fails_in_other_words_fails(monkeypatch: Any) -> None:
    report = judged(monkeypatch, "test_a_b[zero=2]", "failed", "another fault")
    assert report.outcome == "failed" and "it takes 0 and 1" in report.sections[0][1]


def test_a_listed_test_that_passes_fails_the_run_and_names_the_versions(monkeypatch: Any) -> None:
    report = judged(monkeypatch, "test_a_b[zero=2]", "passed")
    assert report.outcome == "failed"
    assert "stopped differing: remove it" in report.longrepr and "9.9.9" in report.longrepr


@pytest.mark.parametrize("name,when", [("test_a_b[zero=1]", "call"), ("test_a_b[zero=2]", "setup")])
def test_other_tests_and_phases_are_left_as_they_are(monkeypatch: Any, name: str, when: str) -> None:
    assert judged(monkeypatch, name, "failed", "ZeRO-2 ", when).outcome == "failed"


JUNIT = """<testsuites><testsuite timestamp="2031-02-03T04:05:06">
<testcase classname="tests.test_x" name="test_c"/>
<testcase classname="tests.test_x" name="test_a[zero=2]">{}</testcase></testsuite></testsuites>"""
EXPECTED = '<skipped type="pytest.xfail" message="refuses"/>'


def test_a_run_is_counted_by_kind(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(judging, "TABLE", (ROW,))
    monkeypatch.setattr(judging.metadata, "version", lambda name: "9.9.9")
    (tmp_path / "junit.xml").write_text(JUNIT.format(EXPECTED))
    found = judging.summary(tmp_path / "junit.xml")
    assert found["counts"] == {"passed": 1, "on purpose": 0, "defect": 0, "not offered": 0, "refuses": 1}
    assert found["passed"] == {"test_x.py": 1} and found["date"] == "2031-02-03"
    assert [row["count"] for row in found["differences"]] == [1]


@pytest.mark.parametrize("inside", ['<failure message="x"/>', "<skipped/>", ""])
def test_only_a_clean_run_that_used_every_row_is_written_down(
    monkeypatch: Any, tmp_path: Path, inside: str
) -> None:
    monkeypatch.setattr(judging, "TABLE", (ROW,))
    (tmp_path / "junit.xml").write_text(JUNIT.format(inside))
    with pytest.raises(SystemExit, match=r"only a run without failures|no test was found"):
        judging.summary(tmp_path / "junit.xml")


def test_every_row_names_a_test_file_and_its_source() -> None:
    for row in TABLE:
        name = row.tests.split("::")[0].removesuffix(".py").removesuffix("*")
        assert any(Path(__file__).parent.glob(f"{name}*.py")), row.tests
        assert row.says and row.reason and row.source
