"""§9.13 The user's own plan, presets and transformers' tp_plan: patterns, roles, shapes, and what contradicts
them.

Guards against: a pattern that silently matches nothing, half a region cut, a fused weight in a layout nobody
said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import WIDTH, Sequence, Stack
from ds_lite.module_inject import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from families import loss_of
from tolerance import LAW, assert_close
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite.cli import main
from ds_lite.tensor_parallel.partition_config import config_of
from ds_lite.tensor_parallel.plan import Plan
from ds_lite.tensor_parallel.policy import make_plan
from ds_lite.tensor_parallel.tp_plan import style_of


def spec(patterns: list[str], kind: str, **more: Any) -> dict[str, Any]:
    return {"patterns": patterns, "partition_type": kind, **more}


ATTENTION = [
    spec([r".*mixer\.(beta|gamma|delta)\.weight"], "column"),
    spec([r".*mixer\.alpha\.weight"], "row"),
]
MLP = [spec([r".*mlp\.[bc]\.weight"], "column"), spec([r".*mlp\.a\.weight"], "row")]


def plan_for(specs: list[dict[str, Any]], model: nn.Module | None = None, **more: Any) -> Plan:
    config = config_of({"layer_specs": specs, **more}, None)
    return make_plan(Stack(Sequence) if model is None else model, 2, partition_config=config)


def in_block(plan: Plan, *kinds: Any) -> set[str]:
    return {name.removeprefix("blocks.0.") for name in plan.names(*kinds) if name.startswith("blocks.0.")}


def test_the_plan_of_the_user_says_which_regions_are_cut() -> None:
    plan = plan_for(ATTENTION)
    assert in_block(plan, "column") == {"mixer.beta", "mixer.gamma", "mixer.delta"}
    assert in_block(plan, "row") == {"mixer.alpha"}
    assert in_block(plan, "whole") == {"mlp.a", "mlp.b", "mlp.c"}
    assert plan.of("blocks.0.mlp.a").reason == "no pattern of partition_config matches it"
    assert plan.of("blocks.0.mixer.alpha").reason.startswith("partition_config; sums the attention")
    both = plan_for([*ATTENTION, *MLP])
    assert in_block(both, "row") == {"mixer.alpha", "mlp.a"}


def test_the_first_pattern_counts() -> None:
    skip = spec([r"blocks\.1\.mlp\..*"], "skip")
    plan = plan_for([skip, *ATTENTION, *MLP])
    assert "blocks.0.mlp.a" in plan.names("row") and plan.of("blocks.1.mlp.a").kind == "whole"
    assert plan.of("blocks.1.mlp.b").reason == "partition_config skips it"


def test_an_output_may_be_gathered() -> None:
    head = spec([r"head\.weight"], "column", gather_output=True)
    plan = plan_for([*ATTENTION, head])
    assert plan.names("gathered") == ["head"] and plan.of("head").ranges == (((0, 9),), ((9, 17),))


@pytest.mark.parametrize(
    "specs, more, match",
    [
        (
            [*ATTENTION, spec([r".*\.omega\..*"], "row")],
            {},
            r"pattern .*omega.* matches no weight of Stack; .*blocks",
        ),
        (
            ATTENTION[:1],
            {},
            r"says column for .*mixer.[a-z]+, but it stays whole: .*alpha is whole and takes its",
        ),
        (ATTENTION[1:], {}, r"says row for .*mixer.alpha, but it stays whole"),
        (
            [spec([r".*mixer\..*"], "column")],
            {},
            r"says column for blocks.0.mixer.alpha, but it is row-parallel in the code",
        ),
        ([spec([r"head\.weight"], "row")], {}, r"says row for head, but .*outside"),
        (ATTENTION, {"strict_mode": True}, r"strict_mode: .* blocks.0.mlp.a, blocks.0.mlp.b"),
        ([spec(["("], "row")], {}, r"pattern '\(' of partition_config is no regular expression"),
        ([spec([".*"], "diagonal")], {}, r"partition_type='diagonal' is unknown; choose one of \['column'"),
        ([{"partition_type": "row"}], {}, r"has no patterns"),
        ([spec([".*"], "row", colour="red")], {}, r"layer_specs has no key colour; its keys are patterns"),
        (ATTENTION, {"strict": True}, r"partition_config has no key strict; its keys are tp_size"),
        ([spec([".*"], "column", shape=[[3, "x"], -1])], {}, r"does not say how dim 0"),
        ([spec([".*"], "column", shape=[-1, 3])], {}, r"does not say how dim 0 is packed"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(specs: list[Any], more: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as refusal:
        plan_for(specs, **more)
    assert "§9.13" in str(refusal.value)


def test_strict_mode_is_content_when_every_layer_is_named() -> None:
    rest = spec([r".*mlp.*"], "skip")
    head = {"lm_head_patterns": ["head"]}
    assert in_block(plan_for([*ATTENTION, rest], strict_mode=True, **head), "row") == {"mixer.alpha"}


# --------------------------------------------------------------------------------------- fused, as declared


class Packed(nn.Module):
    """Attention with one weight for q, k and v, and an MLP with one for gate and up; in either order."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.num_heads, self.by_head = 4, by_head
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both, self.down = nn.Linear(WIDTH, 20), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.by_head:
            q, k, v = qkv.unflatten(-1, (-1, 3, WIDTH // 4)).unbind(-2)
        else:
            q, k, v = (part.unflatten(-1, (-1, WIDTH // 4)) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def packed(by_head: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Stack(lambda: Packed(by_head)).double()
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.4)
    return model


ROWS = spec([r".*\.(out|down)\.weight"], "row")
DECLARED = {
    "thirds": [
        spec([r".*qkv.*"], "column", shape=[3, -1]),
        spec([r".*both.*"], "column", shape=[2, -1]),
        ROWS,
    ],
    "sizes": [
        spec([r".*qkv.*"], "column", shape=[[12, 12, 12], -1]),
        spec([r".*both.*"], "column", shape=[[10, 10], -1], partition_dim=0),
        ROWS,
    ],
    "by head": [
        spec([r".*qkv.*"], "column", per_head=True),
        spec([r".*both.*"], "column", shape=[2, -1]),
        ROWS,
    ],
}


def trains_as_declared(rank: int, how: str) -> None:
    truth, model = packed(how == "by head"), packed(how == "by head")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": DECLARED[how]}},
    }
    engine = ds_lite.initialize(model=model, config=config)[0]
    ids = torch.arange(10).view(2, 5)
    assert_close(engine(ids), truth(ids), LAW)
    loss_of(truth(ids)).backward()
    engine.backward(loss_of(engine(ids)))
    for key, weight in truth.named_parameters():
        assert_close(engine.gradients.full(key), weight.grad, LAW, key)


@pytest.mark.parametrize("how", DECLARED)
def test_a_fused_weight_is_cut_as_it_is_declared(world: Any, how: str) -> None:
    world(trains_as_declared, 2, how)


def test_a_fused_weight_that_nobody_declares_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"layout of the fused weight blocks.0.blocks.0.qkv|blocks.0.qkv is unknown"
    ):
        make_plan(packed(True), 2)
    undeclared = [spec([r".*qkv.*"], "column", shape=[3, -1]), spec([r".*both.*"], "column"), ROWS]
    with pytest.raises(
        ValueError, match=r"layout of the fused weight blocks.0.both is unknown.*shape=\(2, -1\)"
    ):
        plan_for(undeclared, packed(False))
    wrong = [spec([r".*qkv.*"], "column", shape=[[20, 8, 8], -1]), *DECLARED["thirds"][1:]]
    with pytest.raises(
        ValueError, match=r"makes parts of \[20, 8, 8\] rows, but by its heads .* \[12, 12, 12\]"
    ):
        plan_for(wrong, packed(False))


# --------------------------------------------------------------------------------------- DeepSpeed's objects


def test_deepspeeds_objects_say_the_same() -> None:
    column = TPLayerSpec([r".*\.[qkv]_proj\.weight$"], partition_type=PartitionType.COLUMN)
    assert column.matches("model.layers.0.self_attn.q_proj.weight")
    assert not column.matches("q_proj.weight"), "the pattern matches from the start"
    only = TPLayerSpec([".*"], PartitionType.SKIP, model_types=["Llama"])
    assert only.matches("x", "llama") and not only.matches("x", "bert") and not only.matches("x")
    base, own = AutoTPConfig(layer_specs=[column]), AutoTPConfig(layer_specs=[only], strict_mode=True)
    merged = merge_autotp_configs(base, own)
    assert merged.layer_specs == [only, column] and merged.strict_mode
    assert merged.find_matching_spec("a.b.q_proj.weight", "llama") is only
    read = AutoTPConfig.from_dict({"layer_specs": [{"patterns": ["a"], "partition_type": "ROW"}]})
    assert read.layer_specs[0].partition_type is PartitionType.ROW


def test_presets_are_merged_behind_the_users_patterns() -> None:
    with pytest.raises(ValueError, match=r"preset_model='lama' is unknown; choose one of \['bloom'"):
        AutoTPPresets.get_preset("lama")
    own = {"layer_specs": [spec([r".*\.0\..*"], "skip")]}
    both, alone = config_of(own, "llama"), config_of({**own, "use_default_specs": False}, "llama")
    assert both is not None and len(both.layer_specs) == 3
    assert alone is not None and len(alone.layer_specs) == 1
    assert config_of(None, None) is None


@pytest.mark.xdist_group("autotp")
class TestTransformers:
    """What needs transformers, without processes."""

    transformers = pytest.importorskip(
        "transformers", reason="not proved here: plans of transformers' models"
    )

    def model(self, name: str = "Llama", **settings: Any) -> nn.Module:
        config = getattr(self.transformers, f"{name}Config")(
            **{
                "num_hidden_layers": 2,
                "hidden_size": 16,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 11,
                **settings,
            }
        )
        with torch.device("meta"):
            return getattr(self.transformers, f"{name}ForCausalLM")(config)

    @pytest.mark.parametrize("preset, name", [("llama", "Llama"), ("qwen2", "Qwen2"), ("phi3", "Phi3")])
    def test_a_preset_and_the_code_agree(self, preset: str, name: str) -> None:
        model = self.model(name, pad_token_id=0)
        ours, given = make_plan(model, 2), make_plan(model, 2, partition_config=config_of(None, preset))
        kinds = [[(one.name, one.kind, one.ranges) for one in plan] for plan in (ours, given)]
        assert kinds[0] == kinds[1] and len(given.names("row")) == 4

    def test_a_preset_of_another_architecture_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"the preset matches no weight of LlamaForCausalLM"):
            make_plan(self.model(), 2, partition_config=config_of(None, "bloom"))

    def test_a_tp_plan_is_named_as_the_source(self) -> None:
        model = self.model()
        assert style_of(model, "model.layers.1.mlp.up_proj") == "colwise"
        assert style_of(model, "model.layers.1.mlp.other") is None
        assert (
            make_plan(model, 2).of("model.layers.1.mlp.up_proj").reason.startswith("tp_plan; opens the MLP")
        )

    def test_a_style_that_is_not_known_leaves_the_layer_to_the_code(self) -> None:
        plan = make_plan(self.model("Phi3", pad_token_id=0), 2)
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"):
            assert (
                "the code (tp_plan's colwise_gather_output, rowwise_split_input"
                in plan.of(f"model.layers.0.{name}").reason
            )

    def test_a_tied_weight_of_which_one_side_would_be_cut_is_refused(self) -> None:
        model = self.model(tie_word_embeddings=True)
        model.model.embed_tokens.weight = model.lm_head.weight
        head = [spec([r"lm_head\.weight"], "column", gather_output=True)]
        rest = [spec([r".*(q|k|v|up|gate)_proj.*"], "column"), spec([r".*(o|down)_proj.*"], "row")]
        with pytest.raises(
            ValueError, match=r"embed_tokens.weight .*lm_head.weight .* are one weight|one weight, but"
        ):
            plan_for([*rest, *head], model)
        both = make_plan(model, 2, vocab_parallel=True)
        assert both.names("vocabulary", "gathered") == ["model.embed_tokens", "lm_head"]

    def test_no_output_layer_no_cut_of_the_vocabulary(self) -> None:
        with pytest.raises(
            ValueError, match=r"vocab_parallel_lm_head=true, but LlamaModel has no linear output"
        ):
            make_plan(self.model().model, 2, vocab_parallel=True)

    def test_the_command_prints_the_plan(self, capsys: Any, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=r"^(0|)$"):
            main(["autotp", "LlamaForCausalLM", "--tp", "4"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["module", "kind", "before", "each", "rank", "why"]
        row = next(line for line in lines if "down_proj" in line and "row" in line)
        assert "model.layers.0-31.mlp.down_proj" in row and "4096x11008  4096x2752" in row
        assert lines[-1].endswith("each of 4 ranks holds 1,881,411,584 (28%)"), lines[-1]
        self.model().config.save_pretrained(tmp_path)
        with pytest.raises(SystemExit, match=r"^(0|)$"):
            main(["autotp", str(tmp_path), "--every"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 2 * 7 + 2 + 1

    @pytest.mark.parametrize(
        "words, match",
        [
            (["NoSuchModel"], "NoSuchModel is neither a file nor a model class"),
            (["nowhere:Class"], "nowhere:Class is no class that can be imported"),
            (["LlamaForCausalLM", "--tp", "64"], "degree 64 does not fit num_heads=32"),
            (["LlamaForCausalLM", "--preset", "lama"], "preset_model='lama' is unknown"),
            (["LlamaForCausalLM", "--partition-config", "none.json"], "none.json"),
            (["torch.nn:ReLU"], "ReLU has no linear layer"),
        ],
    )
    def test_the_command_says_what_is_wrong(self, capsys: Any, words: list[str], match: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["autotp", *words])
        captured = capsys.readouterr()
        assert match in captured.err and not captured.out
