"""§9.14 Chunks that wait in host memory.

Guards against: a chunk read from the slot of another, bytes that are not counted or never leave, memory
that a finished graph or a failed forward keeps.
"""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from meter import LiveStorages
from shard_checks import pattern
from tolerance import EXACT, assert_close
from torch import Tensor

from ds_lite.sequence import chunked, host_store, pair
from ds_lite.sequence.chunked import chunked_attention
from ds_lite.sequence.host_store import HostStore, Shelf

BATCH, HEADS, GROUPS, TOKENS, WIDTH = 3, 6, 2, 13, 5


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        pattern(BATCH, heads, TOKENS, WIDTH, seed=i).requires_grad_()
        for i, heads in enumerate((HEADS, GROUPS, GROUPS))
    )
    return q, k, v


def test_what_waits_in_the_store_is_counted_and_leaves_with_the_graph() -> None:
    n, store = 4, HostStore()
    q, k, v = _inputs()
    out = chunked_attention(q, k, v, chunks=n, is_causal=True, store=store)
    numbers_held = 2 * q.numel() + k.numel() + v.numel() + q.numel() // WIDTH  # q, out, k, v, log-sum-exp
    pairs = n * (n + 1) // 2
    assert (store.puts, store.gets) == (2 * n + 3 * n, 2 * pairs)
    assert store.bytes_now == store.bytes_peak == 8 * numbers_held
    out.sum().backward()
    assert store.gets == 2 * pairs + 2 * pairs + 3 * n, "each query chunk once, and its keys"
    assert store.bytes_now == 0 and store.bytes_peak == 8 * numbers_held
    with torch.no_grad():
        chunked_attention(q, k, v, chunks=n, is_causal=True, store=store)
    assert store.bytes_now == 0 and store.puts == 7 * n, "without a graph only keys and values wait"


def test_a_chunk_of_the_store_is_good_until_the_next_is_asked_for() -> None:
    store, device = HostStore(), torch.device("cpu")
    shelf = Shelf(store, device)
    for i in range(5):
        shelf.put(torch.full((2, 3 + i % 2), float(i)), torch.full((1,), -float(i)))
    seen = []
    for i, (x, y) in shelf.walk([4, 0, 1, 2, 3, 3]):
        seen.append((i, x.unique().tolist(), tuple(x.shape), y.tolist()))
    assert seen == [(i, [i], (2, 3 + i % 2), [-i]) for i in (4, 0, 1, 2, 3, 3)]
    assert list(shelf.walk([])) == []


def test_a_walk_left_early_waits_for_the_chunk_on_its_way() -> None:
    events = [mock.Mock() for _ in range(4)]
    with mock.patch.object(host_store, "_Done", side_effect=events):
        store = HostStore()
        walk = store.walk([(store.put(torch.zeros(1)),)] * 3, [0, 1, 2], torch.device("cpu"))
        next(walk)
        on_its_way = events[2]  # the second slot's `full`
        assert on_its_way.method_calls == [mock.call.record()]
        walk.close()
    assert on_its_way.method_calls == [mock.call.record(), mock.call.wait()]


def test_nothing_stays_behind_when_the_graph_is_gone() -> None:
    with LiveStorages():  # a process's first mode makes torch import its compiler: the cycles that this
        torch.zeros(1)  # leaves hold the frames of that moment, and all their tensors
    q, k, v = _inputs()
    gc.collect()
    gc.disable()  # cycles would hide
    try:
        with LiveStorages() as meter:
            meter.watch((q, k, v))
            inputs = meter.current
            chunked_attention(q, k, v, chunks=3, is_causal=True, store=HostStore())
            chunked_attention(q, k, v, chunks=3, is_causal=True)
            assert meter.current == inputs < meter.peak
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["attend", "attend_backward"])
def test_a_failure_in_the_middle_leaves_nothing_and_the_next_pass_is_right(name: str) -> None:
    (q, k, v), store = _inputs(), HostStore()

    def gradient() -> Tensor:
        out = chunked_attention(q, k, v, chunks=4, is_causal=True, store=store)
        return torch.autograd.grad(out.square().sum(), q)[0]

    healthy = gradient()
    right = getattr(pair, name)
    results = [mock.DEFAULT, mock.DEFAULT, MemoryError]
    with mock.patch.object(chunked, name, wraps=right, side_effect=results), pytest.raises(MemoryError):
        gradient()
    gc.collect()  # the report of the failure holds its frames
    assert store.bytes_now == 0
    assert_close(gradient(), healthy, EXACT)


def test_graphs_that_share_a_store_do_not_mix() -> None:
    (q, k, v), store = _inputs(), HostStore()
    alone = [torch.autograd.grad(_twice(q, k, v, HostStore(), n).sum(), q)[0] for n in (3, 5)]
    outs = [_twice(q, k, v, store, n) for n in (3, 5)]
    held = store.bytes_now
    for out, expected in zip(outs, alone):
        assert_close(torch.autograd.grad(out.sum(), q)[0], expected, EXACT)
    assert held > 0 == store.bytes_now


def _twice(q: Tensor, k: Tensor, v: Tensor, store: HostStore, chunks: int) -> Tensor:
    """Two layers, the second one in other pieces."""
    inner = chunked_attention(q, k, v, chunks=chunks, is_causal=True, store=store)
    return chunked_attention(inner, k, v, chunks=chunks + 1, is_causal=True, store=store)
