"""§9.3 Layers cut over the model axis compute what the whole layers compute, gradients included.

Guards against: a strided gradient that stays un-reduced, a bias added once per rank, a head cut in its
middle, partial gradients taken for whole ones, a weight replaced by another object, group ranks mixed up with
global ones, and a rank that fails alone while the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shard_checks import Axes, compare_gradients, groups_of, linear, my_group, pattern
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.checkpointing import checkpoint
from ds_lite.comm import ProcessGroup
from ds_lite.tags import cut_of, tags_of
from ds_lite.tensor_parallel import (
    KeyValueLinear,
    LinearAllreduce,
    LinearLayer,
    ReplicatedLinear,
    VocabParallelEmbedding,
    deal,
    deal_heads,
    enter,
    gather,
    leave,
    query_columns,
)

F64 = torch.float64
BATCH, TOKENS, INPUTS, OUTPUTS, VOCABULARY = 2, 3, 7, 5, 11  # both widths and the vocabulary are odd


# --------------------------------------------------------------------------------------------- regions


def _transposed(y: Tensor, rank: int) -> Tensor:
    return (y.transpose(0, 2) * pattern(*y.transpose(0, 2).shape, seed=rank)).sum()


def _expanded(y: Tensor, rank: int) -> Tensor:
    return y.sum() * (rank + 1.5)


def _contiguous(y: Tensor, rank: int) -> Tensor:
    return (y * pattern(*y.shape, seed=rank)).sum()


def _check_enter(group: ProcessGroup, loss: Callable[[Tensor, int], Tensor], is_strided: bool) -> None:
    """The gradient is the sum of what both ranks' losses ask for, however it lies in memory."""
    whole, rank = pattern(2, 3, 4, seed=5), comm.get_rank(group)
    mine, truth = whole.clone().requires_grad_(), whole.clone().requires_grad_()
    alone = whole.clone().requires_grad_()
    entered = enter(mine, group)
    arrived: list[Tensor] = []
    entered.register_hook(arrived.append)
    loss(entered, rank).backward()
    (loss(truth, 0) + loss(truth, 1)).backward()
    loss(alone, rank).backward()
    assert_close(entered, whole, EXACT)
    assert arrived[0].is_contiguous() != is_strided, loss.__name__
    assert_close(arrived[0], alone.grad, EXACT, "the gradient that arrived was not written to")
    assert_close(mine.grad, truth.grad, LAW, loss.__name__)
    assert differs(alone.grad, truth.grad)


def _check_leave(group: ProcessGroup) -> None:
    parts = [pattern(4, 3, 2, seed=rank) for rank in range(2)]
    mine = parts[comm.get_rank(group)].clone().requires_grad_()
    total = leave(mine.transpose(0, 2), group)
    weights = pattern(4, 3, 2, seed=9)
    (total.transpose(0, 2) * weights).sum().backward()
    assert_close(total, (parts[0] + parts[1]).transpose(0, 2), LAW)
    assert_close(mine, parts[comm.get_rank(group)], EXACT, "the argument of leave was not written to")
    assert_close(mine.grad, weights, LAW)
    assert differs(mine, parts[0] + parts[1])


def _check_gather(group: ProcessGroup, ranges: Any) -> None:
    rank, whole, weights = comm.get_rank(group), pattern(2, 3, 7, seed=1), pattern(2, 3, 7, seed=2)
    columns = torch.cat([torch.arange(start, stop) for start, stop in ranges[rank]])
    mine = whole[..., columns].transpose(0, 1).contiguous().requires_grad_()
    gathered = gather(mine.transpose(0, 1), ranges, group)
    (gathered * weights).sum().backward()
    assert_close(gathered, whole, EXACT)
    assert_close(mine.grad.transpose(0, 1), weights[..., columns], EXACT)
    assert differs(mine.grad.transpose(0, 1), 2 * weights[..., columns]), "a sum would double it"


