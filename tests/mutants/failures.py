"""§9.2 §9.9.2 §9.10 Faults of an engine that fails: one rank alone, too late, or without a word."""

from __future__ import annotations

from typing import Any
from unittest import mock

from ds_lite import replicas
from ds_lite.gradients import Gradients
from ds_lite.pipe import shared_fate
from ds_lite.pipe.stage import Stage
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []
OTHER = "tests/test_s09_10_faults.py::test_replicas_that_differ_are_refused_on_every_rank"


@killed_by(MUTANTS, f"{OTHER}[dtype]", "of 3 ranks raised ValueError", section="9.10", deadline=10.0)
def replicas_not_compared() -> Patch:
    """Replicas whose tensors have other dtypes are filled with each other's bytes."""
    return mock.patch.object(replicas, "_other_shapes", lambda tensors, grid: None)


FAULTS = "tests/test_s09_2_faults.py"
ONE_REPLICA = f"{FAULTS}::test_a_failure_on_one_replica_is_raised_on_all_ranks[output]"
OPPOSITE = "tests/test_s09_9_field_reports.py::test_b25b_keys_in_opposite_order_on_two_stages_do_not_hang[2]"


@killed_by(MUTANTS, ONE_REPLICA, "2 of 4 ranks raised TypeError", section="9.10", deadline=10.0)
def replicas_do_not_agree() -> Patch:
    """A rank that fails raises alone, and the other replica waits for it in the reduction."""

    def alone(right: Any, error: Any, *args: Any, **kwargs: Any) -> bool:
        if error is not None:
            raise error
        return True

    return around(shared_fate, "raise_together", alone)


@killed_by(MUTANTS, OPPOSITE, "ReduceTiedGrads", section="9.9.2", deadline=6.0)
def ties_in_the_order_of_the_layers() -> Patch:
    """Each stage sums its ties in the order in which it meets them, and two stages wait for each other."""

    def init(right: Any, self: Gradients, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        place = {id(parameter): index for index, parameter in enumerate(self._parameters.values())}
        self._tied.sort(key=lambda bucket: place[id(bucket.parameters[0])])

    return around(Gradients, "__init__", init)


@killed_by(
    MUTANTS,
    f"{FAULTS}::test_an_engine_that_failed_midway_is_not_used_again[0-3]",
    "of 4 ranks raised RuntimeError",
    section="9.10",
    deadline=10.0,
)
def failure_forgotten() -> Patch:
    """An engine whose batch failed midway takes the next one, with old messages still under way."""
    forgets = property(lambda stage: None, lambda stage, value: None)
    return mock.patch.object(Stage, "failure", forgets, create=True)


@killed_by(
    MUTANTS,
    f"{FAULTS}::test_a_loss_that_never_needs_a_gradient_is_refused_on_every_rank",
    "0 of 4 ranks raised ValueError",
    section="9.2",
)
def trains_nothing_silently() -> Patch:
    """A loss without a graph counts as trained."""
    always = property(lambda stage: True, lambda stage, value: None)
    return mock.patch.object(Stage, "has_trained", always, create=True)
