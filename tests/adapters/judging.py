"""How a run with `--impl deepspeed` is judged: by the table of differences; and what is written down of it.

    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 python -m pytest --impl deepspeed --junit-xml runs/deepspeed.xml tests
    PYTHONPATH=tests python -m adapters.judging runs/deepspeed.xml --write docs/data/deepspeed.json

A listed test must fail, and say what its row says: then it is an expected difference. If it passes, the run
fails: it stopped differing. What fails without a row fails the run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

from adapters.differences import OF_DS_LITE_ALONE, TABLE, VERSION, Difference, Kind

# ------------------------------------------------------------------------------------- while the tests run


def judges_others(item: Any) -> bool:
    """True for a test that another implementation than ds_lite can pass or fail."""
    test = name_of(item)
    return "impl" in item.fixturenames and not any(matches(glob, test) for glob in OF_DS_LITE_ALONE)


def one_case_a_test(metafunc: Any) -> None:
    """Cases that ds_lite runs by the dozen in one world are tests of their own for another implementation."""
    marks = metafunc.definition.own_markers
    marks[:] = [
        _spread(mark) if mark.name == "parametrize" and mark.args[0] == "cases" else mark for mark in marks
    ]


def _spread(mark: Any) -> Any:
    cases = {str(case).replace(" ", ","): case for group in mark.args[1] for case in group.values[0]}
    return pytest.mark.parametrize(
        "cases", [pytest.param([case], id=name) for name, case in cases.items()]
    ).mark


def judge(item: Any, report: Any) -> None:
    """Turn the report of a listed test round."""
    row = row_of(name_of(item))
    if row is None or report.when != "call":
        return
    if report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"stopped differing: remove it from adapters/differences.py or check the version of DeepSpeed "
            f"({metadata.version('deepspeed')}, the table is about {VERSION}). Expected was {_written(row)}"
        )
    elif report.failed and re.search(row.says, str(report.longrepr)):
        report.outcome, report.wasxfail = "skipped", _written(row)
    elif report.failed:
        report.sections.append(("expected difference", f"{_written(row)}, saying {row.says!r}"))


def name_of(item: Any) -> str:
    return f"{item.path.name}::{item.nodeid.split('::', 1)[1]}"


def matches(glob: str, test: str) -> bool:
    """Only `*` is special: ids are full of brackets."""
    return re.fullmatch(re.escape(glob).replace(r"\*", ".*"), test) is not None


def row_of(test: str) -> Difference | None:
    return next((row for row in TABLE if matches(row.tests, test)), None)


def _written(row: Difference) -> str:
    return f"{row.kind}: {row.reason} ({row.source})"


# --------------------------------------------------------------------------------------- after the run


def summary(junit: Path) -> dict[str, Any]:
    """Counts, and the rows of the table with the number of tests each explains."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    passed: Counter[str] = Counter()
    differing: Counter[Difference] = Counter()
    for test, outcome in _outcomes(suite):
        if outcome == "passed":
            passed[test.split("::")[0]] += 1
            continue
        row = row_of(test)
        if outcome != "xfail" or row is None:
            raise SystemExit(f"{test} {outcome}: only a run without failures is written down")
        differing[row] += 1
    idle = [row.tests for row in TABLE if not differing[row]]
    if idle:
        raise SystemExit(f"no test was found to differ by these rows: {idle}")
    kinds = Counter({kind: 0 for kind in get_args(Kind)})
    for row, count in differing.items():
        kinds[row.kind] += count
    return {
        "made_by": [line.strip() for line in (__doc__ or "").split("\n\n")[1].split("\n")],
        "what": "the part of the suite that judges any implementation, against DeepSpeed on CPU with gloo",
        "versions": {name: metadata.version(name) for name in ("deepspeed", "torch")},
        "date": str(suite.get("timestamp"))[:10],
        "counts": {"passed": sum(passed.values()), **kinds},
        "passed": dict(sorted(passed.items())),
        "differences": [{**asdict(row), "count": differing[row]} for row in TABLE],
        "not judged": OF_DS_LITE_ALONE,
    }


def _outcomes(suite: ElementTree.Element) -> Iterator[tuple[str, str]]:
    for case in suite.iter("testcase"):
        test = f"{str(case.get('classname')).rsplit('.', 1)[-1]}.py::{case.get('name')}"
        child = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if child is None:
            yield test, "passed"
        else:
            yield test, "xfail" if child.get("type") == "pytest.xfail" else child.tag


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write down what a run against DeepSpeed came to.")
    parser.add_argument("junit", type=Path)
    parser.add_argument("--write", type=Path, required=True)
    arguments = parser.parse_args(words)
    found = summary(arguments.junit)
    arguments.write.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(found["counts"])


if __name__ == "__main__":
    main()
