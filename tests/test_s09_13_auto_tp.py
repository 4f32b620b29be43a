"""§9.13 AutoTP in use: through initialize with ZeRO, bf16 and checkpoints, and the reports B34, B35, A04,
A07.

Guards against: parameters that nobody trains, heads cut in the middle, a tie that breaks, a norm that counts
copies, a model that is cut twice, a rank that holds too much.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, KeepWide, loss_of
from meter import LiveStorages
from tolerance import BF16, EXACT, LAW, assert_close, differs
from torch import Tensor, nn

import ds_lite
from ds_lite import comm
from ds_lite.tags import cut_of, tags_of
from ds_lite.tensor_parallel.auto_tp import auto_tp, plan_of
from ds_lite.tensor_parallel.fused_layer import SharedQueryKeyValue
from ds_lite.tensor_parallel.policy import make_plan
from ds_lite.tensor_parallel.whole_model import (
    gather_state_dict,
    load_shards,
    parameters_on_meta,
    save_pretrained,
)

pytest.importorskip("transformers", reason="not proved here: AutoTP on transformers' models; pip install it")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
pytestmark = pytest.mark.xdist_group("autotp")

F64 = torch.float64
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def start(model: nn.Module, tp: int = 2, **config: Any) -> Any:
    settings = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": tp}, **config}
    if "optimizer" in settings and not isinstance(settings["optimizer"], dict):
        given = settings.pop("optimizer")
        return ds_lite.initialize(model=model, config=settings, optimizer=given)[0]
    return ds_lite.initialize(model=model, config={**SGD, **settings})[0]


# ------------------------------------------------------------------------------------- training with ZeRO


def trains_as_one_process(rank: int, name: str, zero: int, is_early: bool) -> None:
    """Two replicas of two ranks, two steps of two micro-batches, clipped; the optimizer before or after."""
    family = FAMILIES[name]
    truth, model = family.make(4, 2), family.make(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_early else SGD["optimizer"]
    engine = start(
        model,
        optimizer=optimizer,
        gradient_accumulation_steps=2,
        gradient_clipping=0.2,
        zero_optimization={"stage": zero},
    )
    model.eval()
    reference = torch.optim.SGD(truth.parameters(), lr=0.1)
    replica = engine.grid.coordinate("data")
    for step in range(2):
        batches = [family.inputs(seed=4 * step + number) for number in range(4)]
        with KeepWide():
            for inputs in batches:
                (loss_of(truth(**inputs).logits) / 4).backward()
            for inputs in batches[2 * replica : 2 * replica + 2]:
                engine.backward(loss_of(engine(**inputs).logits))
                engine.step()
        norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.2)
        assert norm > 0.2, "the test clips"
        assert_close(torch.tensor(engine.get_global_grad_norm(), dtype=F64), norm, LAW, "norm")
        before = {key: value.clone() for key, value in truth.state_dict().items()}
        reference.step()
        reference.zero_grad()
        weights = gather_state_dict(model)
        for key, value in truth.state_dict().items():
            assert_close(weights[key], value, LAW, f"step {step}: {key}")
        moved = [key for key in before if differs(before[key], truth.state_dict()[key])]
        assert len(moved) > 10, "control: the steps move the weights"


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name, is_early", [("qwen3", False), ("gpt_bigcode", False), ("gpt_bigcode", True)])
def test_a_cut_model_trains_as_one_process(world: Any, name: str, zero: int, is_early: bool) -> None:
    world(trains_as_one_process, 4, name, zero, is_early)


def low_precision(rank: int, zero: int) -> None:
    family = FAMILIES["llama"]
    truth, model = family.make(4, 2).bfloat16(), family.make(4, 2).float()
    engine = start(model, bf16={"enabled": True}, zero_optimization={"stage": zero})
    model.eval()
    inputs = family.inputs()
    logits = engine(**inputs).logits
    assert logits.dtype == torch.bfloat16
    assert_close(logits, truth(**inputs).logits, BF16)
    first = loss_of(logits)
    for _ in range(8):
        engine.backward(loss_of(engine(**inputs).logits))
        engine.step()
    assert loss_of(engine(**inputs).logits) < first - 0.1


@pytest.mark.parametrize("zero", [0, 2])
def test_a_cut_model_trains_in_bf16(world: Any, zero: int) -> None:
    world(low_precision, 2, zero)


# -------------------------------------------------------------------------------------- B34: the output layer


def tied_gpt2(vocabulary: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.GPT2LMHeadModel(config).double().eval()


def tie_holds(rank: int, vocabulary: int, vocab_parallel: bool) -> None:
    truth, model = tied_gpt2(vocabulary), tied_gpt2(vocabulary)
    block = {"autotp_size": 2, "vocab_parallel_lm_head": vocab_parallel}
    engine = start(model, tensor_parallel=block)
    model.eval()
    ids = torch.arange(6).view(2, 3) % vocabulary
    for step in range(2):
        assert model.lm_head.weight is model.transformer.wte.weight
        logits, wanted = engine(ids).logits, truth(ids).logits
        assert logits.shape == (2, 3, vocabulary)
        assert_close(logits, wanted, LAW, f"step {step}")
        engine.backward(loss_of(logits))
        truth.zero_grad()
        loss_of(wanted).backward()
        gradient = engine.gradients.full("transformer.wte.weight")
        assert_close(gradient, truth.transformer.wte.weight.grad, LAW, "both uses of the tied weight")
        engine.step()
        with torch.no_grad():
            for weight in truth.parameters():
                weight -= 0.1 * weight.grad
    held = (vocabulary + 1) // 2 if rank == 0 else vocabulary // 2
    assert model.lm_head.weight.shape[0] == (held if vocab_parallel else vocabulary)


@pytest.mark.parametrize("vocabulary, vocab_parallel", [(10, False), (10, True), (11, False), (11, True)])
def test_b34_a_tied_output_layer_stays_tied(world: Any, vocabulary: int, vocab_parallel: bool) -> None:
    world(tie_holds, 2, vocabulary, vocab_parallel)


class Scores(nn.Module):
    """Logits that are the columns of a weight, for the loss of the report."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.lm_head = nn.Linear(1, 4, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(0.5)
            self.last.weight.fill_(1.0)
            self.lm_head.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.last(self.first(x)))


