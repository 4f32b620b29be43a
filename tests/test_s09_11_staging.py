"""§9.11 Messages by way of the host, for more ranks than GPUs; here the card is the CPU, the copies real.

Guards against: a result that stays on the host, an input that is overwritten, a message that is read before
it has come, a card for two jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from shard_checks import pattern
from tolerance import EXACT, assert_close, differs
from torch import Tensor

from ds_lite import comm
from ds_lite.staging import Staged

CARD = torch.device("cpu")
Group = Any


def _gather(x: Tensor, group: Group, later: list[Any]) -> Tensor:
    out = x.new_zeros(comm.get_world_size(group) * len(x), *x.shape[1:])
    later.append(comm.all_gather_into_tensor(out, x, group=group, async_op=True))
    return out


def _scatter(x: Tensor, group: Group, later: list[Any]) -> Tensor:
    out = x.new_zeros(len(x) // comm.get_world_size(group), *x.shape[1:])
    later.append(comm.reduce_scatter_tensor(out, x, group=group, async_op=True))
    return out


def _exchange(x: Tensor, group: Group, later: list[Any]) -> Tensor:
    rank, n = comm.get_rank(group), comm.get_world_size(group)
    sizes = [1] * (n - 1) + [len(x) - n + 1]
    mine = [sizes[rank]] * n
    out = x.new_zeros(sum(mine), *x.shape[1:])
    later.append(comm.all_to_all_single(out, x, mine, sizes, group=group, async_op=True))
    return out


def _in_place(call: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(x: Tensor, group: Group, later: list[Any]) -> Tensor:
        out = x.clone()
        later.append(call(out, group=group))
        return out

    return run


def _own(out: Tensor, group: Group) -> Tensor:
    """What an in-place reduce-scatter promises."""
    return out.view(comm.get_world_size(group), -1)[comm.get_rank(group)]


def _ring(x: Tensor, group: Group, later: list[Any]) -> Tensor:
    rank, n = comm.get_rank(group), comm.get_world_size(group)
    out = torch.zeros_like(x)
    later += [comm.isend(x, (rank + 1) % n, group=group), comm.irecv(out, (rank - 1) % n, group=group)]
    return out


def _list(x: Tensor, group: Group, later: list[Any]) -> Tensor:
    outs = [torch.zeros_like(x) for _ in range(comm.get_world_size(group))]
    comm.all_gather(outs, x, group=group)
    return torch.cat(outs)


CALLS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _in_place(lambda x, group: comm.all_reduce(x, group=group, async_op=True)),
    "largest": _in_place(
        lambda x, group: comm.all_reduce(x, op=comm.ReduceOp.MAX, group=group, async_op=True)
    ),
    "broadcast": _in_place(lambda x, group: comm.broadcast(x, src=1, group=group, async_op=True)),
    "all_gather": _gather,
    "all_gather of a list": _list,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "reduce_scatter in place": _in_place(comm.reduce_scatter_in_place),
    "all_gather in place": _in_place(comm.all_gather_in_place),
    "send and receive": _ring,
}


def each_call(rank: int) -> None:
    group = comm.new_group([0, 1, 2, 3], "model")
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        given = (pattern(4, 3, seed=rank) * 8).round().to(dtype)  # whole numbers add up exactly in any order
        for strided in (False, True):
            x = given.T.contiguous().T if strided else given
            for name, call in CALLS.items():
                if strided and name not in ("all_reduce", "largest"):
                    continue  # the others demand contiguous tensors anyway
                results = []
                for card in (None, CARD):
                    later: list[Any] = []
                    before = x.clone()
                    with mock.patch.object(comm, "_shared_card", card):
                        out = call(x, group, later)
                        assert all(isinstance(one, Staged) == (card is not None) for one in later), name
                    for handle in later:
                        handle.wait()
                    assert torch.equal(x, before), f"{name} changes what it reads"
                    results.append(_own(out, group) if name == "reduce_scatter in place" else out)
                assert_close(results[1], results[0], EXACT, f"{name}, {dtype}")
                is_moved = results[0].shape != x.shape or differs(results[0], x) or rank == 1
                assert is_moved, f"control: {name}"


def test_each_message_gives_what_it_gives_directly(world: Any) -> None:
    world(each_call, 4)


def late(rank: int) -> None:
    """What a message brings is not there before it is waited for."""
    group = comm.new_group([0, 1], "model")
    with mock.patch.object(comm, "_shared_card", CARD):
        x = torch.full((3,), float(rank + 1))
        handle = comm.all_reduce(x, group=group, async_op=True)
        assert torch.equal(x, torch.full((3,), float(rank + 1)))
        handle.wait()
        assert torch.equal(x, torch.full((3,), 3.0))
        handle.wait()
        assert torch.equal(x, torch.full((3,), 3.0)), "a second wait changes nothing"


def test_a_message_is_there_when_it_has_been_waited_for(world: Any) -> None:
    world(late, 2)


def layout(rank: int, row: dict[str, Any]) -> None:
    from layouts import check

    with mock.patch.object(comm, "_shared_card", CARD):
        check(rank, [row])


ROWS = [
    {"family": "mixtral", "pp": 2, "dp": 2, "ep": 2, "zero": 2},
    {"family": "llama", "pp": 1, "sp": 2, "tp": 2, "overlap": True},
    {"family": "gpt2", "dp": 2, "tp": 2, "kv_heads": 4, "domino": True, "zero": 1},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["family"])
def test_layouts_by_way_of_the_host_equal_one_process(world: Any, row: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="not proved here: staged layouts of transformers' models")
    world(layout, 4, row)


def no_card(rank: int) -> None:
    comm.destroy_process_group()
    with pytest.raises(ValueError, match="backend='staged' needs a GPU, and there is none here; choose gloo"):
        comm.init_distributed("staged", verbose=False)
    comm.init_distributed("gloo", verbose=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_nothing_is_staged(world: Any) -> None:
    world(no_card, 1)
