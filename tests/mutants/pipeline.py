"""§9.2 §9.9 §9.10 Faults of the pipeline itself: losses, buffers, accumulation, first weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ds_lite import checkpointing, comm
from ds_lite.gradients import Gradients
from ds_lite.pipe import engine as pipe_engine
from ds_lite.pipe import module as pipe_module
from ds_lite.pipe import stage as pipe_stage
from ds_lite.pipe.module import PipelineModule
from ds_lite.pipe.schedule import TrainSchedule
from ds_lite.pipe.stage import Stage
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

EQUALITY = "tests/test_s09_10_pipe_engine.py::test_a_pipeline_equals_one_process"
PP2, DP2 = f"{EQUALITY}[pp2-dp1]", f"{EQUALITY}[pp1-dp2]"
REPORTS = "tests/test_s09_9_field_reports.py"


# ------------------------------------------------------------------------------------------------ the loss


@killed_by(MUTANTS, PP2, "gradient of 0.weight: differs", section="9.2")
def loss_not_divided() -> Patch:
    """The gradients of m micro-batches are added and never divided by m."""

    def backward(right: Any, stage: Stage, buffer: Any) -> None:
        if buffer.loss is not None:
            buffer.loss = buffer.loss * stage.num_micro_batches
        right(stage, buffer)

    return around(Stage, "backward", backward)


@killed_by(MUTANTS, PP2, "gradient of 0.weight: differs", section="9.2")
def divided_again_at_each_stage() -> Patch:
    """Every stage divides the gradient that it receives by m, though the last stage has divided the loss."""

    def backward(right: Any, stage: Stage, buffer: Any) -> None:
        if stage.next is not None:
            for gradient in buffer.arriving.wait().tensors:
                gradient /= stage.num_micro_batches
        right(stage, buffer)

    return around(Stage, "backward", backward)


@killed_by(MUTANTS, PP2, "loss of the first batch: differs", section="9.2")
def loss_of_the_last_micro_batch() -> Patch:
    """train_batch returns the loss of the last micro-batch instead of the mean over all."""

    def finish(right: Any, stage: Stage) -> None:
        del stage.losses[:-1]
        right(stage)

    return around(Stage, "finish", finish)


@killed_by(MUTANTS, DP2, "loss of the first batch: differs", section="9.2")
def loss_of_one_replica() -> Patch:
    """train_batch returns the mean over this replica's micro-batches, a different number on each."""

    def reduced(right: Any, losses: Any, group: Any, how: Any) -> Any:
        alone = mock.patch.multiple(comm, all_reduce=lambda *a, **k: None, get_world_size=lambda group: 1)
        with alone:
            return right(losses, group, how)

    return around(pipe_engine, "reduced", reduced)


# --------------------------------------------------------------------------------- buffers and accumulation


@killed_by(MUTANTS, PP2, "gradient of .*: differs", section="9.10")
def last_gradient_overwrites() -> Patch:
    """The gradient of a micro-batch replaces those of earlier ones instead of being added."""

    def backward(right: Any, stage: Stage, buffer: Any) -> None:
        stage.module.zero_grad(set_to_none=True)
        right(stage, buffer)

    return around(Stage, "backward", backward)


@killed_by(MUTANTS, PP2, "norm of step .: differs", section="9.10")
def gradients_not_cleared() -> Patch:
    """The gradients of a batch stay, and the next batch is added to them."""
    return mock.patch.object(Gradients, "clear", lambda self: None)


@killed_by(MUTANTS, PP2, "gradient of 0.weight: differs", section="9.10")
def gradient_of_another_micro_batch() -> Patch:
    """With two micro-batches in flight, a received gradient meets the outputs of the other one."""

    def backward(right: Any, stage: Stage, buffer: Any) -> None:
        others = [other for other in stage.buffers if other is not buffer and other.outputs is not None]
        if others and buffer.outputs is not None:
            buffer.outputs, others[0].outputs = others[0].outputs, buffer.outputs
        right(stage, buffer)

    return around(Stage, "backward", backward)


@killed_by(MUTANTS, PP2, "gradient of 0.weight: differs", section="9.10")
def received_tensor_used_again() -> Patch:
    """Activations are received into one leaf for all micro-batches, and its gradient is never cleared."""
    kept: dict[int, Any] = {}

    def send_gradient(right: Any, stage: Stage, buffer: Any) -> None:
        for index, leaf in enumerate(buffer.inputs.tensors):
            if leaf.grad is not None:
                leaf.grad = kept[index] = leaf.grad + kept.get(index, 0)
        right(stage, buffer)

    return around(Stage, "send_gradient", send_gradient)


@killed_by(MUTANTS, PP2, "buffer.outputs is not None", section="9.10")
@contextmanager
def one_buffer_too_few() -> Iterator[None]:
    """A stage sets aside one buffer less than micro-batches wait there, so one is used again too early."""
    fewer = around(TrainSchedule, "num_pipe_buffers", lambda right, schedule: right(schedule) - 1)
    with fewer:
        yield


@killed_by(MUTANTS, PP2, "does not require grad", section="9.10", kind="tuple")
def every_float_wants_a_gradient() -> Patch:
    """Whether a tensor needs a gradient is read from its dtype, not from what the sender says."""

    def as_message(right: Any, *args: Any) -> Any:
        message = right(*args)
        flags = tuple(tensor.is_floating_point() for tensor in message.tensors)
        return pipe_stage.Message(message.tensors, flags, message.is_tuple)

    return around(pipe_stage, "_as_message", as_message)


@killed_by(MUTANTS, PP2, "no micro-batch needs a gradient", section="9.10", interval=2)
def checkpoint_cuts_the_graph() -> Patch:
    """Reentrant checkpointing: what is computed from token ids alone has no gradient."""

    def checkpoint(right: Any, *args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "use_reentrant": True})

    return around(checkpointing, "_torch_checkpoint", checkpoint)


# ----------------------------------------------------------------------------------------- initial weights


@killed_by(
    MUTANTS, f"{REPORTS}::test_a09_initial_weights_do_not_depend_on_the_split", "differs", section="9.9"
)
def seed_depends_on_the_split() -> Patch:
    """A layer's seed counts from the first layer of its stage."""

    def build(right: Any, module: PipelineModule) -> None:
        start, seed = module.parts[module.stage_id], pipe_module.set_random_seed
        with mock.patch.object(pipe_module, "set_random_seed", lambda number: seed(number - start)):
            right(module)

    return around(PipelineModule, "_build", build)


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a09_replicas_are_equal_bit_by_bit",
    "differs from a lower rank's",
    section="9.9",
)
def replicas_start_apart() -> Patch:
    """The first weights of replica 0 are not sent to the others, which drew their own."""
    start = importlib.import_module("ds_lite.initialize")  # the module; the attribute is the function
    return mock.patch.object(start, "make_replicas_equal", lambda model, grid: None)
