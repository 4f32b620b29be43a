"""The engine of plain data parallelism: forward, backward, step (§9.1).

Each replica runs its own micro-batches; `backward` divides by the number of accumulation steps, and at the
last of them the gradients are averaged over the data axis by the rules of `gradients.py`.
`step` clips by one norm over all ranks, steps the optimizer and the schedule, and clears the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm, trace
from ds_lite.agreement import raise_together
from ds_lite.config import Batch, resolve_batch
from ds_lite.config_keys import DSConfig
from ds_lite.data import make_loader
from ds_lite.gradients import Bucket, Gradients, Tie, group_by_kind
from ds_lite.grid import PipelineParallelGrid
from ds_lite.zero import ShardedBucket, shard_optimizer


class Engine:
    """A module, its optimizer and its place in the grid; `initialize` makes it.

    Raises: ValueError for batch numbers that do not fit the data axis, and for an optimizer that ZeRO cannot
    shard.

    Source: §9.1; DeepSpeed `runtime/engine.py::DeepSpeedEngine` @ 0.19.8.
    Differs: gradients are never clipped unless the config says so; the reported norm is the one before.
    """

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
        self._make_replicas_equal()
        self._sharded: list[ShardedBucket] = []
        self.gradients = Gradients(module.named_parameters(), self._make_buckets_together(), ties)
        self.trace = trace.current()
        self.trace.place(grid.get_stage_id(), grid.place)

    def _make_replicas_equal(self) -> None:
        """The data axis starts from the weights and buffers of its first rank."""
        source, group = self.grid.ranks("data", "seq")[0], self.grid.group("data", "seq")
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            comm.broadcast(tensor.detach(), src=source, group=group)

    def _make_buckets_together(self) -> list[Bucket]:
        """An optimizer that cannot be sharded on one rank, where it has state already, is refused on all."""
        buckets: list[Bucket] = []
        error: ValueError | None = None
        try:
            buckets = self._make_buckets()
        except ValueError as refusal:
            error = refusal
        raise_together(error)
        return buckets

    def _make_buckets(self) -> list[Bucket]:
        """Sharded buckets for what the optimizer holds under ZeRO, replicated ones for the rest."""
        group, divisor = self.grid.group("data", "seq"), self.grid.size("data", "seq")
        if self.zero_optimization_stage() >= 1 and self.optimizer is not None:
            self._sharded = shard_optimizer(self.optimizer, group, divisor)
        taken = {id(parameter) for bucket in self._sharded for parameter in bucket.parameters}
        rest = [p for p in self.module.parameters() if p.requires_grad and id(p) not in taken]
        return [*self._sharded, *(Bucket(run, group, divisor) for run in group_by_kind(rest))]

    # ------------------------------------------------------------------------------- the three calls

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this replica's micro-batch."""
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add this micro-batch's part to the gradients; at the last one, average over the data axis.

        Communication: at the accumulation boundary one all-reduce (ZeRO-1: reduce-scatter) per bucket.
        """
        # m mean losses add up to m times the gradient of the whole batch's mean.
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        torch.autograd.backward(scaled, retain_graph=retain_graph)
        if self._syncs and self.is_gradient_accumulation_boundary():
            self.gradients.reduce()
        self._last_loss = loss.detach()
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the accumulation boundary update the weights."""
        if not self._syncs:
            raise RuntimeError(
                "step() inside no_sync(): the gradients are not averaged there; leave it first (§9.1)"
            )
        if self.is_gradient_accumulation_boundary():
            self._take_optimizer_step(lr_kwargs)
            self._report(self._last_loss)
            self._accumulated = 0
        else:
            self._accumulated += 1
        self.micro_steps += 1

    def _take_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Norm, clip, optimizer, gather, schedule, clear: the end of the order in DESIGN section 5."""
        if self.optimizer is None:
            raise ValueError(
                "training needs an optimizer; name one in the config or pass it to initialize (§9.1)"
            )
        norm = self.gradients.norm()
        self._norm = float(norm)
        if self.config.gradient_clipping > 0:
            self.gradients.clip(self.config.gradient_clipping, norm)
        self.optimizer.step()
        for bucket in self._sharded:
            bucket.gather()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.gradients.clear()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.trace.step = self.global_steps

    def _report(self, loss: Any) -> None:
        """Every `steps_per_print` steps a line on rank 0; with `wall_clock_breakdown` the times beside it."""
        every = self.config.steps_per_print
        if not every or self.global_steps % every or self.global_rank != 0:
            return
        first = loss[0] if isinstance(loss, tuple) else loss
        rates = ", ".join(f"{rate:.3g}" for rate in self.get_lr())
        words = [
            f"step {self.global_steps}",
            f"loss {float(first):.4f}",
            f"lr {rates}",
            f"norm {self._norm:.3g}",
        ]
        if self.config.wall_clock_breakdown:
            times: dict[str, float] = {}
            for event in self.trace.events():
                times[event.instruction] = times.get(event.instruction, 0.0) + event.end - event.start
            self.trace.forget_events()
            words += [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items()]
        print("ds_lite: " + "  ".join(words), flush=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not average over the data axis, even at the accumulation boundary."""
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

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.train(False)

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
        if self._accumulated:
            raise ValueError(
                f"set_train_batch_size() after {self._accumulated} of {self.gradient_accumulation_steps()} "
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
