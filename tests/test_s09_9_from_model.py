"""§9.9 `PipelineModule.from_model`: models of transformers become pipelines and nothing else changes.

Guards against: a mask or a rotary table of another stage, a tie that is cut, a router's loss that is a sum of
the layers' losses, weights under other names, weights that a stage reads and does not need.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerance import LAW, assert_close
from torch import Tensor, nn

pytest.importorskip("transformers", reason="not proved here: pipelines of transformers' models")

from causal_models import MODELS, KeepWide, batches, one_process

import ds_lite
from ds_lite.pipe import PipelineModule

pytestmark = pytest.mark.xdist_group("sequence")
LR = 0.1


def config_of(micro_batches: int, samples: int, tp: int = 1, zero: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": zero},
        **({"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}),
        **more,
    }


def equals_one_process(
    rank: int, name: str, stages: int, tp: int, zero: int, options: dict[str, Any]
) -> None:
    with KeepWide():
        truth, model = (MODELS[name].make(4, 2 if MODELS[name].kv else 4) for _ in range(2))
        pipeline = PipelineModule.from_model(model, num_stages=stages, **options)
        engine = ds_lite.initialize(model=pipeline, config=config_of(3, 2, tp, zero))[0]
        dp = engine.grid.get_data_parallel_world_size()
        given = batches(3 * dp, 2, 7)
        mine = given[3 * engine.grid.get_data_parallel_rank() :][:3]
        names = engine.module.original_names()
        for step in range(2):
            truth.zero_grad()
            loss = one_process(truth, given)
            found = engine.compute_gradients(iter(mine))
            assert_close(found, loss, LAW, f"loss of step {step}")
            gradients = {names[key]: engine.gradients.full(key) for key in names}
            for key, weight in truth.named_parameters():
                if key in gradients:
                    got = gradients[key]
                    assert_close(
                        got if got is not None else torch.zeros_like(weight), _or_zeros(weight), LAW, key
                    )
            before = float(engine.train_batch(iter(mine)))
            assert before == pytest.approx(float(loss), abs=1e-9)
            norm = torch.stack([_or_zeros(w).square().sum() for w in truth.parameters()]).sum().sqrt()
            assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-10)
            with torch.no_grad():
                for weight in truth.parameters():
                    weight -= LR * _or_zeros(weight)
        assert gradients, "control: this stage has weights"


def _or_zeros(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


CASES = [
    ("llama", 4, 2, 1, 0),
    ("llama tied", 4, 2, 2, 0),
    ("qwen2", 4, 4, 1, 0),
    ("mistral", 4, 2, 2, 0),
    ("gpt2", 4, 2, 1, 1),
    ("gpt_neox", 2, 2, 1, 0),
    ("gemma2", 3, 3, 1, 0),
    ("mixtral", 4, 2, 1, 2),
    ("qwen2_moe", 4, 2, 2, 0),
]


@pytest.mark.parametrize("name, world_size, stages, tp, zero", CASES)
def test_a_pipeline_of_a_model_equals_one_process(
    world: Any, name: str, world_size: int, stages: int, tp: int, zero: int
) -> None:
    world(equals_one_process, world_size, name, stages, tp, zero, {})
