"""§9.15 Domino's layers in parts of the batch equal one process, and wait for every sum in time (report B38).

Guards against: a sum read before it is there, one never waited for, a gradient that is not summed or summed
twice, parts that get each other's sums, masks of another part, dropout in eval, a bias counted once a rank.
"""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
from domino_models import HEADS, TOKENS, WIDTH, Mpu, config_of, make, plain, rotate, whole_weights
from shard_checks import groups_of, my_group, pattern
from tolerance import BF16, EXACT, LAW, assert_close, differs
from torch import Tensor

import ds_lite
from ds_lite import comm
from ds_lite.domino import DominoAsyncColumnParallelLinear, RowParallelLinearNoComm
from ds_lite.domino.interleave import Steps, interleave
from ds_lite.domino.lanes import Lanes
from ds_lite.grid import PipelineParallelGrid
from ds_lite.pipe.timeline import timeline_svg
from ds_lite.tags import cut_of
from ds_lite.tensor_parallel.pending import Pending, finish_sum, start_sum, wait_in_backward
from ds_lite.topology import ProcessTopology

F64 = torch.float64

# ---------------------------------------------------------------------------------------------- report B38


def columns_and_rows(group: Any) -> tuple[DominoAsyncColumnParallelLinear, RowParallelLinearNoComm]:
    config, rank = config_of(), comm.get_rank(group)
    column = DominoAsyncColumnParallelLinear(2, 1, group, config, config.init_method, bias=False)
    row = RowParallelLinearNoComm(1, 2, config, config.init_method, bias=False, _tp_group=group)
    a, b = torch.tensor([[1.0, 2], [3, 4]], dtype=F64), torch.tensor([[1.0, 2], [3, 4]], dtype=F64)
    column.weight.data.copy_(a.T[rank : rank + 1])
    row.weight.data.copy_(b.T[:, rank : rank + 1])
    return column, row


def b38(rank: int, samples: int, late: int | None) -> None:
    """y = x A B; one rank comes half a second late to each sum."""
    for group in groups_of():
        column, row = columns_and_rows(group)
        x = torch.ones(samples, 2, dtype=F64, requires_grad=True)
        pending = Pending()
        delay = 0.5 if comm.get_rank(group) == late else 0.0
        pieces = x.tensor_split(min(2, samples))
        parts = [two_layers(own, key, column, row, pending, delay) for key, own in enumerate(pieces)]
        y = torch.cat(interleave(parts))
        assert_close(y.detach(), torch.tensor([[22.0, 32]], dtype=F64).expand(samples, 2), EXACT, "y")
        y.sum().backward()
        assert x.grad is not None
        assert_close(x.grad, torch.tensor([[17.0, 37]], dtype=F64).expand(samples, 2), EXACT, "dL/dx")
        assert len(pending) == 0
        own = torch.ones(samples, 2, dtype=F64) @ column.weight.T @ row.weight.T
        assert differs(own, y.detach()), "control: one rank's part of the sum"


def two_layers(x: Tensor, key: int, column: Any, row: Any, pending: Pending, delay_s: float) -> Steps[Tensor]:
    normed = wait_in_backward(x, pending, key)
    yield
    inner, _ = column(normed, pending, key)
    inner.register_hook(lambda _: time.sleep(delay_s))
    y, _ = row(inner)
    time.sleep(delay_s)
    y = start_sum(y, pending, (key, "forward"), column.group)
    yield
    return finish_sum(y, pending, (key, "forward"))


@pytest.mark.parametrize("samples, late", [(1, None), (2, None), (3, None), (2, 0), (3, 1)])
def test_b38_the_numbers_of_the_report(world: Any, samples: int, late: int | None) -> None:
    world(b38, 4, samples, late)


def bias_counts_once(rank: int) -> None:
    """Report B32: 20 on both ranks, and a gradient of 1."""
    group, config = my_group([[0, 1]]), config_of()
    row = RowParallelLinearNoComm(2, 1, config, config.init_method, _tp_group=group)
    assert row.bias is not None
    row.weight.data.copy_(torch.tensor([[1.0, 2]] if rank == 0 else [[3.0, 4]], dtype=F64))
    row.bias.data.fill_(10)
    y, later = row(torch.ones(1, 2, dtype=F64))
    pending = Pending()
    y = finish_sum(start_sum(y, pending, 0, group), pending, 0)
    assert later is None and y.item() == 20.0
    y.sum().backward()
    assert row.bias.grad is not None and row.bias.grad.item() == 1.0