def loss_of_b34(rank: int, vocab_parallel: bool) -> list[float]:
    block = {"autotp_size": 2, "vocab_parallel_lm_head": vocab_parallel}
    engine = start(Scores().double(), tensor_parallel=block)
    logits = engine(torch.ones(1, 1, dtype=F64))
    losses = [nn.functional.cross_entropy(logits, torch.tensor([target])) for target in (2, 0, 3)]
    shard = nn.functional.cross_entropy(logits[:, 2:], torch.tensor([0]))
    return [round(float(loss), 4) for loss in (*losses, shard)]


@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_b34_the_loss_of_the_report(world: Any, vocab_parallel: bool) -> None:
    assert world(loss_of_b34, 2, vocab_parallel) == [[1.4402, 3.4402, 0.4402, 1.3133]] * 2


# -------------------------------------------------------------------------------- B35: key and value heads


def heads_of_b35(rank: int, heads: int, kv_heads: int, width: int) -> dict[str, tuple[int, ...]]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=heads * width,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    model = transformers.LlamaForCausalLM(config).double()
    engine = start(model, tp=comm.get_world_size())
    attention = engine.module.model.layers[0].self_attn
    return {key: tuple(getattr(attention, f"{key}_proj").weight.shape) for key in ("q", "k", "v", "o")} | {
        "groups": (attention.num_key_value_groups,)
    }


def test_b35_shapes_of_the_report(world: Any) -> None:
    shapes = {"q": (4, 8), "k": (2, 8), "v": (2, 8), "o": (8, 4), "groups": (2,)}
    assert world(heads_of_b35, 2, 4, 2, 2) == [shapes] * 2
    shared = {"q": (2, 8), "k": (4, 8), "v": (4, 8), "o": (8, 2), "groups": (1,)}
    assert world(heads_of_b35, 4, 4, 2, 2) == [shared] * 4, "kv rows whole on each rank, one head used"


def test_b35_three_heads_are_dealt_two_and_one(world: Any) -> None:
    first, second = world(heads_of_b35, 2, 3, 3, 4)
    assert (first["q"], first["o"]) == ((8, 12), (12, 8)) and (second["q"], second["o"]) == ((4, 12), (12, 4))


@pytest.mark.parametrize(
    "heads, kv_heads, tp, match",
    [
        (2, 2, 4, r"degree 4 does not fit num_heads=2: each rank needs a query head"),
        (12, 3, 4, r"degree 4 cannot share num_kv_heads=3 evenly"),
    ],
)
def test_b35_a_cut_inside_a_group_is_refused(heads: int, kv_heads: int, tp: int, match: str) -> None:
    model = FAMILIES["llama"].make(heads, kv_heads)
    with pytest.raises(ValueError, match=match):
        make_plan(model, tp)


def test_a_degree_above_the_columns_of_an_mlp_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4))
    with pytest.raises(ValueError, match=r"2 columns for 4 tensor-parallel ranks.*at most 2 \(§9.13\)"):
        make_plan(model, 4)


