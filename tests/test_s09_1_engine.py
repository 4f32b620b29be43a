"""§9.1 The plain engine against one process. Guards against: an average over the wrong number of
micro-batches, a gradient that only some replicas have, accumulation that averages too early."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from oracles import one_process, split_micro_batches
from small_models import HIDDEN, INPUTS, OUTPUTS, linear, make_batch, mean_squared
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn


def layers() -> list[Any]:
    return [linear(INPUTS, HIDDEN, 1), nn.Tanh(), linear(HIDDEN, OUTPUTS, 2)]


def make_engine(m: int, *, zero: int = 0, optimizer: str = "SGD", lr: float = 0.1, **config: Any) -> Any:
    import ds_lite

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": m,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": optimizer, "params": {"lr": lr}},
        **config,
    }
    return ds_lite.initialize(model=nn.Sequential(*copy.deepcopy(layers())), config=settings)[0]


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in engine.module.named_parameters()}


def accumulated(rank: int, replicas: int) -> None:
    for m in (1, 2, 3):
        for zero, optimizer, lr in itertools.product((0, 1, 2), ("SGD", "AdamW"), (1e-3,)):
            batch = make_batch(2 * m * replicas)
            truth = one_process(layers(), mean_squared, batch, lr=lr, optimizer=optimizer, clip=0.3, steps=2)
            engine = make_engine(m, zero=zero, optimizer=optimizer, lr=lr, gradient_clipping=0.3)
            mine = split_micro_batches(batch, replica=rank, num_replicas=replicas, steps=2)
            for index, (x, y) in enumerate(mine):
                assert engine.is_gradient_accumulation_boundary() == ((index + 1) % m == 0)
                loss = mean_squared(engine(x), y)
                assert engine.backward(loss) is loss
                engine.step()
                assert engine.global_steps == (index + 1) // m
                if (index + 1) % m == 0:
                    norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
                    assert_close(norm, truth.norms[index // m], LAW, f"m={m} zero={zero} {optimizer}")
            for name, weight in weights_of(engine).items():
                assert differs(weight, truth.before[name])
                assert_close(weight, truth.weights[name], LAW, f"m={m} zero={zero} {optimizer}: {name}")


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_data_parallel_accumulation_equals_one_process(world: Any, nprocs: int) -> None:
    world(accumulated, nprocs, nprocs)


def without_averaging(rank: int, replicas: int) -> None:
    """Three backwards, two of them inside no_sync: their gradients add up and are averaged once."""
    batch = make_batch(3 * replicas)
    truth = one_process(layers(), mean_squared, batch, lr=0.3)  # three losses summed: three times the rate
    mine = split_micro_batches(batch, replica=rank, num_replicas=replicas)
    for zero in (0, 1):
        engine = make_engine(1, zero=zero)
        with engine.no_sync():
            for x, y in mine[:2]:
                engine.backward(mean_squared(engine(x), y))
            local = engine.module[0].weight.grad.clone()
            with pytest.raises(RuntimeError, match="inside no_sync"):
                engine.step()
        assert differs(local, truth.grads["0.weight"]), "control: averaged inside no_sync"
        engine.backward(mean_squared(engine(mine[2][0]), mine[2][1]))
        engine.step()
        for name, weight in weights_of(engine).items():
            assert_close(weight, truth.weights[name], LAW, f"zero={zero}: {name}")


@pytest.mark.parametrize("nprocs", [2, 3])
def test_no_sync_averages_once(world: Any, nprocs: int) -> None:
    world(without_averaging, nprocs, nprocs)


class Branch(nn.Module):
    """`left` or `right` by the sign of the first input; `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (linear(INPUTS, OUTPUTS, seed) for seed in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x[0, 0] < 0 else self.right(x)


def branches(rank: int) -> None:
    """Each branch gets a gradient on one replica only, `never` on none; weight decay would show."""
    import ds_lite

    signs = ((-1.0, 1.0), (-1.0, -1.0))
    batches = [
        [(torch.cat([torch.full((2, 1), sign).double(), x[:, 1:]], 1), y) for sign, (x, y) in zip(pair, rows)]
        for pair, rows in zip(signs, (make_batch(2, seed=1), make_batch(2, seed=2)))
    ]
    flat = [item for batch in batches for item in batch]
    truth = one_process([Branch()], mean_squared, flat, lr=1e-3, optimizer="AdamW", steps=2)
    assert not differs(truth.weights["0.never.weight"], truth.before["0.never.weight"])
    for zero in (0, 1, 2):
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": zero},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        engine = ds_lite.initialize(model=Branch(), config=settings)[0]
        for batch in batches:
            x, y = batch[rank]
            engine.backward(mean_squared(engine(x), y))
            engine.step()
        for name, weight in weights_of(engine).items():
            assert_close(weight, truth.weights[f"0.{name}"], LAW, f"zero={zero}: {name}")


def test_a_gradient_that_one_replica_lacks_counts_as_zero(world: Any) -> None:
    world(branches, 2)
