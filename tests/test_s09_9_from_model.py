"""§9.9 `PipelineModule.from_model`: models of transformers become pipelines and nothing else changes.

Guards against: a mask or a rotary table of another stage, a tie that is cut, a router's loss that is a sum of
the layers' losses, weights under other names, weights that a stage reads and does not need.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from rings import everyday
from tolerance import LAW, assert_close, differs

pytest.importorskip("transformers", reason="not proved here: pipelines of transformers' models")

from causal_models import MODELS, KeepWide, batches, loss_of, one_process, weights_of
from safetensors.torch import save_file

import ds_lite
from ds_lite.pipe import PipelineModule
from ds_lite.pipe.causal_lm import weights as weights_module
from ds_lite.tags import whole
from ds_lite.tensor_parallel import whole_model
from ds_lite.tensor_parallel.whole_model import parameters_on_meta

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


RARE = [CASES[number] for number in (2, 3, 7, 11, 12, 13)]


@pytest.mark.parametrize(
    "name, world_size, stages, tp, zero, ep", everyday(CASES, lambda case: case not in RARE)
)
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
    ("llama", 8, 2, 2, 0, 0, 2),
    ("mixtral", 8, 2, 2, 0, 2, 2),
]


@pytest.mark.parametrize(
    "name, world_size, stages, tp, zero, ep, sp",
    everyday(SPREAD, lambda case: case[1] == 4 and case[0] not in ("gpt2", "gemma2")),
)
def test_a_pipeline_over_sequences_equals_one_process(
    world: Any, name: str, world_size: int, stages: int, tp: int, zero: int, ep: int, sp: int
) -> None:
    world(equals_one_process, world_size, name, stages, tp, zero, ep, sp)


# ------------------------------------------------------------------------------------ weights in and out


def comes_from_a_folder(rank: int, name: str, folder: str, out: str, ep: int) -> int:
    """A model without values, filled from a folder, trains, and goes back under its own names."""
    with KeepWide():
        truth = MODELS[name].make(4, 2 if MODELS[name].kv else 4)
        with parameters_on_meta():
            empty = MODELS[name].make_empty(4, 2 if MODELS[name].kv else 4).double()
        read: list[str] = []
        with mock.patch.object(weights_module, "weights_by_name", _counting(read)):
            pipeline = PipelineModule.from_model(empty, num_stages=2, weights=folder)
        engine = ds_lite.initialize(model=pipeline, config=config_of(2, 2, ep=ep))[0]
        assert sorted(set(read)) == sorted(read), "each tensor is read once"
        dp = engine.grid.get_data_parallel_world_size()
        given = batches(2 * dp, 2, 7)
        loss = one_process(truth, given)
        assert_close(
            engine.train_batch(iter(given[2 * engine.grid.get_data_parallel_rank() :][:2])), loss, LAW, "loss"
        )
        engine.save_16bit_model(out, "model.bin")
        ds_lite.comm.barrier()
        with torch.no_grad():
            for weight in truth.parameters():
                weight -= LR * (0 if weight.grad is None else weight.grad)
        state = torch.load(f"{out}/model.bin", weights_only=True)
        wanted = truth.state_dict()
        assert set(state) == set(wanted)
        for key, value in wanted.items():
            assert_close(state[key], value, LAW, key)
        MODELS[name].make_empty(4, 2 if MODELS[name].kv else 4).double().load_state_dict(state)
    return len(read)


def _counting(read: list[str]) -> Any:
    def weights_by_name(source: Any) -> Any:
        get, known = whole_model.weights_by_name(source)

        def counted(name: str) -> Any:
            read.append(name)
            return get(name)

        return counted, known

    return weights_by_name


@pytest.mark.parametrize("name, world_size, ep", [("llama tied", 2, 0), ("gpt2", 2, 0), ("mixtral", 4, 2)])
def test_weights_come_from_a_folder_and_go_back(
    world: Any, tmp_path: Any, name: str, world_size: int, ep: int
) -> None:
    model = MODELS[name].make(4, 2 if MODELS[name].kv else 4)
    total = len(list(model.parameters()))
    (tmp_path / "in").mkdir()
    save_file(dict(model.named_parameters()), tmp_path / "in" / "model.safetensors")
    counts = world(comes_from_a_folder, world_size, name, str(tmp_path / "in"), str(tmp_path / "out"), ep)
    assert max(counts) < total, "a stage reads its own tensors"


def refusals(rank: int) -> None:
    import transformers

    llama = MODELS["llama"]
    with parameters_on_meta():
        empty = llama.make_empty(4, 2)
    with pytest.raises(ValueError, match=r"parameters of this stage have no values.*weights="):
        PipelineModule.from_model(empty, num_stages=1)
    with torch.device("meta"):
        nothing = llama.make_empty(4, 2)
    with pytest.raises(ValueError, match=r"buffers .* have no values.*parameters_on_meta"):
        PipelineModule.from_model(nothing, num_stages=1)
    with pytest.raises(ValueError, match="cannot cut Linear into layers: it has no base model with a head"):
        PipelineModule.from_model(torch.nn.Linear(2, 2), num_stages=1)
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
        )
    )
    with pytest.raises(ValueError, match="cannot cut BertModel into layers"):
        PipelineModule.from_model(bert, num_stages=1)
    with pytest.raises(ValueError, match="not divisible by num_stages=9"):
        PipelineModule.from_model(llama.make(4, 2), num_stages=9)
    engine = ds_lite.initialize(
        model=PipelineModule.from_model(llama.make(4, 2), num_stages=1), config=config_of(1, 2)
    )[0]
    ids = batches(1, 2, 7)[0]["input_ids"]
    for batch, words in (
        ({"input_ids": ids, "labels": ids, "token_type_ids": ids}, r"a batch has \['token_type_ids'\]"),
        ({"input_ids": ids}, "a batch has no labels"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.compute_gradients(iter([batch]))


def test_what_is_no_pipeline_of_a_model_is_refused(world: Any) -> None:
    world(refusals, 1)


# -------------------------------------------------------------------------------- from layout to layout


def one_step(rank: int, name: str, folder: str, layout: dict[str, int], step: int) -> float:
    """Resume from the folder if there is a step before, train one batch, save."""
    with KeepWide():
        options = {key: value for key, value in layout.items() if key != "stages"}
        model = MODELS[name].make(4, 2 if MODELS[name].kv else 4)
        pipeline = PipelineModule.from_model(model, num_stages=layout["stages"])
        dp = ds_lite.comm.get_world_size() // layout["stages"] // options.get("tp", 1) // options.get("sp", 1)
        engine = ds_lite.initialize(model=pipeline, config=config_of(4 // dp, 2, **options))[0]
        if step:
            engine.load_checkpoint(folder)
        given = batches(4, 2, 7, seed=step)
        mine = given[4 // dp * engine.grid.get_data_parallel_rank() :][: 4 // dp]
        loss = float(engine.train_batch(iter(mine)))
        engine.save_checkpoint(folder)
        return loss


@pytest.mark.parametrize(
    "name, layouts",
    [
        (
            "llama tied",
            [(2, {"stages": 2}), (4, {"stages": 1, "tp": 2, "zero": 1}), (2, {"stages": 1, "sp": 2})],
        ),
        (
            "mixtral",
            [(4, {"stages": 2, "ep": 2}), (2, {"stages": 1, "ep": 1, "tp": 2}), (4, {"stages": 1, "ep": 4})],
        ),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    world: Any, tmp_path: Any, name: str, layouts: list[Any]
) -> None:
    with KeepWide():
        truth = MODELS[name].make(4, 2 if MODELS[name].kv else 4)
        losses = []
        for step in range(len(layouts)):
            truth.zero_grad()
            losses.append(float(one_process(truth, batches(4, 2, 7, seed=step))))
            with torch.no_grad():
                for weight in truth.parameters():
                    weight -= LR * (0 if weight.grad is None else weight.grad)
    for step, (world_size, layout) in enumerate(layouts):
        found = world(one_step, world_size, name, str(tmp_path), layout, step)
        assert found == pytest.approx([losses[step]] * world_size, abs=1e-9), f"step {step} in {layout}"
    assert len(set(losses)) == len(losses), "control: every step has another loss"


def evaluates(rank: int, name: str) -> None:
    with KeepWide():
        truth, model = (MODELS[name].make(4, 2 if MODELS[name].kv else 4) for _ in range(2))
        pipeline = PipelineModule.from_model(model, num_stages=2)
        engine = ds_lite.initialize(model=pipeline, config=config_of(2, 2))[0]
        given = batches(2, 2, 7)
        with torch.no_grad():
            losses = [loss_of(truth, batch) for batch in given]
            ids, mask = given[-1]["input_ids"], given[-1]["attention_mask"]
            wanted = truth(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss, logits = engine.eval_batch(iter(given), return_logits=True)
        assert_close(loss, torch.stack(losses).mean(), LAW, "the loss")
        assert (logits is None) == (rank == 0)
        if logits is not None:
            assert_close(logits, wanted, LAW, "the logits of the last micro-batch")


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_evaluation_gives_the_model_s_loss_and_logits(world: Any, name: str) -> None:
    world(evaluates, 2, name)
