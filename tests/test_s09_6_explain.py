"""§9.6 §9.7 `ds-lite explain`: what it tells without processes is what an engine then has and does.

Guards against: numbers that no engine shows, a layout that one of them refuses and the other does not, other
words for the same refusal, groups of other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="not proved here: what transformers' models would form")

from causal_models import MODELS, batches

import ds_lite
from ds_lite.explain import Stored, explain
from ds_lite.pipe import PipelineModule
from ds_lite.tensor_parallel.whole_model import parameters_on_meta
from ds_lite.zero import ShardedBucket

pytestmark = pytest.mark.xdist_group("sequence")
TOKENS = 7


def config_of(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **more,
    }


def empty(name: str, *, wide: bool = True, heads: int = 4) -> Any:
    """A model without values, for `explain`."""
    with parameters_on_meta():
        return MODELS[name].make_empty(heads, 2 if MODELS[name].kv else heads).to(torch.float64 if wide else None)


def made(name: str, *, wide: bool = True) -> Any:
    dtype = torch.float64 if wide else torch.float32
    return MODELS[name].make(4, 2 if MODELS[name].kv else 4, dtype=dtype)


# ---------------------------------------------------------------------------- against real engines


def bytes_of(tensors: Any) -> int:
    """Each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None
    }
    return sum(storages.values())


def held_by(engine: Any) -> Stored:
    """What an engine holds after a backward whose gradients are reduced."""
    buckets = engine.gradients.buckets
    values = [b.values if isinstance(b, ShardedBucket) else p for b in buckets for p in b.parameters]
    gradients = [
        t for b in buckets for t in (b.buffer, getattr(b, "_spent", None), getattr(b, "gradient", None))
    ]
    masters = [piece.target for b in buckets for piece in b.pieces if b.dtype != b.parameters[0].dtype]
    state = [t for states in engine.optimizer.state.values() for t in states.values()]
    return Stored(bytes_of(values), bytes_of(gradients), 0, bytes_of(masters), bytes_of(state))


def moved_by(ledger: Any) -> dict[tuple[str, str], tuple[int, int]]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for (axis, operation, _), row in ledger.rows.items():
        sums[axis, operation][0] += row.calls
        sums[axis, operation][1] += row.payload
    return {key: (calls, payload) for key, (calls, payload) in sums.items()}


def told(rows: Any) -> dict[tuple[str, str], tuple[int, int]]:
    sums: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in rows:
        calls, payload = sums[row.axis, row.operation]
        sums[row.axis, row.operation] = calls + row.calls, payload + row.payload
    return dict(sums)


def equals_an_engine(
    rank: int, world_size: int, name: str, stages: int, config: dict[str, Any], padded: bool
) -> None:
    is_low = "bf16" in config
    said = explain(
        config,
        world_size,
        empty(name, wide=not is_low),
        num_stages=stages,
        rank=rank,
        tokens=TOKENS,
        has_mask=padded,
    )
    pipeline = PipelineModule.from_model(made(name, wide=not is_low), num_stages=stages)
    engine = ds_lite.initialize(model=pipeline, config=config)[0]
    grid = engine.grid
    dp = grid.get_data_parallel_world_size()
    mine = batches(3 * dp, 2, TOKENS, padded=padded)[3 * grid.get_data_parallel_rank() :][:3]
    engine.train_batch(iter(mine))  # the first compares the ranks' data
    with ds_lite.comm.record() as ledger:
        engine.train_batch(iter(mine))
    expected, moved = told(said.traffic), moved_by(ledger)
    for key in {*expected, *moved} & {("expert", "all_to_all")}:  # the rows that come back are a guess
        assert expected[key][0] == moved[key][0], "as many calls"
        expected[key] = moved[key]
    assert expected == moved, {key: (expected.get(key), moved.get(key)) for key in {*expected, *moved}}
    engine.compute_gradients(iter(mine))
    found, here = held_by(engine), said.stored[engine.stage_id, grid.coordinate("model")]
    assert replace(here, passing=0) == found, (here, found)
    assert set(said.groups["data x seq"]) == set(grid.ranks("data", "seq"))
    assert set(said.groups["model"]) == set(grid.ranks("model"))
    assert set(said.groups["pipe"]) == set(grid.ranks("pipe"))


TP, SP, BF16 = (
    {"tensor_parallel": {"autotp_size": 2}},
    {"sequence_parallel_size": 2},
    {"bf16": {"enabled": True}},
)

EP = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


CASES = [
    ("llama", 4, 2, {**TP}, True),
    ("llama", 4, 2, {**zero(0)}, False),
    ("llama", 4, 2, {**zero(1)}, True),
    ("llama", 4, 2, {**zero(2, reduce_bucket_size=500)}, True),
    ("llama", 4, 1, {**SP, **zero(1)}, True),
    ("llama", 4, 2, {**SP, **BF16}, False),
    ("llama", 4, 2, {**TP, **BF16, **zero(1)}, True),
    ("llama", 4, 1, {**BF16, **zero(2)}, False),
    ("llama tied", 4, 2, {**zero(2)}, True),
    ("llama tied", 4, 2, {"tensor_parallel": {"tp_size": 2, "vocab_parallel_lm_head": True}}, True),
    ("gpt2", 4, 2, {**TP, **zero(1)}, True),
    ("gpt2", 4, 2, {**zero(0)}, True),
    ("gpt2", 4, 2, {**zero(1, reduce_bucket_size=300)}, True),
    ("gpt2", 4, 2, {**zero(2), **BF16}, True),
    ("gpt2", 4, 2, {**SP}, True),
    ("llama", 4, 1, {"tensor_parallel": {"tp_size": 4}}, True),
    ("mixtral", 4, 2, {**EP, **zero(2)}, True),
    ("mixtral", 4, 1, {**EP, **TP}, False),
    ("mixtral", 4, 1, {**EP, **SP, **zero(1)}, True),
    ("qwen2_moe", 4, 2, {**TP, **BF16}, True),
    ("gemma2", 3, 3, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, True),
]


@pytest.mark.parametrize("name, world_size, stages, more, padded", CASES)
def test_what_is_told_is_what_an_engine_has_and_moves(
    world: Any, name: str, world_size: int, stages: int, more: dict[str, Any], padded: bool
) -> None:
    world(equals_an_engine, world_size, world_size, name, stages, config_of(**more), padded)