# ----------------------------------------------------------------------------------- A04 and A07, and calls


def every_parameter_moves(rank: int, name: str) -> None:
    model = FAMILIES[name].make(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine = start(model, optimizer=optimizer)
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    engine.backward(loss_of(engine(**FAMILIES[name].inputs()).logits))
    engine.step()
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert all(id(weight) in held for weight in model.parameters())
    still = [key for key, weight in model.named_parameters() if torch.equal(weight, before[key])]
    assert not still
    assert any(isinstance(module, SharedQueryKeyValue) for module in model.modules()) == (name != "llama")


@pytest.mark.parametrize("name", ["llama", "gpt_bigcode"])
def test_a04_an_optimizer_that_came_first_trains_every_live_parameter(world: Any, name: str) -> None:
    world(every_parameter_moves, 2, name)


def different_data(rank: int) -> None:
    family = FAMILIES["llama"]
    engine = start(family.make(4, 2))
    engine(**family.inputs(seed=rank))


def test_a07_different_data_is_an_error_on_every_rank(world: Any) -> None:
    world.raises(ValueError, "differ", different_data, 2)


def called_in_every_way(rank: int) -> None:
    family = FAMILIES["llama"]
    model = ds_lite.tp_model_init(family.make(4, 2), 2, F64)
    names = [key for key, _ in model.named_parameters()]
    plan = plan_of(model)
    assert plan is not None and plan.ranks == 2
    again = ds_lite.tp_model_init(model, tp_size=2)
    assert again is model and plan_of(model) is plan, "a second time changes nothing"
    engine = ds_lite.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, **SGD})[0]
    assert comm.get_world_size(engine.grid.group("model")) == 2, "the model brings its degree along"
    assert [key for key, _ in model.named_parameters()] == names
    truth = family.make(4, 2)
    with KeepWide():
        assert_close(engine(**family.inputs()).logits, truth(**family.inputs()).logits, LAW)
    with pytest.raises(ValueError, match=r"asks for 1 ranks, but tp_model_init has cut the model for 2"):
        start(model, tp=1, tensor_parallel={"tp_size": 1})


def test_both_entries_lead_to_one_cut(world: Any) -> None:
    world(called_in_every_way, 2)


