"""The ledger: which axis moved how many bytes, in which instruction (§9.11).

`comm.py` notes every call here; labs and tests compare the sums with the chapter's formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from ds_lite import trace


@dataclass
class Traffic:
    """What one kind of call added up to: calls, `payload` bytes handed in, `sent` bytes leaving this rank."""

    calls: int = 0
    payload: int = 0
    sent: int = 0


@dataclass
class Ledger:
    """Traffic by (axis, operation, instruction); filled while `record()` is open.

    Units: bytes. `sent` follows the bandwidth-optimal algorithm of each operation on a group of n:
    all-reduce 2(n-1)/n of the tensor, reduce-scatter and all-to-all (n-1)/n of the input, all-gather
    (n-1) times the input, broadcast the tensor on the source, send the tensor.
    """

    rows: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)

    def add(self, axis: str, operation: str, instruction: str, payload: int, sent: int) -> None:
        row = self.rows.setdefault((axis, operation, instruction), Traffic())
        row.calls += 1
        row.payload += payload
        row.sent += sent

    def total(
        self, axis: str | None = None, operation: str | None = None, instruction: str | None = None
    ) -> Traffic:
        """The sum of the rows that match every name given."""
        wanted = (axis, operation, instruction)
        sums = Traffic()
        for key, row in self.rows.items():
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True)):
                sums.calls += row.calls
                sums.payload += row.payload
                sums.sent += row.sent
        return sums


_open_ledgers: list[Ledger] = []  # process-wide: a backward on CUDA runs on a thread of autograd's own


@contextmanager
def record() -> Iterator[Ledger]:
    """Fill a fresh ledger with every call made through `comm` until the block ends."""
    ledger = Ledger()
    _open_ledgers.append(ledger)
    try:
        yield ledger
    finally:
        # By identity: two ledgers with equal rows are equal, and `remove` would take the other one.
        _open_ledgers[:] = [other for other in _open_ledgers if other is not ledger]


def note(operation: str, group: ProcessGroup | None, payload: int, sent: int) -> None:
    """Add one call to every open ledger; costs nothing when none is open."""
    if not _open_ledgers:
        return
    desc = getattr(group, "group_desc", "") if group is not None else ""
    axis = desc if desc and desc not in ("default_pg", "undefined") else "world"
    for ledger in _open_ledgers:
        ledger.add(axis, operation, trace.current().instruction, payload, sent)
