"""§9.3 The toy GPT cut over the model axis is the toy GPT.

Guards against: other names or initial weights in the cut form, a third all-reduce per block, norms and shared
key and value heads whose gradients stay partial, a tie that comes apart, and collectives out of order when a
layer is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from shard_checks import (
    NEIGHBOURS,
    Axes,
    compare_gradients,
    groups_of,
    my_group,
    pattern,
    shake,
)
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn

from ds_lite import comm, toy
from ds_lite.checkpointing import checkpoint
from ds_lite.comm import ProcessGroup
from ds_lite.tags import cut_of, tags_of
from ds_lite.tensor_parallel import VocabParallelCrossEntropy, enter
from ds_lite.toy_parallel import ParallelAttention, ParallelMLP

F64 = torch.float64
SEED, BATCH = 7, 2
SIZES = {"num_blocks": 2, "context": 5, "vocabulary": 11}
THREE_HEADS = toy.Shape(width=12, num_heads=3, **SIZES)
GROUPED = toy.Shape(width=16, num_heads=4, num_kv_heads=2, qk_norm=True, **SIZES)
UNEVEN = toy.Shape(width=12, num_heads=6, num_kv_heads=2, qk_norm=True, **SIZES)


class Cut:
    """The layers of a parallel list in one process each, as a PipelineModule of one stage would hold them."""

    def __init__(self, specs: list[Any]) -> None:
        self.layers: list[nn.Module] = []
        for index, spec in enumerate(specs[:-1]):
            with torch.random.fork_rng():
                torch.manual_seed(SEED + index)
                self.layers.append(spec.build().double())
        self.head = partial(specs[-1].forward_fn, self.layers[0])

    def parameters(self) -> dict[str, nn.Parameter]:
        named = {f"tied_modules.embed.{name}": p for name, p in self.layers[0].named_parameters()}
        for index, layer in enumerate(self.layers[1:], start=1):
            named |= {f"{index}.{name}": p for name, p in layer.named_parameters()}
        return named

    def bind(self, group: ProcessGroup) -> None:
        for layer in self.layers:
            bind(layer, group)

    def __call__(self, ids: Tensor, run: Callable[..., Tensor] = lambda layer, x: layer(x)) -> Tensor:
        x = ids
        for layer in self.layers:
            x = run(layer, x)
        return self.head(x)


def bind(module: nn.Module, group: ProcessGroup) -> None:
    """What `initialize` does with the grid."""
    for layer in module.modules():
        if hasattr(layer, "bind"):
            layer.bind(Axes(model=group))


def whole_model(shape: toy.Shape) -> toy.GPT:
    return toy.GPT(shape, seed=SEED).double()


def make_ids(shape: toy.Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(shape.vocabulary, (BATCH, shape.context + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


# ---------------------------------------------------------------------------------------- the whole form


def test_grouped_heads_read_the_key_and_value_of_their_group():
    layer, x = toy.Attention(GROUPED).double(), pattern(BATCH, 5, 16)
    shake(dict(layer.named_parameters()))
    q, k, v = (p(x).unflatten(-1, (-1, 4)) for p in (layer.query, layer.key, layer.value))
    q, k = (
        t / (t.square().mean(-1, keepdim=True) + torch.finfo(F64).eps).sqrt() * norm.weight
        for t, norm in ((q, layer.query_norm), (k, layer.key_norm))
    )
    mixed = []
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) / 2.0  # the head width is 4
        allowed = torch.ones(5, 5).tril().bool()
        mixed.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[:, :, head // 2])
    assert_close(layer(x), layer.out(torch.cat(mixed, dim=-1)), LAW)
    assert differs(layer(x), layer.out(torch.cat(mixed[::-1], dim=-1)))


def test_as_many_key_heads_as_query_heads_change_nothing():
    plain = toy.GPT(THREE_HEADS).parameters_by_layer()
    same = toy.GPT(toy.Shape(12, 3, 2, 5, 11, num_kv_heads=3)).parameters_by_layer()
    normed = toy.GPT(toy.Shape(12, 3, 2, 5, 11, qk_norm=True)).parameters_by_layer()
    assert list(plain) == list(same)
    for name, weight in plain.items():
        assert_close(same[name], weight, EXACT, name)
        assert_close(normed[name], weight, EXACT, name)
    assert set(normed) - set(plain) == {
        f"{block}.attention.{name}_norm.weight" for block in (2, 3) for name in ("query", "key")
    }
    assert sum(p.numel() for p in toy.GPT(toy.Shape()).parameters()) == 1_049_184


@pytest.mark.parametrize("kv_heads", [0, 3, 8])
def test_heads_that_are_no_whole_groups_are_refused(kv_heads):
    with pytest.raises(ValueError, match=rf"num_heads=4 .* num_kv_heads={kv_heads}.*from \[1, 2, 4\]"):
        toy.Shape(num_kv_heads=kv_heads)


def test_the_old_names_are_still_there():
    for name in ("GPT", "Shape", "Text", "batches", "layer_specs", "load_text", "loss_fn", "micro_batch"):
        assert hasattr(toy, name)
    for name in ("MicroBatch", "Embedding", "Positions", "Attention", "MLP", "Block", "head", "linear"):
        assert hasattr(toy, name)


# ------------------------------------------------------------------------------------------ the cut form


@pytest.mark.parametrize("specs_of", [toy.parallel_layer_specs, toy.vocab_parallel_layer_specs])
@pytest.mark.parametrize("shape", [THREE_HEADS, GROUPED, UNEVEN], ids=["three heads", "grouped", "uneven"])
def test_the_cut_form_has_the_same_names_and_starts_with_the_same_weights(shape, specs_of):
    cut, whole = Cut(specs_of(shape)), whole_model(shape)
    assert list(cut.parameters()) == list(whole.parameters_by_layer())
    assert "2.attention.query.weight" in cut.parameters()
    for name, weight in whole.parameters_by_layer().items():
        assert_close(cut.parameters()[name], weight, EXACT, name)
    assert_close(cut(make_ids(shape)[0]), whole(make_ids(shape)[0]), EXACT, "and is whole until it is bound")


def _train(rank: int, shape: toy.Shape, is_vocab_parallel: bool, ranks: int) -> None:
    """Loss, every gradient and the weights after a step, on every group that this rank is in."""
    specs_of = toy.vocab_parallel_layer_specs if is_vocab_parallel else toy.parallel_layer_specs
    ids, labels = make_ids(shape)
    for group in groups_of() if ranks == 2 else [my_group([list(range(ranks))])]:
        cut, whole = Cut(specs_of(shape)), whole_model(shape)
        named, expected = cut.parameters(), whole.parameters_by_layer()
        optimizers = [torch.optim.SGD(parameters.values(), lr=0.5) for parameters in (named, expected)]
        shake(named)
        shake(expected)
        cut.bind(group)
        loss_fn = VocabParallelCrossEntropy(shape.vocabulary, group) if is_vocab_parallel else toy.loss_fn
        loss, truth = loss_fn(cut(ids), labels), toy.loss_fn(whole(ids), labels)
        loss.backward()
        truth.backward()
        assert_close(loss, truth, LAW)
        compare_gradients(named, expected, group)
        _check_controls(named, expected)
        _step(named, expected, group, optimizers)


def _check_controls(named: dict[str, nn.Parameter], expected: dict[str, nn.Parameter]) -> None:
    """What is tagged as a part is not the whole yet."""
    for name, parameter in named.items():
        if tags_of(parameter).model != "full":
            assert differs(parameter.grad, expected[name].grad), name


def _step(
    named: dict[str, nn.Parameter],
    expected: dict[str, nn.Parameter],
    group: ProcessGroup,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    before = {name: parameter.detach().clone() for name, parameter in expected.items()}
    for parameter in named.values():
        if tags_of(parameter).model == "partial":
            comm.all_reduce(parameter.grad, group=group)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in named.items():
        how = cut_of(parameter)
        weight = parameter.detach() if how is None else how.gather(parameter.detach())
        assert_close(weight, expected[name].detach(), LAW, f"{name} after the step")
    still = [name for name, weight in expected.items() if not differs(before[name], weight)]
    # A number added to all keys moves all scores of a row alike, unless the keys are normed.
    assert all(name.endswith("attention.key.bias") for name in still), still


@pytest.mark.parametrize(
    "shape, ranks",
    [(THREE_HEADS, 2), (GROUPED, 2), (GROUPED, 4), (UNEVEN, 2), (UNEVEN, 4), (THREE_HEADS, 3)],
    ids=["heads 2 1", "grouped", "two ranks a kv head", "heads 3 3", "heads 2 1 2 1", "one head each"],
)
@pytest.mark.parametrize("is_vocab_parallel", [False, True], ids=["whole logits", "part of the logits"])
def test_it_trains_as_one_process(world, shape, ranks, is_vocab_parallel):
    world(_train, 4 if ranks == 2 else ranks, shape, is_vocab_parallel, ranks)


def _qwen_like(rank: int, ranks: int) -> list[tuple[int, ...]]:
    """Report B35: hidden 8, four query heads, two kv heads of width 2."""
    shape = toy.Shape(width=8, num_heads=4, num_kv_heads=2)
    layer = ParallelAttention(shape)
    bind(layer, my_group([list(range(ranks))]))
    return [tuple(part.weight.shape) for part in (layer.query, layer.key, layer.value, layer.out)]


def test_the_shapes_of_report_b35(world):
    assert world(_qwen_like, 2, 2) == [[(4, 8), (2, 8), (2, 8), (8, 4)]] * 2
    assert world(_qwen_like, 4, 4) == [[(2, 8), (4, 8), (4, 8), (8, 2)]] * 4


def _too_many(rank: int, shape: toy.Shape) -> None:
    bind(ParallelAttention(shape), my_group([[0, 1, 2]]))


def test_a_degree_that_fits_no_heads_is_refused_on_every_rank(world):
    world.raises(ValueError, r"degree 3 cannot share num_kv_heads=2", _too_many, 3, UNEVEN)
    two_heads = toy.Shape(width=12, num_heads=2)
    world.raises(ValueError, r"degree 3 does not fit num_heads=2.*from \[1, 2\]", _too_many, 3, two_heads)


# --------------------------------------------------------------------------------- traffic and recomputation


class EntersThrice(ParallelAttention):
    """The control: one `enter` for each projection, of tensors that are not the same."""

    def __init__(self, shape: toy.Shape) -> None:
        super().__init__(shape)
        self.query.input_is_entered = False
        for layer in (self.key, self.value):
            layer.register_forward_pre_hook(lambda layer, args: (enter(args[0].clone(), layer.group),))

    def forward(self, x: Tensor) -> Tensor:
        return toy.Attention.forward(self, x)


def _traffic(rank: int, shape: toy.Shape) -> None:
    group = my_group(NEIGHBOURS)
    whole = toy.Block(shape).double()
    shake(dict(whole.named_parameters()))
    size = BATCH * shape.context * shape.width * 8  # bytes of B·T·H
    for attention, backward in ((ParallelAttention, 2), (EntersThrice, 4)):
        block = toy.Block(shape, attention, ParallelMLP).double()
        block.load_state_dict(whole.state_dict())
        bind(block, group)
        inputs = pattern(BATCH, shape.context, shape.width, seed=2)
        mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        with comm.record() as ledger:
            y = block(mine)
        _expect(ledger, 2, size)
        with comm.record() as ledger:
            (y * inputs).sum().backward()
        _expect(ledger, backward, size)
        truth = whole(theirs)
        whole.zero_grad()
        (truth * inputs).sum().backward()
        assert_close(y, truth, LAW)
        assert_close(mine.grad, theirs.grad, LAW, "input gradient of the block")
        compare_gradients(dict(block.named_parameters()), dict(whole.named_parameters()), group)


def _expect(ledger: comm.Ledger, calls: int, size: int) -> None:
    reduced = ledger.total("model", "all_reduce")
    assert (reduced.calls, reduced.payload) == (calls, calls * size), ledger.rows
    assert ledger.total().calls == calls, f"nothing else is sent: {ledger.rows}"


@pytest.mark.parametrize("shape", [THREE_HEADS, GROUPED], ids=["three heads", "grouped"])
def test_a_block_costs_two_all_reduces_forward_and_two_backward(world, shape):
    world(_traffic, 4, shape)


def _whole_traffic(rank: int) -> None:
    """The embedding's sum, two per block, the head's; the whole logits are gathered, the parts are not."""
    group, (ids, labels) = my_group([[0, 1]]), make_ids(GROUPED)
    for specs_of, gathers, small in (
        (toy.parallel_layer_specs, 1, 0),
        (toy.vocab_parallel_layer_specs, 0, 2),
    ):
        cut = Cut(specs_of(GROUPED))
        cut.bind(group)
        loss_fn = VocabParallelCrossEntropy(GROUPED.vocabulary, group) if small else toy.loss_fn
        with comm.record() as forward:
            loss = loss_fn(cut(ids), labels)
        with comm.record() as backward:
            loss.backward()
        assert forward.total("model", "all_reduce").calls == 1 + 2 * GROUPED.num_blocks + small
        assert forward.total("model", "all_gather").calls == gathers
        assert backward.total("model").calls == 2 * GROUPED.num_blocks + 1
        assert backward.total("model", "all_gather").calls == 0


def test_the_whole_model_sends_what_its_docstring_says(world):
    world(_whole_traffic, 2)


def _recomputed(rank: int) -> None:
    ids, labels = make_ids(UNEVEN)
    for group in groups_of():
        cut, whole = Cut(toy.parallel_layer_specs(UNEVEN)), whole_model(UNEVEN)
        shake(cut.parameters())
        shake(whole.parameters_by_layer())
        cut.bind(group)
        with comm.record() as ledger:
            loss = toy.loss_fn(cut(ids, run=checkpoint), labels)
            loss.backward()
        toy.loss_fn(whole(ids), labels).backward()
        compare_gradients(cut.parameters(), whole.parameters_by_layer(), group)
        again = ledger.total("model", "all_reduce").calls - (1 + 4 * UNEVEN.num_blocks + 1)
        assert again >= UNEVEN.num_blocks, "backward ran at least the first sum of each block once more"


def test_recomputing_every_layer_in_backward_gives_the_same_gradients(world):
    world(_recomputed, 4)


def test_the_loss_of_the_parts_is_the_loss_of_the_whole_without_processes():
    logits, labels = pattern(2, 3, 11), torch.tensor([[0, 10, 4], [5, 5, 6]])
    assert_close(VocabParallelCrossEntropy(11)(logits, labels), toy.loss_fn(logits, labels), LAW)
    assert differs(toy.loss_fn(logits, labels), toy.loss_fn(logits[:, :2], labels[:, :2]))
