"""§9.14 What scripts of DeepSpeed's sequence parallelism call: the names, and the loss they compute.

Guards against: a script whose registration, groups or loader do nothing here, a loss over ranks whose
gradient is off by sp, token losses in another order than the tokens.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from families import KeepWide
from sequence_models import BATCH, MODELS, one_process, tokens
from shard_checks import groups_of, my_group, pattern
from tolerance import EXACT, LAW, assert_close, differs
from torch.nn import functional as F

import ds_lite
from ds_lite import comm
from ds_lite.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from ds_lite.sequence.data import Part
from ds_lite.sequence.groups import initialize_sequence_parallel
from ds_lite.sequence.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

pytestmark = pytest.mark.xdist_group("sequence")

F64 = torch.float64

# ------------------------------------------------------------------------------------------- cross entropy


def spread_losses(rank: int) -> None:
    """Five tokens on two ranks, three of them here; also where the vocabulary is cut over the other pair."""
    for group in groups_of():
        me = comm.get_rank(group)
        logits, target = pattern(5, 2, 7), torch.tensor([[0, 6], [3, -100], [2, 2], [-100, 5], [1, 4]])
        part = Part((3, 2), me)
        own, truth = part.of(logits, 0).clone().requires_grad_(), logits.clone().requires_grad_()
        losses = vocab_sequence_parallel_cross_entropy(own, part.of(target, 0), group)
        wanted = F.cross_entropy(truth.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
        assert_close(losses.detach(), wanted.detach(), LAW, "losses")
        weights = pattern(5, 2, seed=3)
        (losses * weights).sum().backward()
        (wanted * weights).sum().backward()
        assert own.grad is not None and truth.grad is not None
        assert_close(own.grad, 2 * part.of(truth.grad, 0), LAW, "sp times: the engine takes the mean")
        assert differs(own.grad, part.of(truth.grad, 0)), "control"
        total = vocab_sequence_parallel_cross_entropy(
            own, part.of(target, 0), group, reduction="mean", gather_sequence_loss=False
        )
        comm.all_reduce(total := total.detach(), group=group)
        assert_close(total / 2, F.cross_entropy(logits.flatten(0, 1), target.flatten()), LAW, "not gathered")
        with pytest.raises(ValueError, match="reduction='sum' leaves no token losses to gather"):
            vocab_sequence_parallel_cross_entropy(own, part.of(target, 0), group, reduction="sum")


def both_cut(rank: int) -> None:
    """Tokens over one pair of ranks, the vocabulary over the other."""
    sp, tp = my_group([[0, 2], [1, 3]], "seq"), my_group([[0, 1], [2, 3]])
    part, ids = Part((2, 3), comm.get_rank(sp)), Part((4, 3), comm.get_rank(tp))
    logits, target = pattern(5, 2, 7), torch.tensor([[0, 6], [3, -100], [2, 2], [-100, 5], [1, 4]])
    own = ids.of(part.of(logits, 0), 2).contiguous()
    losses = vocab_sequence_parallel_cross_entropy(own, part.of(target, 0), sp, tp)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    assert_close(losses, wanted, LAW)


def test_every_rank_gets_the_loss_of_every_token(world: Any) -> None:
    world(spread_losses, 4)


def test_tokens_and_vocabulary_may_both_be_cut(world: Any) -> None:
    world(both_cut, 4)


# ------------------------------------------------------------------------------------------------- scripts


def tutorial(rank: int, zero: int) -> None:
    """Register, initialize with the groups, wrap the loader, weigh the ranks' losses by hand."""
    with KeepWide():
        truth, model = MODELS["qwen2"].make(6, 3), MODELS["qwen2"].make(6, 3)
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=2,
            micro_batch_size=BATCH,
            seq_length_is_variable=True,
        )
        assert mpu is not None
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": zero},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        engine = ds_lite.initialize(config=config, model=model, mpu=mpu)[0]
        group, me = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
        batches = [tokens(7 + i, 9) for i in range(2)]
        here = batches[mpu.get_data_parallel_rank() : mpu.get_data_parallel_rank() + 1]
        (batch,) = UlyssesSPDataLoaderAdapter(here, me, group, 2)
        logits = engine(**batch).logits
        labels = batch["shift_labels"]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # torch's all_gather would do, but on gloo its backward knows global ranks only (report B31)
        whole = torch.distributed.nn.functional.all_reduce(total, group=group)  # type: ignore[attr-defined]
        count = (labels != -100).sum()
        comm.all_reduce(count, group=group)
        loss = whole / count
        truths = [one_process(MODELS["qwen2"], truth, batch)[0] for batch in batches]
        assert_close(loss.detach(), truths[mpu.get_data_parallel_rank()].detach(), LAW, "loss")
        (sum(truths) / 2).backward()  # type: ignore[union-attr]
        engine.backward(loss)
        for key, weight in truth.named_parameters():
            assert_close(engine.gradients.full(key), weight.grad, LAW, key)
        engine.step()


