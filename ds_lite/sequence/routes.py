"""The two ways to a model's attention: transformers' registry, and torch's scaled_dot_product_attention
(§9.14).

A transformers model asks a registry for its attention function; it gets one that exchanges, calls the
function that the model had before on all tokens, and exchanges back. Any other model calls
`F.scaled_dot_product_attention`, which is another function while this engine runs forward or backward:
recomputation under activation checkpointing happens in backward, and needs it too.

Legend: B micro-batch, T tokens, N heads, D head width; sp ranks in the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.agreement import raise_together
from ds_lite.sequence.context import Context, current
from ds_lite.sequence.data import Part
from ds_lite.sequence.layer import deal_of, exchanged
from ds_lite.sequence.masks import mask_maker
from ds_lite.sequence.whole import gather_tokens

PREFIX = "ds_lite_sequence_"  # of the names of attention functions in transformers' registry
ATTENTIONS = ("eager", "sdpa")  # of transformers, those that can be exchanged
_BY_HEAD = ("position_bias", "s_aux", "head_mask")  # arguments with a row for each head


# ------------------------------------------------------------------------------------------------ torch


@contextmanager
def rerouted_sdpa(context: Context) -> Iterator[None]:
    """`F.scaled_dot_product_attention` exchanges until the block ends."""
    original = F.scaled_dot_product_attention

    def distributed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        options["enable_gqa"] = enable_gqa
        if context.part is None or context.is_inside:
            return original(query, key, value, attn_mask, **options)
        _agree_on_call(query, key, attn_mask, context)
        mask = whole_mask(attn_mask, context)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context.inside():
                return original(q, k, v, _of_heads(mask, query.shape[1], q_heads), **options)

        dealt = deal_of(query, key, len(context.part.lengths), head_dim=1)
        q_heads = dealt.query[context.part.rank]
        return exchanged(
            local,
            query,
            key,
            value,
            context.group,
            seq_dim=2,
            head_dim=1,
            lengths=context.part.lengths,
            dealt=dealt,
        )

    F.scaled_dot_product_attention = distributed
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention would go by itself in eval
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        F.scaled_dot_product_attention = original


def _agree_on_call(query: Tensor, key: Tensor, mask: Tensor | None, context: Context) -> None:
    """A model of nobody's in particular may mask on one rank only; all ranks shall hear of what one refuses.

    Communication: one all-reduce of a few numbers.
    """
    error: Exception | None = None
    part = context.part
    assert part is not None
    try:
        _check_tokens(query, key, part)
        kind = _mask_kind(mask, part)
    except ValueError as refusal:
        error, kind = refusal, 0
    raise_together(error, context.group, anyone=False, **{"kind of attention mask": kind})


def _mask_kind(mask: Tensor | None, part: Part) -> int:
    """0 none, 1 whole, 2 with this rank's queries, 3 with its keys.

    Raises: ValueError for a mask between this rank's tokens alone: nothing says what the others are.
    """
    if mask is None:
        return 0
    here, (rows, columns) = part.lengths[part.rank], mask.shape[-2:]
    if columns == part.total and rows in (1, part.total):
        return 1
    if columns == part.total and rows == here:
        return 2
    if columns == here and rows == 1 and here > 1:
        return 3
    raise ValueError(
        f"an attention mask of shape {tuple(mask.shape)} is made for {here} of the {part.total} tokens; "
        "give the model a mask of the whole sequence, or is_causal=True (§9.14)"
    )


def whole_mask(mask: Tensor | None, context: Context) -> Tensor | None:
    """A mask for all tokens, where a model made one with this rank's keys or queries.

    Shapes: (..., 1 or T, T) stays; (..., 1, T/sp) and (..., T/sp, T) -> (..., 1 or T, T).
    Communication: one all-gather of a mask that is not whole.
    Raises: ValueError for a mask between this rank's tokens alone: nothing says what the others are.
    """
    if mask is None:
        return None
    part = context.part
    assert part is not None
    kind = _mask_kind(mask, part)
    dim = mask.dim() - (2 if kind == 2 else 1)
    return mask if kind == 1 else gather_tokens(mask, part, context.group, dim=dim)


def _of_heads(mask: Tensor | None, num_heads: int, heads: tuple[int, int]) -> Tensor | None:
    """The rows of a mask that are this rank's heads, if it has one for each head."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] != num_heads or num_heads == 1:
        return mask
    return mask.narrow(-3, heads[0], heads[1] - heads[0])


def _check_tokens(query: Tensor, key: Tensor, part: Part) -> None:
    here = part.lengths[part.rank]
    if query.dim() != 4 or query.shape[2] != here or key.shape[2] != here:
        raise ValueError(
            f"attention of query {tuple(query.shape)} and key {tuple(key.shape)}, where this rank has "
            f"{here} of {part.total} tokens; only self-attention in the form (B, N, T, D) is exchanged "
            "(§9.14)"
        )


# ----------------------------------------------------------------------------------------- transformers


def register_with_transformers() -> None:
    """Put the attention functions and their masks into the registries; they do nothing outside an engine."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for base in ATTENTIONS:
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + base, _attention(base))
        ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + base, mask_maker(base))


def _attention(base: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **named: Any,
    ) -> tuple[Tensor, Tensor | None]:
        plain, context = _plain(base, module), current()
        if context is None or context.part is None:
            return plain(module, query, key, value, attention_mask, **named)
        if given := [name for name in _BY_HEAD if named.get(name) is not None]:
            raise ValueError(
                f"{type(module).__name__} gives its attention {', '.join(given)}, which has a row for each "
                "head and is not cut with them (§9.14)"
            )
        _check_tokens(query, key, context.part)
        mask = whole_mask(attention_mask, context)
        dealt = deal_of(query, key, len(context.part.lengths), head_dim=1)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = _of_heads(mask, query.shape[1], dealt.query[context.part.rank])  # type: ignore[union-attr]
            with context.inside(), _grouped(module, q.shape[1] // k.shape[1]):
                mixed: Tensor = plain(module, q, k, v, own, **named)[0]  # (B, T, N/sp, D)
                return mixed

        mixed = exchanged(
            local,
            query,
            key,
            value,
            context.group,
            seq_dim=2,
            head_dim=1,
            lengths=context.part.lengths,
            dealt=dealt,
            out_dims=(1, 2),
        )
        return mixed, None

    return attention


def _plain(base: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that the model had; the eager one stands beside its attention class."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]
    for owner in type(module).__mro__:
        found = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise ValueError(
        f"{type(module).__name__} has no eager_attention_forward beside it; load the model with "
        f"attn_implementation='sdpa' (§9.14)"
    )


@contextmanager
def _grouped(module: nn.Module, groups: int) -> Iterator[None]:
    """The query heads for each key and value head on this rank: fewer where ranks share a kv head."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == groups:
        yield
        return
    module.num_key_value_groups = groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
