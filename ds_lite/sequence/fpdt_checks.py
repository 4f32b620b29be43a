"""What chunked attention and the FPDT classes refuse, before anything is exchanged (§9.14.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import deal_heads
from ds_lite.sequence.data import IGNORE
from ds_lite.sequence.layer import ranks_of


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: int,
    is_causal: bool,
    window: int | None,
    padding: Tensor | None,
) -> None:
    """Do tensors and settings of `chunked_attention` fit each other?

    Raises: ValueError if not.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fits = all(len(shape) == 4 and 0 not in shape for shape in shapes) and shapes[1] == shapes[2]
    if not fits or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k, v of shapes {shapes[0]}, {shapes[1]}, {shapes[2]} do not fit; give (B, N, T, D) and "
            f"twice (B, G, S, D), none of them 0, with G a divisor of N (§9.14)"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}; give all three in one dtype (§9.14)")
    if chunks < 1:
        raise ValueError(f"chunks={chunks} must be at least 1, which is attention in one piece (§9.14)")
    if window is not None and (window < 1 or not is_causal):
        raise ValueError(
            f"window={window} with is_causal={is_causal}: a window counts keys back from the query, itself "
            f"the first; choose at least 1 and is_causal=True (§9.14)"
        )
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (k.shape[0], k.shape[2])):
        raise ValueError(
            f"key_padding_mask of shape {tuple(padding.shape)} and {padding.dtype} must be bool of shape "
            f"{(k.shape[0], k.shape[2])}, True for keys that count (§9.14)"
        )


def check_chunks(num_tokens: int, chunk_size: int, ranks: int) -> None:
    """Can each rank have an equal share of each chunk?

    Raises: ValueError if not.
    """
    if chunk_size < 1 or num_tokens < 1 or num_tokens % ranks:
        raise ValueError(
            f"{num_tokens} tokens in chunks of {chunk_size} over sequence_parallel_size={ranks}: each rank "
            f"has an equal share of every chunk; pad to {max(1, -(-num_tokens // ranks)) * ranks} tokens "
            f"and choose a chunk of at least {ranks} (§9.14)"
        )
    if chunk_size < num_tokens and chunk_size % ranks:
        raise ValueError(
            f"chunk_size={chunk_size}, in tokens of the whole sequence, is not divisible by "
            f"sequence_parallel_size={ranks}; choose {-(-chunk_size // ranks) * ranks} (§9.14)"
        )


def check_settings(
    config: Any, first_weight: Tensor, second_weight: Tensor, group: ProcessGroup | None, chunk_size: int
) -> None:
    """Do the weights have the config's shapes, and can its heads be dealt?

    Raises: ValueError if not, for dropout, and for a chunk size below 1.
    """
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.kv_channels
    deal_heads(heads, kv_heads, ranks_of(group), what="sequence_parallel_size", section="§9.14")
    first = ((heads + 2 * kv_heads) * width, config.hidden_size)
    if tuple(first_weight.shape) != first or second_weight.shape[-1] != heads * width:
        raise ValueError(
            f"weights of shapes {tuple(first_weight.shape)} and {tuple(second_weight.shape)} do not fit "
            f"{heads} heads, {kv_heads} key and value heads, kv_channels={width} and "
            f"hidden_size={config.hidden_size}; give {first} and (H, {heads * width}) (§9.14)"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout={config.attention_dropout}: a chunk is computed again in backward, where "
            f"the same numbers would have to be drawn; write attention_dropout=0.0 (§9.14)"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 token (§9.14)")


def check_hidden(hidden: Tensor, width: int, chunk_size: int, group: ProcessGroup | None) -> None:
    """Are these hidden states of this layer, in chunks that can be shared?

    Raises: ValueError if not.
    """
    if hidden.dim() != 3 or hidden.shape[-1] != width:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} must be (T/sp, B, {width}), the sequence "
            f"first and the batch second (§9.14)"
        )
    ranks = ranks_of(group)
    check_chunks(hidden.shape[0] * ranks, chunk_size, ranks)


def check_extras(mask: Any, cache: Any, rotary: Any, num_tokens: int, head_width: int) -> None:
    """Does the call ask only for what is built?

    Raises: ValueError for a mask, a key-value cache, and rotary tables that do not fit or are trained.
    """
    if mask is not None or cache is not None:
        name = "attention_mask" if mask is not None else "inference_params"
        raise ValueError(
            f"{name} is given, but FPDT_Attention is causal over the whole sequence and nothing else; "
            f"pass None (§9.14)"
        )
    if rotary is None:
        return
    shapes = [tuple(part.shape) for part in rotary]
    fits = all(len(shape) == 4 and shape[0] >= num_tokens and shape[-1] <= head_width for shape in shapes)
    if len(shapes) != 2 or shapes[0] != shapes[1] or not fits or shapes[0][-1] % 2:
        raise ValueError(
            f"rotary_pos_emb of shapes {shapes} must be cos and sin of the whole sequence, "
            f"({num_tokens}, 1, 1, R) each, R even and at most {head_width} (§9.14)"
        )
    if torch.is_grad_enabled() and any(part.requires_grad for part in rotary):
        raise ValueError(
            "rotary_pos_emb requires a gradient, which FPDT_Attention does not give it; detach it (§9.14)"
        )


def raise_on_all(
    error: Exception | None, hidden: Tensor, group: ProcessGroup | None, *, chunk_size: int = 0
) -> None:
    """Raise one rank's error on every rank of the group; without one, compare the sizes of the call.

    Communication: one all-reduce of a few integers.
    Raises: the error; ValueError if ranks hold other numbers of tokens or samples, or another chunk size.
    """
    if ranks_of(group) > 1:
        local_tokens, batch = [*hidden.shape, 0, 0][:2]
        raise_together(error, group, local_tokens=local_tokens, batch=batch, chunk_size=chunk_size)
    elif error is not None:
        raise error


def wrong_loss(
    lm_output: Tensor,
    labels: Tensor,
    weights: Tensor,
    rank: int,
    ranks: int,
    group: ProcessGroup | None,
    num_chunk: int,
) -> ValueError | None:
    """What is wrong with a call of FPDT_LogitsLoss, to be told to all ranks."""
    true = (0, 1) if group is None else (comm.get_rank(group), comm.get_world_size(group))
    if (rank, ranks) != true:
        return ValueError(f"rank={rank} and spg_size={ranks}, but spg says {true}; pass those (§9.14)")
    if lm_output.dim() != 3 or tuple(lm_output.shape[1::-1]) != tuple(labels.shape):
        return ValueError(
            f"lm_output of shape {tuple(lm_output.shape)} and labels of shape {tuple(labels.shape)}; give "
            f"(T/sp, B, H) and (B, T/sp) (§9.14)"
        )
    if lm_output.shape[-1:] != weights.shape[1:] or num_chunk < 1:
        return ValueError(
            f"logit_weights of shape {tuple(weights.shape)} and num_chunk={num_chunk}; give "
            f"(V, {lm_output.shape[-1]}) and at least 1 (§9.14)"
        )
    named = labels[labels != IGNORE]
    if named.numel() and not (0 <= int(named.min()) and int(named.max()) < len(weights)):
        return ValueError(
            f"labels from {int(named.min())} to {int(named.max())} lie outside the vocabulary "
            f"0..{len(weights) - 1}; mark tokens without a label with {IGNORE} (§9.14)"
        )
    return None