def _check_second_derivative(group: ProcessGroup) -> None:
    """y = (c0 + c1) x and the loss sum(y^3): its second derivative is 6 (c0 + c1)^3 x."""
    x = pattern(5, seed=3).requires_grad_()
    y = leave(enter(x, group) * (comm.get_rank(group) + 2.0), group)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert_close(first, 3 * 5.0**3 * x**2, LAW)
    assert_close(x.grad, 6 * 5.0**3 * x, LAW)


def _regions(rank: int) -> None:
    alone = comm.new_group_of_one()
    for group in groups_of():
        _check_enter(group, _transposed, is_strided=True)
        _check_enter(group, _expanded, is_strided=True)
        _check_enter(group, _contiguous, is_strided=False)
        _check_leave(group)
        _check_gather(group, (((0, 4),), ((4, 7),)))
        _check_gather(group, (((0, 2), (6, 7)), ((2, 6),)))  # two pieces on one rank, as in a fused weight
        _check_second_derivative(group)
    x = pattern(2, 3)
    for nobody in (alone, None):
        assert enter(x, nobody) is x and leave(x, nobody) is x and gather(x, (), nobody) is x


def test_what_enters_is_summed_backward_what_leaves_forward_and_a_gather_takes_its_own(world):
    world(_regions, 4)


# ---------------------------------------------------------------------------------------------- layers


def _check_layer(
    sharded: nn.Module,
    whole: nn.Module,
    x: Tensor,
    group: ProcessGroup,
    *,
    own_in: slice = slice(None),
    own_out: slice = slice(None),
) -> None:
    """Output, input gradient and parameter gradients; the gradient comes back through a transpose."""
    name = type(sharded).__name__
    mine, theirs = x[..., own_in].clone().requires_grad_(), x.clone().requires_grad_()
    y, truth = sharded(mine), whole(theirs)
    weights = pattern(*truth.shape, seed=8)
    (y.transpose(0, 1) * weights[..., own_out].transpose(0, 1)).sum().backward()
    (truth * weights).sum().backward()
    assert_close(y, truth[..., own_out], LAW, name)
    assert_close(mine.grad, theirs.grad[..., own_in], LAW, f"{name}: input gradient")
    compare_gradients(dict(sharded.named_parameters()), dict(whole.named_parameters()), group, name)


def _own(widths: list[int], rank: int) -> slice:
    return slice(sum(widths[:rank]), sum(widths[: rank + 1]))


def _column_and_row(rank: int) -> None:
    x, outside = pattern(BATCH, TOKENS, INPUTS, seed=4), pattern(BATCH, TOKENS, OUTPUTS, seed=4)
    prepared = []
    for group in groups_of():  # both groups' layers live before the first one runs
        layers = (
            LinearLayer(linear(INPUTS, OUTPUTS, 1), group),
            LinearLayer(linear(INPUTS, OUTPUTS, 1), group, gather_output=True),
            LinearAllreduce(linear(INPUTS, OUTPUTS, 1), group),
            LinearAllreduce(nn.Linear(OUTPUTS, INPUTS, bias=False, dtype=F64), group),
        )
        prepared.append((group, layers))
    for group, (column, gathering, row, without_bias) in prepared:
        r = comm.get_rank(group)
        inputs, outputs = _own([4, 3], r), _own([3, 2], r)
        _check_layer(column, linear(INPUTS, OUTPUTS, 1), x, group, own_out=outputs)
        _check_layer(gathering, linear(INPUTS, OUTPUTS, 1), x, group)
        _check_layer(row, linear(INPUTS, OUTPUTS, 1), x, group, own_in=inputs)
        whole = nn.Linear(OUTPUTS, INPUTS, bias=False, dtype=F64)
        whole.weight.data = cut_of(without_bias.weight).gather(without_bias.weight.detach())
        _check_layer(without_bias, whole, outside, group, own_in=outputs)
        tags = [tags_of(p).model for p in (*column.parameters(), *row.parameters())]
        assert tags == ["sharded", "sharded", "sharded", "full"]
        _check_controls(group, x, inputs)


