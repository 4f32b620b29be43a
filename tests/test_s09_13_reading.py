"""§9.13 What the parser reads from code: blocks with names that say nothing, and operations that forbid a
cut.

Guards against: a plan that follows names or the order of definition, a router or a bottleneck that is cut, a
cut under a norm over all columns, a weight that one rank would use alone.
"""

from __future__ import annotations

import functools
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
    Scaled,
    Sequence,
    Stack,
    attend,
)
from ds_lite.module_inject.auto_tp import AutoTP
from families import FAMILIES, loss_of
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import layer_norm
from torch.utils.checkpoint import checkpoint

import ds_lite
from ds_lite.tensor_parallel.policy import make_plan, tp_parser
from ds_lite.tensor_parallel.reading import read_block

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


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_blocks_of_any_author_train_as_the_whole_model(world: Any, name: str, tp: int) -> None:
    world(trains_as_the_whole, tp, name, tp)


# ------------------------------------------------------------------------- operations that need all columns


class Middle(nn.Module):
    """An MLP with something between its two layers."""

    def __init__(self, between: Any = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.between = between
        self.norm = norm if norm is not None else nn.Identity()
        self.norms = nn.ModuleDict({"n": Scaled(INNER)})
        self.extra = nn.ModuleList()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.between(self, self.norm(self.first(x))))


class Silent(nn.Module):
    """A norm without weights of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Inherited(Silent):
    """The same by way of its base class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


def plain(module: Any, h: Tensor) -> Tensor:
    return torch.relu(h) * torch.sigmoid(h.float()).to(h.dtype) + 1


def over_tokens(module: Any, h: Tensor) -> Tensor:
    return h - h.mean(dim=-2, keepdim=True)


def in_place(module: Any, h: Tensor) -> Tensor:
    try:
        h = h.mul_(2)
    except RuntimeError:
        h = h * 2
    return F.silu(h.view(-1, h.shape[-1]).view_as(h)).contiguous()


