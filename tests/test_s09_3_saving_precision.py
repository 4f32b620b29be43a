"""§9.3 Checkpoints of bf16 and fp16 runs. Guards against: masters that are rounded or left behind, a loss
scale that starts again, parameters that leave their ZeRO buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saving_layouts import AFTER, BEFORE, Layout, data_of, make_engine
from saving_models import scratch_folder
from tolerance import EXACT, assert_close, differs
from torch import Tensor

LAYOUTS = [Layout(), Layout(dp=2, zero=2), Layout(pp=2, dp=2, zero=1)]
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALED = {"initial_scale_power": 6, "loss_scale_window": 2}


def make_low(layout: Layout, precision: str) -> Any:
    """An engine in another precision; `fp32` is a float32 model without masters."""
    config: dict[str, Any] = {
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, **SCALED}},
    }
    engine = make_engine(layout, "AdamW", dtype=LOW[precision], **config.get(precision, {}))
    assert all(parameter.dtype == LOW[precision] for parameter in engine.module.parameters())
    return engine


def train_low(engine: Any, start: int, steps: int) -> list[float]:
    dtype = next(engine.module.parameters()).dtype
    data = ((x.to(dtype), y) for x, y in data_of(engine, start, steps))
    return [float(engine.train_batch(data)) for _ in range(steps)]


def stepped(engine: Any) -> dict[tuple[str, int], dict[str, Tensor]]:
    """What this rank's optimizer holds, by parameter name and offset: values and state, cloned."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = {}
    for bucket in engine.gradients.buckets:
        for piece in bucket.pieces:
            state = {
                key: value.clone() for key, value in engine.optimizer.state.get(piece.target, {}).items()
            }
            values = {"value": piece.target.detach().clone(), **state}
            found[names[id(bucket.parameters[piece.index])], piece.start] = values
    return found


def assert_equal(here: dict[Any, dict[str, Tensor]], there: dict[Any, dict[str, Tensor]], msg: str) -> None:
    assert here.keys() == there.keys(), msg
    for name, values in here.items():
        assert values.keys() == there[name].keys(), f"{msg}: {name}"
        for key, value in values.items():
            assert_close(value, there[name][key], EXACT, f"{msg}: {name} {key}")


def exact_in_low_precision(rank: int, layout: Layout, folder: str) -> None:
    """In one layout the continued run repeats every bit: values, masters, states, loss scale."""
    for precision in ("bf16", "fp16"):
        msg = f"{precision} {layout}"
        engine = make_low(layout, precision)
        train_low(engine, 0, BEFORE)
        engine.save_checkpoint(folder, tag=precision)
        losses, held = train_low(engine, BEFORE, AFTER), stepped(engine)
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        other = make_low(layout, precision)
        train_low(other, 0, 1)
        other.load_checkpoint(folder, tag=precision)
        before = stepped(other)
        assert any(differs(held[place]["value"], before[place]["value"]) for place in held), (
            "control: no step"
        )
        assert (again := train_low(other, BEFORE, AFTER)) == losses, f"{msg}: {again}, before {losses}"
        assert_equal(stepped(other), held, msg)
        for name, parameter in other.module.named_parameters():
            assert_close(parameter.detach(), weights[name], EXACT, f"{msg}: {name}")
        assert other.scaler.state_dict() == engine.scaler.state_dict()
        assert other.gradients.loss_scale == other.scaler.scale == (256.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=list(map(str, LAYOUTS)))
def test_low_precision_continues_bit_by_bit(world: Any, layout: Layout) -> None:
    with scratch_folder() as folder:
        world(exact_in_low_precision, layout.world_size, layout, folder)


def another_precision(rank: int, folder: str) -> None:
    """Masters are what counts: they go from precision to precision unrounded, and parameters follow them."""
    layout = Layout()
    source = make_low(layout, "bf16")
    train_low(source, 0, BEFORE)
    source.save_checkpoint(folder, tag="bf16")
    masters = stepped(source)
    for precision, dtype in LOW.items():
        engine = make_low(layout, precision)
        engine.load_checkpoint(folder, tag="bf16")
        assert_equal(stepped(engine), masters, f"bf16 to {precision}")
        for name, parameter in engine.module.named_parameters():
            if (name, 0) in masters:
                value = masters[name, 0]["value"].to(dtype)
                assert_close(parameter.detach(), value, EXACT, f"bf16 to {precision}: {name}")
    rounded = [values["value"].bfloat16().float() for values in masters.values()]
    assert any(differs(a, b["value"]) for a, b in zip(rounded, masters.values())), "control: nothing to round"
    source = make_low(layout, "fp32")
    train_low(source, 0, BEFORE)
    source.save_checkpoint(folder, tag="fp32")
    for optimizer_states in (True, False):
        engine = make_low(layout, "bf16")
        engine.load_checkpoint(folder, tag="fp32", load_optimizer_states=optimizer_states)
        for name, values in stepped(engine).items():
            assert_close(values["value"], stepped(source)[name]["value"], EXACT, f"fp32 to bf16: {name}")


def test_masters_go_unrounded_from_precision_to_precision(world: Any) -> None:
    with scratch_folder() as folder:
        world(another_precision, 1, folder)


def masters_follow(rank: int, layout: Layout, folder: str) -> None:
    """Only weights are loaded into an engine that was elsewhere: its masters must not bring old ones back."""
    source = make_low(layout, "bf16")
    train_low(source, 0, BEFORE)
    source.save_checkpoint(folder)
    weights = {name: p.detach().clone() for name, p in source.module.named_parameters()}
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        engine = make_low(layout, "bf16")
        with torch.no_grad():
            for values in engine.gradients.buckets:
                for piece in values.pieces:
                    piece.target.fill_(5.0)
        engine.gradients.publish()
        engine.load_checkpoint(folder, **options)
        parameters = dict(engine.module.named_parameters())
        for (name, start), held in stepped(engine).items():
            stop = start + held["value"].numel()
            expected = weights[name].reshape(-1)[start:stop].view(held["value"].shape)
            assert_close(held["value"], expected.float(), EXACT, f"{options}: the master of {name}")
        for name, weight in weights.items():
            assert_close(parameters[name].detach(), weight, EXACT, f"{options}: {name}")
        for bucket in engine.gradients.buckets:
            if layout.zero:
                base = bucket.values.untyped_storage().data_ptr()
                assert all(p.untyped_storage().data_ptr() == base for p in bucket.parameters if p.numel())
        assert engine.global_steps == (0 if "load_module_only" in options else BEFORE)
        train_low(engine, BEFORE, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=list(map(str, LAYOUTS)))
def test_masters_and_shards_follow_loaded_weights(world: Any, layout: Layout) -> None:
    with scratch_folder() as folder:
        world(masters_follow, layout.world_size, layout, folder)
