"""§9.14 What cannot be tiled is refused, with the numbers and a remedy.

Guards against: tiles that are none, labels of other positions or another vocabulary, a trainable tensor
that would silently get no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shard_checks import pattern
from small_models import linear
from torch import Tensor, nn

from ds_lite.sequence.tiled import TiledFusedLogitsLoss, sequence_tiled_compute, tiled, tiled_loss

BATCH, TOKENS, WIDTH, VOCABULARY = 2, 7, 5, 13


def _head() -> nn.Linear:
    return linear(WIDTH, VOCABULARY, 4)


def _hidden() -> Tensor:
    return pattern(BATCH, TOKENS, WIDTH, seed=5).requires_grad_()


def _labels(tokens: int = TOKENS) -> Tensor:
    return torch.arange(BATCH * tokens).view(BATCH, tokens) % VOCABULARY


def _sum(head: nn.Module, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    return head(x).sum()


def _loss(**changes: Any) -> Tensor:
    options = {"head": _head(), "hidden": _hidden(), "labels": _labels(), "tiles": 2}
    return tiled_loss(**{**options, **changes})


def _fuse(fn: Any = _sum, **changes: Any) -> Tensor:
    options = {"self": _head(), "x": _hidden(), "y": _labels(), "mask": None, "shards": 2}
    return TiledFusedLogitsLoss.apply(fn, **{**options, **changes})


def _compute(fn: Any = lambda x, **_: x, **changes: Any) -> Tensor:
    options = {"seqlen": TOKENS, "shards": 2, "kwargs_to_shard": {"x": _hidden()}, "kwargs_to_pass": {}}
    options["grad_requiring_tensor_key"] = "x"
    return sequence_tiled_compute(fn, **{**options, **changes})


def _sharded(**more: Any) -> Tensor:
    return _compute(kwargs_to_shard={"x": _hidden(), **more})


def _sums(x: Tensor) -> Tensor:
    return x.sum(1)


STRANGER = nn.Parameter(pattern(3, WIDTH))


def _strange(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (x @ STRANGER.T).sum()


CASES: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "loss, 0 tiles": (ValueError, "^0 tiles; choose 1 or more", lambda: _loss(tiles=0)),
    "mlp, -1 tiles": (ValueError, "^-1 tiles", lambda: tiled(_head(), _hidden(), -1)),
    "fused, 0 tiles": (ValueError, "^0 tiles", lambda: _fuse(shards=0)),
    "computed, 0 tiles": (ValueError, "^0 tiles", lambda: _compute(shards=0)),
    "half a tile": (TypeError, r"number of tiles is 2\.5", lambda: _loss(tiles=2.5)),
    "no positions": (ValueError, "no positions to cut", lambda: tiled(_head(), pattern(WIDTH), 1)),
    "mixed": (ValueError, r"fn made \(2, 5\) of a", lambda: tiled(lambda x: x.sum(1), _hidden(), 2)),
    "two results": (ValueError, "fn made tuple of a", lambda: tiled(lambda x: (x, x), _hidden(), 2)),
    "loss, reduction": (ValueError, "reduction='none' is unknown", lambda: _loss(reduction="none")),
    "fused, reduction": (ValueError, "reduction=None is", lambda: _fuse(output_reduction=None)),
    "computed, reduction": (ValueError, "reduction='max' is", lambda: _compute(output_reduction="max")),
    "fewer labels": (ValueError, r"of shape \(2, 7\), got \(2, 6\)", lambda: _loss(labels=_labels(6))),
    "labels, no ids": (TypeError, r"labels are torch\.float64", lambda: _loss(labels=pattern(2, 7))),
    "label 13": (ValueError, r"from 1 to 13 lie outside .*0\.\.12", lambda: _loss(labels=_labels() + 1)),
    "label -1": (ValueError, "from -1 to 11 lie outside", lambda: _loss(labels=_labels() - 1)),
    "function": (TypeError, "head is a function", lambda: _loss(head=lambda x: x)),
    "narrow": (ValueError, r"weight of shape \(13, 4\) .*\(V, 5\)", lambda: _loss(head=pattern(13, 4))),
    "no logits": (ValueError, r"returned shape \(35,\) for 7 pos", lambda: _loss(head=nn.Flatten(0))),
    "many losses": (ValueError, r"tensor of shape \(7, 5\)", lambda: _fuse(lambda head, x, y: x)),
    "no tensor": (ValueError, r"loss of a tile is 1\.5", lambda: _fuse(lambda head, x, y: 1.5)),
    "sums": (ValueError, r"shape \(2, 5\); fn must", lambda: _compute(_sums, output_unshard_dimension=0)),
    "stranger": (ValueError, r"shape \(3, 5\) past x and past the module", lambda: _fuse(_strange)),
    "soft labels": (ValueError, r"shape \(14,\) needs a", lambda: _fuse(y=pattern(2, 7).requires_grad_())),
    "no module": (TypeError, "self is a object; give the module", lambda: _fuse(self=object())),
    "params": (ValueError, r"\(3, 5\) that is no param", lambda: _fuse(compute_params=[STRANGER])),
    "short y": (ValueError, r"y of shape \(2, 6\) do not fit", lambda: _fuse(y=_labels(6))),
    "mask": (ValueError, r"mask of shape \(7,\) .* \(2, 7\)", lambda: _fuse(mask=torch.ones(7))),
    "seqlen": (ValueError, "seqlen=8 positions", lambda: _compute(seqlen=8)),
    "lengths": (ValueError, r"'y': \(2, 6\)\} do not all have seqlen=7", lambda: _sharded(y=_labels(6))),
    "key": (ValueError, "'z' is none of .*'x'", lambda: _compute(grad_requiring_tensor_key="z")),
    "None": (TypeError, "mask is a NoneType; pass it in kwargs_to_pass", lambda: _sharded(mask=None)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_right_is_refused(case: str) -> None:
    error, match, call = CASES[case]
    with pytest.raises(error, match=match) as caught:
        call()
    assert "(§9.14)" in str(caught.value)


def test_what_is_refused_beside_this_is_fine() -> None:
    for call in (
        _loss,
        _fuse,
        _compute,
        lambda: _loss(labels=_labels().int()),
        lambda: _sharded(y=_labels()),
    ):
        assert call().isfinite().all()
