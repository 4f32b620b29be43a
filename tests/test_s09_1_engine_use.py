"""§9.1 Engines as scripts use them, at every ZeRO stage. Guards against: gradients of one engine that another
loses, a failed backward that spoils the next step, a step on gradients that were not averaged, a parameter
that never trains and nobody says so, masters that bring old weights back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import INPUTS, OUTPUTS, linear, make_batch, mean_squared
from test_s09_1_zero import make_engine
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_lite

STAGES = (0, 1, 2)


def trained(zero: int, wrong: Any = None) -> list[Tensor]:
    """Three steps of one small model; `wrong(engine, x, y)` happens before each of them."""
    torch.manual_seed(3)
    model = nn.Sequential(linear(INPUTS, 4, 1), nn.Tanh(), linear(4, OUTPUTS, 2))
    engine = make_engine(model, zero, zero_optimization={"reduce_bucket_size": 20})
    rank = engine.grid.get_data_parallel_rank()
    for step in range(3):
        x, y = make_batch(6)[2 * step + rank]
        if wrong is not None:
            wrong(engine, x, y)
        engine.backward(mean_squared(engine(x), y))
        engine.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def fails_and_goes_on(engine: Any, x: Tensor, y: Tensor) -> None:
    """A backward that breaks off in the middle, on every rank, and is given up."""
    first = next(iter(engine.module.parameters()))
    handle = first.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(mean_squared(engine(x), y))
    handle.remove()
    engine.zero_grad()


def after_a_failure(rank: int) -> None:
    for zero in STAGES:
        for ours, expected in zip(trained(zero, fails_and_goes_on), trained(0), strict=True):
            assert_close(ours, expected, LAW, f"zero={zero}")


def test_a_backward_that_failed_leaves_no_trace(world: Any) -> None:
    world(after_a_failure, 2)


def two_engines(rank: int) -> None:
    """A generator trained through a critic: the second engine's hooks hear the first one's backward."""
    results = []
    for zero in STAGES:
        generator, critic = linear(INPUTS, OUTPUTS, 1), linear(OUTPUTS, 1, 2)
        engines = [make_engine(model, zero) for model in (generator, critic)]
        for step in range(3):
            x, y = make_batch(6)[2 * step + rank]
            engines[0].backward(engines[1](engines[0](x)).mean())
            engines[0].step()
            engines[1].zero_grad()
            engines[1].backward(engines[1](y).mean() - engines[1](engines[0](x).detach()).square().mean())
            engines[1].step()
        results.append([p.detach().clone() for model in (generator, critic) for p in model.parameters()])
        moved = [differs(p, q) for p, q in zip(critic.parameters(), linear(OUTPUTS, 1, 2).parameters())]
        assert all(moved), f"zero={zero}"
    for other in results[1:]:
        for ours, expected in zip(other, results[0], strict=True):
            assert_close(ours, expected, LAW)


def test_two_engines_do_not_disturb_each_other(world: Any) -> None:
    world(two_engines, 2)


def reduced_late(rank: int) -> None:
    """backward() inside no_sync, or the loss's own backward: step() averages what nobody averaged yet."""
    for zero in STAGES:
        for how in ("no_sync", "own") if zero < 2 else ("own",):
            torch.manual_seed(1)
            model = linear(INPUTS, OUTPUTS, 1)
            engine = make_engine(model, zero)
            x, y = make_batch(2)[rank]
            if how == "own":
                mean_squared(engine(x), y).backward()
            else:
                with engine.no_sync():
                    engine.backward(mean_squared(engine(x), y))
            engine.step()
            plain = linear(INPUTS, OUTPUTS, 1)
            torch.stack([mean_squared(plain(x), y) for x, y in make_batch(2)]).mean().backward()
            for ours, p in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(ours.detach(), (p - 1e-3 * p.grad).detach(), LAW, f"zero={zero} {how}")


def test_a_step_reduces_what_was_not_reduced(world: Any) -> None:
    world(reduced_late, 2)


def late_parameter(rank: int, zero: int) -> None:
    model = nn.Sequential(linear(INPUTS, 4, 1), linear(4, OUTPUTS, 2))
    model[0].requires_grad_(False)
    engine = make_engine(model, zero)
    model[0].requires_grad_(True)
    engine.backward(engine(make_batch(1)[0][0]).sum())


@pytest.mark.parametrize("zero", STAGES)
def test_a_parameter_that_becomes_trainable_later_is_refused(world: Any, zero: int) -> None:
    match = r"0.weight, 0.bias became trainable after initialize; set requires_grad before it"
    world.raises(ValueError, match, late_parameter, 2, zero)


def learnable_temperature(rank: int) -> None:
    """A tensor that only the optimizer knows is averaged, stepped and cleared like the others."""
    for zero in STAGES:
        model = linear(INPUTS, OUTPUTS, 1)
        scale = nn.Parameter(
            torch.tensor([1.0 + rank], dtype=torch.float64)
        )  # replicas start equal all the same
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": zero}}
        engine = ds_lite.initialize(model=model, optimizer=optimizer, config=config)[0]
        values = []
        for _ in range(3):
            engine.backward((engine(make_batch(1)[0][0]).detach().sum() * 0 + (rank + 1)) * scale.sum())
            engine.step()
            values.append(float(scale))
        assert values == pytest.approx([0.85, 0.7, 0.55]), f"zero={zero}"