def test_b32_a_bias_before_the_sum_counts_once(world: Any) -> None:
    world(bias_counts_once, 2)


# ------------------------------------------------------------------------------------------- whole stacks

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": {"gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False},
    "groups": {"num_query_groups": 2},
    "intra": {"domino_intra_layer_overlap": True, "num_query_groups": 2},
    "normed residual": {"apply_residual_connection_post_layernorm": True},
    "recomputed": {"recompute_granularity": "full", "gated_linear_unit": True},
    "recomputed intra": {"recompute_granularity": "full", "domino_intra_layer_overlap": True},
}


def equals_one_process(rank: int, ranks: int, name: str, samples: int, parts: int, has_mask: bool) -> None:
    config = config_of(**CASES[name])
    groups = groups_of() if ranks == 2 else [my_group([list(range(ranks))])]
    for group in groups:
        model = make(Mpu(group, ranks), config, rotate=rotate, parts=parts)
        weights = whole_weights(model)
        x, upstream = (
            pattern(TOKENS, samples, WIDTH).requires_grad_(),
            pattern(TOKENS, samples, WIDTH, seed=1),
        )
        truth_x = x.detach().clone().requires_grad_()
        angle = torch.arange(TOKENS, dtype=F64).view(-1, 1, 1, 1)
        angles = torch.cat((angle.cos(), angle.sin()), dim=-1)
        mask = torch.zeros(samples, 1, 1, TOKENS, dtype=torch.bool)
        mask[: samples - 1, ..., -2:] = True  # the last two keys of all sequences but one are padding
        given = mask if has_mask else None
        truth = plain(weights, config, truth_x, given, angles)
        truth.backward(upstream)
        y = model(x, given, angles)
        assert_close(y.detach(), truth.detach(), LAW, "output")
        y.backward(upstream)
        assert x.grad is not None and truth_x.grad is not None
        assert_close(x.grad, truth_x.grad, LAW, "gradient of the input")
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            how, wanted = cut_of(parameter), weights[key].grad
            assert wanted is not None
            found = parameter.grad if how is None else how.gather(parameter.grad)
            assert_close(found, wanted, LAW, f"gradient of {key}")
        if has_mask:
            assert differs(plain(weights, config, truth_x, None, angles), truth), "control: the mask matters"


@pytest.mark.parametrize(
    "ranks, name, samples, parts, has_mask",
    [
        (2, "plain", 4, 2, True),
        (2, "gated", 3, 2, False),
        (2, "groups", 3, 3, True),
        (2, "intra", 5, 2, True),
        (2, "normed residual", 1, 2, False),
        (2, "recomputed", 3, 2, True),
        (2, "recomputed intra", 2, 2, False),
        (4, "plain", 3, 2, True),
        (4, "gated", 2, 1, True),
        (4, "recomputed", 4, 3, False),
    ],
)
def test_a_stack_in_parts_equals_one_process(
    world: Any, ranks: int, name: str, samples: int, parts: int, has_mask: bool
) -> None:
    world(equals_one_process, 4, ranks, name, samples, parts, has_mask)


def one_rank_is_late(rank: int, late: int, name: str) -> None:
    """Half a second before each of its collectives; nobody may read a sum before it is there."""
    if rank == late:
        all_reduce = comm.all_reduce
        with mock.patch.object(
            comm, "all_reduce", lambda *args, **named: (time.sleep(0.5), all_reduce(*args, **named))[1]
        ):
            equals_one_process(rank, 4, name, 2, 2, True)
    else:
        equals_one_process(rank, 4, name, 2, 2, True)


@pytest.mark.parametrize(
    "late, name",
    [
        (2, "plain"),
        pytest.param(0, "recomputed intra", marks=pytest.mark.full),
        pytest.param(3, "gated", marks=pytest.mark.full),
        pytest.param(1, "recomputed", marks=pytest.mark.full),
    ],
)
def test_a_stack_with_a_late_rank_equals_one_process(world: Any, late: int, name: str) -> None:
    world(one_rank_is_late, 4, late, name)


