"""Several computations in turn, one step each (§9.15).

A computation is a generator that yields where it has started a sum over the ranks and would have to wait for
it: while the sum runs, the others multiply.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def interleave(computations: Sequence[Steps[Result]]) -> list[Result]:
    """The results of all, run a step at a time, one after another.

    >>> def count(name):
    ...     for i in range(3):
    ...         print(name, i, end=" ")
    ...         yield
    ...     return name
    >>> interleave([count("a"), count("b")])
    a 0 b 0 a 1 b 1 a 2 b 2 ['a', 'b']
    """
    results: dict[int, Result] = {}
    try:
        while len(results) < len(computations):
            for index, computation in enumerate(computations):
                if index not in results:
                    try:
                        next(computation)
                    except StopIteration as end:
                        results[index] = end.value
    finally:
        for computation in computations:  # if one has failed, the others end where they are
            computation.close()
    return [results[index] for index in range(len(computations))]
