"""The suite run for people. Guards against: a wrong verdict or exit status, a skip that nobody sees, a report
that does not say what was measured, processes left behind.

Most tests look at one run of a tiny suite, which borrows the harness of this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import measured
import pytest
import torch
from rings import everyday
from tolerance import EXACT, FP32, LAW, assert_close
from typer.testing import CliRunner

from ds_lite.conformance import bandwidth, command, machine, running
from ds_lite.conformance.asked import Asked, checked
from ds_lite.conformance.page import page
from ds_lite.conformance.results import Results
from ds_lite.sections import find

pytestmark = pytest.mark.xdist_group("conformance")  # one run for all

TESTS = Path(__file__).resolve().parent
HARNESS = ("conftest.py", "measured.py", "oracles.py", "mixture.py", "tolerance.py", "adapters")

FAKE = {
    "test_s09_10_fake.py": """
        import pytest, torch
        from tolerance import EXACT, LAW, assert_close

        pytestmark = pytest.mark.xdist_group("one")  # they share the processes of one world

        def _off_on_rank_1(rank, off):
            x = torch.full((3,), 2.0, dtype=torch.float64)
            assert_close(x + off * rank, x, LAW)
            assert_close(x, x, EXACT)
            with pytest.raises(AssertionError):
                assert_close(x + 1, x, LAW)  # a control, which is no difference of this rule

        def test_ranks_agree(world):
            world(_off_on_rank_1, 2, 4e-11)

        def test_one_rank_is_off(world):
            world(_off_on_rank_1, 2, 4e-3)

        @pytest.mark.parametrize("nprocs", [1, 4])
        def test_needs_more_ranks(world, nprocs):
            world(_off_on_rank_1, nprocs, 0.0)

        @pytest.mark.full
        def test_takes_long():
            pass
        """,
    "test_s09_12_fake.py": """
        import pytest
        pytest.importorskip("no_such_peer", reason="not proved here: no_such_peer is not installed")
        """,
    "test_s09_14_equality.py": """
        import pytest, torch
        from tolerance import FP32, assert_close
        from ds_lite import launch

        def test_stands_in_two_sections():
            assert_close(torch.tensor([300.0]), torch.tensor([300.0003]), FP32)

        def test_a_launched_job_is_limited_too():
            launch.run(print, 3)

        def test_later():
            pytest.skip("not proved here: <another> day & place")
        """,
}
SLOW = """
        import os, time
        from pathlib import Path

        def test_quick():
            pass

        def _sleep(rank):
            Path(f"pid{rank}").write_text(str(os.getpid()))
            time.sleep(100)

        def test_slow(world):
            world(_sleep, 2, deadline=200.0)
        """


def make_suite(root: Path, files: dict[str, str]) -> Path:
    """A repository with these tests and the harness of the real ones."""
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["full: x"]\n')
    for source in [*(TESTS / name for name in HARNESS), *TESTS.glob("world*.py")]:
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, root / "tests" / source.name)
    for name, text in files.items():
        (root / "tests" / name).write_text(re.sub("(?m)^        ", "", text))
    return root


def request(root: Path | None = None, **options: Any) -> Asked:
    return checked(
        **{
            "sections": None,
            "nproc": None,
            "backend": "auto",
            "impl": "ds_lite",
            "full": False,
            "jobs": "0",
            "root": root,
            **options,
        }
    )


class Run(NamedTuple):
    root: Path
    folder: Path
    said: str
    status: int
    report: dict[str, Any]

    def section(self, number: str) -> dict[str, Any]:
        return next(one for one in self.report["sections"] if one["number"] == number)

    def rule(self, number: str, name: str) -> dict[str, Any]:
        rules = self.section(number)["rules"]
        return next(rule for rule in rules if rule["name"].endswith(name))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny suite, run once for all tests here, with at most two ranks and two processes of pytest."""
    root = make_suite(tmp_path_factory.mktemp("suite"), FAKE)
    folder = tmp_path_factory.mktemp("report")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = command.run(request(root, sections="9.5,9.10,9.12", nproc=2, jobs="2"), folder)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Run(root, folder, said.getvalue(), status, report)


# ----------------------------------------------------------------------------------------------- the verdict


def test_rules_are_counted_by_section(fake: Run) -> None:
    counts = {
        one["number"]: [one[key] for key in ("checked", "passed", "failed", "not_proved")]
        for one in fake.report["sections"]
    }
    assert counts == {"9.5": [1, 1, 0, 2], "9.10": [3, 2, 1, 0], "9.12": [0, 0, 0, 1]}
    verdicts = {rule["title"]: rule["verdict"] for rule in fake.section("9.10")["rules"]}
    assert verdicts == {
        "ranks agree": "passed",
        "one rank is off": "failed",
        "needs more ranks": "in part",
    }  # the rule that is only in the full suite does not exist


