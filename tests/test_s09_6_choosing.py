"""§9.6 What to use when. Guards against: estimates that are not what `explain` counts, a layout that does not
exist, a choice that something else beats, an axis that is used without a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ds_lite.choosing import (
    Layout,
    Machine,
    Model,
    choose,
    estimate,
    layouts,
    rank_parameters,
    ranked,
    reasons,
    sending,
    stored,
)

MACHINE = Machine(gpus_per_node=8, memory=72 * 2**30, flops=5e14, inside=4.5e11, between=5e10)
LLAMA_7B = Model("Llama 7B", 4096, 11008, 32, 32, 32, 32000)
LLAMA_70B = Model("Llama 70B", 8192, 28672, 80, 64, 8, 128256)
MIXTRAL = Model("Mixtral", 4096, 14336, 32, 32, 8, 32000, experts=8, choices=2)
SMALL = Model("small", 64, 160, 4, 8, 4, 96)
TOKENS, SEQUENCES = 64, 8


@pytest.mark.parametrize(
    "model,billions",
    [(LLAMA_7B, 6.74), (LLAMA_70B, 70.5), (MIXTRAL, 46.7)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_parameters_are_those_that_are_published(model: Model, billions: float) -> None:
    """Of the models' cards, in 10^9."""
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.002)


# ----------------------------------------------------------------------------------- the same as `explain`


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=SMALL.width,
        intermediate_size=SMALL.inner,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        vocab_size=SMALL.vocabulary,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def explained(llama: Any, layout: Layout) -> Any:
    from ds_lite.explain import explain

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SEQUENCES // layout.dp,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": layout.zero},
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.sp > 1:
        config["sequence_parallel_size"] = layout.sp
    stages = layout.pp if layout.pp > 1 else None
    return explain(config, layout.world, llama, num_stages=stages, tokens=TOKENS)


CASES = [
    Layout(dp=4, zero=0),
    Layout(dp=4, zero=1),
    Layout(tp=4),
    Layout(dp=2, tp=2),
    Layout(sp=2),
    Layout(pp=2, dp=2, tp=2),
    Layout(pp=2, sp=2),
]


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_stored_bytes_are_those_of_explain(llama: Any, layout: Layout) -> None:
    """Of the first stage; norms are not counted here."""
    said = explained(llama, layout).stored[0, 0]
    assert stored(SMALL, layout) == pytest.approx(said.total, rel=0.02)


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_sent_bytes_are_those_of_explain(llama: Any, layout: Layout) -> None:
    """On a link of one byte a second the seconds of an axis are its bytes."""
    unit = dataclasses.replace(MACHINE, inside=1.0, between=1.0)
    ours = sending(SMALL, layout, unit, TOKENS, SEQUENCES // layout.dp)
    said = dict.fromkeys(ours, 0.0)
    replicas = layout.dp * layout.sp
    for row in explained(llama, layout).traffic:
        if row.payload < 8 * TOKENS * SEQUENCES or "head" in row.operation:
            continue  # flags, losses and descriptions
        if row.axis == "pipe":
            said["pp"] += row.payload - (layout.sp > 1) * row.calls // 2 * 8 * TOKENS * ("act" in row.what)
        elif row.axis == "model":
            said["tp"] += 2 * row.payload * (layout.tp - 1) / layout.tp
        elif row.operation == "all_to_all":
            said["sp"] += row.payload  # what leaves
        else:
            said["dp"] += row.payload * (1 + (row.operation == "all_reduce")) * (replicas - 1) / replicas
    assert set(said) == {axis for axis, size in ours.items() if size}
    for axis, size in ours.items():
        assert size == pytest.approx(said[axis], rel=0.03), axis


# ------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("model", [LLAMA_7B, LLAMA_70B, MIXTRAL], ids=lambda model: model.name)
@pytest.mark.parametrize("world", [8, 64])
def test_every_layout_is_legal(model: Model, world: int) -> None:
    found = list(layouts(model, world, 256))
    assert len(set(found)) == len(found) > 20
    for one in found:
        assert one.world == world and 256 % one.dp == 0 and model.layers % one.pp == 0
        assert model.kv_heads % (one.tp * one.sp) == 0 and (one.dp * one.sp) % one.ep == 0
        assert one.zero == 1 or one.pp == 1


def test_nothing_that_fits_is_much_faster_than_the_choice() -> None:
    best = choose(LLAMA_70B, 64, MACHINE, 8192, 512)
    assert best.memory <= MACHINE.memory
    for one in layouts(LLAMA_70B, 64, 512):
        other = estimate(LLAMA_70B, one, MACHINE, 8192, 512)
        if other.memory <= MACHINE.memory:
            assert best.seconds <= 1.03 * other.seconds
            assert (
                best.layout.axes <= one.axes
                or other.seconds > 1.03 * ranked(LLAMA_70B, 64, MACHINE, 8192, 512)[0].seconds
            )


def test_what_is_known_comes_out() -> None:
    """Small models need replicas only, large ones all three axes, long sequences theirs."""
    assert str(choose(LLAMA_7B, 8, MACHINE, 4096, 256).layout) == "dp8, ZeRO-1"
    large = choose(LLAMA_70B, 512, MACHINE, 8192, 512).layout
    assert min(large.pp, large.dp) > 1 and large.tp * large.sp > 1
    assert choose(LLAMA_7B, 64, MACHINE, 131072, 64).layout.sp >= 8
    slow = dataclasses.replace(MACHINE, inside=2e9, between=1e9)
    assert choose(LLAMA_7B, 8, slow, 4096, 256).layout.tp == 1, "tensor parallelism needs a fast link"


def test_each_axis_in_use_has_a_reason() -> None:
    best = choose(LLAMA_70B, 64, MACHINE, 8192, 512)
    said = reasons(best, LLAMA_70B, MACHINE, 8192, 512)
    assert set(said) == {axis for axis in ("pp", "dp", "sp", "tp", "ep") if getattr(best.layout, axis) > 1}
    assert all(words.endswith("times the time") or "does not fit" in words for words in said.values())


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    with pytest.raises(
        ValueError, match=r"Llama 70B does not fit on 8 GPUs: every layout needs \d+ GiB or more of 72"
    ):
        choose(LLAMA_70B, 8, MACHINE, 8192, 512)
    with pytest.raises(ValueError, match="6 sequences do not divide by dp=4"):
        estimate(SMALL, Layout(dp=4), MACHINE, 64, 6)


def test_recomputing_costs_time_and_saves_memory() -> None:
    kept, again = (
        estimate(LLAMA_7B, Layout(dp=8, recomputes=flag), MACHINE, 4096, 256) for flag in (False, True)
    )
    assert again.activations < kept.activations / 5 and kept.compute < again.compute < 1.34 * kept.compute
    assert sum(rank_parameters(LLAMA_7B, Layout(dp=8))) == LLAMA_7B.parameters
