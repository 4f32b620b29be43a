"""§9.1 §9.3 Faults of checkpoints: what is lost, what is believed, and what a dead save leaves behind."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ds_lite import comm
from ds_lite.saving import checks, loading, optimizer, writing
from ds_lite.saving.publishing import Publication
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

PAIR = "tests/test_s09_3_saving.py::test_pp2_dp2_zero1_goes_on_as_tp2_zero2"
MASTERS = "tests/test_s09_3_saving_precision.py::test_masters_and_shards_follow_loaded_weights"
EXACT = "tests/test_s09_3_saving_precision.py::test_low_precision_continues_bit_by_bit"
KILLED = "tests/test_s09_1_saving_dies.py::test_a_save_killed_at_any_step_leaves_the_last_checkpoint"
DAMAGED = "tests/test_s09_1_saving_damaged.py::test_a_damaged_file_is_found_and_named"
ALONE = "tests/test_s09_1_saving_refused.py::test_a_failure_on_one_rank_is_raised_on_all"


@killed_by(MUTANTS, PAIR, "of step 3: differs", section="9.3")
def optimizer_states_not_loaded() -> Patch:
    """Only the weights come back, and the optimizer starts its moments and its count anew."""
    return mock.patch.object(loading, "_load_optimizer", lambda plan, optimizer: None)


@killed_by(MUTANTS, PAIR, "of step 3: differs", section="9.3")
def options_of_groups_not_loaded() -> Patch:
    """The rate that a schedule had reached is that of the config again."""
    return mock.patch.object(loading, "set_options", lambda optimizer, chosen: None)


@killed_by(MUTANTS, PAIR, "of step 3: differs", section="9.3")
def shards_not_joined() -> Patch:
    """Of a ZeRO state the writer's own shard is saved, and zeros for the rest."""
    alone = SimpleNamespace(all_reduce=lambda *args, **kwargs: None, get_rank=comm.get_rank)
    return mock.patch.object(optimizer, "comm", alone)


@killed_by(MUTANTS, f"{MASTERS}[pp2-dp2-tp1-zero1]", "the master of", section="9.3")
def masters_left_behind() -> Patch:
    """The parameters are loaded and the masters are not, so the next step brings the old weights back."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(loading, "follow_parameters", lambda places: None))
    stack.enter_context(mock.patch.object(loading, "set_target", lambda place, value: None))
    return stack


@killed_by(MUTANTS, f"{EXACT}[pp2-dp2-tp1-zero1]", "bf16 pp2-dp2-tp1-zero1: ", section="9.3")
def masters_rounded() -> Patch:
    """After a load the masters are the rounded weights, and what they had beyond is lost."""

    def rounded(right: Any, place: Any, value: Any) -> None:
        right(place, value.to(place.parameter.dtype))

    return around(loading, "set_target", rounded)


@killed_by(MUTANTS, f"{KILLED}[new]", "no checkpoint 'new'", section="9.1")
def latest_written_first() -> Patch:
    """`latest` names a checkpoint that is not there yet."""

    def publish(right: Any, self: Publication, *, with_latest: bool) -> None:
        if with_latest:
            self.point_latest()
        right(self, with_latest=False)

    return around(Publication, "publish", publish)


@killed_by(MUTANTS, f"{KILLED}[old]", "old/.* is damaged", section="9.1")
def old_checkpoint_removed_first() -> Patch:
    """A checkpoint that is saved again under its tag is removed before the new one has the name."""

    def publish(right: Any, self: Publication, *, with_latest: bool) -> None:
        shutil.rmtree(os.path.join(self.save_dir, self.tag), ignore_errors=True)
        right(self, with_latest=with_latest)

    return around(Publication, "publish", publish)


@killed_by(MUTANTS, DAMAGED, "DID NOT RAISE|something was loaded", section="9.1")
def checksums_not_checked() -> Patch:
    """What is on the disk is believed."""
    return mock.patch.object(checks, "verify", lambda folder, name, record: None)


@killed_by(MUTANTS, ALONE, "(?i)still ran|did not finish|gloo", section="9.1", deadline=15.0)
def a_writer_fails_alone() -> Patch:
    """The rank that cannot write raises, and the others wait for it."""

    def alone(right: Any, error: Any, *args: Any, **kwargs: Any) -> bool:
        if error is not None:
            raise error
        return False

    return around(writing, "raise_together", alone)