def _check_controls(group: ProcessGroup, x: Tensor, inputs: slice) -> None:
    """Without `enter` the input gradient is wrong; with the bias before the sum the output is."""
    whole = linear(INPUTS, OUTPUTS, 1)
    truth, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole(truth).sum().backward()
    LinearLayer(linear(INPUTS, OUTPUTS, 1), group, input_is_entered=True)(mine).sum().backward()
    assert differs(mine.grad, truth.grad)
    early = leave(F.linear(x[..., inputs], whole.weight[:, inputs], whole.bias), group)
    assert differs(early, whole(x))


def test_column_and_row_equal_the_whole_layer_on_two_groups_at_once(world):
    world(_column_and_row, 4)


def _embedding(rank: int) -> None:
    ids = torch.tensor([[0, 10, 5], [6, 4, 5]])  # the first and the last id, and both sides of the cut
    for padding_idx in (None, 5, 8):
        for group in groups_of():
            weights = (pattern(VOCABULARY, INPUTS, seed=6) for _ in range(2))
            whole, other = (
                nn.Embedding(VOCABULARY, INPUTS, padding_idx, dtype=F64, _weight=weight) for weight in weights
            )
            sharded = VocabParallelEmbedding(other, group)
            _check_table(sharded, whole, ids, group)
            assert sharded.weight.shape == ((6, 5)[comm.get_rank(group)], INPUTS)


def _check_table(
    sharded: VocabParallelEmbedding, whole: nn.Embedding, ids: Tensor, group: ProcessGroup
) -> None:
    """Rows, then whole and partial scores from the same table: the gradient is the sum of all uses."""
    hidden = pattern(BATCH, TOKENS, INPUTS, seed=7)
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    weights = pattern(BATCH, TOKENS, VOCABULARY, seed=8)
    own = slice(sharded.start, sharded.stop)
    rows, scores, part = sharded(ids), sharded.whole_logits(mine), sharded.logits(mine)
    true_rows, true_scores = whole(ids), F.linear(theirs, whole.weight)
    (rows.transpose(0, 1) * weights[..., :INPUTS].transpose(0, 1)).sum().backward(retain_graph=True)
    ((scores * weights).sum() + (part * weights[..., own]).sum()).backward()
    (true_rows * weights[..., :INPUTS]).sum().backward()
    (2 * (true_scores * weights).sum()).backward()
    assert_close(rows, true_rows, LAW)
    assert_close(scores, true_scores, LAW)
    assert_close(part, true_scores[..., own], LAW)
    assert_close(mine.grad, theirs.grad, LAW)
    compare_gradients({"weight": sharded.weight}, {"weight": whole.weight}, group)
    is_here = (ids >= sharded.start) & (ids < sharded.stop)
    assert differs(whole(ids).masked_fill(~is_here.unsqueeze(-1), 0), true_rows), "a rank alone lacks rows"


def test_a_table_cut_by_rows_equals_the_whole_one_in_every_use(world):
    world(_embedding, 4)


class QueryOnKeys(nn.Module):
    """A bit of attention: scores of every query head on the key head it shares, then an output projection."""

    def __init__(self, project: list[nn.Module], group: ProcessGroup | None, head_width: int) -> None:
        super().__init__()
        self.query, self.key, self.scale, self.out = project
        self.group, self.head_width = group, head_width

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.group)
        q, k = (p(x).unflatten(-1, (-1, self.head_width)) for p in (self.query, self.key))
        k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
        return self.out((q * k * self.scale(x).unsqueeze(-2)).flatten(-2))


