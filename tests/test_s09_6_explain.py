"""§9.6 §9.7 `ds-lite explain`: what it tells without processes is what an engine then has and does.

Guards against: numbers that no engine shows, a layout that one of them refuses and the other does not, other
words for the same refusal, groups of other ranks.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rings import everyday

pytest.importorskip("transformers", reason="not proved here: what transformers' models would form")

from causal_models import MODELS, batches
from torch import Tensor, nn

import ds_lite
from ds_lite import cli
from ds_lite.expert_groups import expert_rank_lists
from ds_lite.explain import Stored, explain
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.tensor_parallel.whole_model import parameters_on_meta
from ds_lite.topology import ProcessTopology
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
        return (
            MODELS[name]
            .make_empty(heads, 2 if MODELS[name].kv else heads)
            .to(torch.float64 if wide else None)
        )


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
    longer = explain(
        config, world_size, empty(name, wide=not is_low), num_stages=stages, rank=rank, tokens=TOKENS + 1
    )
    moves_tokens = any(axis in ("pipe", "seq", "model") for axis, _ in moved)
    assert moves_tokens == (told(longer.traffic) != expected), "control: another length moves other bytes"
    engine.compute_gradients(iter(mine))
    assert engine.skipped_steps == 0
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
    ("gemma2", 3, 3, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, False),
]


EVERYDAY = [CASES[number] for number in (0, 3, 5, 9, 10, 16, 18, 20)]


@pytest.mark.parametrize("name, world_size, stages, more, padded", everyday(CASES, EVERYDAY.__contains__))
def test_what_is_told_is_what_an_engine_has_and_moves(
    world: Any, name: str, world_size: int, stages: int, more: dict[str, Any], padded: bool
) -> None:
    world(equals_an_engine, world_size, world_size, name, stages, config_of(**more), padded)


def equals_a_plain_engine(rank: int, world_size: int, name: str, config: dict[str, Any]) -> None:
    said = explain(config, world_size, empty(name), rank=rank, tokens=TOKENS)
    engine = ds_lite.initialize(model=made(name), config=config)[0]

    def step() -> None:
        for batch in batches(3, 2, TOKENS, padded=False):
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()

    step()
    with ds_lite.comm.record() as ledger:
        step()
    axes = ("data", "model", "world")
    expected, moved = (
        {key: value for key, value in sums.items() if key[0] in axes}
        for sums in (told(said.traffic), moved_by(ledger))
    )
    assert expected == moved, {key: (expected.get(key), moved.get(key)) for key in {*expected, *moved}}
    here = said.stored[0, engine.grid.coordinate("model")]
    assert replace(here, gradients=0, passing=0) == replace(held_by(engine), gradients=0)


PLAIN = [("llama", {**TP}), ("llama tied", {**zero(2)}), ("gpt2", {**TP, **zero(1)}), ("llama", {**zero(1)})]


@pytest.mark.parametrize("name, more", PLAIN)
def test_a_plain_engine_has_and_moves_what_is_told(world: Any, name: str, more: dict[str, Any]) -> None:
    world(equals_a_plain_engine, 4, 4, name, config_of(**more))


# ------------------------------------------------------------------------------------- refusals


class NoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def bert() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes))


def model_of(what: str, *, has_values: bool) -> Any:
    if what == "specs":
        return [LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
    if what in ("no linears", "bert"):
        return NoLinears() if what == "no linears" else bert()
    return made(what) if has_values else empty(what)


def refused_by_an_engine(
    rank: int, what: str, stages: int | None, config: dict[str, Any], method: str
) -> str | None:
    try:
        model = model_of(what, has_values=True)
        if stages is not None:
            options = {"num_stages": stages, "loss_fn": nn.MSELoss(), "partition_method": method}
            model = (
                PipelineModule(model, **options)
                if what == "specs"
                else PipelineModule.from_model(model, **options)
            )
        ds_lite.initialize(model=model, config=config)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def tp(degree: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": degree, **more}}


def ep(size: int, **more: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": size, **more}}


REFUSED: dict[str, tuple[int, str, int | None, dict[str, Any]]] = {
    "stages do not divide the world": (4, "llama", 3, {}),
    "no stage": (1, "llama", 0, {}),
    "more stages than layers": (4, "specs", 4, {}),
    "more stages than layers of a model": (6, "llama", 6, {}),
    "unknown partition method": (1, "llama", 1, {"_method": "evenly"}),
    "no model of language": (1, "bert", 1, {}),
    "stages and tensor-parallel ranks do not divide the world": (2, "llama", 2, tp(2)),
    "tensor-parallel ranks do not divide the world": (3, "llama", None, tp(2)),
    "sequences do not divide the world": (3, "llama", 1, SP),
    "kv heads that ranks cannot share": (3, "llama", 1, tp(3)),
    "more tensor-parallel ranks than heads": (5, "gpt2", None, tp(5)),
    "more tensor-parallel ranks than heads, in stages": (5, "gpt2", 1, tp(5)),
    "kv heads that a sequence cannot share": (3, "llama", 1, {"sequence_parallel_size": 3}),
    "heads of a tp rank over a sequence": (6, "llama", 1, {**tp(2), "sequence_parallel_size": 3}),
    "a sequence over layers": (2, "specs", 1, SP),
    "domino and a sequence": (4, "llama", 1, {**tp(2, domino=True), **SP}),
    "domino in layers": (2, "specs", 1, tp(2, domino=True)),
    "ZeRO 3": (1, "llama", 1, zero(3)),
    "two switches that are not built": (1, "llama", None, {**zero(3), "compile": {"passes": ["autosp"]}}),
    "compile passes": (1, "llama", 1, {"compile": {"passes": ["autotp"]}}),
    "experts that a degree does not divide": (3, "mixtral", 1, ep(3)),
    "an expert degree that replicas do not fill": (2, "mixtral", 2, ep(2)),
    "no experts": (2, "llama", 2, ep(1)),
    "no experts in layers": (2, "specs", 1, ep(1)),
    "tensor parallelism inside experts": (2, "mixtral", 1, ep(1, expert_tensor_parallel_size=2)),
    "batch numbers": (2, "llama", 1, {"train_batch_size": 7}),
    "no batch number": (1, "llama", 1, {"train_micro_batch_size_per_gpu": None}),
    "another number of replicas": (2, "llama", 2, {"data_parallel_size": 2}),
    "nothing to cut": (2, "no linears", None, tp(2)),
    "bf16 and fp16": (1, "llama", 1, {**BF16, "fp16": {"enabled": True}}),
    "an unknown optimizer": (1, "llama", 1, {"optimizer": {"type": "AdamWW"}}),
    "an optimizer of matrices": (2, "llama", 2, {"optimizer": {"type": "Muon"}}),
    "an unknown key": (1, "llama", None, {"zero_optimisation": {}}),
    "two degrees": (2, "llama", None, {"tensor_parallel": {"autotp_size": 2, "tp_size": 1}}),
    "a plan for another model": (2, "llama", 1, tp(2, preset_model="bloom")),
    "an output layer that is no linear": (2, "no linears", None, tp(2, vocab_parallel_lm_head=True)),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_initialize_refuses_is_refused_in_its_words(world: Any, why: str) -> None:
    world_size, what, stages, more = REFUSED[why]
    method = more.get("_method", "parameters")
    config = config_of(**{key: value for key, value in more.items() if not key.startswith("_")})
    config = {key: value for key, value in config.items() if value is not None}
    words = world(refused_by_an_engine, world_size, what, stages, config, method)
    assert words[0] and set(words) == {words[0]}, "every rank says the same"
    with pytest.raises((ValueError, TypeError)) as refusal:
        explain(
            config, world_size, model_of(what, has_values=False), num_stages=stages, partition_method=method
        )
    assert str(refusal.value) == words[0]


def test_without_a_model_the_config_alone_is_checked() -> None:
    for world_size, _, stages, more in (REFUSED["batch numbers"], REFUSED["ZeRO 3"]):
        with pytest.raises(ValueError, match=r"train_batch_size|stage=3"):
            explain(config_of(**more), world_size, num_stages=stages)
    assert explain(config_of(**ep(2)), 4).stored is None


# --------------------------------------------------------------------------------------- groups


def test_the_groups_of_sixteen_ranks() -> None:
    config = config_of(**TP, **SP, **ep(2), **zero(1))
    topology = ProcessTopology(["pipe", "data", "seq", "model"], [2, 2, 2, 2])
    replicas = [[p + d + s + m for d in (0, 4) for s in (0, 2)] for p in (0, 8) for m in (0, 1)]
    for rank in range(16):
        said = explain(config, 16, empty("mixtral"), num_stages=2, rank=rank, tokens=TOKENS)
        assert said.job.topology == topology
        for axis in topology.get_axis_names():
            assert list(said.groups[axis]) in topology.get_axis_comm_lists(axis) and rank in said.groups[axis]
        for name, lists in zip(("expert", "expert-data"), expert_rank_lists(replicas, 2), strict=True):
            assert list(said.groups[name]) in lists and rank in said.groups[name]
        assert list(said.groups["data x seq"]) in replicas
    five = explain(config, 16, empty("mixtral"), num_stages=2, rank=5, tokens=TOKENS)
    assert five.groups == {
        "pipe": (5, 13),
        "data": (1, 5),
        "seq": (5, 7),
        "model": (4, 5),
        "data x seq": (1, 3, 5, 7),
        "pipe x model": (4, 5, 12, 13),
        "expert": (5, 7),
        "expert-data": (1, 5),
    }
    rows = {row.kind: (row.sums, row.divisor, row.shards, row.counted_by) for row in five.reductions}
    all_four = (1, 3, 5, 7)
    assert rows == {
        "dense sharded": ((("data x seq", all_four),), 4, all_four, all_four),
        "dense full": ((("data x seq", all_four),), 4, all_four, (0, 2, 4, 6)),
        "expert sharded": ((("expert-data", (1, 5)),), 4, (1, 5), (1, 5)),
    }
    other = explain(
        {**config, "use_data_before_expert_parallelism": True}, 16, empty("mixtral"), num_stages=2, rank=5
    )
    assert (other.groups["expert"], other.groups["expert-data"]) == ((1, 5), (5, 7))


def test_the_rows_of_shared_and_tied_weights() -> None:
    said = explain(config_of(**tp(4)), 16, empty("llama tied"), num_stages=2, rank=13, tokens=TOKENS)
    rows = {row.kind: (row.sums, row.divisor, row.shards, row.counted_by) for row in said.reductions}
    assert rows["dense partial"] == ((("model", (12, 13, 14, 15)), ("data x seq", (9, 13))), 2, (), (8,))
    assert rows["dense full tied"] == ((("stages", (5, 13)), ("data x seq", (9, 13))), 2, (), (0,))
    assert said.groups["tie 'embedding'"] == (5, 13)
    assert "dense partial" not in {row.kind for row in explain(config_of(), 4, empty("llama")).reductions}


# --------------------------------------------------------------------------------------- the command


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", *words])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "config.json")


def test_the_command_prints_all_of_it(capsys: Any, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaConfig(num_key_value_heads=2, vocab_size=41, **sizes).save_pretrained(
        tmp_path / "model"
    )
    config = written(tmp_path, config_of(**TP, **zero(1)))
    words = (
        "--world",
        "16",
        "--stages",
        "2",
        "--rank",
        "5",
        "--tokens",
        "8",
        "--model",
        str(tmp_path / "model"),
    )
    status, out, _ = run(capsys, config, *words)
    assert status == 0
    assert "16 ranks: pipe=2 x data=4 x model=2" in out
    for line in (
        r"data x seq +\[1, 3, 5, 7\]",
        r"dense full +data x seq \[1, 3 \.\.\. 7\] +4 +\[1, 3 \.\.\. 7\] +\[0, 2 \.\.\. 6\]",
        r"pipe +send +3 +3072 B +activations to the next stage",
        r"model +all_reduce +6 +6144 B +forward of layers that are cut",
        r"bytes on each rank, with ZeRO 1",
    ):
        assert re.search(line, out), line
    assert max(map(len, out.splitlines())) <= 100
    assert "told for a model" in run(capsys, config, "--world", "4")[1]


def test_the_command_says_what_initialize_would_say(capsys: Any, tmp_path: Path) -> None:
    status, out, err = run(capsys, written(tmp_path, config_of(**TP)), "--world", "6", "--stages", "2")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith("error: world size 6 is not divisible by 2 stages * 2 tensor-parallel ranks;")
    assert not ds_lite.comm.is_initialized(), "control: no process group"
