"""The layers of a pipeline that runs a causal language model of transformers (§9.9).

    TokenEmbedding   ids, and what a batch brings beside them, to hidden states
    BeforeBlocks     what else stands before the blocks, e.g. learned positions; left out if there is nothing
    Block            one block, as it is
    AfterBlocks      the last norm
    OutputHead       logits

Between layers travels a tuple: hidden states (B, T, H), then what the batch brought of CONTEXT, in this
order, then, where a router's loss is asked for, its sums (2, E).

Legend: B micro-batch, T tokens, H width, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite.domino.blocks import in_plain_order
from ds_lite.pipe.building import LayerSpec, TiedLayerSpec
from ds_lite.pipe.causal_lm.hull import CONTEXT, Hull
from ds_lite.pipe.causal_lm.routers import sums_of_block

TIE = "embedding"
Travelling = tuple[Tensor, ...]


def layers_of(hull: Hull) -> list[LayerSpec]:
    """The model as a list of layers."""
    pieces = hull.pieces
    first = {"embedding": pieces.embedding}
    blocks = [LayerSpec(Block, hull, index) for index in range(len(hull.blocks))]
    before = [LayerSpec(BeforeBlocks, hull, _keys(pieces.before))] if hull.changes_before else []
    after = LayerSpec(AfterBlocks, hull, _keys(pieces.after))
    if pieces.is_tied:
        # nothing but the embedding is tied, so the head's own module stays out of the tie
        tied = [
            TiedLayerSpec(TIE, TokenEmbedding, hull, first, forward_fn=f, tied_weight_attr=())
            for f in (None, tied_head)
        ]
        return [tied[0], *before, *blocks, after, tied[1]]
    head = LayerSpec(OutputHead, hull, {"head": pieces.head})
    return [LayerSpec(TokenEmbedding, hull, first), *before, *blocks, after, head]


def _keys(names: tuple[str, ...]) -> dict[str, str]:
    """Short names where they are different ones."""
    short = {name.rpartition(".")[2]: name for name in names}
    return short if len(short) == len(names) else {name.replace(".", "_"): name for name in names}


def names_in_pipeline(hull: Hull) -> dict[str, str]:
    """What the parameters of a pipeline begin with, and what they begin with in the model; of all stages."""
    found: dict[str, str] = {}
    for index, spec in enumerate(layers_of(hull)):
        place = f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(index)
        names = names_of(hull, *spec.module_args[1:])
        found |= {f"{place}.{key}.": f"{name}." for key, name in names.items()}
    return found


def names_of(hull: Hull, what: Mapping[str, str] | int) -> Mapping[str, str]:
    """The modules of a piece by key: as given, or of one block."""
    return {"block": f"{hull.blocks_name}.{what}"} if isinstance(what, int) else what


class Piece(nn.Module):
    """Some modules of the model: `names` says under which key, and what the model calls them."""

    hull: Hull

    def __init__(self, hull: Hull, names: Mapping[str, str]) -> None:
        super().__init__()
        self.__dict__["hull"] = hull  # the model around is nobody's child
        self.names = dict(names)
        self.adopt()

    def adopt(self) -> None:
        """Take the modules as the model has them now; AutoTP puts others in their places."""
        for key, name in self.names.items():
            setattr(self, key, self.hull.module(name))

    def train(self, mode: bool = True) -> Piece:
        super().train(mode)
        self.hull.train(mode)
        return self

    def opened(self, x: Travelling) -> tuple[Tensor, dict[str, Tensor], Travelling]:
        """Hidden states, the context by name, and a router's sums."""
        hidden, *rest = x
        end = len(rest) - (self.hull.router is not None)
        return hidden, dict(zip(self.hull.context, rest[:end], strict=False)), tuple(rest[end:])

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """This rank's tokens, where a sequence is spread. (B, T, H) -> (B, T/sp, H)."""
        part = self.hull.part(hidden.shape[1])
        return hidden if part is None else part.of(hidden)


class TokenEmbedding(Piece):
    """ids (B, T), or a tuple of ids, attention_mask (B, T), position_ids (B, T) -> what travels."""

    def forward(self, inputs: Any) -> Travelling:
        ids, *context = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        if len(context) > len(CONTEXT) or not all(isinstance(x, Tensor) for x in (ids, *context)):
            raise ValueError(
                f"the inputs of {type(self.hull.model).__name__} are {len(context) + 1} values; give "
                f"input_ids, or a tuple of input_ids, {', '.join(CONTEXT)} in this order (§9.9)"
            )
        hidden = self.hull.module(self.hull.pieces.embedding)(ids)
        if self.hull.tokens is not None:
            context = _by_position(ids, context)
        if not self.hull.changes_before:
            hidden = self.own_tokens(hidden)
        if self.hull.router is None:
            return hidden, *context
        wide = torch.promote_types(hidden.dtype, torch.float32)  # counts beyond what bfloat16 tells apart
        sums = torch.zeros(2, self.hull.router.num_experts, dtype=wide, device=hidden.device)
        return hidden, *context, sums


def _by_position(ids: Tensor, context: list[Tensor]) -> list[Tensor]:
    """Positions first, then what there is of a mask: the positions say how long the whole sequence is.

    Positions that nobody gave are (T,).
    """
    made = torch.arange(ids.shape[1], device=ids.device)
    return [context[1] if len(context) > 1 else made, *context[:1]]


class BeforeBlocks(Piece):
    """What stands between the embedding and the first block; the last that ranks of a sequence do whole."""

    def forward(self, x: Travelling) -> Travelling:
        hidden, context, _ = self.opened(x)
        return self.own_tokens(self.hull.before(hidden, context)), *x[1:]


class Block(Piece):
    """One block of the model."""

    block: nn.Module

    def __init__(self, hull: Hull, index: int) -> None:
        super().__init__(hull, names_of(hull, index))
        self.index = index

    def forward(self, x: Travelling) -> Travelling:
        hidden, context, sums = self.opened(x)
        args, named = self.hull.around(hidden, context, self.index)
        router = self.hull.router
        with self.hull.at_work(context) as mine, ExitStack() as watching:
            if router is not None:
                watching.enter_context(in_plain_order(self.block))
            logits = watching.enter_context(router.watching(self.block)) if router is not None else []
            hidden = _first(self.block(hidden, *args, **named))
        if router is None:
            return hidden, *x[1:]
        added = sums_of_block(logits, router, mine.get("attention_mask"))
        return hidden, *x[1:-1], sums[0] + added.to(sums[0].dtype)


class AfterBlocks(Piece):
    """What stands between the last block and the head."""

    def forward(self, x: Travelling) -> Travelling:
        hidden, context, _ = self.opened(x)
        return self.hull.after(hidden, context), *x[1:]


class OutputHead(Piece):
    """What travels -> logits (B, T, V); with a router's loss (logits, its sums, what there is of CONTEXT)."""

    def forward(self, x: Travelling) -> Any:
        return _with_sums(self, x)


def tied_head(embedding: nn.Module, x: Travelling) -> Any:
    """The head whose weight is the embedding's."""
    assert isinstance(embedding, TokenEmbedding)
    return _with_sums(embedding, x)


def _with_sums(piece: Piece, x: Travelling) -> Any:
    hidden, context, sums = piece.opened(x)
    logits = piece.hull.head(hidden)
    return (logits, *sums, *context.values()) if sums else logits


def _first(outputs: Any) -> Tensor:
    """Some blocks return a tuple, hidden states first."""
    hidden: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return hidden
