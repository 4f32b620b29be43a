"""Which cases of a test run every day; the others run in `make full`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def everyday(cases: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """The cases of a parametrisation, marked `full` where `keep` says no. A tuple is one value for each name.

    Raises: ValueError if none is left for every day, or none is marked.
    """
    listed = [_case(case, keep) for case in cases]
    marked = sum(bool(case.marks) for case in listed)
    if marked in (0, len(listed)):
        raise ValueError(f"{marked} of {len(listed)} cases are left for make full; keep some, and not all")
    return listed


def _case(case: Any, keep: Callable[[Any], bool]) -> Any:
    ids = getattr(case, "id", None)
    values = case.values if hasattr(case, "marks") else case if isinstance(case, tuple) else (case,)
    kept = keep(ids if ids is not None else case)
    return pytest.param(*values, id=ids, marks=() if kept else pytest.mark.full)