def test_what_was_not_proved_says_why(fake: Run) -> None:
    assert fake.section("9.10")["reasons"] == {"needs 4 ranks": 1}
    assert fake.section("9.12")["reasons"] == {"no_such_peer is not installed": 1}
    assert fake.section("9.5")["reasons"] == {"needs 3 ranks": 1, "<another> day & place": 1}
    for words in ("needs 4 ranks (1)", "no_such_peer", "not proved"):
        assert words in fake.said


def test_a_failure_names_the_test_and_what_the_rank_raised(fake: Run) -> None:
    (failure,) = fake.rule("9.10", "test_one_rank_is_off")["failures"]
    assert failure["case"] == "tests/test_s09_10_fake.py::test_one_rank_is_off"
    for words in ("1 of 2 ranks failed", "AssertionError", "differs by 4.000e-03", "LAW allows 2.0e-10"):
        assert words in failure["why"]
    assert f"FAILED {failure['case']}" in fake.said
    assert f"python -m pytest --backend auto --impl ds_lite --nproc 2 '{failure['case']}'" in fake.said
    assert fake.status == 1 and fake.report["exit_status"] == 1


def test_the_last_line_sums_up_each_rule_once(fake: Run) -> None:
    line = "4 rules checked in 4 cases: 3 passed, 1 failed; 4 cases not proved here"
    assert fake.report["verdict"] == line and line in fake.said


def test_progress_is_told_by_section(fake: Run) -> None:
    assert "§9.10 Schedules and the ten pipe instructions: 4 cases, 1 failed" in fake.said