def centred(module: Any, h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def second_of_two(module: Any, h: Tensor) -> Tensor:
    return h - h.flatten(0, 1).mean(1, keepdim=True)


def normed(module: Any, h: Tensor) -> Tensor:
    return layer_norm(h, h.shape[-1:])


def after_a_view(module: Any, h: Tensor) -> Tensor:
    return F.layer_norm(h.view(-1, h.shape[-1]), h.shape[-1:])


def competing(module: Any, h: Tensor) -> Tensor:
    return h * torch.softmax(h, dim=-1)


def by_a_lambda(module: Any, h: Tensor) -> Tensor:
    return AS_LAMBDA(h)


def by_a_partial(module: Any, h: Tensor) -> Tensor:
    return AS_PARTIAL(h)


def by_a_function_of_autograd(module: Any, h: Tensor) -> Tensor:
    return Centre.apply(h)


def in_a_nested_function(module: Any, h: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    return inner(h)


def behind_a_try(module: Any, h: Tensor) -> Tensor:
    try:
        h = h * 1
    finally:
        h = F.layer_norm(h, h.shape[-1:])
    return h


def behind_a_loop(module: Any, h: Tensor) -> Tensor:
    for _ in range(2):
        h = h * 1
    else:
        h = F.layer_norm(h, h.shape[-1:])
    return h


def in_a_match(module: Any, h: Tensor) -> Tensor:
    match len(h):
        case 1:
            h = F.layer_norm(h, h.shape[-1:])
    return h


def by_a_name(module: Any, h: Tensor) -> Tensor:
    return getattr(module, f"{'no'}rm")(h) if len(h) else h


def from_a_dictionary(module: Any, h: Tensor) -> Tensor:
    return module.norms["n"](h)


def checkpointed(module: Any, h: Tensor) -> Tensor:
    return checkpoint(module.norms["n"], h, use_reentrant=False)


def in_training(module: Any, h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:]) if module.training else h


def without_extras(module: Any, h: Tensor) -> Tensor:
    if not module.extra:
        h = F.layer_norm(h, h.shape[-1:])
    return h


def compared(module: Any, h: Tensor) -> Tensor:
    return h @ h.transpose(-1, -2) @ h


def mixed(module: Any, h: Tensor) -> Tensor:
    return F.linear(h, torch.ones(INNER, INNER))


def of_first_order(module: Any, h: Tensor) -> Tensor:
    return h / h.norm(1, -1, keepdim=True)


def rolled(module: Any, h: Tensor) -> Tensor:
    return torch.roll(h, 1, -1)


def swapped(module: Any, h: Tensor) -> Tensor:
    a, b = h.chunk(2, dim=-1)
    return torch.cat([b, a], dim=-1)


def every_other(module: Any, h: Tensor) -> Tensor:
    return h[..., ::2].repeat_interleave(2, -1)


def unheard_of(module: Any, h: Tensor) -> Tensor:
    return torch.cdist(h, h)


AS_LAMBDA = lambda h: h.softmax(-1)  # noqa: E731
AS_PARTIAL = functools.partial(F.softmax, dim=-1)
APART = [plain, over_tokens, in_place]
TOGETHER = [
    *(centred, second_of_two, normed, after_a_view, competing, by_a_lambda, by_a_partial, in_a_match),
    *(by_a_function_of_autograd, in_a_nested_function, behind_a_try, behind_a_loop, by_a_name),
    *(from_a_dictionary, checkpointed, in_training, without_extras, compared, mixed, of_first_order),
    *(rolled, swapped, every_other, unheard_of),
]


def role_of_first(between: Any, norm: nn.Module | None = None) -> str:
    flow = read_block(Middle(between, norm))
    return "cut" if "last" in flow.closers and "first" not in flow.whole else "whole"


@pytest.mark.parametrize("between", APART, ids=lambda function: function.__name__)
def test_what_keeps_columns_apart_lets_them_be_cut(between: Any) -> None:
    assert role_of_first(between) == "cut"


@pytest.mark.parametrize("between", TOGETHER, ids=lambda function: function.__name__)
def test_what_takes_columns_together_keeps_them_together(between: Any) -> None:
    assert role_of_first(between) == "whole"


@pytest.mark.parametrize(
    "norm, role",
    [
        (nn.PReLU(), "cut"),
        (nn.Dropout(), "cut"),
        (nn.GELU(), "cut"),
        (nn.PReLU(INNER), "whole"),
        (nn.LayerNorm(INNER), "whole"),
        (nn.LayerNorm(INNER, elementwise_affine=False), "whole"),
        (nn.Softmax(dim=-1), "whole"),
        (nn.GLU(), "whole"),
        (Scaled(INNER), "whole"),
        (Silent(), "whole"),
        (Inherited(), "whole"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_layers_in_between_are_known_or_keep_columns_together(norm: nn.Module, role: str) -> None:
    assert role_of_first(plain, norm) == role


def test_parameters_of_a_list_are_noticed_in_a_region() -> None:
    def scaled(module: Any, h: Tensor) -> Tensor:
        return h * module.scales[0]

    assert read_block(Middle(scaled)).weights == {"scales": {"first"}}


class Around(nn.Module):
    """A block around the MLP, with code of its own for each case."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.same = Middle(plain), nn.PReLU(), nn.Linear(WIDTH, WIDTH)


class Returned(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner.first(x)
        return x + self.inner.last(h), h


class UsedOutside(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner.last(self.act(self.inner.first(self.act(x))))


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.same(torch.relu(self.same(x)))


class OtherNames(Around):
    def forward(s, y: Tensor) -> Tensor:
        return y + s.inner.last(torch.relu(s.inner.first(y)))


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Inheriting(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x is not None else x


@pytest.mark.parametrize(
    "block, closers, why",
    [
        (Returned, set(), "its output leaves the block"),
        (UsedOutside, set(), "act is used outside its region, too"),
        (Twice, set(), "it both opens and closes a region"),
        (OtherNames, {"inner.last"}, None),
        (Checkpointed, {"inner.last"}, None),
        (Inheriting, {"inner.last"}, None),
    ],
)
def test_blocks_in_other_forms(block: type[nn.Module], closers: set[str], why: str | None) -> None:
    flow = read_block(block())
    assert set(flow.closers) == closers
    assert why is None or any(why in reason for reason in flow.whole.values())


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

    with pytest.raises(ValueError, match=r"computes self.dim \*\* \(-0.5\), but self.dim has to become"):
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
    assert rows == B33[name] and kind is type(next(m for m in model.modules() if isinstance(m, kind)))
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
