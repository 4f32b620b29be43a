"""What a rank computed and what its link did meanwhile, from a real run (§9.15).

lanes = Lanes()
with lanes.recording():
    model(x).sum().backward()
print(lanes.order())
picture = timeline_svg(lanes.spans(rank=0), title="Domino", unit="ms", row_name="rank")
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ds_lite.pipe.timeline import Span
from ds_lite.tensor_parallel.pending import watched_by


@dataclass(frozen=True)
class Event:
    """A sum was started or waited for, until `until`; or the caller noted something."""

    what: str  # "start", "wait" or "note"
    key: Hashable
    at: float
    until: float


class Lanes:
    """Recorder of one rank's sums. `exposed_s` is the time that it did nothing but wait."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._begin = self._end = 0.0
        self._under_way: dict[Hashable, tuple[float, Any]] = {}
        self._transfers: list[tuple[Hashable, float, float]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the block ends; a second time begins anew."""
        self.__init__()  # type: ignore[misc]
        self._begin = perf_counter()
        with watched_by(self):
            yield
        self._end = perf_counter()

    @property
    def exposed_s(self) -> float:
        return sum(event.until - event.at for event in self.events)

    def order(self) -> list[str]:
        """What was started and waited for, one after another: part of the batch, layer, half, direction."""
        return [
            _words(event.key) if event.what == "note" else f"{event.what} {_words(event.key)}"
            for event in self.events
        ]

    def note(self, words: str) -> None:
        """Enter into the order what the caller computes now."""
        now = perf_counter()
        self.events.append(Event("note", words, now, now))

    def spans(self, rank: int) -> list[Span]:
        """For `timeline_svg`, in ms: boxes are computation, numbered by part; strips are sums under way."""
        found, since = [], self._begin
        for event in self.events:
            if event.what != "note":
                kind = "forward" if _is_forward(event.key) else "backward"
                found.append(self._span(rank, event.key, kind, since, event.at))
                since = event.until
        for key, start, end in self._transfers:
            found.append(self._span(rank, key, "communication", start, end))
        return found

    def _span(self, rank: int, key: Hashable, kind: str, start: float, end: float) -> Span:
        return Span(
            rank, _words(key), kind, _part(key), 1e3 * (start - self._begin), 1e3 * (end - self._begin)
        )

    # ------------------------------------------------------------------------ what `pending.py` calls

    def started(self, key: Hashable, work: Any) -> None:
        now = perf_counter()
        self.events.append(Event("start", key, now, now))
        self._look(now)
        self._under_way[key] = now, work

    def waits(self, key: Hashable) -> None:
        now = perf_counter()
        self._look(now)
        self.events.append(Event("wait", key, now, now))

    def waited(self, key: Hashable) -> None:
        now, last = perf_counter(), self.events.pop()
        self.events.append(Event("wait", key, last.at, now))
        if key in self._under_way:
            start, _ = self._under_way.pop(key)
            self._transfers.append((key, start, now))

    def _look(self, now: float) -> None:
        """Sums that are over by now: nobody tells when, so this moment stands for it."""
        for key, (start, work) in list(self._under_way.items()):
            if work is None or work.is_completed():
                self._transfers.append((key, start, now))
                del self._under_way[key]


def _part(key: Hashable) -> int | None:
    return key[0] if isinstance(key, tuple) and isinstance(key[0], int) else None


def _is_forward(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[-1] in ("forward", "out")


def _words(key: Hashable) -> str:
    """(0, 1, "MLP", "forward") in words; other keys as they are."""
    if not isinstance(key, tuple):
        return str(key)
    if len(key) >= 3 and key[2] in ("attention", "MLP"):
        return f"part {key[0]} layer {key[1]} {key[2]} {'forward' if _is_forward(key) else 'backward'}"
    return f"part {key[0]} region {key[1]} {'forward' if _is_forward(key) else 'backward'}"