def bit_for_bit(rank: int) -> None:
    """Parts change nothing but the order in which a weight's gradients are added."""
    group = my_group([[0, 1]])
    x = pattern(TOKENS, 4, WIDTH)
    outputs = [make(Mpu(group, 2), config_of(), parts=parts)(x) for parts in (1, 2, 4)]
    for other in outputs[1:]:
        assert_close(other, outputs[0], LAW)


def test_parts_do_not_change_the_output(world: Any) -> None:
    world(bit_for_bit, 2)


def bytes_and_messages(rank: int) -> None:
    """As many bytes as plain tensor parallelism; with two parts twice the messages of half the size."""
    group, x = my_group([[0, 1]]), pattern(TOKENS, 4, WIDTH).requires_grad_()
    totals = {}
    for parts in (1, 2):
        model = make(Mpu(group, 2), config_of(), parts=parts)
        with comm.record() as ledger:
            model(x).sum().backward()
        totals[parts] = ledger.total(operation="all_reduce")
    assert totals[1].calls == 4 * 2 and totals[2].calls == 2 * totals[1].calls
    assert totals[1].sent == totals[2].sent == 4 * 2 * TOKENS * 4 * WIDTH * 8  # 2 (n-1)/n of each tensor


def test_bytes_are_equal_and_messages_twice_as_many(world: Any) -> None:
    world(bytes_and_messages, 2)


def in_eval(rank: int) -> None:
    group, x = my_group([[0, 1]]), pattern(TOKENS, 2, WIDTH)
    model = make(Mpu(group, 2), config_of(hidden_dropout=0.5, attention_dropout=0.5))
    calm = make(Mpu(group, 2), config_of())
    assert differs(model(x), calm(x)), "control: dropout is on in training"
    assert_close(model.eval()(x), calm(x), EXACT, "and off in eval")


def test_dropout_stops_in_eval(world: Any) -> None:
    world(in_eval, 2)


# ------------------------------------------------------------------------------------------ in the engine


