"""§9.4 Checkpoints of experts: each once, under its global number, for any other ep_size.

Guards against: an expert that is missing, or saved by a rank that holds another one; optimizer states of the
wrong expert; a checkpoint that only its own layout can read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_s09_4_equality
import torch
from oracles import Truth, one_process, split_micro_batches
from saving_models import scratch_folder
from test_s09_4_equality import BATCH, EXPERTS, Case, loss_fn, make_batch, make_layers
from tolerance import EXACT, LAW, assert_close, differs

MICRO_BATCHES, BEFORE, AFTER, RATE = 4, 1, 2, 1e-3  # of all replicas; steps


def make(impl: Any, case: Case) -> Any:
    return impl.make_pipeline(
        make_layers(case.drop),
        num_stages=case.pp,
        loss_fn=loss_fn,
        num_micro_batches=MICRO_BATCHES // case.dp,
        micro_batch_size=BATCH,
        lr=RATE,
        optimizer="AdamW",
        config={"zero_optimization": {"stage": case.zero}},
        module={"partition_method": "uniform"},
        tensor_parallel=case.tp,
        expert_parallel=case.ep,
        expert_tensor_parallel=case.cut,
    )


def truth_after(steps: int) -> Truth:
    batch = make_batch(MICRO_BATCHES * (BEFORE + AFTER))[: MICRO_BATCHES * steps]
    return one_process(make_layers(True), loss_fn, batch, lr=RATE, optimizer="AdamW", steps=steps)


def train(pipeline: Any, case: Case, start: int, stop: int) -> None:
    """The steps start..stop-1 of the whole run."""
    batch = make_batch(MICRO_BATCHES * (BEFORE + AFTER))[MICRO_BATCHES * start : MICRO_BATCHES * stop]
    part = {"replica": pipeline.replica, "num_replicas": case.dp, "steps": stop - start}
    data = iter(split_micro_batches(batch, **part))
    for _ in range(stop - start):
        pipeline.train_batch(data)


def save(rank: int, impl: Any, case: Case, folder: str) -> None:
    pipeline = make(impl, case)
    train(pipeline, case, 0, BEFORE)
    pipeline.engine.save_checkpoint(folder, tag="moe")
    pipeline.engine.save_16bit_model(folder, "whole.bin")


def go_on(rank: int, impl: Any, case: Case, folder: str, saved: Truth, end: Truth) -> None:
    pipeline = make(impl, case)
    assert any(differs(w, saved.weights[name]) for name, w in pipeline.weights().items())
    pipeline.engine.load_checkpoint(folder)
    for name, weight in pipeline.weights().items():
        assert_close(weight, saved.weights[name], LAW, f"{case}: {name} as loaded")
    train(pipeline, case, BEFORE, BEFORE + AFTER)
    for name, weight in pipeline.weights().items():
        assert_close(weight, end.weights[name], LAW, f"{case}: {name} at the end")


LOADERS = [Case(1, 1), Case(4, 4, zero=2), Case(2, 2, pp=2), Case(2, 2, 2, zero=1, cut=True)]


def test_saved_with_two_ranks_an_expert_group_and_loaded_with_one_and_four(world: Any, impl: Any) -> None:
    saved, end = truth_after(BEFORE), truth_after(BEFORE + AFTER)
    with scratch_folder() as folder:
        world(save, 2, impl, Case(2, 2, zero=1), folder)
        check_files(Path(folder), saved)
        for case in LOADERS:
            world(go_on, case.world_size, impl, case, folder, saved, end)


def check_files(folder: Path, saved: Truth) -> None:
    """Every expert once, beside two others or with its states; one file with everything for plain torch."""
    manifest = json.loads((folder / "moe" / "manifest.json").read_text())
    assert sorted(manifest["tensors"]) == sorted(saved.weights)
    names = [name for name in saved.weights if ".experts." in name]
    assert len(names) == 2 * EXPERTS * 4
    files = {name: manifest["tensors"][name]["file"] for name in names}
    assert len(set(files.values())) == 4 and all("experts" in file for file in files.values())
    assert manifest["tensors"]["2.mixture.gate.wg.weight"]["file"] == "layer_02-model_states.pt"
    assert sorted(manifest["optimizer"]) == sorted(saved.weights)
    whole = torch.load(folder / "whole.bin", weights_only=True)
    for name, weight in saved.weights.items():
        assert_close(whole[name], weight, LAW, name)


@pytest.mark.parametrize("case", [Case(2, 4, zero=1), Case(2, 2, 2)], ids=["dp4", "dp2-tp2"])
def test_a_run_goes_on_from_its_own_checkpoint(world: Any, impl: Any, case: Case) -> None:
    saved, end = truth_after(BEFORE), truth_after(BEFORE + AFTER)
    with scratch_folder() as folder:
        world(save, case.world_size, impl, case, folder)
        world(go_on, case.world_size, impl, case, folder, saved, end)


def load_into_more_experts(rank: int, impl: Any, folder: str) -> None:
    with mock.patch.object(test_s09_4_equality, "EXPERTS", 2 * EXPERTS):
        pipeline = make(impl, Case(2, 2, zero=1))
    before = pipeline.weights()
    try:
        pipeline.engine.load_checkpoint(folder, load_optimizer_states=False)
    finally:
        for name, weight in pipeline.weights().items():
            assert_close(weight, before[name], EXACT, name)


def test_another_number_of_experts_is_refused_on_every_rank(world: Any, impl: Any) -> None:
    with scratch_folder() as folder:
        world(save, 2, impl, Case(2, 2), folder)
        match = r"2\.mixture\.gate\.wg\.weight is \(4, 6\) .* and \(8, 6\)"
        world.raises(ValueError, match, load_into_more_experts, 2, impl, folder)