@pytest.mark.parametrize("name,status", [("test_s09_14_equality.py", 0), ("test_s09_12_fake.py", 0)])
def test_skips_do_not_change_the_status(fake: Run, name: str, status: int) -> None:
    results = Results([find("9.5"), find("9.12")])
    for line in (fake.folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        if name in line:
            results.add(json.loads(line))
    results.add({"event": "ended", "status": 0})
    assert results.cases("skipped") and results.exit_status == status


@pytest.mark.parametrize("status,words", [(3, "fault of its own"), (4, "options"), (-9, "status -9")])
def test_a_pytest_that_breaks_is_a_failure(status: int, words: str) -> None:
    results = Results([find("9.10")])
    results.add({"event": "ended", "status": status})
    assert results.exit_status == 1 and words in results.broken


# ----------------------------------------------------------------------------------------------- differences


def test_a_rule_carries_its_largest_difference_from_all_ranks(fake: Run) -> None:
    passed = fake.rule("9.10", "test_ranks_agree")
    assert passed["ranks"] == 2
    assert set(passed["differences"]) == {"LAW", "EXACT"}
    law = passed["differences"]["LAW"]  # 4e-11 of values up to 2; without the control, which is 0.5 off
    assert law["allowed"] == 1e-10 and law["largest"] == pytest.approx(2e-11, rel=1e-4)
    assert passed["differences"]["EXACT"] == {"largest": 0.0, "allowed": 0.0}
    failed = fake.rule("9.10", "test_one_rank_is_off")["differences"]["LAW"]
    assert failed["largest"] == pytest.approx(2e-3)


def test_so_does_a_rule_without_ranks(fake: Run) -> None:
    rule = fake.rule("9.5", "test_stands_in_two_sections")
    assert rule["ranks"] == 0 and rule["differences"]["FP32"]["largest"] == pytest.approx(1e-6, rel=0.1)


def test_what_is_measured_is_kept_by_tolerance_and_largest() -> None:
    x = torch.tensor([0.5, 4.0], dtype=torch.float64)
    with measured.record() as seen:
        with measured.record() as inner:
            assert_close(x + 4e-12, x, LAW)
            assert_close(x + 2e-12, x, LAW)
        assert_close(x + 4e-6, x, FP32)
        with pytest.raises(AssertionError):
            assert_close(x + 8e-12, x, EXACT)
    assert_close(x + 4e-6, x, FP32)  # no record is open
    assert inner.within == {"LAW": pytest.approx(1e-12, rel=1e-3)} and not inner.refused
    assert seen.within == {**inner.within, "FP32": pytest.approx(1e-6)}
    assert seen.refused == {"EXACT": pytest.approx(2e-12, rel=1e-3)}
    assert seen.allowed == {"LAW": 1e-10, "FP32": 1e-5, "EXACT": 0.0}


def test_nan_is_an_infinite_difference_in_valid_json(fake: Run) -> None:
    with measured.record() as seen, pytest.raises(AssertionError):
        assert_close(torch.tensor([float("nan")]), torch.tensor([0.0]), FP32)
    results = Results([find("9.10")])
    event = {"event": "test", "nodeid": "tests/test_s09_10_x.py::test_x", "sections": ["9.10"], "seconds": 0}
    results.add(
        {**event, "outcome": "failed", "reason": "", "failure": "x", "measured": json.loads(seen.as_json())}
    )
    from ds_lite.conformance.report import as_dict

    content = as_dict(request(fake.root, sections="9.10"), results, {}, [])
    json.dumps(content, allow_nan=False)
    assert content["sections"][0]["rules"][0]["differences"]["FP32"]["largest"] == "inf"
    assert "inf of 1e-05" in page(content)


# ------------------------------------------------------------------------------------------------ the report


def test_the_json_has_every_field_of_its_kind(fake: Run) -> None:
    kinds: dict[str, Any] = {"format": int, "when": str, "seconds": float, "asked": dict, "machine": dict}
    kinds |= {"exit_status": int, "verdict": str, "sections": list, "bandwidth": list}
    assert {name: type(fake.report[name]) for name in kinds} == kinds
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", fake.report["when"])
    asked = {"sections": ["9.5", "9.10", "9.12"], "nproc": 2, "backend": "auto", "impl": "ds_lite"}
    assert fake.report["asked"] == {**asked, "full": False}


def test_the_report_names_the_machine_but_not_its_host_nor_any_folder(fake: Run) -> None:
    facts = fake.report["machine"]
    for name in ("system", "CPU", "cores", "memory", "GPUs", "driver", "CUDA", "NCCL", "torch", "Python"):
        assert facts[name]
    assert facts["torch"] == torch.__version__ and facts["DeepSpeed"] and "host" not in facts
    assert facts["backend"] == ("gloo" if facts["GPUs"] == "none" else facts["backend"])
    host = machine.facts("auto", host_name=True)["host"]
    for name in ("report.json", "report.html", "junit.xml"):
        text = (fake.folder / name).read_text(encoding="utf-8")
        assert f'"{host}"' not in text and str(fake.root) not in text


def test_junit_holds_every_case_and_what_it_measured(fake: Run) -> None:
    cases = {case.get("name"): case for case in ET.parse(fake.folder / "junit.xml").iter("testcase")}
    assert len([name for name in cases if name and name.startswith("test_")]) == 7
    properties = {one.get("name"): one.get("value") for one in cases["test_ranks_agree"].iter("property")}
    assert json.loads(str(properties["measured"]))["ranks"] == 2
    assert cases["test_one_rank_is_off"].find("failure") is not None


class _Links(HTMLParser):
    """Whatever a page would fetch or lead to, its texts, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_shows_everything(fake: Run) -> None:
    text = (fake.folder / "report.html").read_text(encoding="utf-8")
    parser = _Links()
    parser.feed(text)
    assert not parser.open and not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert all(link.startswith("#") for link in parser.links) and parser.links
    assert not re.search(r"https?:|url\(|@import", text)
    for number in ("9.5", "9.10", "9.12"):
        assert f"id='s{number}'" in text
    for words in ("one rank is off", "&lt;another&gt; day &amp; place", "2.0e-11 of 1e-10", "all-to-all"):
        assert words in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


# --------------------------------------------------------------------------------------------- the bandwidth


def test_the_report_holds_bandwidth_for_every_collective(fake: Run) -> None:
    rates = fake.report["bandwidth"]
    assert {rate["operation"] for rate in rates} == set(bandwidth.FACTORS)
    assert {rate["axis"] for rate in rates} == {"data"} and all(rate["bus"] > 0 for rate in rates)


@pytest.mark.parametrize(
    "nproc,axes",
    everyday(
        [(2, {"data": 2}), (4, {"data": 2, "model": 2, "all ranks": 4})],
        lambda case: case[0] == 4,
    ),
)
def test_bandwidth_is_measured_along_each_axis(nproc: int, axes: dict[str, int]) -> None:
    rates = bandwidth.measure(nproc, on_cpu=True, sizes=(1024, 4096), repeats=2)
    assert {rate.axis: rate.ranks for rate in rates} == axes
    assert len(rates) == len(axes) * len(bandwidth.FACTORS) * 2
    for rate in rates:
        assert 0 < rate.seconds < 10 and rate.device == "cpu"
        assert rate.bus == pytest.approx(
            rate.size / rate.seconds * bandwidth.FACTORS[rate.operation](rate.ranks) / 1e9
        )


def test_factors_are_those_of_nccl_tests() -> None:
    factors = {
        name: [bandwidth.bus_bandwidth(name, n, 10**9, 1.0) for n in (2, 4)] for name in bandwidth.FACTORS
    }
    assert factors == {
        "all_reduce": [1.0, 1.5],
        "reduce_scatter": [0.5, 0.75],
        "all_gather": [0.5, 0.75],
        "all_to_all": [0.5, 0.75],
        "broadcast": [1.0, 1.0],
        "send_recv": [1.0, 1.0],
    }


def test_the_slowest_rank_counts_and_the_median_repeat() -> None:
    def sample(*seconds: float) -> bandwidth.Sample:
        return bandwidth.Sample("data", 2, "all_reduce", "cpu", 1000, list(seconds))

    rate = bandwidth._slowest((sample(1.0, 5.0, 2.0), sample(3.0, 1.0, 1.0)))
    assert rate.seconds == 3.0 and rate.bus == pytest.approx(1000 / 3.0 / 1e9)


@pytest.mark.parametrize("nproc,dims", [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (16, 3)])
def test_the_grid_has_no_more_ranks_than_wanted(nproc: int, dims: int) -> None:
    assert len(bandwidth.grid_of(nproc)) == dims and bandwidth.measure(1, on_cpu=True) == []


# ----------------------------------------------------------------------------------------------- the command

INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has been told to ignore it
from pathlib import Path
sys.path[:0] = {path!r}
from ds_lite.conformance import command
from test_conformance import request
sys.exit(command.run(request(Path({root!r}), sections="9.10"), Path({folder!r})))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run that sleeps in a world of two ranks, and their folder."""
    root = make_suite(tmp_path / "suite", {"test_s09_10_slow.py": SLOW})
    code = INTERRUPTED.format(path=[str(TESTS), *sys.path], root=str(root), folder=str(tmp_path / "report"))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    pids = [root / f"pid{rank}" for rank in range(2)]
    end = time.monotonic() + 170
    while not all(path.exists() and path.read_text() for path in pids) and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    yield root, process
    if process.poll() is None:
        process.kill()
    process.communicate()


def no_rank_is_left(root: Path) -> None:
    end = time.monotonic() + 20
    for path in root.glob("pid?"):
        while _is_there(int(path.read_text())):
            assert time.monotonic() < end, f"process {path.read_text()} is still there"
            time.sleep(0.1)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_everything_and_shows_the_table_so_far(
    started: tuple[Path, subprocess.Popen[str]], tmp_path: Path
) -> None:
    root, process = started
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "1 rule checked in 1 case: 1 passed, 0 failed" in said and "stopped by Ctrl-C" in said
    assert "not reached (1)" in said
    no_rank_is_left(root)
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["exit_status"] == 130 and report["sections"][0]["not_reached"] == 1


def test_nothing_is_left_when_the_command_is_killed(started: tuple[Path, subprocess.Popen[str]]) -> None:
    root, process = started
    process.kill()
    process.wait()
    no_rank_is_left(root)


def test_a_section_of_the_real_suite_with_two_ranks(tmp_path: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = command.run(request(sections="9.7", nproc=2), None)
    assert status == 0, said.getvalue()
    assert "§9.7" in said.getvalue() and "needs 4 ranks" in said.getvalue()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"sections": "9.8"}, "not in the chapter"),
        ({"backend": "mpi"}, "choose from auto, gloo, nccl"),
        ({"backend": "nccl", "nproc": 1000}, r"needs a GPU for each rank: 1000 wanted, \d+ found"),
        ({"impl": "nobody"}, "choose from .*ds_lite, student"),
        ({"impl": "nobody.py"}, "give a .py file"),
        ({"jobs": "many"}, "write auto, 0, 1"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request(**options)


def test_a_section_without_tests_says_which_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = dataclasses.replace(find("9.16"), tests=())
    monkeypatch.setattr("ds_lite.conformance.asked.find", lambda number: empty)
    with pytest.raises(ValueError, match=r"section 9\.16 has no tests; choose from 9\.1, "):
        request(sections="9.16")


def test_without_a_checkout_it_says_where_the_tests_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ds_lite.conformance.asked.__file__", str(tmp_path / "a" / "b" / "asked.py"))
    with pytest.raises(ValueError, match="git clone"):
        request()


@pytest.mark.parametrize("words", [["--sections", "9.8"], ["--nproc", "0"], ["--jobs", "x"], ["--flight"]])
def test_a_mistake_in_the_call_has_status_two(words: list[str]) -> None:
    from ds_lite import cli

    result = CliRunner().invoke(cli.app, ["conformance", *words], prog_name="ds-lite")
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_the_words_reach_pytest(tmp_path: Path) -> None:
    asked = request(sections="9.10,9.2", nproc=8, backend="gloo", full=True, jobs="3", impl="student")
    words = " ".join(running.words(asked, tmp_path, 7))
    for part in ("--nproc 8", "--backend gloo", "--impl student", "--full", "-n 3 --dist loadgroup"):
        assert part in words
    files = asked.files()
    assert "tests/test_s09_2_config.py" in files and "tests/test_s09_10_hang.py" in files
    assert not any("s09_1_" in file or "s09_11_" in file for file in files)
    assert len(files) == len(set(files)) and words.endswith(" ".join(files))
