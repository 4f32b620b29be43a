"""§9.3 bf16 and fp16 against their one-process twins. Guards against: accumulation in low precision, masters
that do not follow, an overflow that one stage or replica keeps to itself, a skip that nobody hears of."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import Layer, MicroBatch, Tied, split_micro_batches
from rings import everyday
from test_s09_3_three_axes import Case, loss_fn, make, make_batch, make_layers
from tolerance import BF16, EXACT, assert_close, differs
from torch import Tensor, nn

from ds_lite.precision import LossScaler

GOLDEN = Path(__file__).parent / "golden"
STEPS = 3
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ------------------------------------------------------------------------------------------------ the twin


class Twin:
    """One process in low precision: float32 masters, float32 accumulation, one scaled loss after another."""

    def __init__(self, layers: list[Layer], dtype: torch.dtype, case: Case, scale: float = 1.0) -> None:
        self.layers = copy.deepcopy(layers)
        self.named: dict[str, nn.Parameter] = {}
        for index, layer in enumerate(self.layers):
            module = layer.module if isinstance(layer, Tied) else layer
            prefix = f"tied_modules.{layer.key}" if isinstance(layer, Tied) else str(index)
            module.to(dtype)
            self.named |= {f"{prefix}.{name}": p for name, p in module.named_parameters()}
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.named.items()}
        self.optimizer = getattr(torch.optim, case.optimizer)(list(self.masters.values()), lr=case.lr)
        self.clip, self.scale = case.clip, scale

    def step(self, batch: list[MicroBatch]) -> tuple[Tensor, Tensor]:
        """The mean loss and the norm before clipping."""
        self.optimizer.zero_grad()
        losses = []
        for x, labels in batch:
            for layer in self.layers:
                x = layer(x)
            loss = loss_fn(x, labels)
            losses.append(loss.detach())
            (loss.float() * (self.scale / len(batch))).backward()
            for name, parameter in self.named.items():
                fresh, master = parameter.grad.float() / self.scale, self.masters[name]
                master.grad = fresh if master.grad is None else master.grad + fresh
                parameter.grad = None
        grads = [master.grad for master in self.masters.values()]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
        if self.clip:
            nn.utils.clip_grad_norm_(self.masters.values(), self.clip)
        self.optimizer.step()
        for name, parameter in self.named.items():
            parameter.data.copy_(self.masters[name])
        return torch.stack(losses).double().mean().to(losses[0].dtype), norm


def follow(rank: int, impl: Any, kind: str, cases: list[Case]) -> None:
    for case in cases:
        layers = make_layers(case)
        for layer in layers:
            (layer.module if isinstance(layer, Tied) else layer).float()
        count = case.m * case.dp
        batch = make_batch(count * STEPS)
        twin = Twin(layers, DTYPES[kind], case, scale=256.0 if kind == "fp16" else 1.0)
        before = {name: parameter.detach().clone() for name, parameter in twin.named.items()}
        pipeline = make(impl, case, layers, CONFIGS[kind])
        part = {"replica": pipeline.replica, "num_replicas": case.dp, "steps": STEPS}
        mine = iter(split_micro_batches(batch, **part))
        for step in range(STEPS):
            loss, norm = twin.step(batch[count * step : count * (step + 1)])
            ours = pipeline.train_batch(mine)
            assert_close(ours, loss, BF16, f"{kind} {case}: loss of step {step}")
            assert_close(pipeline.norm(), norm, BF16, f"{kind} {case}: norm of step {step}")
        for name, weight in pipeline.weights().items():
            assert weight.dtype == DTYPES[kind]
            assert_close(weight, twin.named[name].detach(), BF16, f"{kind} {case}: {name}")
        moved = sum(differs(parameter, before[name]) for name, parameter in twin.named.items())
        assert moved > len(before) / 2, f"control: {moved} of {len(before)} moved"


CASES = {
    1: [Case(1, 1, 1, zero=zero, optimizer="AdamW") for zero in (0, 1, 2)],
    2: [
        Case(2, 1, 1, zero=0, tied=True, optimizer="AdamW"),
        Case(1, 2, 1, zero=1, clip=0.5, optimizer="AdamW"),
        Case(1, 2, 1, zero=2, optimizer="AdamW"),
        Case(1, 1, 2, zero=0, optimizer="AdamW"),
    ],
    4: [
        Case(2, 2, 1, zero=1, tied=True, clip=0.5, optimizer="AdamW"),
        Case(2, 2, 1, zero=2, tied=True, optimizer="AdamW"),
        Case(2, 1, 2, zero=0, tied=True, optimizer="AdamW"),
        Case(1, 2, 2, zero=2, clip=0.5, optimizer="AdamW"),
    ],
}


NAMED = [pytest.param(cases, id=str(nprocs)) for nprocs, cases in CASES.items()]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("cases", everyday(NAMED, lambda name: name != "2"))
def test_low_precision_follows_its_twin(world: Any, impl: Any, cases: list[Case], kind: str) -> None:
    world(follow, cases[0].world_size, impl, kind, cases, deadline=120.0)


def test_fp16_follows_its_twin_on_two_ranks(world: Any, impl: Any) -> None:
    world(follow, 2, impl, "fp16", [Case(1, 2, 1, zero=1, clip=0.5, optimizer="AdamW")])


def accumulate_small_numbers(rank: int, kind: str) -> None:
    """512 gradients of 1/256 beside one of 1: in low precision the sum would stand still or lose bits."""
    import ds_lite

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    for zero in (0, 1, 2):
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 513,
            "zero_optimization": {"stage": zero},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            kind: {"enabled": True, **({"loss_scale": 1.0} if kind == "fp16" else {})},
        }
        engine = ds_lite.initialize(model=copy.deepcopy(model), config=settings)[0]
        for index in range(513):
            x = torch.full((1, 1), 1.0 if index == 0 else 1 / 256, dtype=DTYPES[kind])
            engine.backward(engine(x).sum() * 513, scale_wrt_gas=True)
            engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(3.0, rel=1e-6), f"zero={zero}"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_gradients_add_up_in_float32(world: Any, kind: str) -> None:
    world(accumulate_small_numbers, 2, kind)


# ------------------------------------------------------------------------------------- B17: one bad gradient


def one_bad_gradient(
    rank: int, impl: Any, case: Case, culprit: int, config: dict[str, Any], bad: float
) -> Any:
    """Step 1 gets `bad` into one gradient of one rank; then a good step."""
    layers = make_layers(case)
    if config:
        for layer in layers:
            (layer.module if isinstance(layer, Tied) else layer).float()
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_min_lr": 0.05, "warmup_max_lr": 0.1},
    }
    pipeline = make(impl, case, layers, {**config, "scheduler": schedule})
    engine = pipeline.engine
    batch = make_batch(case.m * case.dp)

    def step() -> None:
        data = iter(split_micro_batches(batch, replica=pipeline.replica, num_replicas=case.dp))
        pipeline.train_batch(data)

    step()
    before, rate = pipeline.weights(), engine.get_lr()
    state = {id(p): copy.deepcopy(dict(values)) for p, values in engine.optimizer.state.items()}
    victim = next(p for p in engine.module.parameters() if p.numel())
    handle = victim.register_hook(lambda grad: grad * bad) if rank == culprit else None
    step()
    if handle is not None:
        handle.remove()
    for name, weight in pipeline.weights().items():
        assert_close(weight, before[name], EXACT, f"{name} moved in a skipped step")
    for parameter, values in engine.optimizer.state.items():
        for key, value in values.items():
            assert_close(torch.as_tensor(value), torch.as_tensor(state[id(parameter)][key]), EXACT, key)
    assert engine.skipped_steps == 1 and engine.get_lr() == rate and engine.global_steps == 2
    assert not math.isfinite(engine.get_global_grad_norm())
    assert all(p.grad is None for p in engine.module.parameters())
    scale = pipeline.loss_scale()
    step()
    assert engine.skipped_steps == 1 and math.isfinite(engine.get_global_grad_norm())
    assert differs(pipeline.weights()["0.weight"], before["0.weight"]), "the step after the skip did nothing"
    return scale


def fp16(**options: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": 10, **options}}


BAD = {
    "a stage": (Case(2, 1, 1, optimizer="AdamW"), 0, fp16(hysteresis=1), 512.0),
    "a stage, patience left": (Case(2, 1, 1, optimizer="AdamW"), 0, fp16(hysteresis=2), 1024.0),
    "a fixed scale": (Case(2, 1, 1), 0, fp16(loss_scale=64.0), 64.0),
    "a replica": (Case(2, 2, 1, zero=1, optimizer="AdamW"), 3, fp16(hysteresis=1), 512.0),
    "a replica, ZeRO-2": (Case(1, 2, 1, zero=2, optimizer="AdamW"), 1, fp16(hysteresis=1), 512.0),
    "a tensor-parallel rank": (Case(1, 1, 2, optimizer="AdamW"), 1, fp16(hysteresis=1), 512.0),
    "bf16": (Case(2, 2, 1, zero=2, optimizer="AdamW"), 2, {"bf16": {"enabled": True}}, 1.0),
    "float64": (Case(2, 2, 1, optimizer="AdamW"), 2, {}, 1.0),
}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", list(BAD))
def test_b17_one_bad_gradient_skips_the_step_everywhere(
    world: Any, impl: Any, where: str, bad: float
) -> None:
    case, culprit, config, scale = BAD[where]
    assert set(world(one_bad_gradient, case.world_size, impl, case, culprit, config, bad)) == {scale}


def test_b17_one_bad_gradient_skips_the_step_on_all_ranks(world: Any, impl: Any) -> None:
    case, culprit, config, _ = BAD["a stage"]
    world(one_bad_gradient, case.world_size, impl, case, culprit, config, math.inf)


def speak(rank: int, impl: Any, capture: str) -> None:
    import contextlib

    with open(capture + str(rank), "w") as file, contextlib.redirect_stdout(file):
        case = Case(2, 1, 1)
        one_bad_gradient(rank, impl, case, 0, fp16(loss_scale=64.0), math.inf)


def test_a_skip_is_reported_once_also_with_a_fixed_scale(world: Any, impl: Any, tmp_path: Path) -> None:
    world(speak, 2, impl, str(tmp_path / "rank"))
    said = (tmp_path / "rank0").read_text()
    assert said.count("skipped:") == 1 and "step 2 skipped: the gradient norm is" in said
    assert "loss scale 64 -> 64" in said and "1 skipped so far" in said
    assert not (tmp_path / "rank1").read_text()


# ------------------------------------------------------------------------------------------- the loss scale


SCALES = json.loads((GOLDEN / "loss_scale.json").read_text())["cases"]


@pytest.mark.parametrize("case", SCALES, ids=[f"sequence{index}" for index in range(len(SCALES))])
def test_the_dynamic_scale_is_that_of_deepspeed(case: dict[str, Any]) -> None:
    scaler = LossScaler(
        initial=65536.0,
        window=case["window"],
        hysteresis=case["hysteresis"],
        minimum=case["min_loss_scale"],
        refills=case["consecutive_hysteresis"],
    )
    scales = []
    for overflowed in case["overflowed"]:
        scaler.update(overflowed=bool(overflowed))
        scales.append(scaler.scale)
    assert scales == case["scales"]


def test_a_scaler_goes_on_where_it_was_saved() -> None:
    first, second = (LossScaler(initial=8.0, window=3, hysteresis=2, minimum=1.0) for _ in range(2))
    for overflowed in (True, False, False):
        first.update(overflowed=overflowed)
    second.load_state_dict(first.state_dict())
    for overflowed in (False, True, True, False, False, False):
        first.update(overflowed=overflowed)
        second.update(overflowed=overflowed)
        assert first.scale == second.scale


def cast_inputs(rank: int, impl: Any) -> None:
    """auto_cast: float inputs arrive in float16; without it they stay as they are, and the layer refuses."""
    linear = nn.Linear(3, 2)
    x = torch.ones(2, 3)
    losses: list[Any] = []
    for auto_cast in (True, False):
        config = {"fp16": {"enabled": True, "auto_cast": auto_cast}}
        pipeline = impl.make_pipeline(
            [linear, nn.Identity()],
            num_stages=2,
            loss_fn=lambda y, label: (y.float() - label).square().mean(),
            num_micro_batches=1,
            config=config,
        )
        batch = [(x, torch.zeros(2, 2))]
        if auto_cast:
            losses.append(pipeline.eval_batch(iter(batch)))
            expected = linear(x).square().mean()
            assert_close(losses[0], expected.detach(), BF16)
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                pipeline.eval_batch(iter(batch))


def test_auto_cast_casts_the_inputs(world: Any, impl: Any) -> None:
    world(cast_inputs, 2, impl)
