"""§9.9 `PipelineModule.from_model`: models of transformers become pipelines and nothing else changes.

Guards against: a mask or a rotary table of another stage, a tie that is cut, a router's loss that is a sum of
the layers' losses, weights under other names, weights that a stage reads and does not need.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerance import LAW, assert_close, differs

pytest.importorskip("transformers", reason="not proved here: pipelines of transformers' models")

from causal_models import MODELS, KeepWide, batches, one_process, weights_of

import ds_lite
from ds_lite.pipe import PipelineModule
from ds_lite.tags import whole

pytestmark = pytest.mark.xdist_group("sequence")
LR = 0.1


def config_of(
    micro_batches: int, samples: int, tp: int = 1, zero: int = 0, ep: int = 0, sp: int = 1
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": zero},
        **({"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}),
        **({"sequence_parallel_size": sp} if sp > 1 else {}),
        **({"expert_parallel": {"enabled": True, "autoep_size": ep}} if ep else {}),
    }


def equals_one_process(rank: int, name: str, stages: int, tp: int, zero: int, ep: int, sp: int = 1) -> None:
    with KeepWide():
        truth, model = (MODELS[name].make(4, 2 if MODELS[name].kv else 4) for _ in range(2))
        pipeline = PipelineModule.from_model(model, num_stages=stages)
        engine = ds_lite.initialize(model=pipeline, config=config_of(3, 2, tp, zero, ep, sp))[0]
        dp = engine.grid.get_data_parallel_world_size()
        given = batches(3 * dp, 2, 7)
        mine = given[3 * engine.grid.get_data_parallel_rank() :][:3]
        names = engine.module.original_names()
        for step in range(2):
            truth.zero_grad()
            loss = one_process(truth, given)
            found = engine.compute_gradients(iter(mine))
            assert_close(found, loss, LAW, f"loss of step {step}")
            for key, there in names.items():
                got, wanted = engine.gradients.full(key), weights_of(truth, there, gradient=True)
                assert_close(torch.zeros_like(wanted) if got is None else got, wanted, LAW, there)
            assert_close(engine.train_batch(iter(mine)), loss, LAW, "loss of the batch that trains")
            norm = sum(float(w.grad.square().sum()) for w in truth.parameters() if w.grad is not None) ** 0.5
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-10)
            with torch.no_grad():
                for weight in truth.parameters():
                    if weight.grad is not None:
                        weight -= LR * weight.grad
        assert names, "control: this stage has weights"
        start = weights_of(MODELS[name].make(4, 2 if MODELS[name].kv else 4), there)
        for key, there in names.items():
            assert_close(
                whole(engine.module.get_parameter(key)), weights_of(truth, there), LAW, f"weight {there}"
            )
        assert differs(weights_of(truth, there), start), "control: the weights have moved"


CASES = [
    ("llama", 4, 2, 1, 0, 0),
    ("llama tied", 4, 2, 2, 0, 0),
    ("qwen2", 4, 4, 1, 0, 0),
    ("mistral", 4, 2, 2, 0, 0),
    ("gpt2", 4, 2, 1, 1, 0),
    ("gpt_neox", 2, 2, 1, 0, 0),
    ("gemma2", 3, 3, 1, 0, 0),
    ("mixtral", 4, 2, 1, 2, 0),
    ("mixtral", 4, 2, 1, 0, 2),
    ("mixtral", 4, 1, 2, 1, 2),
    ("qwen2_moe", 4, 2, 2, 0, 0),
    ("qwen2_moe", 2, 1, 1, 0, 2),
    ("llama", 8, 2, 2, 1, 0),
    ("mixtral", 8, 2, 2, 0, 2),
]


@pytest.mark.parametrize("name, world_size, stages, tp, zero, ep", CASES)
def test_a_pipeline_of_a_model_equals_one_process(
    world: Any, name: str, world_size: int, stages: int, tp: int, zero: int, ep: int
) -> None:
    world(equals_one_process, world_size, name, stages, tp, zero, ep)


SPREAD = [
    ("llama", 4, 2, 1, 0, 0, 2),
    ("llama tied", 4, 2, 1, 2, 0, 2),
    ("mistral", 4, 1, 1, 0, 0, 4),
    ("gpt2", 4, 2, 1, 1, 0, 2),
    ("gemma2", 4, 2, 1, 0, 0, 2),
    ("mixtral", 4, 2, 1, 0, 2, 2),
    ("qwen2_moe", 4, 1, 2, 0, 0, 2),
    ("mixtral", 8, 2, 2, 0, 2, 2),
]


@pytest.mark.parametrize("name, world_size, stages, tp, zero, ep, sp", SPREAD)
def test_a_pipeline_over_sequences_equals_one_process(
    world: Any, name: str, world_size: int, stages: int, tp: int, zero: int, ep: int, sp: int
) -> None:
    world(equals_one_process, world_size, name, stages, tp, zero, ep, sp)
