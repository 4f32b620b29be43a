"""§9.13 AutoTP on transformers' architectures equals the uncut model: logits and every gradient, in float64.

Guards against: a layer that is cut alone, heads that change places, fused weights mixed, gradients of norms
and shared heads that are parts, one all-reduce too many or too few.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from families import FAMILIES, REFUSED, KeepWide, loss_of
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor

import ds_lite
from ds_lite import comm
from ds_lite.tensor_parallel.fused_layer import SharedQueryKeyValue
from ds_lite.tensor_parallel.fused_qkv import put_back
from ds_lite.tensor_parallel.policy import make_plan
from ds_lite.tensor_parallel.whole_model import gather_state_dict

pytest.importorskip("transformers", reason="not proved here: AutoTP on transformers' models; pip install it")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
pytestmark = pytest.mark.xdist_group("autotp")

SETTINGS = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    """Every gradient as the uncut model has it."""
    full = engine.gradients.full
    modules = dict(engine.module.named_modules())
    found = {}
    for name in engine.gradients.names():
        path, _, key = name.rpartition(".")
        module = modules[path]
        if not isinstance(module, SharedQueryKeyValue):
            found[name] = full(name)
        elif key in ("weight", "bias"):
            dim = module.out_dim if key == "weight" else 0
            parts = [full(name), full(f"{path}.kv_{key}")]
            found[name] = put_back(parts, module._rows_of_kinds(), dim)
    return found


def equals_the_uncut_model(rank: int, name: str, heads: int, kv_heads: int, tp: int) -> None:
    family = FAMILIES[name]
    truth, model, inputs = family.make(heads, kv_heads), family.make(heads, kv_heads), family.inputs()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = {**SETTINGS, "tensor_parallel": {"autotp_size": tp}}
    engine = ds_lite.initialize(model=model, config=config)[0]
    model.eval()
    for key, value in gather_state_dict(model).items():
        assert_close(value, before[key], EXACT, f"{key} after cut and gather")
    with KeepWide():
        wanted = truth(**inputs).logits
        loss_of(wanted).backward()
        with comm.record() as forward:
            logits = model(**inputs).logits
        with comm.record() as backward:
            loss_of(logits).backward()
        model.zero_grad()
        engine.backward(loss_of(engine(**inputs).logits))
    assert_close(logits, wanted, LAW, "logits")
    calls, wanted_calls = (forward.total().calls, backward.total().calls), (family.forward, family.backward)
    assert calls == wanted_calls, f"{calls} all-reduces forward and backward, {wanted_calls} wanted"
    gradients = {key: value for key, value in whole_gradients(engine).items() if value is not None}
    for key, weight in truth.named_parameters():
        wanted_gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert_close(gradients.pop(key, torch.zeros_like(weight)), wanted_gradient, LAW, f"gradient of {key}")
    assert not gradients
    with KeepWide(), mock.patch.object(comm, "all_reduce", lambda *args, **named: None):
        assert differs(model(**inputs).logits, wanted), "control: without the sums"


# Two ranks: six heads, and three key and value heads where a family has fewer: whole groups, uneven.
# Four ranks: eight heads and two key and value heads, which pairs of ranks share; or six heads, 2, 2, 1, 1.
TWO = [(name, 8 if name == "codegen" else 6, 3, 2) for name in FAMILIES]
FOUR = [(name, 16 if name == "codegen" else 8 if family.kv else 6, 2, 4) for name, family in FAMILIES.items()]
NO_SHARED_ROWS = ("cohere",)  # its norms have a row for each key and value head


# One family for each mechanism; the others with --full.
QUICK = ("llama", "phi3", "gpt2", "bloom", "falcon_new", "gpt_bigcode", "mixtral", "t5")


def cases() -> list[Any]:
    rest = [case for case in FOUR if case[0] not in (*QUICK, *NO_SHARED_ROWS)]
    quick = [*TWO, *(case for case in FOUR if case[0] in QUICK)]
    return [
        *(pytest.param(*case, id=f"{case[0]}-{case[3]}") for case in quick),
        *(pytest.param(*case, id=f"{case[0]}-{case[3]}", marks=pytest.mark.full) for case in rest),
    ]


@pytest.mark.parametrize("name, heads, kv_heads, tp", cases())
def test_a_cut_model_equals_the_whole_one(world: Any, name: str, heads: int, kv_heads: int, tp: int) -> None:
    world(equals_the_uncut_model, tp, name, heads, kv_heads, tp)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_reason(name: str) -> None:
    model = REFUSED[name].make(6, 6)
    with pytest.raises(ValueError, match=REFUSED[name].refused) as refusal:
        make_plan(model, 2)
    assert "partition_config" in str(refusal.value) and "§9.13" in str(refusal.value)


def test_rows_shared_by_ranks_cannot_be_normalised_head_by_head() -> None:
    with pytest.raises(ValueError, match=r"k_norm has a row for each of 2 key and value heads.*at most 2"):
        make_plan(FAMILIES["cohere"].make(8, 2), 4)


def test_the_recorded_comparison_names_every_family() -> None:
    """`docs/data/autotp.json` is made by labs/bench/autotp.py, which runs DeepSpeed on the same models."""
    table = json.loads((Path(__file__).parents[1] / "docs/data/autotp.json").read_text(encoding="utf-8"))
    assert set(table["families"]) == set(FAMILIES)
    for peer in ("ds_lite", "deepspeed"):
        verdicts = [row[peer]["verdict"] for row in table["families"].values()]
        assert table["counts"][peer] == {kind: verdicts.count(kind) for kind in ("same", "wrong", "refused")}
    assert table["counts"]["ds_lite"]["same"] == len(FAMILIES)
