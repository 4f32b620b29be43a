"""Inputs for tests of tiled computation, and each tiled way to a loss beside the plain one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from shard_checks import pattern
from small_models import linear
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.sequence.tiled import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute, tiled_loss

Compute = Callable[[nn.Module, Tensor], Tensor]

F64 = torch.float64
BATCH, TOKENS, WIDTH, INNER, VOCABULARY, IGNORED = 2, 7, 5, 11, 13, -100
TILES = (1, 2, 3, 4, 5, 7, 14, 50)  # of 7 or 14 positions: most do not divide them, some are more

LABELS = {
    "all": [[0, 5, 6, 10, 3, 12, 1], [7, 4, 1, 9, 6, 2, 11]],
    "uneven": [[0, IGNORED, 6, 10, IGNORED, 12, 1], [IGNORED, IGNORED, IGNORED, 9, 6, 2, 11]],
    "masked tiles": [[IGNORED] * 7, [IGNORED] * 5 + [2, 11]],
    "none": [[IGNORED] * 7, [IGNORED] * 7],
}


class Gated(nn.Module):
    """An MLP with three weights and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = linear(WIDTH, INNER, 1), linear(WIDTH, INNER, 2)
        self.down = linear(INNER, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def make_head(dtype: torch.dtype = F64) -> nn.Linear:
    return linear(WIDTH, VOCABULARY, 4).to(dtype)


def make_hidden() -> Tensor:
    return pattern(BATCH, TOKENS, WIDTH, seed=5).requires_grad_()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def plain_loss(head: nn.Module, x: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        head(x).flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def _fused(reduction: str, tiles: int, labels: Tensor) -> Compute:
    def fn(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain_loss(head, x, y, reduction)

    return lambda head, x: TiledFusedLogitsLoss.apply(fn, head, x, labels, None, tiles, None, reduction)


def _computed(reduction: str, tiles: int, labels: Tensor) -> Compute:
    def fn(hidden: Tensor, shift_labels: Tensor, model: nn.Module) -> Tensor:
        return plain_loss(model, hidden, shift_labels, reduction)

    return lambda head, x: sequence_tiled_compute(
        fn,
        x.shape[1],
        tiles,
        {"hidden": x, "shift_labels": labels},
        {"model": head},
        "hidden",
        list(head.parameters()),
        0,
        reduction,
    )


def _tiled(reduction: str, tiles: int, labels: Tensor) -> Compute:
    return lambda head, x: tiled_loss(head, x, labels, tiles=tiles, reduction=reduction)


WAYS: dict[str, Callable[[str, int, Tensor], Compute]] = {
    "tiled_loss": _tiled,
    "TiledFusedLogitsLoss": _fused,
    "sequence_tiled_compute": _computed,
}
NAMES = [*WAYS, "TiledMLP"]


def way_of(name: str) -> tuple[Compute, Compute]:
    """The computation in three tiles, and the plain one."""
    labels = torch.tensor(LABELS["uneven"])
    if name in WAYS:
        return WAYS[name]("mean", 3, labels), lambda head, x: plain_loss(head, x, labels)
    return (
        lambda head, x: TiledMLP.apply(lambda head, x: head(x), head, x, 3).square().mean(),
        lambda head, x: head(x).square().mean(),
    )
