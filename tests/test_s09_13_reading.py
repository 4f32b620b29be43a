"""§9.13 What the parser reads from code: blocks with names that say nothing, and operations that forbid a
cut.

Guards against: a plan that follows names or the order of definition, a router or a bottleneck that is cut, a
cut under a norm over all columns, a weight that one rank would use alone.
"""

from __future__ import annotations

from typing import Any

import blocks
import pytest
import torch
from blocks import (
    HEADS,
    INNER,
    WIDTH,
    Flat,
    LowRank,
    Mixer,
    Parallel,
    Routed,
    Sequence,
    Stack,
    attend,
)
from ds_lite.module_inject.auto_tp import AutoTP
from families import FAMILIES, loss_of
from test_s09_13_operations import Middle, plain
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite.tensor_parallel.policy import blocks_of, make_plan, tp_parser

MIXER = ({"mixer.beta", "mixer.gamma", "mixer.delta"}, "mixer.alpha")
GATED = ({"mlp.b", "mlp.c"}, "mlp.a")


def cut_in(block: nn.Module, ranks: int = 2) -> tuple[set[str], set[str]]:
    """The layers of a block that are cut by columns, and those by rows."""
    plan = make_plan(nn.ModuleDict({"only": nn.ModuleList([block])}), ranks)
    names = [{name.removeprefix("only.0.") for name in plan.names(kind)} for kind in ("column", "row")]
    return names[0], names[1]


def whole_in(block: nn.Module) -> dict[str, str]:
    plan = make_plan(nn.ModuleDict({"only": nn.ModuleList([block])}), 2)
    return {one.name.removeprefix("only.0."): one.reason for one in plan if one.kind == "whole"}