def test_a_tensor_that_only_the_optimizer_holds_is_trained(world: Any) -> None:
    world(learnable_temperature, 2)


def swapped_storage(engine: Any, x: Tensor, y: Tensor) -> None:
    """What a round trip over another device or `vector_to_parameters` does."""
    parameters = list(engine.module.parameters())
    vector = nn.utils.parameters_to_vector(parameters).clone()
    nn.utils.vector_to_parameters(vector, parameters)


def after_a_swap(rank: int) -> None:
    for zero in STAGES:
        for ours, expected in zip(trained(zero, swapped_storage), trained(0), strict=True):
            assert_close(ours, expected, LAW, f"zero={zero}")


def test_parameters_may_be_given_another_storage(world: Any) -> None:
    world(after_a_swap, 2)


def loaded_by_hand(rank: int, kind: str) -> None:
    for zero in STAGES:
        model = nn.Linear(3, 2)
        engine = make_engine(model, zero, **{kind: {"enabled": True}})
        engine.optimizer.param_groups[0]["lr"] = 0.0
        wanted = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
        model.load_state_dict(wanted)
        x = torch.ones(2, 3, dtype=next(model.parameters()).dtype)
        for _ in range(2):
            engine.backward(engine(x).sum())
            engine.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]), f"zero={zero}: {name} was brought back"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_masters_follow_weights_that_were_loaded_by_hand(world: Any, kind: str) -> None:
    world(loaded_by_hand, 2, kind)


def twice_in_one_backward(rank: int) -> None:
    """Reentrant checkpointing runs a backward inside a backward: the second gradient comes too late."""
    model = linear(INPUTS, INPUTS, 1)
    engine = make_engine(model, 2)
    x = make_batch(1)[0][0].requires_grad_()
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    engine.backward(y.sum())


def test_a_gradient_that_comes_twice_is_refused_with_zero_2(world: Any) -> None:
    world.raises(RuntimeError, "got a gradient twice in one backward", twice_in_one_backward, 2)


def constant_on_one_replica(rank: int) -> None:
    """A replica whose loss has no graph counts as zero; if all are like that, nothing would be trained."""
    for zero in STAGES:
        model = linear(INPUTS, OUTPUTS, 1)
        engine = make_engine(model, zero)
        before = copy.deepcopy(model)
        x, y = make_batch(1)[0]
        loss = mean_squared(engine(x), y) if rank == 0 else torch.zeros((), dtype=torch.float64)
        engine.backward(loss)
        engine.step()
        mean_squared(before(x), y).backward()
        for ours, p in zip(model.parameters(), before.parameters(), strict=True):
            assert_close(ours.detach(), (p - 1e-3 * p.grad / 2).detach(), LAW, f"zero={zero}")
        with pytest.raises(ValueError, match="no parameter has a gradient on any replica"):
            engine.backward(torch.zeros((), dtype=torch.float64))


def test_a_replica_without_a_loss_counts_as_zero(world: Any) -> None:
    world(constant_on_one_replica, 2)


def batch_size_in_between(rank: int) -> None:
    engine = make_engine(linear(INPUTS, OUTPUTS, 1), 0)
    engine.backward(engine(make_batch(1)[0][0]).sum())
    with pytest.raises(ValueError, match="after 1 of 1 micro-batches, whose losses are divided already"):
        engine.set_train_batch_size(8)
    engine.step()
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 2


def test_the_batch_size_changes_only_between_steps(world: Any) -> None:
    world(batch_size_in_between, 2)


def assigned_gradient(rank: int) -> None:
    """`p.grad = ...` between backward and step: norm and clipping see what the optimizer sees."""
    model = linear(INPUTS, OUTPUTS, 1)
    engine = make_engine(model, 0, gradient_clipping=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    engine.backward(engine(make_batch(1)[0][0]).sum() * 100)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 1.0
    engine.step()
    moved = torch.cat(
        [(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)]
    )
    assert float(moved.norm()) == pytest.approx(0.1 * 1e-3, rel=1e-6)


def test_an_assigned_gradient_is_clipped(world: Any) -> None:
    world(assigned_gradient, 2)


def plateau(rank: int, pipeline: bool) -> None:
    model: nn.Module = linear(INPUTS, OUTPUTS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = {"train_micro_batch_size_per_gpu": 2}
    if pipeline:
        model = ds_lite.PipelineModule([model], num_stages=1, loss_fn=mean_squared)
    engine = ds_lite.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    engine.backward(engine(make_batch(1)[0][0]).sum())
    engine.step(lr_kwargs={"metrics": 1.0})
    engine.backward(engine(make_batch(1)[0][0]).sum())
    engine.step()


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_schedule_that_watches_a_number_needs_it(world: Any, pipeline: bool) -> None:
    match = "watches a number that train_batch" if pipeline else "needs the number it watches"
    world.raises(ValueError, match, plateau, 2, pipeline)


def not_elementwise(rank: int) -> None:
    from test_s09_3_field_reports import Cuttable

    model = Cuttable()
    optimizer = torch.optim.Adafactor(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"tp_size": 2}}
    ds_lite.initialize(model=model, optimizer=optimizer, config=config)


def test_an_optimizer_of_whole_matrices_is_refused_on_parts(world: Any) -> None:
    match = "Adafactor does not act on each element alone, so it cannot work on the parts of tensor-parallel"
    world.raises(ValueError, match, not_elementwise, 2)
