"""What the tests of checkpoints share: a folder, a plain model that hides nothing, an engine for it."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from small_models import HIDDEN, INPUTS, OUTPUTS, linear, make_batch, mean_squared
from tolerance import EXACT, assert_close
from torch import Tensor, nn


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where the system has such a folder: fsync of a thousand small files takes long on a disk."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


class Net(nn.Module):
    """Blocks with numbers, a head, a frozen scale and a normalisation whose buffers depend on the data."""

    def __init__(self, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear(INPUTS, INPUTS, 1), linear(INPUTS, HIDDEN, 2)])
        self.norm = nn.BatchNorm1d(HIDDEN, dtype=torch.float64)
        self.head = linear(HIDDEN, outputs, 3)
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x) * self.scale)


def make_engine(model: nn.Module | None = None, *, zero: int = 0, m: int = 1, **options: Any) -> Any:
    import ds_lite

    arguments = {
        name: options.pop(name) for name in ("optimizer", "lr_scheduler") if callable(options.get(name))
    }
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": m,
        "zero_optimization": {"stage": zero},
        **({} if "optimizer" in arguments else {"optimizer": ADAMW}),
        **options,
    }
    return ds_lite.initialize(model=Net() if model is None else model, config=settings, **arguments)[0]


def train(engine: Any, steps: int = 1, seed: int = 1) -> list[float]:
    """Other data on every replica."""
    losses = []
    replica = engine.grid.get_data_parallel_rank()
    for x, y in make_batch(steps * engine.gradient_accumulation_steps(), samples=4, seed=10 * seed + replica):
        loss = mean_squared(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def copied(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def assert_same(engine: Any, expected: dict[str, Tensor], msg: str = "") -> None:
    for name, value in engine.module.state_dict().items():
        assert_close(value, expected[name], EXACT, f"{msg}: {name}")


def is_same(engine: Any, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in engine.module.state_dict().items())
