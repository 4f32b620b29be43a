"""What a run has shown so far: cases add up to rules, rules to sections.

A rule is one test function, whose name says it; a case is one set of its parameters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ds_lite.sections import Section


@dataclass(frozen=True)
class Difference:
    """The largest one seen under a tolerance and what that allows, both relative to max(1, max|expected|)."""

    largest: float
    allowed: float


@dataclass(frozen=True)
class Case:
    """How one test ended; `why` is the reason of a skip, or the first line of a failure."""

    nodeid: str
    outcome: str  # passed, failed, skipped
    seconds: float = 0.0
    why: str = ""
    differences: dict[str, Difference] = field(default_factory=dict)
    ranks: int = 0  # of the largest job that it ran in; 0: none


@dataclass
class Rule:
    """One test function, or a file that could not be loaded."""

    name: str
    cases: list[Case] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The sentence that its name is."""
        return self.name.rpartition("::")[2].removeprefix("test_").replace("_", " ")

    @property
    def verdict(self) -> str:
        """failed if a case failed; passed, in part, or not proved by how many of the others were run."""
        outcomes = {case.outcome for case in self.cases}
        if "failed" in outcomes:
            return "failed"
        if len(outcomes) > 1:
            return "in part"
        return "passed" if "passed" in outcomes else "not proved"

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    @property
    def ranks(self) -> int:
        return max(case.ranks for case in self.cases)

    def differences(self) -> dict[str, Difference]:
        """The largest of all cases, by tolerance."""
        largest: dict[str, Difference] = {}
        for case in self.cases:
            for name, one in case.differences.items():
                if name not in largest or one.largest > largest[name].largest:
                    largest[name] = one
        return largest


@dataclass
class SectionResults:
    """The rules of one section; `expected` cases of a file are known once pytest has collected."""

    section: Section
    rules: dict[str, Rule] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)

    def count(self, *verdicts: str) -> int:
        return sum(rule.verdict in verdicts for rule in self.rules.values())

    def cases(self, *outcomes: str) -> list[Case]:
        all_cases = (case for rule in self.rules.values() for case in rule.cases)
        return [case for case in all_cases if not outcomes or case.outcome in outcomes]

    @property
    def is_over(self) -> bool:
        return bool(self.expected) and len(self.cases()) >= sum(self.expected.values())

    def reasons(self) -> Counter[str]:
        """Why cases were not run, and how many."""
        return Counter(case.why for case in self.cases("skipped"))


class Results:
    """All sections of a run. A file may prove two of them: its rules stand in both and count once in sums."""

    def __init__(self, sections: Iterable[Section]) -> None:
        self.sections = {section.number: SectionResults(section) for section in sections}
        self.started = time.time()
        self.interrupted = False
        self.status: int | None = None  # of pytest, once it has ended

    def add(self, event: dict[str, Any]) -> list[SectionResults]:
        """Take in one event of `running.events`; the sections that it touches."""
        if event["event"] == "ended":
            self.status = event["status"]
        elif event["event"] == "collected":
            return self._expect(event["files"])
        elif event["event"] == "test":
            return self._put(event["nodeid"].partition("[")[0], event["sections"], _case(event))
        elif event["event"] == "module":
            return self._put(event["file"], event["sections"], _module(event))
        return []

    def _expect(self, files: dict[str, int]) -> list[SectionResults]:
        from ds_lite.conformance.asked import sections_of

        for file, number in files.items():
            for section in sections_of(file):
                if section in self.sections:
                    self.sections[section].expected[file] = number
        return list(self.sections.values())

    def _put(self, name: str, numbers: list[str], case: Case) -> list[SectionResults]:
        touched = [self.sections[number] for number in numbers if number in self.sections]
        for one in touched:
            rule = one.rules.setdefault(name, Rule(name))
            if all(other.nodeid != case.nodeid for other in rule.cases):  # workers tell of a module each
                rule.cases.append(case)
                if "::" not in name:  # a file as a whole, which pytest does not count
                    one.expected.setdefault(name, 1)
        return touched

    def rules(self) -> list[Rule]:
        """Every rule once."""
        every = {name: rule for one in self.sections.values() for name, rule in one.rules.items()}
        return list(every.values())

    def cases(self, *outcomes: str) -> list[Case]:
        return [case for rule in self.rules() for case in rule.cases if case.outcome in outcomes]

    @property
    def broken(self) -> str:
        """What is wrong with the run itself; empty if pytest ended as it should."""
        if self.interrupted or self.status in (0, 1) or (self.status == 2 and self.cases("failed")):
            return ""
        ends = {
            None: "was not seen to end",
            2: "was interrupted",
            3: "had a fault of its own",
            4: "did not understand its options",
            5: "found no test",
        }
        if self.status == 5 and self.cases("skipped"):  # every file needs something that is not here
            return ""
        return f"pytest {ends.get(self.status, f'ended with status {self.status}')}"

    @property
    def exit_status(self) -> int:
        """0 nothing failed, 1 something did, 130 interrupted before anything did. Skips do not count."""
        if self.cases("failed") or self.broken:
            return 1
        return 130 if self.interrupted else 0


def _case(event: dict[str, Any]) -> Case:
    seen = event["measured"] or {"allowed": {}, "within": {}, "refused": {}, "ranks": 0}
    refused = seen["refused"] if event["outcome"] == "failed" else {}  # else it was a negative control
    differences = {
        name: Difference(largest, seen["allowed"][name])
        for name, largest in {**seen["within"], **refused}.items()
    }
    why = event["failure"] or event["reason"]
    return Case(event["nodeid"], event["outcome"], event["seconds"], why, differences, seen["ranks"])


def _module(event: dict[str, Any]) -> Case:
    return Case(event["file"], event["outcome"], why=event["text"])
