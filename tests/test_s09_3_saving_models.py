"""§9.3 Checkpoints of uncommon pipelines. Guards against: stages whose groups, losses or axes differ, state
that hides outside parameters, a rank that holds the whole model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from meter import LiveStorages
from saving_models import ADAMW, copied, scratch_folder
from small_models import HIDDEN, INPUTS, OUTPUTS, linear, make_batch, mean_squared
from tolerance import EXACT, assert_close
from torch import Tensor, nn

from ds_lite.tags import tag
from ds_lite.tensor_parallel import LinearLayer
from ds_lite.topology import ProcessTopology


def make_engine(layers: list[Any], *, loss: Any = mean_squared, config: Any = None, **options: Any) -> Any:
    import ds_lite
    from ds_lite.pipe import PipelineModule

    functions = {name: options.pop(name) for name in ("optimizer", "lr_scheduler") if name in options}
    settings = {"train_micro_batch_size_per_gpu": 2, **(config or {})}
    if "optimizer" not in functions:
        settings["optimizer"] = ADAMW
    model = PipelineModule(layers, loss_fn=loss, partition_method="uniform", **options)
    return ds_lite.initialize(model=model, config=settings, **functions)[0]


def three(seed: int = 0) -> list[Any]:
    return [linear(INPUTS, HIDDEN, seed + 1), nn.Tanh(), linear(HIDDEN, OUTPUTS, seed + 2), nn.Identity()]


# -------------------------------------------------------------------------------- groups and schedules


def a_group_each(parameters: Any) -> torch.optim.Optimizer:
    """Every parameter has a group and a rate of its own: the stages have nothing in common."""
    rates = {(HIDDEN, INPUTS): 0.1, (HIDDEN,): 0.2, (OUTPUTS, HIDDEN): 0.3, (OUTPUTS,): 0.4}
    each = [parameter for group in parameters for parameter in group["params"]]
    return torch.optim.SGD([{"params": [p], "lr": rates[tuple(p.shape)]} for p in each], momentum=0.9)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def one_group(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def different_groups(rank: int, folder: str, stages: int) -> None:
    options = {"optimizer": a_group_each, "lr_scheduler": falling, "num_stages": stages}
    engine = make_engine(three(), **options)
    if stages == 2:
        engine.train_batch(iter(make_batch(1)))
        engine.save_checkpoint(folder, "two")
        other = make_engine(three(5), **options)
        other.load_checkpoint(folder, "two")
        assert other.get_lr() == engine.get_lr() == [[0.05, 0.1], [0.15, 0.2]][rank]
        assert other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
        return
    with pytest.raises(ValueError, match=r"a schedule of its own for each of 2 stages.*this run has 1"):
        engine.load_checkpoint(folder, "two")
    assert engine.get_lr() == [0.1, 0.2, 0.3, 0.4], "changed by a refused load"
    engine.load_checkpoint(folder, "two", load_lr_scheduler_states=False)
    assert engine.get_lr() == [0.05, 0.1, 0.15, 0.2]
    mixed = make_engine(three(), optimizer=one_group, num_stages=1)
    with pytest.raises(ValueError, match=r"group 0 holds 0.weight and 0.bias, which were saved in groups"):
        mixed.load_checkpoint(folder, "two")


def test_groups_and_schedules_that_differ_between_stages(world: Any) -> None:
    with scratch_folder() as folder:
        world(different_groups, 2, folder, 2)
        world(different_groups, 1, folder, 1)


# -------------------------------------------------------------------------------------- hidden places


class Loss(nn.Module):
    """A loss with a parameter and a buffer: every stage has a copy, the last one trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.seen += 1
        return mean_squared(outputs * self.heat, labels)


