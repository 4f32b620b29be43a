"""Deliberately wrong engines, each with the test that must notice it.

A mutant changes one thing in the running modules, by `unittest.mock.patch`, in every process of a world. What
it breaks is what a plausible engine gets wrong; `test_mutants.py` runs the named test against it. A new rule
brings its mutant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    `killer` is the id of a test, as pytest writes it; the regular expression `keyword` is found in its
    failure. Where that test runs a list of cases, the smallest one that has the options `needs` is enough.
    A mutant that makes ranks wait has a `deadline` in seconds, shorter than the test's own.
    """

    section: str
    breaks: str
    patch: Callable[[], Patch]
    killer: str
    keyword: str
    needs: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None

    @property
    def name(self) -> str:
        return self.patch.__name__


def killed_by(
    mutants: list[Mutant],
    killer: str,
    keyword: str,
    *,
    section: str,
    deadline: float | None = None,
    **needs: Any,
) -> Callable[[Callable[[], Patch]], Callable[[], Patch]]:
    """Enter the decorated patch into the list; its docstring says what it breaks."""

    def enter(patch: Callable[[], Patch]) -> Callable[[], Patch]:
        breaks = " ".join(str(patch.__doc__).split())
        mutants.append(Mutant(section, breaks, patch, killer, keyword, needs, deadline))
        return patch

    return enter


def around(owner: Any, name: str, wrong: Callable[..., Any]) -> Patch:
    """Replace `owner.name` by `wrong`, which gets the right one as its first argument."""
    right = getattr(owner, name)

    @functools.wraps(right)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    return mock.patch.object(owner, name, wrapper)
