"""§9.14 A checkpoint whose inputs wait in host memory has the gradients of one whose inputs stay.

Guards against: inputs that stay on the device after all, a copy that is not the input, a store that never
empties."""

from __future__ import annotations

import contextlib
import functools
import gc
import io

import torch
from meter import LiveStorages
from shard_checks import pattern
from small_models import linear
from tolerance import EXACT, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

import ds_lite
from ds_lite.checkpointing import checkpoint
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.sequence.host_store import HostStore
from ds_lite.sequence.offload import checkpoint_to_host

LAYERS, BATCH, TOKENS, WIDTH = 3, 2, 64, 5
BYTES = BATCH * TOKENS * WIDTH * 8  # of what goes into a layer


def _layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(linear(WIDTH, WIDTH, seed), nn.Tanh()) for seed in range(LAYERS))


def _run(store: HostStore | None) -> list[Tensor]:
    """Output and all gradients."""
    layers, x = _layers(), pattern(BATCH, TOKENS, WIDTH, seed=7).requires_grad_()
    keep = checkpoint if store is None else functools.partial(checkpoint_to_host, store=store)
    y: Tensor = x
    for number, layer in enumerate(layers):
        y = keep(layer, y)
        if store is not None:
            assert store.bytes_now == BYTES * (number + 1), "every layer's input lies on the host"
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]


def _same_gradients(rank: int) -> None:
    store = HostStore()
    found, expected = _run(store), _run(None)
    assert len(found) == len(expected) == 2 + 2 * LAYERS
    for actual, one in zip(found, expected):
        assert_close(actual, one, EXACT)
        assert differs(2 * actual, one)
    assert (store.bytes_peak, store.puts, store.gets) == (LAYERS * BYTES, LAYERS, LAYERS)
    assert store.bytes_now == 0, "backward gives the host memory back"


def test_gradients_are_those_of_a_checkpoint_and_every_byte_is_counted(world: World) -> None:
    world(_same_gradients, 1)


