"""What the tests of checkpoints between layouts share: the layouts, a model with everything, its truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from oracles import MicroBatch, Tied, Truth, one_process, split_micro_batches
from small_models import linear
from tolerance import LAW, assert_close
from torch import Tensor, nn

from ds_lite.tags import whole
from ds_lite.tensor_parallel import LinearAllreduce, LinearLayer

WIDTH, HIDDEN, INSIDE, SAMPLES, MICRO_BATCHES = 5, 4, 6, 2, 4
BEFORE, AFTER = 2, 3  # steps


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"pp{self.pp}-dp{self.dp}-tp{self.tp}-zero{self.zero}"


LAYOUTS = [
    Layout(),
    Layout(pp=2, dp=2, zero=1),
    Layout(dp=2, zero=2),
    Layout(pp=2),
    Layout(pp=4),
    Layout(dp=4, zero=1),
    Layout(tp=2, zero=2),
    Layout(dp=2, tp=2, zero=1),
    Layout(pp=2, tp=2),
]


# ---------------------------------------------------------------------------------------------- the model


class Word(nn.Module):
    """Shared by the first and the last layer, like an embedding and its output head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear(WIDTH, HIDDEN, 1).weight.detach() * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def back(word: nn.Module, x: Tensor) -> Tensor:
    return x @ word.weight


class Block(nn.Module):
    """Cut over the model axis where there is one, whole elsewhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = LinearLayer(linear(HIDDEN, INSIDE, seed))
        self.down = LinearAllreduce(linear(INSIDE, HIDDEN, seed + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Odd(nn.Module):
    """What is easily forgotten: one number, no element, no gradient so far or ever, frozen, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.late = nn.Parameter(torch.full((3,), 0.7, dtype=torch.float64))
        self.idle = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((2,), 1.1, dtype=torch.float64), requires_grad=False)
        self.register_buffer("offset", torch.tensor([0.25], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain + self.offset * self.frozen.sum() + self.none.sum()
        # The first sample that begins with a large number comes after the checkpoint.
        return y + self.late.sum() if bool((x[:, 0].abs() > 2.1).any()) else y


def stretch(x: Tensor) -> Tensor:
    return x * 1.5


def oracle_layers() -> list[Any]:
    word = Word()
    inner = [nn.Tanh(), Block(3), stretch, Odd(), Block(5), nn.Tanh()]
    return [Tied("word", word), *inner, Tied("word", word, back)]


def pipeline_layers() -> list[Any]:
    from ds_lite.pipe import TiedLayerSpec

    inner = [nn.Tanh(), Block(3), stretch, Odd(), Block(5), nn.Tanh()]
    return [TiedLayerSpec("word", Word), *inner, TiedLayerSpec("word", Word, forward_fn=back)]


def mean_squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.to(labels.dtype) - labels).square().mean()


def batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(33)
    count = MICRO_BATCHES * (BEFORE + AFTER)
    values = torch.randn(count, 2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, y) for x, y in values]


def grouped(kind: str) -> Any:
    """An optimizer with two groups, whose rates fall from step to step."""

    def make(parameters: Any, lr: float = 0.0) -> torch.optim.Optimizer:
        parameters = (
            [p for group in parameters for p in group["params"]] if _is_groups(parameters) else parameters
        )
        small = [p for p in parameters if p.dim() < 2]
        large = [p for p in parameters if p.dim() >= 2]
        groups = [{"params": small, "weight_decay": 0.0, "lr": 2e-3}, {"params": large}]
        if kind == "AdamW":
            return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)

    return make


def _is_groups(parameters: Any) -> bool:
    return bool(parameters) and isinstance(parameters[0], dict)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


def truth(kind: str, steps: int = BEFORE + AFTER) -> Truth:
    """The uninterrupted run in one process."""

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = grouped(kind)(parameters)
        schedule = falling(optimizer)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    batch = batches()[: steps * MICRO_BATCHES]
    return one_process(oracle_layers(), mean_squared, batch, lr=0.0, optimizer=make, clip=0.5, steps=steps)


def make_engine(layout: Layout, kind: str, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    import ds_lite
    from ds_lite.pipe import PipelineModule

    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES // layout.dp,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": layout.zero},
        "tensor_parallel": {"tp_size": layout.tp},
        **config,
    }
    cut = {"num_stages": layout.pp, "partition_method": "uniform"}
    model = PipelineModule(pipeline_layers(), loss_fn=mean_squared, **cut).to(dtype)
    options = {"optimizer": grouped(kind), "lr_scheduler": falling}
    return ds_lite.initialize(model=model, config=settings, **options)[0]


def data_of(engine: Any, start: int, steps: int) -> Iterator[MicroBatch]:
    """This replica's micro-batches of the steps from `start` on."""
    batch = batches()[start * MICRO_BATCHES : (start + steps) * MICRO_BATCHES]
    replica, replicas = engine.grid.get_data_parallel_id(), engine.grid.get_data_parallel_world_size()
    return iter(split_micro_batches(batch, replica=replica, num_replicas=replicas, steps=steps))


def continue_and_compare(engine: Any, expected: Truth, msg: str) -> None:
    data = data_of(engine, BEFORE, AFTER)
    for step in range(BEFORE, BEFORE + AFTER):
        assert_close(engine.train_batch(data), expected.losses[step], LAW, f"{msg}: loss of step {step}")
        norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
        assert_close(norm, expected.norms[step], LAW, f"{msg}: norm of step {step}")
    for name, parameter in engine.module.named_parameters():
        assert_close(whole(parameter), expected.weights[name], LAW, f"{msg}: {name}")
