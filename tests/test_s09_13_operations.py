"""§9.13 Which operations keep the columns of a value apart, so that ranks may have some each.

Guards against: a cut under a norm over all columns, by whatever name, alias or detour the code calls it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from blocks import INNER, WIDTH, Scaled, Sequence, Stack
from families import loss_of
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import layer_norm
from torch.utils.checkpoint import checkpoint

import ds_lite
from ds_lite.tensor_parallel.policy import make_plan
from ds_lite.tensor_parallel.reading import read_block


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


# ------------------------------------------------------------------------- what is more than it looks


class Own(nn.Linear):
    """A linear layer by class, and something else by its code."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(x))


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def centring(self: Any, x: Tensor) -> Tensor:
        return function(self, x - x.mean(-1, keepdim=True))

    return centring


class Decorated(nn.Module):
    @passed_on
    def forward(self, x: Tensor) -> Tensor:
        return x


class Chained(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Kept(Middle):
    """Somebody else may use what is kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.first(x)
        return x + self.last(self.seen)


class Written(Middle):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[..., 0] = 1.0
        return x + self.last(h)


class Conditional(Middle):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.amax(dim=-2).sum() > 0:
            h = -h
        return x + self.last(h)


class Factor(Middle):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return x + self.last(h * h.shape[-1] ** -0.5)


class Beside(Middle):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x)) * self.first.weight.norm()


class Asked(Middle):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return x + self.last(h * 2 if isinstance(self.last, nn.Linear) else h)


class Grouped(Middle):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).unflatten(-1, (-1, 2))
        return x + self.last((h / h.norm(dim=-1, keepdim=True)).flatten(2))


class Listed(Middle):
    def __init__(self) -> None:
        super().__init__(plain)
        self.layers = [self.first, self.last]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[1](self.layers[0](x))


def hooked() -> nn.Module:
    block = Middle(plain)
    block.first.register_forward_hook(lambda module, args, output: output * 2)
    return block


def with_own_layer() -> nn.Module:
    block = Middle(plain)
    block.last = Own(INNER, WIDTH)
    return block


MORE = {
    **{kind.__name__: kind for kind in (Kept, Written, Conditional, Factor, Beside, Asked, Listed)},
    "a hook": hooked,
    "a linear of its own": with_own_layer,
    "a decorator": lambda: Middle(plain, Decorated()),
    "a chain of its own": lambda: Middle(plain, Chained(nn.ReLU())),
}


@pytest.mark.parametrize("name", MORE)
def test_what_is_more_than_it_looks_is_not_cut(name: str) -> None:
    flow = read_block(MORE[name]())
    assert "last" not in flow.closers or "first" in flow.whole


def test_columns_in_groups_are_no_heads() -> None:
    with pytest.raises(ValueError, match=r"folds the columns of first into groups that no rank may share"):
        make_plan(Grouped(), 2)


def test_a_helper_that_calls_itself_ends_the_reading() -> None:
    class Recursive(Middle):
        def half(self, h: Tensor, depth: int) -> Tensor:
            return h if depth == 0 else self.half(h, depth - 1) + self.half(h, depth - 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.last(self.half(self.first(x), len(x)))

    assert "first" in read_block(Recursive()).whole


def test_an_uneven_deal_and_dropout_do_not_go_together() -> None:
    def with_dropout(share: float) -> nn.Module:
        block = Sequence()
        block.drop = nn.Dropout(share)
        return Stack(lambda: block)

    make_plan(with_dropout(0.0), 3)
    make_plan(with_dropout(0.1), 2)
    with pytest.raises(
        ValueError, match=r"dealt unevenly over 3 ranks, and blocks.0 drops elements \(drop.p=0.1\)"
    ):
        make_plan(with_dropout(0.1), 3)


# ------------------------------------------------------------------- learned by others, used in a region


class Biased(Sequence):
    """What is added to the values, and how much of it, comes from outside."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        m, h = self.mixer, self.one(x)
        q, k, v = (m.heads(layer(h)) for layer in (m.beta, m.gamma, m.delta))
        scores = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        x = x + m.alpha((scores @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.two(x))


class BiasedStack(Stack):
    def __init__(self) -> None:
        super().__init__(Biased)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 25).view(1, 1, 5, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.bias)
        return self.head(x)


def learns_the_bias(rank: int) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            return BiasedStack().double()

    truth, model, ids = make(), make(), torch.arange(10).view(2, 5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"tp_size": 2},
    }
    engine = ds_lite.initialize(model=model, config=config)[0]
    loss_of(truth(ids)).backward()
    engine.backward(loss_of(engine(ids)))
    assert differs(truth.bias.grad, torch.zeros(1, 1, 5, 5, dtype=torch.float64)), "control"
    for key, weight in truth.named_parameters():
        assert_close(engine.gradients.full(key), weight.grad, LAW, key)


def test_what_a_block_gets_from_outside_has_its_whole_gradient(world: Any) -> None:
    world(learns_the_bias, 2)


# ---------------------------------------------------------------------------------------- on every rank


class TimesTheStream(Middle):
    """What the stream multiplies needs the gradient of all columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x) * x.mean(-1, keepdim=True))


def train_with(rank: int, name: str) -> None:
    def block() -> nn.Module:
        made = Sequence()
        made.mlp = TimesTheStream(plain) if name == "the stream" else Middle(globals()[name])
        return made

    config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"tp_size": 2}}
    ds_lite.initialize(model=Stack(block), config=config)


@pytest.mark.parametrize("name", ["normed", "unheard_of", "the stream"])
def test_a_block_that_cannot_be_cut_is_refused_on_every_rank(world: Any, name: str) -> None:
    match = r"no row-parallel MLP output was found in blocks.0 \(Sequence\).*first stays whole: .*its output"
    world.raises(ValueError, match, train_with, 2, name)