class Pair(nn.Module):
    """A layer whose input and output are tuples, as between layers of a pipeline."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = linear(WIDTH, WIDTH, seed)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, other = pair
        return self.inner(x).tanh() + other, other * 2


def _pipeline(rank: int) -> None:
    results, stores = [], [HostStore(), None]
    for store in stores:
        keep = checkpoint if store is None else functools.partial(checkpoint_to_host, store=store)
        model = PipelineModule(
            [Pair(seed) for seed in range(LAYERS)],
            num_stages=1,
            activation_checkpoint_interval=1,
            activation_checkpoint_func=keep,
        )
        pair = tuple(pattern(BATCH, TOKENS, WIDTH, seed=seed).requires_grad_() for seed in (7, 8))
        y, _ = model(pair)
        if store is not None:
            assert store.bytes_now == 2 * LAYERS * BYTES, "both of each layer's inputs lie on the host"
        y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in (*pair, *model.parameters()))])
    assert len(results[0]) == 3 + 2 * LAYERS
    for actual, expected in zip(*results):
        assert_close(actual, expected, EXACT)
        assert differs(2 * actual, expected)
    assert stores[0].bytes_now == 0


def test_slices_of_a_pipeline_wait_on_the_host_with_whole_tuples(world: World) -> None:
    world(_pipeline, 1)


class Slice(nn.Sequential):
    def __init__(self, seed: int) -> None:
        super().__init__(linear(WIDTH, WIDTH, seed), nn.Tanh())


def _by_config(rank: int, on_host: bool) -> tuple[list[Tensor], int]:
    """One batch through two stages; gradients here, and tensors that went to the host."""
    layers = [LayerSpec(Slice, seed) for seed in range(4)]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "pipeline": {"activation_checkpoint_interval": 1},
        "activation_checkpointing": {"cpu_checkpointing": on_host},
    }
    module = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss)
    engine = ds_lite.initialize(model=module, config=config)[0]
    pairs = [tuple(pattern(BATCH, TOKENS, WIDTH, seed=i + j) for j in (0, 9)) for i in (0, 1)]
    engine.compute_gradients(iter(pairs))
    gradients = [engine.gradients.full(name) for name, _ in module.named_parameters()]
    store = getattr(engine.module.activation_checkpoint_func, "keywords", {}).get("store", HostStore())
    assert store.bytes_now == 0
    return gradients, store.puts


def test_the_config_sends_a_pipelines_checkpoints_to_the_host(world: World) -> None:
    stays, moves = (world(_by_config, 2, on_host) for on_host in (False, True))
    for (plain, none), (found, puts) in zip(stays, moves):
        assert none == 0
        assert puts > 0
        assert len(found) == len(plain) > 0
        for actual, expected in zip(found, plain):
            assert_close(actual, expected, EXACT)


def _plain_module(rank: int) -> None:
    told = io.StringIO()
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"cpu_checkpointing": True}}
    with contextlib.redirect_stdout(told):
        ds_lite.initialize(model=linear(WIDTH, WIDTH, 0), config=config)
    words = "config keys without effect here: activation_checkpointing.cpu_checkpointing"
    assert (words in told.getvalue()) == (rank == 0)


def test_a_module_that_is_no_pipeline_is_told_that_the_key_does_nothing(world: World) -> None:
    world(_plain_module, 2)


def test_the_original_is_freed_and_only_the_copy_waits() -> None:
    layers, sizes = _layers(), {}
    for name, keep in (("stays", checkpoint), ("moves", None)):
        store = HostStore()
        keep = keep or functools.partial(checkpoint_to_host, store=store)
        with LiveStorages(min_bytes=BYTES) as meter:
            y = pattern(BATCH, TOKENS, WIDTH).requires_grad_().sin()
            for layer in layers:
                y = keep(layer, y)
        sizes[name] = (meter.current, store.bytes_now)
        y.sum().backward()
    assert sizes["moves"][1] == LAYERS * BYTES and sizes["stays"][1] == 0
    assert sizes["moves"][0] == sizes["stays"][0], "on the CPU copies take the place of the originals"


def test_a_later_change_in_place_does_not_reach_the_copy() -> None:
    x, store = pattern(TOKENS, WIDTH).requires_grad_(), HostStore()
    hidden = x.sin()
    y = checkpoint_to_host(torch.sin, hidden, store=store)
    expected = torch.cos(x.sin()) * torch.cos(x)
    with torch.no_grad():
        hidden.zero_()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert_close(found, expected.detach(), EXACT)


def test_parameters_integers_and_small_tensors_stay_where_they_are() -> None:
    weight, store = nn.Parameter(pattern(WIDTH, WIDTH)), HostStore()
    x, ids, small = pattern(TOKENS, WIDTH).requires_grad_(), torch.arange(TOKENS * WIDTH), pattern(WIDTH)

    def segment(x: Tensor, weight: Tensor, ids: Tensor, small: Tensor, factor: float) -> Tensor:
        return (x @ weight + small).sin() * ids.view(TOKENS, WIDTH) * factor

    y = checkpoint_to_host(segment, x, weight, ids, small, 0.5, store=store, min_bytes=WIDTH * 8 + 1)
    assert (store.puts, store.bytes_now) == (1, x.nbytes)
    found = torch.autograd.grad(y.sum(), [x, weight])
    for actual, expected in zip(
        found, torch.autograd.grad(segment(x, weight, ids, small, 0.5).sum(), [x, weight])
    ):
        assert_close(actual, expected, EXACT)


def test_a_first_segment_without_gradients_is_stored_too_and_no_grad_stores_nothing() -> None:
    layer, x, store = linear(WIDTH, WIDTH, 1), pattern(TOKENS, WIDTH), HostStore()
    checkpoint_to_host(layer, x, store=store).sum().backward()
    assert (store.puts, store.gets, store.bytes_now) == (1, 1, 0) and layer.weight.grad is not None
    with torch.no_grad():
        checkpoint_to_host(layer, x, store=store)
    assert (store.puts, store.bytes_now) == (1, 0)


def test_a_kept_graph_keeps_its_copy_and_a_dropped_graph_gives_it_back() -> None:
    x, store = pattern(TOKENS, WIDTH).requires_grad_(), HostStore()
    y = checkpoint_to_host(torch.sin, x, store=store).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert_close(first, second, EXACT)
    assert (store.bytes_now, store.gets) == (x.nbytes, 2)
    del y
    gc.collect()
    assert store.bytes_now == 0
