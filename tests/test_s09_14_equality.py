"""§9.5 §9.14 A model whose sequences are spread over ranks equals one process: outputs, loss, gradients,
weights.

Guards against: labels lost between ranks, means of means, gradients off by sp, masks and positions of one
rank's tokens, heads that change places, replicas and sequence ranks mixed up.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from families import KeepWide
from sequence_models import BATCH, MODELS, one_process, outside_loss
from tolerance import LAW, assert_close, differs

import ds_lite
from ds_lite.sequence.data import part_of

pytest.importorskip("transformers", reason="not proved here: sequence parallelism of transformers' models")
pytestmark = pytest.mark.xdist_group("sequence")

LR = 0.1


def equals_one_process(
    rank: int, name: str, heads: int, kv_heads: int, length: int, sp: int, zero: int, steps: int
) -> None:
    with KeepWide():  # transformers' norms and rotary tables go through float32
        compare(name, heads, kv_heads, length, sp, zero, steps)


def compare(name: str, heads: int, kv_heads: int, length: int, sp: int, zero: int, steps: int) -> None:
    model = MODELS[name]
    truth, module = model.make(heads, kv_heads), model.make(heads, kv_heads)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": steps,
        "sequence_parallel_size": sp,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine = ds_lite.initialize(model=module, config=config)[0]
    replicas, replica = engine.grid.size("data"), engine.grid.coordinate("data")
    sp_rank = engine.grid.coordinate("seq")
    batches = [model.batch(100 * i, length) for i in range(replicas * steps)]
    losses = []
    for batch in batches:
        loss, _ = one_process(model, truth, batch)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    _, expected = one_process(model, truth, batches[replica * steps])
    for step in range(steps):
        batch = batches[replica * steps + step]
        got = engine(**batch)
        logits = got if model.loss == "outside" else got.logits
        loss = outside_loss(got, batch) if model.loss == "outside" else got.loss
        loss = loss if model.loss != "own" else torch.nn.functional.cross_entropy(logits, batch["labels"])
        if step == 0:
            mine = (
                part_of(length, sp_rank, sp).of(expected) if model.loss in ("causal", "token") else expected
            )
            assert_close(logits, mine, LAW, "logits")
            if model.loss in ("causal", "token") and sp_rank == sp - 1:
                assert differs(alone(model, truth, batch, sp_rank, sp), mine), "control: its tokens alone"
        assert_close(loss.detach(), losses[replica * steps + step], LAW, f"loss of micro-batch {step}")
        engine.backward(loss)
        if step < steps - 1:
            engine.step()
    for key, weight in truth.named_parameters():
        got = engine.gradients.full(key)
        wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert_close(torch.zeros_like(weight) if got is None else got, wanted, LAW, f"gradient of {key}")
    engine.step()
    with torch.no_grad():
        for weight in truth.parameters():
            if weight.grad is not None:
                weight -= LR * weight.grad
    norm = torch.stack([w.grad.norm() for w in truth.parameters() if w.grad is not None]).norm()
    assert_close(torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64), norm, LAW, "norm")
    for (key, weight), other in zip(truth.named_parameters(), module.parameters(), strict=True):
        assert_close(other.detach(), weight.detach(), LAW, f"{key} after the step")


def alone(model: Any, truth: Any, batch: dict[str, Any], sp_rank: int, sp: int) -> torch.Tensor:
    """What the rank's tokens give if they see only each other."""
    part = part_of(batch["input_ids"].shape[1], sp_rank, sp)
    with torch.no_grad():
        return one_process(model, truth, {key: part.of(value) for key, value in batch.items()})[1]


# name, heads, kv heads, tokens, sp, dp, ZeRO stage, micro-batches
HEADS = {"gpt2": (7, 7), "gpt2_eager": (5, 5), "bert": (6, 6), "bert_classifier": (4, 4), "vit": (6, 6)}
QUICK = [
    ("llama", 6, 3, 12, 2, 2, 0, 2),
    ("llama_eager", 6, 1, 11, 3, 1, 1, 1),
    ("llama_packed", 8, 2, 13, 4, 1, 2, 1),
    ("qwen2", 6, 2, 9, 2, 2, 1, 1),
    ("mistral", 6, 3, 11, 3, 1, 0, 1),
    ("mistral_packed", 8, 4, 12, 2, 2, 2, 1),
    ("gpt2", 7, 7, 9, 2, 1, 2, 2),
    ("gpt2_eager", 5, 5, 8, 4, 1, 0, 1),
    ("bert", 6, 6, 10, 2, 2, 2, 1),
    ("bert_classifier", 4, 4, 11, 4, 1, 0, 1),
    ("llama_classifier", 6, 3, 10, 3, 1, 1, 1),
    ("vit", 6, 6, 10, 2, 2, 1, 1),
    ("toy", 6, 3, 9, 2, 2, 2, 2),
    ("toy", 7, 7, 10, 3, 1, 0, 1),
]


def full_cross() -> list[tuple[Any, ...]]:
    cases = itertools.product(MODELS, (2, 3, 4), (1, 2), (0, 1, 2))
    return [(name, *HEADS.get(name, (8, 4)), 11, sp, dp, zero, 1) for name, sp, dp, zero in cases]


def run(world: Any, case: tuple[Any, ...]) -> None:
    name, heads, kv_heads, length, sp, dp, zero, steps = case
    world(equals_one_process, sp * dp, name, heads, kv_heads, length, sp, zero, steps)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case[0]}-sp{case[4]}-dp{case[5]}-zero{case[6]}")
def test_spread_sequences_equal_one_process(world: Any, case: tuple[Any, ...]) -> None:
    run(world, case)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", full_cross(), ids=lambda case: f"{case[0]}-sp{case[4]}-dp{case[5]}-zero{case[6]}"
)
def test_the_full_cross_equals_one_process(world: Any, case: tuple[Any, ...]) -> None:
    run(world, case)


def beside_tensor_parallel(rank: int, name: str, heads: int, kv_heads: int, zero: int) -> None:
    """Heads are cut over tp first; what a rank has left of them is dealt over its sequence ranks."""
    with KeepWide():
        model = MODELS[name]
        truth, module = model.make(heads, kv_heads), model.make(heads, kv_heads)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "sequence_parallel_size": 2,
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": zero},
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
        }
        engine = ds_lite.initialize(model=module, config=config)[0]
        batch = model.batch(0, 9)
        loss, _ = one_process(model, truth, batch)
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in truth.parameters()]).norm()
        got = engine(**batch)
        assert_close(got.loss.detach(), loss.detach(), LAW, "loss")
        engine.backward(got.loss)
        for key, weight in truth.named_parameters():
            assert_close(engine.gradients.full(key), weight.grad, LAW, f"gradient of {key}")
        engine.step()
        assert_close(torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64), norm, LAW, "norm")


TENSOR = [("llama", 6, 1, 0), ("mistral_packed", 8, 2, 2), ("gpt2", 5, 5, 1), ("bert", 6, 6, 0)]


@pytest.mark.parametrize("case", TENSOR, ids=lambda case: f"{case[0]}-zero{case[3]}")
def test_spread_sequences_beside_tensor_parallel_layers(world: Any, case: tuple[Any, ...]) -> None:
    world(beside_tensor_parallel, 4, *case)
