"""§9.1 §9.2 §9.10 What went wrong when it was tried. Guards against: gradients and messages that outlive a
failure, a module untied without a word, a layer that reuses its memory, modes lost in evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from oracles import MicroBatch, Tied, one_process
from small_models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    linear,
    make_batch,
    make_pipeline,
    mean_squared,
    train_and_compare,
)
from tolerance import LAW, assert_close
from torch import Tensor, nn


class Fuse(nn.Module):
    """Passes x on; blows in the forward number `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.at = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("blown")
        return x * 1.0


def use_after_failure(rank: int, impl: Any, where: int, at: int) -> None:
    layers: list[Any] = []
    for index in range(4):
        layers += [linear(INPUTS, INPUTS, index), Fuse()]
    pipeline = make_pipeline(impl, layers, 4, 6)
    batch = [(x, x.flip(1)) for x, _ in make_batch(12)]
    (fuse,) = (layer for layer in pipeline.engine.module.modules() if isinstance(layer, Fuse))
    fuse.at = at if rank == where else 0
    with pytest.raises((KeyError, RuntimeError), match="blown"):
        pipeline.train_batch(iter(batch[:6]))
    pipeline.train_batch(iter(batch[6:]))


@pytest.mark.parametrize("where,at", [(0, 3), (1, 2), (2, 4), (3, 2)])
def test_an_engine_that_failed_midway_is_not_used_again(world: Any, impl: Any, where: int, at: int) -> None:
    world.raises(
        RuntimeError, "failed midway.*blown.*new engine", use_after_failure, 4, impl, where, at, deadline=30
    )


def gradients_twice(rank: int, impl: Any) -> None:
    shared = linear(HIDDEN, HIDDEN, 4)
    layers = [
        linear(INPUTS, HIDDEN, 1),
        Tied("k", shared),
        nn.Tanh(),
        Tied("k", shared),
        linear(HIDDEN, OUTPUTS, 2),
    ]
    batch = make_batch(2)
    truth = one_process(layers, mean_squared, batch, lr=0.1)
    for zero in impl.zero_stages:
        pipeline = make_pipeline(impl, layers, 2, 2, zero=zero)
        for _ in range(2):
            pipeline.compute_gradients(iter(batch))
            for name, gradient in pipeline.gradients().items():
                assert_close(gradient, truth.grads[name], LAW, f"zero={zero}: {name}")
        pipeline.train_batch(iter(batch))
        for name, weight in pipeline.weights().items():
            assert_close(weight, truth.weights[name], LAW, f"zero={zero}: {name}")


def test_gradients_are_those_of_the_last_batch(world: Any, impl: Any) -> None:
    world(gradients_twice, 2, impl)


def modes(rank: int, impl: Any) -> None:
    """A layer that the caller put into eval mode alone stays there, in evaluation and in training."""
    layers = [linear(INPUTS, HIDDEN, 1), nn.Dropout(0.5), linear(HIDDEN, OUTPUTS, 2), nn.Dropout(0.5)]
    pipeline = make_pipeline(impl, layers, 2, 2)
    module = pipeline.engine.module
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()
    for call in (pipeline.eval_batch, pipeline.train_batch):
        call(iter(make_batch(2)))
        assert [layer.training for layer in module.modules()] == [True, True, True, False]


def test_modes_of_single_layers_stay(world: Any, impl: Any) -> None:
    world(modes, 2, impl)


def several_losses(rank: int, impl: Any) -> None:
    layers = [linear(INPUTS, HIDDEN, 1), linear(HIDDEN, OUTPUTS, 2)]
    batch = make_batch(3)
    truth = one_process(layers, mean_squared, batch, lr=0.0)
    pipeline = make_pipeline(impl, layers, 2, 3, loss_fn=lambda o, y: (mean_squared(o, y), o.sum()))
    for bcast in (True, False):
        losses = pipeline.engine.eval_batch(iter(batch), reduce_output=None, bcast_loss=bcast)
        if not bcast and rank == 0:
            assert losses is None
            continue
        assert len(losses) == 3
        for (first, second), output, (_, y) in zip(losses, truth.outputs, batch, strict=True):
            assert_close(first, mean_squared(output, y), LAW)
            assert_close(second, output.sum(), LAW)


def test_eval_keeps_the_losses_of_a_micro_batch_together(world: Any, impl: Any) -> None:
    world(several_losses, 2, impl)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Add(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.left + pair.right


class Counting(nn.Module):
    """Hands out its own buffer, which the next forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1_000_000, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return x, self.count


def add_mean(x: tuple[Tensor, Tensor]) -> Tensor:
    return x[0] + x[1].mean()


def conjugate(x: Tensor) -> Tensor:
    return torch.complex(x, 2 * x).conj()


def both_parts(z: Tensor) -> Tensor:
    return z.real + 3 * z.imag


def no_label_is_zero(outputs: Tensor, labels: Any) -> Tensor:
    return outputs.new_zeros(()) if labels is None else mean_squared(outputs, labels)


def legal_but_odd(rank: int, impl: Any) -> None:
    a, c = linear(INPUTS, HIDDEN, 1), linear(HIDDEN, OUTPUTS, 2)
    named: list[MicroBatch] = [(Pair(x, 2 * x), y) for x, y in make_batch(8)]
    train_and_compare(impl, [Add(), a, nn.Tanh(), c], 2, 4, batch=named, msg="named tuple")
    train_and_compare(impl, [a, Counting(), add_mean, c], 2, 4, msg="a layer's own buffer")
    train_and_compare(impl, [a, conjugate, both_parts, c], 2, 4, msg="conjugate view")
    train_and_compare(impl, [a, lambda x: torch._neg_view(x * 1.0), nn.Tanh(), c], 2, 4, msg="negative view")
    missing: list[MicroBatch] = [
        (x, None if index % 3 == 1 else y) for index, (x, y) in enumerate(make_batch(8))
    ]
    train_and_compare(
        impl, [a, nn.Tanh(), c], 2, 4, batch=missing, loss_fn=no_label_is_zero, msg="constant loss"
    )


def test_legal_but_odd_models_equal_one_process(world: Any, impl: Any) -> None:
    world(legal_but_odd, 2, impl)


def untied(rank: int, impl: Any) -> None:
    layer = linear(INPUTS, INPUTS, 1)
    make_pipeline(impl, [layer, nn.Tanh(), layer], 2, 1)


def test_a_module_on_two_stages_needs_a_tie(world: Any, impl: Any) -> None:
    world.raises(ValueError, "layers 0 and 2 share a parameter.*TiedLayerSpec", untied, 2, impl)


def batches_in_a_list(rank: int, impl: Any) -> None:
    pipeline = make_pipeline(impl, [linear(INPUTS, HIDDEN, 1), linear(HIDDEN, OUTPUTS, 2)], 2, 2)
    pipeline.engine.set_batch_fn(lambda batch: batch)
    pipeline.train_batch(make_batch(2))


def test_a_batch_fn_does_not_hide_a_list(world: Any, impl: Any) -> None:
    world.raises(TypeError, "is a list, which starts anew", batches_in_a_list, 2, impl, deadline=20)


def plain_engine(m: int, zero: int) -> Any:
    import ds_lite

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": m,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return ds_lite.initialize(model=linear(INPUTS, OUTPUTS, 1), config=settings)[0]


def two_backwards(rank: int) -> None:
    """Two losses of one forward, each with its own backward."""
    batch = make_batch(2)
    truth = one_process(
        [linear(INPUTS, OUTPUTS, 1)], lambda o, y: mean_squared(o, y) + o.exp().sum(), batch, lr=0.1
    )
    for zero in (0, 1, 2):
        engine = plain_engine(1, zero)
        outputs = engine(batch[rank][0])
        engine.backward(mean_squared(outputs, batch[rank][1]), retain_graph=True)
        engine.backward(outputs.exp().sum())
        engine.step()
        assert_close(engine.module.weight.detach(), truth.weights["0.weight"], LAW, f"zero={zero}")


def test_two_backwards_before_a_step_add_up(world: Any) -> None:
    world(two_backwards, 2)


def other_batch_size(rank: int) -> None:
    engine, steps = plain_engine(2, 0), []
    for index, (x, y) in enumerate(make_batch(10)):
        if index == 2:
            engine.set_train_batch_size(6)
        if index == 3:
            with pytest.raises(ValueError, match="after 1 of 3 micro-batches"):
                engine.set_train_batch_size(4)
        engine.backward(mean_squared(engine(x), y))
        engine.step()
        steps.append(engine.global_steps)
    assert steps == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_new_batch_size_starts_a_new_accumulation(world: Any) -> None:
    world(other_batch_size, 2)


def adagrad_on_shards(rank: int, impl: Any) -> None:
    make_pipeline(impl, [linear(INPUTS, OUTPUTS, 1), nn.Tanh()], 2, 1, zero=1, optimizer="Adagrad")


def test_adagrad_is_refused_on_every_rank_also_without_parameters(world: Any, impl: Any) -> None:
    world.raises(
        ValueError, "Adagrad makes its state when it is built", adagrad_on_shards, 2, impl, deadline=20
    )


class OddOnOneReplica(nn.Module):
    """Returns what cannot travel, or raises, but on one replica only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if torch.distributed.get_rank() != 1:  # stage 0 of replica 1
            return x
        if self.kind == "output":
            return x, None
        x = x.clone()
        if x.requires_grad:
            x.register_hook(self._raise)
        return x

    def _raise(self, gradient: Tensor) -> None:
        raise KeyError("in the last backward of a stage")


def fail_on_one_replica(rank: int, impl: Any, kind: str) -> None:
    layers = [nn.Linear(3, 4).double(), OddOnOneReplica(kind), nn.Linear(4, 2).double(), nn.Identity()]
    pipeline = impl.make_pipeline(
        layers,
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        num_micro_batches=2,
        micro_batch_size=5,
        module={"partition_method": "uniform"},
    )
    batch = (torch.ones(5, 3, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64))
    pipeline.train_batch(iter([batch] * 2))


@pytest.mark.parametrize(
    "kind, error, words",
    [
        pytest.param("output", TypeError, "element 1 of the output of layer 1", id="output"),
        pytest.param("hook", (KeyError, RuntimeError), "last backward", id="hook"),
    ],
)
def test_a_failure_on_one_replica_is_raised_on_all_ranks(
    world: Any, impl: Any, kind: str, error: Any, words: str
) -> None:
    """Without the agreement before the first reduction the other replica waits for it until a time limit."""
    world.raises(error, words, fail_on_one_replica, 4, impl, kind, deadline=30)


def detached_loss(rank: int, impl: Any, valid_on: tuple[int, ...]) -> float:
    """The loss of a replica hangs on its graph only if the replica is among `valid_on`."""

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        loss = mean_squared(outputs, labels)
        return loss if torch.distributed.get_rank() % 2 in valid_on else loss.detach()

    pipeline = impl.make_pipeline(
        [linear(INPUTS, HIDDEN, 1), linear(HIDDEN, OUTPUTS, 2)],
        num_stages=2,
        loss_fn=loss_fn,
        num_micro_batches=2,
        micro_batch_size=len(make_batch(1)[0][0]),
    )
    pipeline.train_batch(iter(make_batch(2)))
    return float(pipeline.norm())


def test_a_loss_that_never_needs_a_gradient_is_refused_on_every_rank(world: Any, impl: Any) -> None:
    """One process raises there too; a single replica or micro-batch without valid labels is no fault."""
    world.raises(ValueError, "no micro-batch needs a gradient.*§9.2", detached_loss, 4, impl, ())
    norms = world(detached_loss, 4, impl, (1,))
    assert len(set(norms)) == 1 and norms[0] > 0
