"""The pipeline engine: one loop over instructions, one method for each (§9.2 §9.10).

`train_batch` asks the schedule for this stage's instruction stream and dispatches it. What a hang shows is
the instruction this loop is in (`trace.py`). Nothing here knows 1F1B: another schedule is another stream.
What instructions do with tensors stands in `stage.py`, what the reductions do in `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.config_keys import DSConfig
from ds_lite.data import RepeatingLoader, different_data, take_micro_batches
from ds_lite.engine import Engine
from ds_lite.grid import PipelineParallelGrid
from ds_lite.pipe.causal_lm.batches import by_name
from ds_lite.pipe.instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from ds_lite.pipe.losses import arranged, reduced
from ds_lite.pipe.module import PipelineModule
from ds_lite.pipe.p2p import StageLink
from ds_lite.pipe.schedule import InferenceSchedule, PipeSchedule, TrainSchedule
from ds_lite.pipe.shared_fate import SharedFate
from ds_lite.pipe.stage import Buffer, Stage
from ds_lite.sequence.models import Kind


class PipelineError(RuntimeError):
    """A call that a pipeline engine does not offer."""


def _on_buffer(work: Callable[[Stage, Buffer], None]) -> Callable[..., None]:
    """The engine's method for an instruction on one buffer: the stage does it, by name, so that a subclass
    of Stage may do it differently."""

    def execute(engine: PipelineEngine, buffer_id: int, micro_batch_id: int | None = None) -> None:
        getattr(engine.stage, work.__name__)(engine.stage.buffers[buffer_id])

    return execute


class PipelineEngine(Engine):
    """Train and evaluate a PipelineModule, one whole batch of m micro-batches a call.

    Source: §9.2 §9.10; DeepSpeed `runtime/pipe/engine.py::PipelineEngine` @ 0.19.8.
    Differs: the loss is 0-dim and of one dtype on every rank; shapes, dtypes and tuple lengths may change
    between micro-batches; whether a tensor needs a gradient is told by its sender.
    """

    module: PipelineModule
    takes_metrics = False

    def __init__(
        self,
        module: PipelineModule,
        grid: PipelineParallelGrid,
        config: DSConfig,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        super().__init__(module, grid, config, optimizer, ties=module.ties())
        self._has_compared_data = grid.size("seq", "model") == 1
        self.num_stages, self.stage_id = grid.get_pipe_parallel_world_size(), grid.get_stage_id()
        previous = None if self.is_first_stage() else self._link(self.stage_id - 1)
        following = None if self.is_last_stage() else self._link(self.stage_id + 1)
        input_dtype = self.dtype if self._casts_inputs else None
        self.stage = Stage(module, previous, following, self.device, input_dtype)
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None if module.hull is None else by_name
        self._fate = SharedFate(self.stage, self.gradients, exchanges_tokens=grid.exchanges_tokens)

    def spread_sequences(self, kind: Kind) -> None:
        """From now on blocks work on this rank's tokens; batches hold whole sequences, on every rank."""
        hull, group = self.module.hull, self.grid.group("seq")
        ranks = comm.get_world_size(group)
        assert hull is not None, "form_grid refuses other pipelines"
        hull.spread(group)
        if self.global_rank == 0:
            print(
                f"ds_lite: sequences of {type(hull.model).__name__} are cut over {ranks} ranks "
                f"before the first block; its attention is reached through {kind.route}",
                flush=True,
            )

    def _link(self, stage_id: int) -> StageLink:
        return StageLink(self.grid.stage_to_global(stage_id), self.grid.group("pipe"), self.device)

    # ----------------------------------------------------------------------------------- whole batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Any:
        """One optimizer step over m micro-batches; the mean loss over them and all replicas, on every rank.

        `data_iter` gives (inputs, labels) on the first and on the last stage; other stages do not read it,
        and without it the iterator of `set_dataloader` serves. A loss_fn may return several losses: the
        first is trained on, and the means of all come back as a tuple.

        Communication: per stage m activations and m gradients to each neighbour, the reductions of
        `gradients.py`, and the loss from stage to stage.
        Raises: RuntimeError with gradients switched off; on every rank ValueError or TypeError for data that
        ends early or is not a pair, and for a stage's output that cannot travel.
        """
        if self.optimizer is None:
            raise ValueError("train_batch() needs an optimizer; name one in the config or pass it (§9.2)")
        loss = self._run_training(data_iter, without=())
        self.micro_steps += self.micro_batches
        self._report(loss)
        return loss

    def compute_gradients(self, data_iter: Iterator[Any] | None = None) -> Any:
        """`train_batch` up to the reduced gradients: no optimizer step, gradients stay; returns the loss."""
        return self._run_training(data_iter, without=(OptimizerStep,))

    def _run_training(
        self, data_iter: Iterator[Any] | None, without: tuple[type[PipeInstruction], ...]
    ) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "train_batch() inside torch.no_grad(); use eval_batch() or enable gradients (§9.2)"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._load(self.data_iterator, self.micro_batches, training=True)
        self.gradients.clear()
        if not self.module.training:  # a layer that the caller set to eval alone stays there
            self.module.train()
        schedule = self._train_schedule()
        self.stage.start(schedule.num_pipe_buffers(), self.micro_batches, scaled=self.scaler.scaled)
        self.gradients.expect(self.micro_batches)
        with self._fate.batch():
            self._exec_schedule(schedule, without)
            self.stage.finish()
            return self._result("avg")

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss in eval mode, without gradients; weights, counters, iterator and mode stay as is.

        `reduce_output=None` gives a list with one loss per micro-batch instead. With `return_logits` the
        result is (loss, outputs of the last micro-batch); the outputs are on the last stage, None elsewhere.
        With `bcast_loss=False` the loss is on the last stage, None elsewhere; with `compute_loss=False` None.

        Raises: ValueError for another `reduce_output`; what `train_batch` raises for its data.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"reduce_output={reduce_output!r} is not offered; choose 'avg' or None (§9.2)")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        schedule = self._inference_schedule(count)
        self._load(data_iter, count, training=False)
        modes, offset = [(layer, layer.training) for layer in self.module.modules()], self.module.micro_offset
        self.module.eval()
        self.stage.start(schedule.num_pipe_buffers(), count, compute_loss=compute_loss)
        try:
            with torch.no_grad(), self._fate.batch():
                self._exec_schedule(schedule)
                outputs = self.stage.last_outputs
                with self.trace.span("FinishBatch"):
                    self.stage.finish()
                    self._fate.agree()
                loss = self._result(reduce_output, is_shared=bcast_loss) if compute_loss else None
        finally:
            for layer, was_training in modes:
                layer.training = was_training
            self.module.micro_offset = offset
        return (loss, outputs) if return_logits else loss

    def _result(self, how: str | None, *, is_shared: bool = True) -> Any:
        """The reduced losses of this run, on every stage if they are shared."""
        with self.trace.span("ShareLoss"):
            losses = reduced(self.stage.losses, self.grid.group("data"), how)
            if is_shared:
                losses = self.stage.share_result(losses)
        return arranged(losses, how, self.stage.num_micro_batches)

    def _load(self, iterator: Iterator[Any] | None, count: int, *, training: bool) -> None:
        """Take this batch's micro-batches where they are needed, and agree that every rank has them.

        Before anything is sent: a stage that runs out of data alone would leave the others waiting.
        """
        error: Exception | None = None
        self.stage.loaded.clear()
        with self.trace.span("LoadData"):
            try:
                if self.stage.failure is not None:
                    raise RuntimeError(
                        f"an earlier batch failed midway ({self.stage.failure}) and messages of it may still "
                        f"be under way; make a new engine, e.g. from the last checkpoint (§9.10)"
                    )
                if self.is_first_stage() or self.is_last_stage():
                    where = f"stage {self.stage_id} (global_rank {self.global_rank})"
                    batches = take_micro_batches(iterator, count, where=where, batch_fn=self.batch_fn)
                    self.stage.loaded.extend(batches)
            except Exception as failure:  # from the user's loader: anything; raised again on every rank
                error = failure
            raise_together(error, micro_batches=count, training=int(training))
            if not self._has_compared_data:
                self._has_compared_data = True
                data = list(self.stage.loaded)
                for axis, words in (("seq", "sequence"), ("model", "tensor")):
                    ranks, group = self.grid.ranks(axis), self.grid.group(axis)
                    raise_together(different_data(data, group, ranks, axis=words) if len(ranks) > 1 else None)

    # ------------------------------------------------------------------------------------ the dispatch

    def _train_schedule(self) -> PipeSchedule:
        """The schedule of `train_batch`; a subclass may return another."""
        return TrainSchedule(self.micro_batches, self.num_stages, self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> PipeSchedule:
        """The schedule of `eval_batch`; a subclass may return another."""
        return InferenceSchedule(micro_batches, self.num_stages, self.stage_id)

    def _exec_schedule(
        self, pipe_schedule: PipeSchedule, without: tuple[type[PipeInstruction], ...] = ()
    ) -> None:
        """Run a schedule: for each step, for each instruction in it, call the method of its class."""
        for step_commands in pipe_schedule:
            for command in step_commands:
                if type(command) not in without:
                    self._exec_instruction(command)

    def _exec_instruction(self, command: PipeInstruction) -> None:
        kind = type(command)
        if kind not in self._INSTRUCTION_MAP:
            raise RuntimeError(f"{type(self).__name__} has no method for the instruction {command!r} (§9.10)")
        micro_batch_id = getattr(command, "micro_batch_id", None)
        if micro_batch_id is not None:
            self._tell_time(micro_batch_id)
        self.trace.begin(command.name, -1 if micro_batch_id is None else micro_batch_id, self._peer_of(kind))
        try:
            MethodType(self._INSTRUCTION_MAP[kind], self)(**command.kwargs)
        except BaseException:
            self.trace.abandon()  # the row keeps the instruction; a caller may catch this and go on
            raise
        self.trace.end()

    def _peer_of(self, kind: type[PipeInstruction]) -> int:
        """The global rank that an instruction talks to, for the hang table; -1 if none."""
        links: dict[type[PipeInstruction], StageLink | None] = {
            RecvActivation: self.stage.previous,
            SendGrad: self.stage.previous,
            SendActivation: self.stage.next,
            RecvGrad: self.stage.next,
        }
        link = links.get(kind)
        return -1 if link is None else link.peer

    def _exec_backward_pass(self, buffer_id: int, micro_batch_id: int | None = None) -> None:
        buffer = self.stage.buffers[buffer_id]
        if buffer.loss is not None:
            self._check_graph(buffer.loss)
        self.stage.backward(buffer)
        self.gradients.collect()

    def _exec_reduce_tied_grads(self) -> None:
        self._fate.agree()
        self.gradients.sum_tied()

    def _exec_reduce_grads(self) -> None:
        self._fate.agree()
        self.gradients.reduce()

    def _exec_optimizer_step(self) -> None:
        self._take_optimizer_step()

    _INSTRUCTION_MAP: ClassVar[dict[type[PipeInstruction], Callable[..., None]]] = {
        OptimizerStep: _exec_optimizer_step,
        ReduceGrads: _exec_reduce_grads,
        ReduceTiedGrads: _exec_reduce_tied_grads,
        LoadMicroBatch: _on_buffer(Stage.load),
        ForwardPass: _on_buffer(Stage.forward),
        BackwardPass: _exec_backward_pass,
        SendActivation: _on_buffer(Stage.send_activation),
        RecvActivation: _on_buffer(Stage.recv_activation),
        SendGrad: _on_buffer(Stage.send_gradient),
        RecvGrad: _on_buffer(Stage.recv_gradient),
    }

    # ------------------------------------------------------------------------------- data and answers

    def set_dataloader(self, loader: Any) -> None:
        """Take micro-batches from this loader, over and over, whenever `train_batch` gets no iterator."""
        self.training_dataloader = loader if isinstance(loader, RepeatingLoader) else RepeatingLoader(loader)
        self.data_iterator = iter(self.training_dataloader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from this iterator whenever `train_batch` gets none."""
        self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Turn each item of the iterator into (inputs, labels) with `fn`."""
        self.batch_fn = fn

    @property
    def micro_batches(self) -> int:
        """m, the micro-batches of one `train_batch`."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        return self.module.get_additional_losses()

    def reset_activation_shape(self) -> None:
        """Nothing to reset: each message describes itself. Kept for scripts that call it."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing to set: masks travel like any tensor. Kept for scripts that call it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError("a pipeline engine has no forward(); call train_batch() or eval_batch() (§9.2)")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError("a pipeline engine has no backward(); train_batch() does the whole step (§9.2)")

    def no_sync(self) -> Any:
        raise PipelineError("a pipeline engine has no no_sync(); train_batch() reduces once a batch (§9.2)")

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise PipelineError("a pipeline engine has no step(); train_batch() does the whole step (§9.2)")