class Hidden(nn.Module):
    """Extra state, one parameter under two names, a buffer that is a view of something large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(HIDDEN, HIDDEN, 3), linear(HIDDEN, HIDDEN, 4)
        self.b.weight = self.a.weight
        self.register_buffer("corner", torch.arange(10_000.0)[:2])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(torch.tanh(self.a(x)))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def hidden_places(rank: int, folder: str, stages: int) -> list[float]:
    layers = [linear(INPUTS, HIDDEN, 1), Hidden(), linear(HIDDEN, OUTPUTS, 2), nn.Identity()]
    engine = make_engine(layers, loss=Loss(), num_stages=stages)
    if stages == 2:
        engine.train_batch(iter(make_batch(1)))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        assert engine.module.loss_fn.seen.item() == 1 and engine.module.loss_fn.heat.item() != 1
        assert layers[1].calls == 1 and layers[1].a.weight is layers[1].b.weight
    return [float(engine.train_batch(iter(make_batch(1, seed=4)))) for _ in range(2)]


def test_extra_state_shared_parameters_and_a_loss_with_parameters(world: Any) -> None:
    with scratch_folder() as folder:
        twice = world(hidden_places, 2, folder, 2)
        once = world(hidden_places, 1, folder, 1)
        assert once[0] == pytest.approx(twice[0], rel=1e-12)
        names = sorted(os.listdir(f"{folder}/global_step1"))
        assert "stage_00-model_states.pt" in names and "stage_01-model_states.pt" in names
        hidden = Path(folder, "global_step1", "layer_01-model_states.pt")
        assert hidden.stat().st_size < 8_000, "a view brought its whole storage"
        content = torch.load(hidden, weights_only=True)
        shared = [content[f"1.{name}.weight"].untyped_storage().data_ptr() for name in "ab"]
        assert content["1._extra_state"] == {"calls": 1} and shared[0] == shared[1]


def with_dropout(rank: int, folder: str) -> None:
    """Masks that are seeded by layer and forward count go on where they were."""
    layers = [linear(INPUTS, HIDDEN, 1), nn.Dropout(0.5), linear(HIDDEN, OUTPUTS, 2), nn.Dropout(0.5)]
    engines = [make_engine(layers, num_stages=2, seed_layers=seeded) for seeded in (True, False)]
    for engine, seeded in zip(engines, (True, False)):
        engine.train_batch(iter(make_batch(1)))
        engine.save_checkpoint(folder, f"seeded{seeded}")
        expected = [float(engine.train_batch(iter(make_batch(1)))) for _ in range(2)]
        engine.load_checkpoint(folder, f"seeded{seeded}")
        assert [float(engine.train_batch(iter(make_batch(1)))) for _ in range(2)] == expected
        assert expected[0] != expected[1]


def test_dropout_goes_on_where_it_was(world: Any) -> None:
    with scratch_folder() as folder:
        world(with_dropout, 2, folder)


def other_axes(rank: int, folder: str, axes: list[str] | None) -> None:
    """The stages of a user's topology need not follow the ranks."""
    topology = {"num_stages": 1} if axes is None else {"topology": ProcessTopology(axes, [2] * len(axes))}
    engine = make_engine(three() if axes else three(7), **topology)
    if axes:
        engine.save_checkpoint(folder, "-".join(axes))
        return
    for tag_ in ("data-pipe", "pipe-data"):
        engine.load_checkpoint(folder, tag_)
        for index, seed in ((0, 1), (2, 2)):
            expected = linear(*((INPUTS, HIDDEN), (HIDDEN, OUTPUTS))[index // 2], seed)
            name = f"{index}.weight"
            assert_close(copied(engine)[name], expected.weight.detach(), EXACT, f"{tag_}: {name}")


def test_any_order_of_the_axes(world: Any) -> None:
    with scratch_folder() as folder:
        for axes in (["data", "pipe"], ["pipe", "data"]):
            world(other_axes, 4, folder, axes)
        world(other_axes, 1, folder, None)


def plain_to_pipeline(rank: int, folder: str) -> None:
    """The same names, so a sequence trained by the plain engine goes on as a pipeline."""
    import ds_lite

    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "zero_optimization": {"stage": 1}}
    engine = ds_lite.initialize(model=nn.Sequential(*three()), config=config)[0]
    x, y = make_batch(1)[0]
    engine.backward(mean_squared(engine(x), y))
    engine.step()
    engine.save_checkpoint(folder)
    pipeline = make_engine(three(5), num_stages=2)
    pipeline.load_checkpoint(folder)
    assert pipeline.global_steps == 1
    for name, parameter in pipeline.module.named_parameters():
        assert_close(parameter.detach(), copied(engine)[name], EXACT, name)
    engine.backward(mean_squared(engine(x), y))
    engine.step()
    pipeline.train_batch(iter([(x, y)]))
    for name, parameter in pipeline.module.named_parameters():
        assert torch.allclose(parameter, copied(engine)[name], rtol=0, atol=1e-12), name


def test_a_plain_sequence_goes_on_as_a_pipeline(world: Any) -> None:
    with scratch_folder() as folder:
        world(plain_to_pipeline, 2, folder)


def cut_by_somebody(rank: int, folder: str) -> None:
    layers = [LinearLayer(linear(INPUTS, HIDDEN, 1), gather_output=True), nn.Linear(HIDDEN, OUTPUTS)]
    tag(layers[1].weight, model="sharded")
    engine = make_engine(layers, num_stages=1, config={"tensor_parallel": {"tp_size": 2}})
    for call in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(
            ValueError, match=r"1.weight is cut over 2 tensor-parallel ranks by another library"
        ):
            call(folder)


def test_a_cut_that_nobody_described_is_refused(world: Any) -> None:
    with scratch_folder() as folder:
        world(cut_by_somebody, 2, folder)


# ------------------------------------------------------------------------------------------------ memory

LAYERS, SIDE = 16, 160
LAYER_BYTES = SIDE * SIDE * 8


def lean(rank: int, folder: str, zero: int) -> tuple[float, float]:
    """How far saving and loading rise above what is there anyway, in weights of one layer."""
    layers = [nn.Linear(SIDE, SIDE, bias=False, dtype=torch.float64) for _ in range(LAYERS)]
    engine = make_engine(layers, num_stages=1, config={"zero_optimization": {"stage": zero}})
    x = torch.randn(2, SIDE, dtype=torch.float64)
    engine.train_batch(iter([(x, x)]))
    peaks = []
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with LiveStorages(min_bytes=LAYER_BYTES // 4) as meter:
            meter.watch([list(engine.module.parameters()), list(engine.optimizer.state.values())])
            meter.reset_peak()
            before = meter.current
            assert before >= LAYERS * LAYER_BYTES
            call(folder)
        peaks.append((meter.peak - before) / LAYER_BYTES)
    return peaks[0], peaks[1]


@pytest.mark.parametrize("zero", [0, 1])
def test_no_rank_holds_more_than_a_layer(world: Any, zero: int) -> None:
    with scratch_folder() as folder:
        for rank, (saving, loading) in enumerate(world(lean, 2, folder, zero)):
            assert (rank > 0 or saving >= 1) and saving <= 4 < LAYERS, f"rank {rank}: {saving} layers to save"
            assert loading <= 4 < LAYERS, f"rank {rank}: {loading} layers to load"
