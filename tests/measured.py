"""What a test measured besides passing: the largest difference under each tolerance, and on how many ranks.

`assert_close` and `World` note it in every record that is open. A rank of a world records its own and sends
it back with its report; conftest.py records each test and hands the sums to pytest as its property.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

Largest = dict[str, float]  # by the name of a tolerance


@dataclass
class Measured:
    """Units: a difference is relative to max(1, max|expected|), like the tolerance it is held against.

    `refused` is the last one beyond its tolerance: the fault of a test that failed then, or else a control.
    """

    allowed: Largest = field(default_factory=dict)
    within: Largest = field(default_factory=dict)
    refused: Largest = field(default_factory=dict)
    ranks: int = 0

    def note(self, tolerance: str, allowed: float, difference: float) -> None:
        self.allowed[tolerance] = allowed
        if difference <= allowed:
            self.within[tolerance] = max(difference, self.within.get(tolerance, 0.0))
        else:
            self.refused = {tolerance: difference}

    def add(self, other: Measured) -> None:
        self.allowed |= other.allowed
        for mine, theirs in ((self.within, other.within), (self.refused, other.refused)):
            for tolerance, difference in theirs.items():
                mine[tolerance] = max(difference, mine.get(tolerance, 0.0))
        self.ranks = max(self.ranks, other.ranks)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


_open_records: list[Measured] = []


@contextmanager
def record() -> Iterator[Measured]:
    """Collect what is noted until the block ends, also what inner records collect."""
    mine = Measured()
    _open_records.append(mine)
    try:
        yield mine
    finally:
        _open_records[:] = [other for other in _open_records if other is not mine]


def note(tolerance: str, allowed: float, difference: float) -> None:
    for one in _open_records:
        one.note(tolerance, allowed, difference)


def add(other: Measured) -> None:
    for one in _open_records:
        one.add(other)