@pytest.mark.parametrize(
    "block, column, row",
    [
        (Sequence(), MIXER[0] | GATED[0], {"mixer.alpha", "mlp.a"}),
        (Sequence(2), MIXER[0] | GATED[0], {"mixer.alpha", "mlp.a"}),
        (Parallel(), MIXER[0] | {"mlp.0"}, {"mixer.alpha", "mlp.2"}),
        (Flat(), {"w1", "w2", "w3", "w5"}, {"w4", "w6"}),
        (Flat(gates=True), {"w1", "w2", "w3", "w5"}, {"w4", "w6"}),
        (
            Routed(),
            MIXER[0] | {f"experts.{i}.{key}" for i in range(3) for key in "bc"},
            {"mixer.alpha", *(f"experts.{i}.a" for i in range(3))},
        ),
        (LowRank(), MIXER[0] | GATED[0], {"mixer.alpha", "mlp.a"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_code_shows_is_cut_whatever_its_name(block: nn.Module, column: set[str], row: set[str]) -> None:
    assert cut_in(block) == (column, row)


def test_routers_gates_and_bottlenecks_stay_whole() -> None:
    assert whole_in(Routed()) == {"router": "softmax needs all columns of its output"}
    assert whole_in(Flat(gates=True)) == {"gate": "its output meets the stream"}
    assert whole_in(Flat()) == {"gate": "the code of its block does not call it"}
    assert whole_in(LowRank()) == {"down": "norm needs all columns of its output"}


MAKERS = {
    "sequence": Sequence,
    "shared kv": lambda: Sequence(2),
    "parallel": Parallel,
    "flat": Flat,
    "gates": lambda: Flat(True),
    "routed": Routed,
    "low rank": LowRank,
}


def trains_as_the_whole(rank: int, name: str, tp: int) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = Stack(MAKERS[name]).double()
            for weight in model.parameters():
                nn.init.normal_(weight, std=0.4)
        return model

    truth, model = make(), make()
    ids = torch.arange(10).view(2, 5) * 3 % 17
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"tp_size": tp},
    }
    engine = ds_lite.initialize(model=model, config=config)[0]
    logits, wanted = engine(ids), truth(ids)
    assert_close(logits, wanted, LAW)
    loss_of(wanted).backward()
    engine.backward(loss_of(logits))
    for key, weight in truth.named_parameters():
        gradient = engine.gradients.full(key)
        assert (gradient is None) == (weight.grad is None), key
        if weight.grad is not None and gradient is not None:
            assert_close(gradient, weight.grad, LAW, key)
    noticed = [w for w in truth.parameters() if w.grad is not None and differs(w.grad, torch.zeros_like(w))]
    assert len(noticed) > 10, "control"


@pytest.mark.parametrize("name, tp", [(name, tp) for name in MAKERS for tp in (2, 4)])
def test_blocks_of_any_author_train_as_the_whole_model(world: Any, name: str, tp: int) -> None:
    world(trains_as_the_whole, tp, name, tp)


# ----------------------------------------------------------------------------------- attention in other forms


class Unusual(Mixer):
    """An attention of which only the middle is other than usual."""

    def middle(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.beta, self.gamma, self.delta))
        return self.alpha(self.middle(q, k, v).transpose(1, 2).flatten(2))


class Sigmoid(Unusual):
    def middle(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.transpose(-1, -2)) @ v


class OverHeads(Unusual):
    def middle(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(1) @ v


class SomeHeads(Unusual):
    def middle(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([v[:, :2], attend(q, k, v)[:, 2:]], dim=1)


class NormedAtTheEnd(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.beta, self.gamma, self.delta))
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        return self.alpha(F.layer_norm(out, out.shape[-1:]))


def in_a_block(mixer: type[nn.Module]) -> nn.Module:
    block = Sequence()
    block.mixer = mixer()
    return block


def test_an_attention_is_known_without_a_softmax() -> None:
    plan = make_plan(Stack(lambda: in_a_block(Sigmoid)), 2)
    assert plan.attentions and plan.of("blocks.0.mixer.beta").layout is not None


@pytest.mark.parametrize("mixer", [OverHeads, SomeHeads, NormedAtTheEnd])
def test_what_goes_across_heads_is_refused(mixer: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"no row-parallel attention output was found in only.0.*\(§9.13\)"):
        cut_in(in_a_block(mixer))


def test_a_size_that_is_also_a_factor_is_refused() -> None:
    class Scaling(Mixer):
        def __init__(self) -> None:
            super().__init__()
            self.dim = WIDTH

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.dim**-0.5

    with pytest.raises(ValueError, match=r"the code computes with only.0.mixer.dim, which has to become"):
        cut_in(in_a_block(Scaling))


def test_narrow_queries_are_not_taken_for_grouped_ones() -> None:
    block = in_a_block(Mixer)
    block.mixer.beta, block.mixer.gamma = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
    with pytest.raises(
        ValueError, match=r"as wide as 2 heads of 3, and the model says 4 key and value heads"
    ):
        cut_in(block)
    block = Sequence(2)
    del block.mixer.num_key_value_heads
    with pytest.raises(
        ValueError, match=r"two projections as wide as 2 heads of 3, and the model says None key"
    ):
        cut_in(block)


def test_a_sequential_of_blocks_is_a_list_of_blocks() -> None:
    plan = make_plan(nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(), Routed()), 2)
    assert {"1.mixer.alpha", "2.mixer.alpha", "2.experts.1.a"} <= set(plan.names("row"))
    assert plan.of("0").kind == "whole"


def test_one_linear_under_two_names_is_refused_in_words() -> None:
    block = Sequence()
    block.mixer.gamma = block.mixer.beta
    with pytest.raises(ValueError, match="two projections of"):
        cut_in(block)


def test_a_weight_beside_the_layers_is_refused_in_a_region() -> None:
    class Weighted(Middle):
        def __init__(self) -> None:
            super().__init__(plain)
            self.scale = nn.Parameter(torch.ones(INNER))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.last(self.first(x) * self.scale)

    with pytest.raises(ValueError, match=r"only.0.scale is a weight of its own.*first open.*\(§9.13\)"):
        cut_in(Weighted())


def test_two_layers_that_take_one_output_are_refused() -> None:
    class Forked(Middle):
        def __init__(self) -> None:
            super().__init__(plain)
            self.other = nn.Linear(INNER, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return x + self.last(h) + self.other(h)

    with pytest.raises(ValueError, match=r"both .*last and .*other take the output of .*first"):
        cut_in(Forked())


def test_both_ways_of_a_condition_that_nobody_knows_are_followed() -> None:
    class Either(Middle):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = self.first(x)
            h = h if mask is None else h * mask
            if mask is not None:
                return x + self.last(h)
            return x + self.last(torch.relu(h))

    assert cut_in(Either(plain)) == ({"first"}, {"last"})


def test_code_that_cannot_be_read_is_an_error() -> None:
    scope: dict[str, Any] = {"Middle": Middle}
    exec(
        "class Hidden(Middle):\n    def forward(self, x):\n        return x + self.last(self.first(x))\n",
        scope,
    )

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = scope["Hidden"](plain)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(ValueError, match=r"the code of Hidden \(inner\) cannot be read.*partition_config"):
        cut_in(Around())


def test_attention_of_torch_is_not_understood() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER)
    with pytest.raises(
        ValueError, match=r"no row-parallel attention.*self_attn holds weights of an unknown kind"
    ):
        cut_in(layer)


def test_heads_that_nobody_counts_are_an_error() -> None:
    block = Sequence()
    del block.mixer.num_heads
    with pytest.raises(
        ValueError, match=r"mixer is 12 columns wide and no number of heads was found.*num_heads"
    ):
        cut_in(block)
    block.mixer.num_heads = 5
    with pytest.raises(ValueError, match="5 heads do not divide it"):
        cut_in(block)


# ------------------------------------------------------------------------------------------------------ B33


B33 = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "opt": ("self_attn.out_proj", "fc2"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "falcon_new": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "phi": ("self_attn.dense", "mlp.fc2"),
    "qwen2_moe": ("self_attn.o_proj", "mlp.shared_expert.down_proj"),
}


@pytest.mark.xdist_group("autotp")
@pytest.mark.parametrize("name", B33)
def test_b33_each_family_has_a_closing_layer_for_attention_and_mlp(name: str) -> None:
    pytest.importorskip(
        "transformers", reason="not proved here: AutoTP on transformers' models; pip install it"
    )
    model = FAMILIES[name].make(6, 6)
    ((kind, rows),) = AutoTP.tp_parser(model)
    assert rows == B33[name] and kind is type(blocks_of(model)[0][1])
    plan = make_plan(model, 2)
    for one in plan:
        if any(word in one.name for word in ("router", "gate.", "shared_expert_gate", "lm_head", "embed")):
            assert one.kind == "whole", one


def test_b33_a_norm_of_another_name_does_not_hide_a_closing_layer() -> None:
    assert tp_parser(Stack(Sequence)) == [(Sequence, ("mixer.alpha", "mlp.a"))]


def test_a_model_without_lists_is_one_block() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 3))
    plan = make_plan(model, 2)
    assert (plan.names("column"), plan.names("row"), plan.names("whole")) == (["0"], ["2"], ["3"])
    assert make_plan(blocks.Gated(), 2).names("row") == ["a"]


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no linear layer.*\(§9.13\)"):
        make_plan(nn.Sequential(nn.Embedding(3, 4), nn.ReLU()), 2)


class Rotated(Mixer):
    """Rotates part of a head's width; how much is by chance the number of key and value heads."""

    rotated = 2

    def heads(self, x: Tensor) -> Tensor:
        x = super().heads(x)
        return torch.cat((x[..., : self.rotated].neg(), x[..., self.rotated :]), -1)


class CutByHead(Mixer):
    """The same number, but of heads."""

    rotated = 2

    def heads(self, x: Tensor) -> Tensor:
        x = super().heads(x)
        return torch.cat((x[..., : self.rotated, :, :].neg(), x[..., self.rotated :, :, :]), 1)


def test_a_part_of_a_heads_width_is_no_number_of_heads() -> None:
    block = Sequence(2)
    block.mixer = Rotated(2)
    assert cut_in(block) == (MIXER[0] | GATED[0], {"mixer.alpha", "mlp.a"})
    block.mixer = CutByHead(2)
    with pytest.raises(ValueError, match=r"folds heads by \S*rotated=2"):
        cut_in(block)