def _heads(rank: int, num_heads: int, num_kv_heads: int, head_width: int, lists: list[list[int]]) -> Any:
    inputs, x = 5, pattern(BATCH, TOKENS, 5, seed=4)
    widths = [(inputs, num_heads * head_width), (inputs, num_kv_heads * head_width), (inputs, head_width)]
    widths.append((num_heads * head_width, 3))
    group = my_group(lists)
    whole = QueryOnKeys([linear(*w, i) for i, w in enumerate(widths)], None, head_width)
    query, key, scale, out = (linear(*w, i) for i, w in enumerate(widths))
    columns = _Columns(num_heads, num_kv_heads, head_width)
    parts = [
        LinearLayer(query, group, dealing=columns, input_is_entered=True),
        KeyValueLinear(key, num_heads, num_kv_heads, group),
        ReplicatedLinear(scale, group),
        LinearAllreduce(out, group, dealing=columns),
    ]
    sharded = QueryOnKeys(parts, group, head_width)
    _check_layer(sharded, whole, x, group)
    assert differs(sharded.scale.bias.grad, whole.scale.bias.grad), "one rank's share of a partial gradient"
    return [tuple(p.weight.shape) for p in parts], tags_of(parts[1].weight).model


class _Columns:
    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, ranks: int) -> Any:
        return query_columns(*self.sizes, ranks)


PAIRS, ALL, TRIPLE = [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 1, 2]]


@pytest.mark.parametrize(
    "heads, kv_heads, lists, query_rows, key_rows, kind",
    [
        (4, 2, PAIRS, [4, 4], [2, 2], "sharded"),
        (3, 3, PAIRS, [4, 2], [4, 2], "sharded"),  # three heads on two ranks
        (6, 3, PAIRS, [8, 4], [4, 2], "sharded"),  # groups stay together
        (4, 2, ALL, [2, 2, 2, 2], [4, 4, 4, 4], "partial"),  # two ranks share a kv head
        (6, 2, ALL, [4, 2, 4, 2], [4, 4, 4, 4], "partial"),
        (5, 1, TRIPLE, [4, 4, 2], [2, 2, 2], "partial"),  # one kv head for all
    ],
)
def test_heads_are_dealt_whole_and_the_result_is_that_of_one_process(
    world, heads, kv_heads, lists, query_rows, key_rows, kind
):
    ranks = len(lists[0])
    for rank, (shapes, tag) in enumerate(world(_heads, len(lists) * ranks, heads, kv_heads, 2, lists)):
        assert shapes == [
            (query_rows[rank % ranks], 5),
            (key_rows[rank % ranks], 5),
            (2, 5),
            (3, query_rows[rank % ranks]),
        ]
        assert tag == kind


# ------------------------------------------------------------------------------ numbers worked out by hand


def _bias_once(rank: int) -> None:
    """Report B32: W = [[1,2,3,4]], b = [10], x = ones."""
    group, whole = my_group([[0, 1]]), nn.Linear(4, 1, dtype=F64)
    with torch.no_grad():
        whole.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        whole.bias.fill_(10.0)
    twin = nn.Linear(4, 1, dtype=F64)
    twin.load_state_dict(whole.state_dict())
    layer, x = LinearAllreduce(whole, group), torch.ones(1, 4, dtype=F64)
    part = x[:, :2]
    assert_close(layer(part), torch.tensor([[20.0]], dtype=F64), LAW)
    assert differs(leave(F.linear(part, layer.weight, layer.bias), group), layer(part)), "30: once per rank"
    layer(part).sum().backward()
    assert_close(layer.bias.grad, torch.tensor([1.0], dtype=F64), LAW)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (layer, twin)]
    for _ in range(10):
        for module, optimizer, inputs in zip((layer, twin), optimizers, (part, x)):
            optimizer.zero_grad()
            (module(inputs) - 3.0).square().sum().backward()
            optimizer.step()
    everyone = torch.empty(2, dtype=F64)
    comm.all_gather_into_tensor(everyone, layer.bias.detach(), group=group)
    assert everyone[0] == everyone[1] and differs(layer.bias, torch.tensor([10.0], dtype=F64))
    assert_close(layer.bias, twin.bias, LAW)
    assert_close(cut_of(layer.weight).gather(layer.weight.detach()), twin.weight, LAW)


def test_a_row_bias_counts_once_and_learns_at_full_speed(world):
    world(_bias_once, 2)