class Scored(torch.nn.Module):
    def __init__(self, mpu: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.stack = make(mpu, config_of(params_dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stack(x).square().mean()
        return y


def trains(rank: int, zero: int, dtype: torch.dtype) -> None:
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data", "model"], [1, 2, 2]))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 0.05,
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    model = Scored(Mpu(grid.get_model_parallel_group(), 2), dtype)
    engine = ds_lite.initialize(model=model, config=config, mpu=grid)[0]
    wide = torch.float32 if dtype is torch.bfloat16 else F64
    tolerance = BF16 if dtype is torch.bfloat16 else LAW
    weights = {
        key.removeprefix("stack."): weight.detach().to(wide).requires_grad_()
        for key, weight in whole_weights(engine.module).items()
    }
    for step in range(2):
        batches = [pattern(TOKENS, 3, WIDTH, seed=step * 2 + i).to(wide) for i in range(2)]
        outputs = [plain(weights, config_of(), x, None, None) for x in batches]
        truth = torch.stack([y.square().mean() for y in outputs]).mean()
        for weight in weights.values():
            weight.grad = None
        truth.backward()
        engine.backward(engine(batches[grid.get_data_parallel_rank()].to(dtype)))
        for key, weight in weights.items() if dtype is F64 else ():
            assert_close(engine.gradients.full(f"stack.{key}"), weight.grad, LAW, key)
        engine.step()
        norm = torch.stack([w.grad.norm() for w in weights.values()]).norm()
        assert_close(torch.tensor(engine.get_global_grad_norm(), dtype=wide), norm, tolerance, "norm")
        with torch.no_grad():
            for weight in weights.values():
                weight -= 0.1 * weight.grad * min(1.0, 0.05 / (norm.item() + 1e-6))
    for key, weight in whole_weights(engine.module).items():
        assert_close(weight.detach().to(wide), weights[key.removeprefix("stack.")].detach(), tolerance, key)


@pytest.mark.parametrize("zero, dtype", [(0, F64), (1, F64), (2, F64), (2, torch.bfloat16)])
def test_a_stack_trains_under_the_engine(world: Any, zero: int, dtype: torch.dtype) -> None:
    world(trains, 4, zero, dtype)


# ------------------------------------------------------------------------------------------------ the lanes


def lanes_of(rank: int, late_s: float) -> tuple[list[str], float, str]:
    group = my_group([[0, 1]])
    model, lanes = make(Mpu(group, 2), config_of(num_layers=1)), Lanes()
    with lanes.recording():
        if rank == 1:
            time.sleep(late_s)
        model(pattern(TOKENS, 2, WIDTH).requires_grad_()).sum().backward()
    spans = lanes.spans(rank)
    transfers = [span for span in spans if span.kind == "communication"]
    assert len(transfers) == 8 and {span.micro_batch_id for span in transfers} == {0, 1}
    assert {span.kind for span in spans} == {"forward", "backward", "communication"}
    assert all(span.end >= span.start >= 0 for span in spans)
    return lanes.order(), lanes.exposed_s, timeline_svg(spans, title="One layer", unit="ms", row_name="rank")


def test_lanes_show_the_order_and_the_waiting(world: Any) -> None:
    (order, exposed, picture), (same, late, _) = world(lanes_of, 2, 0.3)
    assert order == same and len(order) == 16
    forward = [f"part {part} layer 1 {half} forward" for half in ("attention", "MLP") for part in (0, 1)]
    a, b, c, d = forward
    assert order[:8] == [
        f"start {a}",
        f"start {b}",
        f"wait {a}",
        f"start {c}",
        f"wait {b}",
        f"start {d}",
        f"wait {c}",
        f"wait {d}",
    ]
    back = [line.replace("forward", "backward") for line in (d, c, b, a)]
    assert [line.split()[0] for line in order[8:]] == [
        "start",
        "start",
        "wait",
        "start",
        "wait",
        "start",
        "wait",
        "wait",
    ]
    assert [line.removeprefix("start ") for line in order[8:] if line.startswith("start")] == back
    assert exposed > 0.2 > late, "rank 0 waits for the one that is late"
    assert picture.startswith("<svg") and "rank 0" in picture


# ---------------------------------------------------------------------------------------------- bad input


def refused(rank: int) -> None:
    group = my_group([[0, 1, 2]])
    for changes, words in (
        ({}, r"num_attention_heads=4 is not divisible by 3 tensor-parallel ranks"),
        ({"num_attention_heads": 6, "num_query_groups": 2}, r"num_query_groups=2 is not divisible by 3"),
        ({"num_attention_heads": 6}, r"ffn_hidden_size=20 is not divisible by 3"),
    ):
        with pytest.raises(ValueError, match=words):
            make(Mpu(group, 3), config_of(**changes))
    with pytest.raises(ValueError, match="parts=0 is not a number of parts"):
        make(Mpu(None, 1), config_of(), parts=0)
    with pytest.raises(ValueError, match=r"drop_path_rate=0\.1 is not built"):
        make(Mpu(None, 1), config_of(), drop_path_rate=0.1)


def test_what_the_ranks_do_not_divide_is_refused(world: Any) -> None:
    world(refused, 3)


def twice(rank: int) -> None:
    """A second backward is torch's own error on every rank, before any sum; a retained graph may go again."""
    group = my_group([[0, 1]])
    model, x = make(Mpu(group, 2), config_of()), pattern(TOKENS, 2, WIDTH).requires_grad_()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert_close(x.grad, 2 * first, EXACT, "the same twice")
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_backward_needs_a_retained_graph(world: Any) -> None:
    world(twice, 2)


def test_handles_are_waited_for_once() -> None:
    pending = Pending()
    pending.start("sum", torch.ones(2), None)
    with pytest.raises(RuntimeError, match="'sum' is under way already"):
        pending.start("sum", torch.ones(2), None)
    pending.wait("sum")
    with pytest.raises(RuntimeError, match="nothing is under way for 'sum': it was waited for before"):
        pending.wait("sum")


def forgotten(rank: int) -> None:
    """Who forgets to wait hears of it at the end of the backward."""
    group, config, pending = my_group([[0, 1]]), config_of(), Pending()
    column = DominoAsyncColumnParallelLinear(2, 3, group, config, config.init_method)
    x = torch.ones(1, 2, dtype=F64, requires_grad=True)
    y, _ = column(x, pending, "mine")
    with pytest.raises(AssertionError, match=r"backward is over, but \['mine'\] were not waited for"):
        y.sum().backward()
    pending.wait("mine")


def test_a_sum_that_nobody_waits_for_is_noticed(world: Any) -> None:
    world(forgotten, 2)


def test_parts_take_turns() -> None:
    order: list[str] = []

    def steps(name: str, count: int) -> Steps[str]:
        for number in range(count):
            order.append(f"{name}{number}")
            yield
        return name

    assert interleave([steps("a", 3), steps("b", 2), steps("c", 0)]) == ["a", "b", "c"]
    assert order == ["a0", "b0", "a1", "b1", "a2"]
    assert list(itertools.chain(interleave([]))) == []


# ------------------------------------------------------------------------------------- uncommon backwards


def some_gradients_alone(rank: int) -> None:
    """A backward that never comes to the wait starts no sum; one that failed leaves nothing for the next."""
    group = my_group([[0, 1]])
    config = config_of(num_layers=1)
    model = make(Mpu(group, 2), config)
    x = pattern(TOKENS, 4, WIDTH).requires_grad_()
    weight = model.layers[0].query_key_value.weight
    y = model(x)
    y.square().sum().backward(retain_graph=True)
    wanted, of_x = weight.grad.clone(), x.grad.clone()
    (found,) = torch.autograd.grad(y.square().sum(), [weight], retain_graph=True)
    assert_close(found, wanted, LAW, "the gradient of one weight")
    hook = model.layers[0].core_attention.register_full_backward_hook(_raise)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(model(x).square().sum(), [x])
    hook.remove()
    fails = [True]

    def once(gradient: Tensor) -> Tensor:
        if fails.pop() if fails else False:
            raise KeyError("in backward")
        return gradient

    y = model(x)
    loss = y.square().sum()
    handle = model.layers[0].dense.weight.register_hook(once)
    with pytest.raises(KeyError, match="in backward"):
        loss.backward(retain_graph=True)
    handle.remove()
    x.grad = None
    loss.backward()
    assert_close(x.grad, of_x, LAW, "after a backward that failed")
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (first,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
        first.sum().backward()


def _raise(*_: Any) -> None:
    raise RuntimeError("a hook fails")


def test_some_gradients_alone_and_backwards_that_fail(world: Any) -> None:
    world(some_gradients_alone, 2)


def masks_and_angles(rank: int) -> None:
    """A mask with a row for each head, and rotary angles with one for each sample, go with their owners."""
    group = my_group([[0, 1]])
    config, samples = config_of(num_layers=1), 3
    model = make(Mpu(group, 2), config, rotate=rotate)
    weights = whole_weights(model)
    x = pattern(TOKENS, samples, WIDTH)
    angle = pattern(TOKENS, samples, 1, 1, seed=4)
    angles = torch.cat((angle.cos(), angle.sin()), dim=-1)
    mask = pattern(samples, HEADS, TOKENS, TOKENS, seed=5) > 0.3
    mask = mask & ~torch.eye(TOKENS, dtype=torch.bool)
    assert_close(model(x, mask, angles), plain(weights, config, x, mask, angles), LAW, "with all of them")
    assert_close(model(x, mask[:1], angles), plain(weights, config, x, mask[:1], angles), LAW, "one for all")
    assert differs(model(x, mask, angles), model(x, mask.flip(1), angles)), "control: heads have their own"


def test_masks_by_head_and_angles_by_sample(world: Any) -> None:
    world(masks_and_angles, 2)


def one_row(rank: int) -> None:
    group = my_group([[0, 1]])
    column, row = columns_and_rows(group)
    pending = Pending()
    x = torch.ones(2, dtype=F64, requires_grad=True)
    columns, _ = column(wait_in_backward(x, pending, "x"), pending, "x")
    y, _ = row(columns)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == (2,) and column.weight.grad.shape == column.weight.shape


def test_a_single_row_goes_through_the_layers(world: Any) -> None:
    world(one_row, 2)
