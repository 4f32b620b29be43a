"""§9.3 Faults of low precision: masters, accumulation, the overflow decision, the loss scale."""

from __future__ import annotations

from typing import Any
from unittest import mock

from ds_lite import bucketing, comm
from ds_lite.engine import Engine
from ds_lite.gradients import Gradients
from ds_lite.precision import MasterBucket
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

TESTS = "tests/test_s09_3_precision.py"
SMALL_NUMBERS = f"{TESTS}::test_gradients_add_up_in_float32[bf16]"
ONE_STAGE = f"{TESTS}::test_b17_one_bad_gradient_skips_the_step_on_all_ranks"


@killed_by(MUTANTS, SMALL_NUMBERS, r"zero=0|get_global_grad_norm", section="9.3")
def accumulated_in_bfloat16() -> Patch:
    """Micro-batches add up in the parameters' own precision, where small gradients vanish."""
    return mock.patch.object(bucketing, "master_dtype", lambda parameter, config: None)


@killed_by(MUTANTS, ONE_STAGE, "the step after the skip did nothing", section="9.3")
def masters_not_published() -> Patch:
    """The optimizer steps masters, and the parameters stay what they were."""
    return mock.patch.object(MasterBucket, "publish", lambda self: None)


@killed_by(MUTANTS, ONE_STAGE, "moved in a skipped step|skipped_steps", section="9.3")
def each_stage_decides() -> Patch:
    """A stage skips the step only if its own gradients overflowed."""

    def norm(right: Any, gradients: Gradients) -> Any:
        with mock.patch.object(comm, "all_reduce", lambda *args, **kwargs: None):
            return right(gradients)

    return around(Gradients, "norm", norm)


@killed_by(MUTANTS, ONE_STAGE, "differs from a lower rank's|moved in a skipped step", section="9.3")
def overflow_not_noticed() -> Patch:
    """A step whose gradients are not finite is taken."""

    def step(right: Any, engine: Engine, *args: Any) -> None:
        with mock.patch("math.isfinite", lambda value: True):
            right(engine, *args)

    return around(Engine, "_take_optimizer_step", step)


@killed_by(
    MUTANTS, f"{TESTS}::test_fp16_follows_its_twin_on_two_ranks", "norm of step 0: differs", section="9.3"
)
def scale_left_in_the_gradients() -> Patch:
    """The loss is scaled, and the gradients are clipped and stepped with the scale in them."""
    return around(Gradients, "norm", lambda right, self: right(self) * self.loss_scale)


@killed_by(
    MUTANTS,
    "tests/test_s09_1_engine_use.py::test_masters_follow_weights_that_were_loaded_by_hand[bf16]",
    "zero=0: weight was brought back",
    section="9.3",
)
def masters_bring_old_weights_back() -> Patch:
    """Weights that a script loads are overwritten by the masters at the next step."""
    return mock.patch.object(MasterBucket, "follow", lambda self: None)
