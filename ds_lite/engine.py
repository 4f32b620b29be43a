"""The engine of plain data parallelism: forward, backward, step (§9.1).

Each replica runs its own micro-batches; `backward` divides by the number of accumulation steps, and at the
last of them the gradients are averaged over the data axis by the rules of `gradients.py`.
`step` clips by one norm over all ranks, steps the optimizer and the schedule, and clears the gradients.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ds_lite import comm, trace
from ds_lite.agreement import raise_together
from ds_lite.bucketing import make_buckets
from ds_lite.config import Batch, resolve_batch
from ds_lite.config_keys import DSConfig
from ds_lite.data import cast_floats, different_data, make_loader
from ds_lite.gradients import Gradients, Routes, Tie
from ds_lite.grid import PipelineParallelGrid
from ds_lite.moe.clock import Clock
from ds_lite.moe.dispatch import check_graph
from ds_lite.moe.layer import give_clock
from ds_lite.precision import LossScaler, compute_dtype
from ds_lite.reporting import skip_line, step_line, times
from ds_lite.saving import LoadOptions, load_checkpoint, save_checkpoint, save_whole_model
from ds_lite.sequence.auto_sp import SequenceParallel
from ds_lite.sequence.models import Kind


class Engine:
    """A module, its optimizer and its place in the grid; `initialize` makes it.

    Raises: ValueError for batch numbers that do not fit the data axis, and for an optimizer that ZeRO cannot
    shard.

    Source: §9.1; DeepSpeed `runtime/engine.py::DeepSpeedEngine` @ 0.19.8.
    Differs: gradients are never clipped unless the config says so; the reported norm is the one before.
    """

    takes_metrics = True  # step(lr_kwargs={"metrics": ...}) reaches the schedule

    def __init__(
        self,
        module: nn.Module,
        grid: PipelineParallelGrid,
        config: DSConfig,
        optimizer: torch.optim.Optimizer | None,
        ties: Sequence[Tie] = (),
    ) -> None:
        self.module, self.grid, self.config, self.optimizer = module, grid, config, optimizer
        self.device = comm.device_of_this_rank()
        self.global_rank, self.world_size = grid.global_rank, grid.world_size
        self.local_rank = self.device.index or 0
        self.batch: Batch = resolve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            grid.get_data_parallel_world_size(),
        )
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._accumulated = 0  # micro-batches since the last optimizer step
        self._norm: float | None = None
        self._last_loss: Tensor | None = None
        self._syncs = True
        self._has_backward = self._has_reduced = False  # since the last step()
        self.scaler = LossScaler.from_config(config.fp16)
        self.dtype = compute_dtype(config)  # None: whatever the model has
        self._casts_inputs = config.fp16.enabled and config.fp16.auto_cast
        self._has_compared_data = grid.size("model") == 1
        buckets = make_buckets(module, optimizer, Routes(grid, ties), config)
        exchanges = grid.exchanges_tokens or grid.size("seq") > 1
        self.gradients = Gradients(module.named_parameters(), buckets, waits_in_backward=exchanges)
        self.gradients.loss_scale = self.scaler.scale
        self.sequence: SequenceParallel | None = None
        self.clock = Clock(config.seed)
        give_clock(module, self.clock)
        self.trace = trace.current()
        self.trace.place(grid.get_stage_id(), grid.place)

    # ------------------------------------------------------------------------------- the three calls

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this replica's micro-batch.

        Raises: ValueError on the first call if tensor-parallel ranks got different inputs.
        """
        if self._casts_inputs:
            inputs, kwargs = cast_floats((inputs, kwargs), self.dtype)
        if not self._has_compared_data:
            self._compare_data((inputs, kwargs))
        self._tell_time(self._accumulated)
        with self.trace.span_if_idle("ForwardPass", self._accumulated):
            if self.sequence is not None:
                return self.sequence(*inputs, **kwargs)
            return self.module(*inputs, **kwargs)

    def spread_sequences(self, kind: Kind) -> None:
        """From now on `forward` takes whole sequences and gives each rank of the seq axis its tokens."""
        self.sequence = SequenceParallel(self.module, self.grid.group("seq"), kind)
        if self.global_rank == 0:
            print(f"ds_lite: {self.sequence}", flush=True)

    def _tell_time(self, micro_batch: int) -> None:
        """Which micro-batch of this replica the layers work on next."""
        self.clock.step = self.global_steps
        first = self.grid.coordinate("data") * self.gradient_accumulation_steps()
        self.clock.micro_batch = first + micro_batch

    def _compare_data(self, data: Any) -> None:
        """Once: tensor-parallel ranks compute parts of one result, so their data must be the same."""
        self._has_compared_data = True
        raise_together(different_data(data, self.grid.group("model"), self.grid.ranks("model")))

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add this micro-batch's part to the gradients; at the last one, average over the data axis.

        Communication: at the accumulation boundary one all-reduce per bucket (ZeRO-1: a reduce-scatter and an
        all-reduce of one flag per parameter); with ZeRO-2 one reduce-scatter per bucket in every call.
        Raises: ValueError at the boundary if no parameter has a gradient on any replica; for a loss without
        graph beside experts on several ranks.
        """
        # m mean losses add up to m times the gradient of the whole batch's mean.
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        is_last = self._syncs and self.is_gradient_accumulation_boundary()
        with self.trace.span_if_idle("BackwardPass", self._accumulated):
            self._check_graph(scaled)
            if is_last:
                self.gradients.start_early()
            if scaled.requires_grad:  # a replica without valid labels may give a plain zero; it takes part
                with nullcontext() if self.sequence is None else self.sequence.backward():
                    torch.autograd.backward(self.scaler.scaled(scaled), retain_graph=retain_graph)
            self.gradients.collect()
        self._has_backward, self._has_reduced = True, False
        if is_last:
            self._reduce()
        self._last_loss = loss.detach()
        return loss

    def _check_graph(self, loss: Tensor) -> None:
        if self.grid.exchanges_tokens:
            check_graph(loss, self.grid.group("data", "seq"))

    def _reduce(self) -> None:
        with self.trace.span_if_idle("ReduceGrads"):
            self.gradients.reduce()
            self._has_reduced = True
            has_any = self.gradients.has_any()
            if self.grid.exchanges_tokens:  # data ranks hold different experts, of which some may be frozen
                has_any = raise_together(None, self.grid.group("data", "seq"), anyone=has_any)
        if not has_any:
            raise ValueError(
                "no parameter has a gradient on any replica, so nothing would be trained; do not detach the "
                "loss, and leave some parameter trainable (§9.1)"
            )

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the accumulation boundary update the weights."""
        if not self._syncs:
            raise RuntimeError(
                "step() inside no_sync(): the gradients are not averaged there; leave it first (§9.1)"
            )
        if self.is_gradient_accumulation_boundary():
            if not self._has_reduced:  # the last backward was inside no_sync(), or not this engine's
                self.gradients.collect()
                self._reduce()
            with self.trace.span_if_idle("OptimizerStep"):
                self._take_optimizer_step(lr_kwargs)
            self._report(self._last_loss)
            self._accumulated = 0
        else:
            self._accumulated += 1
        self._has_backward = self._has_reduced = False
        self.micro_steps += 1

    def _take_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Norm, overflow, clip, optimizer, gather, schedule, clear: the end of a batch, in this order."""
        if self.optimizer is None:
            raise ValueError(
                "training needs an optimizer; name one in the config or pass it to initialize (§9.1)"
            )
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and "metrics" not in (lr_kwargs or {}):
            raise ValueError(
                "ReduceLROnPlateau needs the number it watches; call step(lr_kwargs={'metrics': loss}), or "
                "choose a schedule over steps (§9.1)"
            )
        norm = self.gradients.norm()
        self._norm = float(norm)
        overflowed = not math.isfinite(self._norm)  # one number for all ranks, so one decision
        if overflowed:
            self.skipped_steps += 1
        else:
            self.gradients.unscale_and_clip(self.config.gradient_clipping, norm)
            self.optimizer.step()
            self.gradients.publish()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        self._rescale(overflowed)
        self.gradients.clear()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.trace.step = self.global_steps

    def _rescale(self, overflowed: bool) -> None:
        """Tell the loss scaler, and the reader if the step was skipped."""
        before = self.scaler.scale
        self.scaler.update(overflowed=overflowed)
        self.gradients.loss_scale = self.scaler.scale
        if overflowed and self.global_rank == 0:
            assert self._norm is not None
            scales = (before, self.scaler.scale) if self.fp16_enabled() else None
            print(skip_line(self.global_steps + 1, self._norm, self.skipped_steps, scales), flush=True)

    def _report(self, loss: Any) -> None:
        """Every `steps_per_print` steps a line on rank 0; with `wall_clock_breakdown` the times beside it."""
        every = self.config.steps_per_print
        if not every or self.global_steps % every or self.global_rank != 0 or loss is None:
            return
        first = loss[0] if isinstance(loss, tuple) else loss
        assert self._norm is not None
        line = step_line(self.global_steps, float(first), self.get_lr(), self._norm)
        print(line + (times(self.trace) if self.config.wall_clock_breakdown else ""), flush=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not average over the data axis, even at the accumulation boundary.

        Raises: ValueError with ZeRO-2, whose gradients exist nowhere but in the ranks' shards.
        """
        if self.zero_optimization_stage() >= 2:
            raise ValueError(
                "no_sync() with zero_optimization.stage=2: every backward is reduced into the shards; use "
                "stage 0 or 1, or leave no_sync out (§9.1)"
            )
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def set_dataloader(self, loader: Any) -> None:
        """The loader that a script finds as `engine.training_dataloader`."""
        self.training_dataloader = loader

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.gradients.clear()

    def micro_batches_begun(self) -> int:
        """Micro-batches since the last optimizer step, whose gradients no checkpoint holds."""
        return self._accumulated + self._has_backward

    def micro_steps_at_last_step(self) -> int:
        """`micro_steps` as it was after the last optimizer step."""
        return self.micro_steps - self._accumulated

    def forget_batch(self) -> None:
        """No gradient and no micro-batch since the last optimizer step is left."""
        self.gradients.clear()
        self._accumulated = 0
        self._has_backward = self._has_reduced = False

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.train(False)

    # ---------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir/tag` so that any layout can go on from it; see `saving.py`. Every rank calls it."""
        return save_checkpoint(
            self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from `load_dir/tag` (default: what `latest` names). Every rank calls it.

        Returns (path, client_state).
        """
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        return load_checkpoint(self, load_dir, tag, options)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """One file with the whole state dict, for `torch.load` in a plain program. Every rank calls it."""
        return save_whole_model(self, save_dir, save_filename, exclude_frozen_parameters)

    # --------------------------------------------------------------------------------------- answers

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all replicas."""
        return self.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one replica."""
        return self.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step on one replica."""
        return self.batch.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step, and nothing else."""
        if begun := self.micro_batches_begun():
            raise ValueError(
                f"set_train_batch_size() after {begun} of {self.gradient_accumulation_steps()} "
                f"micro-batches, whose losses are divided already; call it right after a step (§9.2)"
            )
        replicas = self.grid.get_data_parallel_world_size()
        self.batch = resolve_batch(train_batch_size, self.batch.micro_batch_size, None, replicas)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch now under way is the last one before an optimizer step."""
        return self._accumulated + 1 == self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients of the last step before clipping, the same on every rank."""
        return self._norm

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A DataLoader over this replica's part of `dataset`, in micro-batches."""
        return make_loader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            replicas=self.grid.get_data_parallel_world_size(),
            replica=self.grid.get_data_parallel_rank(),
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
        )