@pytest.mark.parametrize("zero", [0, 2])
def test_a_script_of_the_tutorial(world: Any, zero: int) -> None:
    world(tutorial, 4, zero)


def by_mesh(rank: int) -> None:
    config = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = MODELS["llama"].make(4, 4)
    engine = ds_lite.initialize(model=model, config=config, mesh_param=(2, 2))[0]
    assert (engine.grid.size("data"), engine.grid.size("seq")) == (2, 2)
    assert engine.sequence is not None
    for mesh, more, words in (
        ((2,), {}, r"mesh_param=\(2,\) is not \(data-parallel size, sequence-parallel size\)"),
        ((2, 2), {"sequence_parallel_size": 4}, r"mesh_param=\(2, 2\), but the config has .*size=4"),
        ((4, 2), {}, r"data_parallel_size=4 in the config, but the ranks form 2 replicas"),
    ):
        with pytest.raises(ValueError, match=words):
            ds_lite.initialize(model=MODELS["llama"].make(4, 4), config={**config, **more}, mesh_param=mesh)


def test_a_mesh_of_data_and_sequence_ranks(world: Any) -> None:
    world(by_mesh, 4)


def registration(rank: int) -> None:
    model = MODELS["llama"].make(4, 4)
    register = UlyssesSPAttentionHF.register_with_transformers
    assert register(model, "sdpa", 1, 1) is None
    with pytest.raises(ValueError, match="'flash_attention_2' cannot be exchanged; choose from eager, sdpa"):
        register(model, "flash_attention_2", 2, 1)
    with pytest.raises(ValueError, match="'eager', but the model uses 'sdpa'"):
        register(model, "eager", 2, 1)
    with pytest.raises(ValueError, match="disable_in_eval=True is not yet built"):
        register(model, "sdpa", 2, 1, disable_in_eval=True)
    with pytest.raises(ValueError, match="sequence_parallel_size=3 does not divide 2 processes"):
        initialize_sequence_parallel(3)


def test_a_registration_that_cannot_be_kept_is_refused(world: Any) -> None:
    world(registration, 2)


PATHS = {
    "sequence.layer": ["DistributedAttention", "single_all_to_all", "uneven_heads_all2all", "_SeqAllToAll"],
    "sequence.cross_entropy": ["vocab_sequence_parallel_cross_entropy", "vocab_parallel_cross_entropy"],
    "sequence.auto_sp": ["auto_wrap_model_for_sp"],
    "sequence.fpdt_layer": ["FPDT_InputConstruct", "FPDT_Attention", "FPDT_FFN", "FPDT_LogitsLoss"],
    "runtime.sequence_parallel.parallel_state_sp": ["initialize_sequence_parallel"],
    "runtime.sequence_parallel.ulysses_sp": [
        "UlyssesSPAttentionHF",
        "UlyssesSPDataLoaderAdapter",
        "TiledMLP",
        "TiledFusedLogitsLoss",
        "sequence_tiled_compute",
    ],
}


@pytest.mark.parametrize("path", PATHS)
def test_deepspeeds_paths_lead_here(path: str) -> None:
    module = importlib.import_module(f"ds_lite.{path}")
    assert [name for name in PATHS[path] if not hasattr(module, name)] == []


def test_control_a_script_without_groups_spreads_nothing() -> None:
    with comm.record() as ledger:
        losses = vocab_sequence_parallel_cross_entropy(pattern(2, 1, 3), torch.tensor([[0], [1]]), None)
    assert ledger.total().calls == 0
    assert_close(losses[:, 0], F.cross_entropy(pattern(2, 3), torch.tensor([0, 1]), reduction="none"), LAW)
    assert_close(losses, losses, EXACT)
