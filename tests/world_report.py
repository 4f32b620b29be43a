"""What a call of a world came to on each rank, and the message that shows it."""

from __future__ import annotations

import pickle
import re
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from world_worker import Report

KEPT_LINES = 60


class WorldError(RuntimeError):
    """A rank raised, died, hung, or left something behind; the message shows every rank."""


class WorldAssertionError(WorldError, AssertionError):
    """Every rank that failed did so by an assertion."""


@dataclass
class Outcome:
    """How a call ended on one rank. Exactly one of `report`, `death`, `stuck` is set."""

    rank: int
    report: Report | None = None
    death: int | None = None  # as subprocess counts: -9 is signal 9, else an exit code
    stuck: str = ""
    when: float = field(default_factory=time.monotonic)
    output: str = ""
    left_behind: list[str] = field(default_factory=list)
    place: str = ""  # in a job, if the rank is one of its processes

    @property
    def returned(self) -> bool:
        return self.report is not None and self.report.result is not None

    def result(self) -> Any:
        assert self.report is not None and self.report.result is not None, self.headline()
        return pickle.loads(self.report.result)

    def raised(self, *kinds: str) -> bool:
        return self.report is not None and not set(kinds).isdisjoint(self.report.kinds)

    def headline(self) -> str:
        who = f"rank {self.rank} ({self.place})" if self.place else f"rank {self.rank}"
        if self.stuck:
            return f"{who} {self.stuck}"
        if self.death is not None:
            return f"{who} {_cause(self.death)}"
        assert self.report is not None
        if self.returned:
            return f"{who} returned"
        return f"{who} raised {self.report.kinds[0].removeprefix('builtins.')}"


def message(text: str, outcomes: list[Outcome], table: str) -> str:
    """What went wrong, in the order it happened; a rank that was killed comes before those it pulled down."""
    parts = [text, *(f"  {outcome.headline()}" for outcome in outcomes)]
    if table:
        parts += ["", "what each rank did last:", table]
    failed = [outcome for outcome in outcomes if not outcome.returned or outcome.left_behind]
    failed.sort(key=lambda o: (bool(o.stuck), not (o.death is not None and o.death < 0), o.when))
    for outcome in failed:
        parts += ["", f"--- {outcome.headline()}"]
        if outcome.report is not None and not outcome.returned:
            parts.append(outcome.report.trace.rstrip())
        parts += [f"left behind: {thing}" for thing in outcome.left_behind]
        if outcome.output.strip():
            parts += [f"--- output of rank {outcome.rank}", _tail(outcome.output)]
    return "\n".join(parts)


def _tail(output: str) -> str:
    """The last lines, without the stack of the thread that listens to this process."""
    stacks = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", output)
    lines = "".join(stack for stack in stacks if "in _listen" not in stack).rstrip().splitlines()
    return "\n".join(lines[-KEPT_LINES:])


def _cause(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