def another_degree(rank: int) -> None:
    groups = [comm.new_group(ranks, "model") for ranks in ([0, 1], [2, 3], [0, 1, 2, 3])]
    model = FAMILIES["llama"].make(4, 2)
    auto_tp(model, groups[rank // 2])
    auto_tp(model, groups[2])


def test_another_degree_is_refused(world: Any) -> None:
    world.raises(
        ValueError, r"was cut for 2 tensor-parallel ranks already and cannot be cut for 4", another_degree, 4
    )


# --------------------------------------------------------------------------------------------- real configs

LLAMA_FACTORY = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "tensor_parallel": {"autotp_size": 2},
}


def with_file(rank: int, path: str) -> float:
    import transformers  # noqa: F401

    family = FAMILIES["llama"]
    model = family.make(4, 2, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ds_lite.initialize(model=model, config=path, optimizer=optimizer)[0]
    losses = []
    for _ in range(6):
        loss = loss_of(engine(**family.inputs()).logits.float())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses[-1] - losses[0]


def test_a_config_of_a_trainer_runs_once_its_autos_are_replaced(world: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds_z2_autotp_config.json"
    path.write_text(json.dumps(LLAMA_FACTORY))
    autos = (
        "train_batch_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
    )
    messages = world.raises(ValueError, "auto", with_file, 4, str(path))
    assert all(name in message for name in autos for message in messages)
    filled = {**LLAMA_FACTORY, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    filled |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    filled["fp16"] = {**LLAMA_FACTORY["fp16"], "enabled": False}
    path.write_text(json.dumps(filled))
    assert all(change < 0 for change in world(with_file, 4, str(path)))


# -------------------------------------------------------------------------------------- memory, speed, files


def what_a_rank_holds(rank: int, name: str) -> tuple[int, int, int]:
    """Numbers of this rank's parameters, of the whole ones that are cut, and of those that are not."""
    model = FAMILIES[name].make(4, 4)
    auto_tp(model, comm.new_group(list(range(comm.get_world_size())), "model"))
    cut = [how.whole_shape(p.shape) for p in model.parameters() if (how := cut_of(p)) is not None]
    whole = sum(p.numel() for p in model.parameters() if cut_of(p) is None)
    return sum(p.numel() for p in model.parameters()), sum(torch.Size(s).numel() for s in cut), whole


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral", "t5"])
def test_a_rank_holds_its_share_and_what_is_replicated(world: Any, name: str) -> None:
    for held, cut, whole in world(what_a_rank_holds, 2, name):
        assert held == cut // 2 + whole and cut > whole


def sharded_without_a_whole_model(rank: int, folder: str) -> tuple[float, float, float]:
    """Bytes at the peak, of this rank's part, and of the largest whole weight."""
    family = FAMILIES["gpt_bigcode"]
    group = comm.new_group([0, 1], "model")
    truth = family.make(6, 1)
    if rank == 0:
        truth.save_pretrained(folder)
    comm.barrier()
    with parameters_on_meta():
        model = family.make_empty(6, 1)
    assert all(weight.is_meta for weight in model.parameters())
    auto_tp(model, group)
    with LiveStorages() as meter:
        load_shards(model, folder, dtype=F64)
    assert not any(weight.is_meta for weight in model.parameters())
    inputs = family.inputs()
    with KeepWide():
        assert_close(model(**inputs).logits, truth(**inputs).logits, LAW)
    for key, value in gather_state_dict(model).items():
        assert_close(value, truth.state_dict()[key], EXACT, key)
    parts = {id(weight): weight.numel() * weight.element_size() for weight in model.parameters()}
    largest = max(weight.numel() * weight.element_size() for weight in truth.parameters())
    assert {tags_of(weight).model for weight in model.parameters()} == {"sharded", "full", "partial"}
    return meter.peak, sum(parts.values()), largest


def test_a_rank_never_holds_more_than_its_part_and_one_weight(world: Any, tmp_path: Path) -> None:
    for peak, part, largest in world(sharded_without_a_whole_model, 2, str(tmp_path)):
        assert peak <= part + 2 * largest, "its part, a whole weight, and that weight's pieces"
        assert part > 2 * largest


def saved_and_read(rank: int, name: str, folder: str) -> None:
    import transformers

    family = FAMILIES[name]
    truth, model = family.make(4, 1), family.make(4, 1)
    auto_tp(model, comm.new_group([0, 1], "model"))
    save_pretrained(model, folder)
    read = type(truth).from_pretrained(folder, dtype=F64)
    assert isinstance(read, transformers.PreTrainedModel)
    for key, value in truth.state_dict().items():
        assert_close(read.state_dict()[key], value, EXACT, key)
    other = family.make(4, 1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    auto_tp(other, comm.new_group([0, 1], "model"))
    load_shards(other, folder)
    for key, value in gather_state_dict(other).items():
        assert_close(value, truth.state_dict()[key], EXACT, key)
    with pytest.raises(ValueError, match=r"the source has no weight"):
        load_shards(other, {})


@pytest.mark.parametrize("name", ["gpt2", "falcon_multi_query", "qwen3"])
def test_saved_files_are_those_of_transformers(world: Any, name: str, tmp_path: Path) -> None:
    world(saved_and_read, 2, name, str(tmp_path))


def checkpointed(rank: int, folder: str) -> None:
    family = FAMILIES["qwen3"]
    engine, other = start(family.make(4, 2), tp=2), start(family.make(4, 2), tp=4)
    with KeepWide():
        engine.backward(loss_of(engine(**family.inputs()).logits))
        engine.step()
        engine.save_checkpoint(folder)
        assert differs(other(**family.inputs(5)).logits, engine(**family.inputs(5)).logits), "control"
        other.load_checkpoint(folder)
        assert_close(other(**family.inputs(5)).logits, engine(**family.inputs(5)).logits, LAW)


def test_a_checkpoint_loads_at_another_degree(world: Any, tmp_path: Path) -> None:
    world(checkpointed, 4, str(tmp_path))


def test_the_share_of_the_plan_is_what_a_rank_holds(world: Any) -> None:
    for name in ("gpt2", "phi3", "mixtral", "qwen3"):
        model = FAMILIES[name].make(6, 3)
        total, kept = make_plan(model, 2).shares(model)
        assert total == sum(weight.numel() for weight in model.parameters())
        assert kept == world(held_by, 2, name)


def held_by(rank: int, name: str) -> int:
    model = FAMILIES[name].make(6, 3)
    auto_tp(model, comm.new_group([0, 1], "model"))
    return sum(weight.numel() for weight in model.parameters())


def test_planning_a_thousand_layers_takes_moments() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=20, num_hidden_layers=143, num_attention_heads=4
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    start_s = time.process_time()
    plan = make_plan(model, 4)
    assert len(plan.names("row", "column")) == 1001 and time.process_time() - start_s < 2.0