def _pair_by_hand(rank: int) -> None:
    """Report B38: x = [1,1], A = [[1,2],[3,4]] by columns, B = [[1,2],[3,4]] by rows, y = xAB."""
    group, matrix = my_group([[0, 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)

    def layer_of(a: Tensor) -> nn.Linear:
        layer = nn.Linear(2, 2, bias=False, dtype=F64)
        layer.weight.data.copy_(a.T)  # torch multiplies by the transpose
        return layer

    down = LinearAllreduce(layer_of(matrix), group)

    def run(is_entered: bool = False, twice: bool = False, recompute: bool = False) -> tuple[Tensor, Tensor]:
        up = LinearLayer(layer_of(matrix), group, input_is_entered=is_entered)
        x = torch.ones(1, 2, dtype=F64, requires_grad=True)
        inner = enter(x, group) if twice else x

        def both(z: Tensor) -> Tensor:
            return down(up(z))

        y = checkpoint(both, inner) if recompute else both(inner)
        if rank == 1:
            time.sleep(0.2)  # the other one waits in its collective
        y.sum().backward()
        return y.squeeze(0), x.grad.squeeze(0)

    def expect(got: tuple[Tensor, Tensor], gradient: list[float]) -> None:
        assert_close(got[0], torch.tensor([22.0, 32.0], dtype=F64), LAW)
        assert_close(got[1], torch.tensor(gradient, dtype=F64), LAW)

    expect(run(), [17, 37])
    expect(run(recompute=True), [17, 37])
    expect(run(is_entered=True), [[3, 9], [14, 28]][rank])  # no all-reduce in backward
    expect(run(twice=True), [34, 74])  # one too many


def test_the_classic_pair_gives_the_numbers_worked_out_by_hand(world):
    world(_pair_by_hand, 2)


# -------------------------------------------------------------------------------------- joining a group


def _joining(rank: int) -> list[str]:
    group = my_group([[0, 1]])
    source = linear(INPUTS, OUTPUTS, 3)
    weight, before = source.weight, source.weight.detach().clone()
    layer = LinearLayer(source)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    unbound = str(layer)
    assert_close(layer(pattern(2, INPUTS)), source(pattern(2, INPUTS)), EXACT, "without a group it is whole")
    layer.bind(Axes(model=group))
    layer.bind(Axes())  # it has a group and asks for no other
    own = _own([3, 2], rank)
    assert layer.weight is weight and source.weight is weight
    assert_close(weight, before[own], EXACT)
    layer(pattern(2, INPUTS)).sum().backward()
    gradient = weight.grad.clone()
    optimizer.step()
    assert_close(weight, before[own] - 0.5 * gradient, LAW, "the optimizer made earlier moves the part")
    assert cut_of(layer.bias).gather(layer.bias.detach()).shape == (OUTPUTS,)
    return [unbound, str(layer), str(nn.Sequential(LinearAllreduce(linear(3, 4, 1), group)))]


def test_a_layer_is_whole_until_it_is_bound_and_its_parameters_stay_the_same_objects(world):
    for rank, (unbound, layer, row) in enumerate(world(_joining, 2)):
        assert unbound == "LinearLayer(weight (5, 7) of (5, 7), bias=True)"
        assert layer == f"LinearLayer(rank {rank} of 2, weight ({3 - rank}, 7) of (5, 7), bias=True)"
        assert f"LinearAllreduce(rank {rank} of 2, weight (4, {2 - rank}) of (4, 3), bias=True)" in row


def test_without_processes_every_layer_is_the_whole_layer():
    x, whole = pattern(BATCH, INPUTS), linear(INPUTS, OUTPUTS, 1)
    for make in (LinearLayer, LinearAllreduce, ReplicatedLinear, lambda m: KeyValueLinear(m, 5, 5)):
        assert_close(make(whole)(x), whole(x), EXACT)
    table = VocabParallelEmbedding(nn.Embedding(VOCABULARY, 3, dtype=F64))
    assert_close(table(torch.tensor([0, 10])), table.weight[[0, 10]], EXACT)
    assert table.whole_logits(pattern(2, 3)).shape == (2, VOCABULARY)
    assert all(tags_of(p).model == "full" for p in (*whole.parameters(), *table.parameters()))


def _already_cut(rank: int) -> None:
    """Parts of unequal widths that no deal would make: 1 and 4 of 5 columns."""
    for group in groups_of():
        r, whole = comm.get_rank(group), linear(INPUTS, OUTPUTS, 1)
        own = _own([1, 4], r)
        part = nn.Linear(INPUTS, [1, 4][r], dtype=F64)
        part.load_state_dict({"weight": whole.weight[own].detach(), "bias": whole.bias[own].detach()})
        layer = LinearLayer(part, skip_partition=True, gather_output=True)
        assert [tags_of(p).model for p in layer.parameters()] == ["sharded"] * 2, "no copies of one weight"
        layer.bind(Axes(model=group))
        assert layer.whole_shape == (OUTPUTS, INPUTS)
        _check_layer(layer, whole, pattern(BATCH, TOKENS, INPUTS), group)


def test_a_part_that_is_given_as_a_part_is_not_cut_again(world):
    world(_already_cut, 4)


def _tied(rank: int) -> None:
    """A head that shares the embedding's weight: both layers join, the weight is cut once."""
    group = my_group([[0, 1]])
    table = nn.Embedding(VOCABULARY, 3, dtype=F64, _weight=pattern(VOCABULARY, 3, seed=5))
    projection = nn.Linear(3, VOCABULARY, bias=False, dtype=F64)
    projection.weight = table.weight
    whole = pattern(VOCABULARY, 3, seed=5).requires_grad_()
    embedding, head = VocabParallelEmbedding(table), LinearLayer(projection, gather_output=True)
    for layer in (embedding, head):
        layer.bind(Axes(model=group))
    ids, weights = torch.tensor([[0, 10, 3]]), pattern(1, 3, VOCABULARY)
    (head(embedding(ids)) * weights).sum().backward()
    (F.linear(F.embedding(ids, whole), whole) * weights).sum().backward()
    assert embedding.weight is head.weight and head.weight.shape == (6 - rank, 3)
    compare_gradients({"weight": head.weight}, {"weight": whole}, group)
    with pytest.raises(ValueError, match=r"shared by two layers was cut along dim 0 .* now along dim 1"):
        LinearAllreduce(projection, group)


def test_a_tied_head_is_cut_with_its_embedding_and_never_in_another_way(world):
    world(_tied, 2)


# -------------------------------------------------------------------------------------------- refusals


def test_a_deal_is_even_whole_and_puts_the_rest_in_front():
    assert deal(11, 4) == [3, 3, 3, 2]
    assert deal(15, 2, unit=5) == [10, 5]
    assert deal(6, 1) == [6]
    for total in range(1, 30):
        for ranks in range(1, total + 1):
            widths = deal(total, ranks)
            assert sum(widths) == total and max(widths) - min(widths) <= 1
            assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (
            {"total": 3, "ranks": 4, "what": "size"},
            r"4 .* exceed the 3 units of size=3.* at most 3",
        ),
        ({"total": 12, "ranks": 4, "unit": 4}, r"4 .* exceed the 3 units of width=12, unit=4"),
        ({"total": 7, "ranks": 1, "unit": 2}, r"width=7 is not a multiple of unit=2"),
        ({"total": 7, "ranks": 0}, r"ranks=0"),
    ],
)
def test_a_deal_that_would_cut_a_unit_or_leave_a_rank_without_one_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        deal(**arguments)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (12, 4), (7, 1)])
def test_every_head_is_computed_once_next_to_the_kv_head_it_reads(num_heads, num_kv_heads):
    group, refused = num_heads // num_kv_heads, []
    for ranks in range(1, num_heads + 1):
        try:
            dealt = deal_heads(num_heads, num_kv_heads, ranks)
        except ValueError:
            refused.append(ranks)
            continue
        assert [h for start, stop in dealt.query for h in range(start, stop)] == list(range(num_heads))
        for (start, stop), (kv_start, kv_stop) in zip(dealt.query, dealt.kv, strict=True):
            assert start < stop
            assert {head // group for head in range(start, stop)} == set(range(kv_start, kv_stop))
            assert (stop - start) % (kv_stop - kv_start) == 0
        assert dealt.kv_is_replicated == (ranks > num_kv_heads)
    assert refused == [n for n in range(num_kv_heads + 1, num_heads + 1) if n % num_kv_heads]


@pytest.mark.parametrize(
    "numbers, match",
    [
        ((4, 2, 8), r"degree 8 does not fit num_heads=4.*choose a degree from \[1, 2, 4\]"),
        ((6, 2, 3), r"degree 3 cannot share num_kv_heads=2.*choose a degree from \[1, 2, 4, 6\]"),
        ((8, 3, 2), r"num_heads=8 is not a multiple of num_kv_heads=3.*from \[1, 2, 4, 8\]"),
        ((4, 8, 2), r"num_heads=4 is not a multiple of num_kv_heads=8"),
        ((4, 0, 2), r"num_kv_heads=0"),
        ((4, 2, 0), r"degree 0 does not fit"),
    ],
)
def test_heads_that_need_irregular_routing_are_refused_with_the_degrees_that_work(numbers, match):
    with pytest.raises(ValueError, match=match):
        deal_heads(*numbers)


def _refused(rank: int, case: str) -> None:
    group = my_group([[0, 1]])
    table = VocabParallelEmbedding(nn.Embedding(VOCABULARY, 3), group)
    cases: dict[str, Callable[[], object]] = {
        "too narrow": lambda: LinearLayer(nn.Linear(3, 1), group),
        "whole input": lambda: LinearAllreduce(nn.Linear(4, 3), group)(torch.ones(2, 4)),
        "uncovered": lambda: LinearLayer(nn.Linear(3, 8), group, dealing=_Columns(3, 3, 2)),
        "heads": lambda: KeyValueLinear(nn.Linear(3, 4), 1, 1, group),
        "kv width": lambda: KeyValueLinear(nn.Linear(3, 5), 4, 2, group),
        "transposed": lambda: LinearLayer(Transposed(), group),
        "id": lambda: table(torch.tensor([0, VOCABULARY])),
        "negative id": lambda: table(torch.tensor([0, -1])),
        "option": lambda: VocabParallelEmbedding(nn.Embedding(4, 3, max_norm=1.0), group),
    }
    cases[case]()


class Transposed(nn.Module):
    """Keeps its weight as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    "case, match",
    [
        ("too narrow", r"2 ranks exceed the 1 units"),
        ("whole input", r"got 4 input columns; it takes the 2 of this rank"),
        ("uncovered", r"do not cover dim 0 of a parameter of shape \(8, 3\)"),
        ("heads", r"degree 2 does not fit num_heads=1"),
        ("kv width", r"out_features=5 is not divisible by num_kv_heads=2"),
        ("transposed", r"LinearLayer is made from a whole Linear with a weight, got Transposed"),
        ("id", r"ids from 0 to 11 do not fit a vocabulary of 11"),
        ("negative id", r"ids from -1 to 0 do not fit"),
        ("option", r"does not support \['max_norm'\]"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank_alike(world, case, match):
    world.raises((ValueError, TypeError), match, _refused, 2, case)


def _stranger(rank: int) -> None:
    group = comm.new_group([1], "model")
    if rank == 0:
        with pytest.raises(ValueError, match=r"process 0 is not in the group"):
            LinearLayer(nn.Linear(3, 4), group)
    else:
        assert LinearLayer(nn.Linear(3, 4), group).weight.shape == (4, 3)


def test_a_group_without_this_process_is_refused(world):
    world(_stranger, 2)
