"""Inside pytest: one JSON line for each thing that `ds-lite conformance` wants to know.

Loaded by `-p ds_lite.conformance.plugin`. With pytest-xdist only the process that collects the reports of
the others writes. Lines: `collected` (tests by file), `module` (skipped or broken as a whole), `test`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ds_lite.conformance.asked import sections_of

_REASON = re.compile(r"^(Skipped: )?(not proved( here)?: )?")
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+(?:Error|Exception)\b)")
_CAUSE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Failed|Interrupt|Exit)\b.*", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--conformance-events", help="file to which one JSON line an event is appended")
    group.addoption("--conformance-lifeline", type=int, help="descriptor that ends when the caller is gone")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--conformance-events")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Events(Path(path)), "ds_lite-conformance-events")
        lifeline = config.getoption("--conformance-lifeline")
        if lifeline is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
            threading.Thread(target=_leave_with_the_caller, args=(lifeline,), daemon=True).start()


def _leave_with_the_caller(lifeline: int) -> None:
    os.read(lifeline, 1)  # nobody writes: this returns when the other end is closed
    os.kill(os.getpid(), signal.SIGINT)


class _Events:
    """Writes the lines; a test is written once, after its last phase."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._phases: dict[str, list[pytest.TestReport]] = {}

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()

    def _collected(self, nodeids: list[str]) -> None:
        files: dict[str, int] = {}
        for nodeid in nodeids:
            files[_file(nodeid)] = files.get(_file(nodeid), 0) + 1
        self._write("collected", files=files)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected(ids)  # the same from every worker

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            text = _reason(report) if report.skipped else _failure(report)
            file = _file(report.nodeid)
            self._write("module", file=file, sections=sections_of(file), outcome=report.outcome, text=text)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when not in ("setup", "call"):  # teardown; "???" where a worker has died
            self._write("test", **_summed_up(self._phases.pop(report.nodeid)))


def _summed_up(phases: list[pytest.TestReport]) -> dict[str, Any]:
    nodeid = re.sub(r"@[^@\]:]*$", "", phases[0].nodeid)  # xdist appends the group of a test
    failed = next((phase for phase in phases if phase.failed), None)
    skipped = next((phase for phase in phases if phase.skipped), None)
    measured = [text for name, text in phases[-1].user_properties if name == "measured"]
    return {
        "nodeid": nodeid,
        "sections": sections_of(_file(nodeid)),
        "outcome": "failed" if failed else "skipped" if skipped else "passed",
        "seconds": round(sum(phase.duration for phase in phases), 3),
        "reason": _reason(skipped) if skipped and not failed else "",
        "failure": _failure(failed) if failed else "",
        "measured": json.loads(str(measured[-1])) if measured else None,
    }


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped, without the words that every reason begins with."""
    if hasattr(report, "wasxfail"):
        return f"known to fail: {report.wasxfail}"
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return _REASON.sub("", text.strip())


def _failure(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of what was raised; for a world also what the first rank raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (str(report.longrepr) if crash is None else crash.message).strip()
    first, _, rest = text.partition("\n")
    cause = _CAUSE.search(rest) if crash is None or " ranks " in first else None
    first = _MODULE.sub("", first)
    return f"{first}: {cause.group()}" if cause else first
