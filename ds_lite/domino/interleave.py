"""Several computations in turn, one step each (§9.15).

A computation is a generator that yields where another one may go on: after it has started a sum over the
ranks, and before it needs one. Each starts one turn after the one before, so that no two do the same thing at
the same time: while one waits, another multiplies.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def interleave(computations: Sequence[Steps[Result]]) -> list[Result]:
    """The results of all, run a step at a time: first, then first and second, then first to third.

    >>> def count(name):
    ...     for i in range(3):
    ...         print(name, i, end=" ")
    ...         yield
    ...     return name
    >>> interleave([count("a"), count("b")])
    a 0 a 1 b 0 a 2 b 1 b 2 ['a', 'b']
    """
    results: dict[int, Result] = {}
    started = 0
    try:
        while len(results) < len(computations):
            started = min(started + 1, len(computations))
            for index in range(started):
                if index not in results:
                    try:
                        next(computations[index])
                    except StopIteration as end:
                        results[index] = end.value
    finally:
        for computation in computations:  # if one has failed, the others end where they are
            computation.close()
    return [results[index] for index in range(len(computations))]
