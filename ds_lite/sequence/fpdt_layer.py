"""FPDT under DeepSpeed's names: a transformer layer for sequences that do not fit at once (§9.14.2).

    FPDT_InputConstruct   deals the tokens: of every chunk of the sequence each rank gets an equal share
    FPDT_Attention        projection, Ulysses exchange and causal attention, chunk by chunk
    FPDT_FFN              the feed-forward, chunk by chunk (`fpdt_pointwise.py`)
    FPDT_LogitsLoss       logits and cross entropy, chunk by chunk (`fpdt_pointwise.py`)

Hidden states have the sequence first and the batch second, as in Megatron-LM.

Legend: B micro-batch, T tokens, H hidden width, N query heads, G key and value heads, D head width; sp
ranks in the group. A chunk is `chunk_size` tokens of the whole sequence, chunk_size/sp of each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.comm import ProcessGroup
from ds_lite.dealing import deal_heads
from ds_lite.grid import PipelineParallelGrid
from ds_lite.sequence.fpdt_checks import (
    check_chunks,
    check_extras,
    check_hidden,
    check_settings,
    raise_on_all,
)
from ds_lite.sequence.fpdt_pointwise import FPDT_FFN, FPDT_LogitsLoss
from ds_lite.sequence.host_store import HostStore
from ds_lite.sequence.layer import ranks_of
from ds_lite.sequence.ulysses_chunks import Rotary, Setup, attention_of_chunks, places_of

__all__ = ["FPDT_Attention", "FPDT_FFN", "FPDT_InputConstruct", "FPDT_LogitsLoss"]


class FPDT_InputConstruct:
    """What one rank of the sequence group holds of a batch, in the order that FPDT_Attention needs.

    Rank r gets the r-th part of every chunk, so early and late tokens, cheap and dear ones in causal
    attention, are shared evenly. The chunk size is `args.ds_sequence_parallel_fpdt_chunk_size`, in tokens
    of the whole sequence; the last chunk may be shorter.

    Raises: ValueError for a sequence or a chunk that sp does not divide, and a chunk size below 1.

    Source: §9.14; DeepSpeed `sequence/fpdt_layer.py::FPDT_InputConstruct` @ 0.19.8.
    Differs: DeepSpeed wants chunks that divide the sequence, and compares all tokens with all chunks.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        self.tokens, self.labels, self.loss_mask = tokens, labels, loss_mask
        self.attention_mask, self.position_ids = attention_mask, position_ids
        self.chunk_size = args.ds_sequence_parallel_fpdt_chunk_size
        self.sp_size, self.sp_rank = sp_size, sp_rank
        check_chunks(tokens.shape[1], self.chunk_size, sp_size)

    def generate(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """tokens, labels, loss_mask, attention_mask, position_ids.

        The loss mask keeps all tokens, in the order in which FPDT_LogitsLoss gathers their losses: rank
        after rank. The attention mask stays as it is.

        Shapes: tokens, labels and position_ids (B, T) -> (B, T/sp); loss_mask (B, T) -> the same.
        """
        own, everyone = self.positions(self.sp_rank), range(self.sp_size)
        gathered = torch.cat([self.positions(rank) for rank in everyone])
        tokens = self.tokens[:, own]
        labels, position_ids = (None if x is None else x[:, own] for x in (self.labels, self.position_ids))
        loss_mask = None if self.loss_mask is None else self.loss_mask[:, gathered]
        return tokens, labels, loss_mask, self.attention_mask, position_ids

    def positions(self, sp_rank: int) -> Tensor:
        """Where the tokens of a rank stand in the whole sequence."""
        num_tokens = self.tokens.shape[1]
        _, places = places_of(num_tokens // self.sp_size, self.chunk_size, self.sp_size)
        whole = torch.arange(num_tokens, device=self.tokens.device)
        return torch.cat([whole[slice(*place)].chunk(self.sp_size)[sp_rank] for place in places])


class FPDT_Attention(nn.Module):
    """Causal self-attention whose hidden states hold, chunk by chunk, what FPDT_InputConstruct deals.

    `config` has hidden_size, num_attention_heads, num_key_value_heads, kv_channels (D) and
    attention_dropout. The rows of the first weight are those of q, k and v; the second weight is that of
    the output. With `enable_offloading` chunks that are not in work wait in `store`, which counts them. The
    group may also come from `bind(grid)`. Heads are dealt as in DistributedAttention: uneven and shared kv
    heads are fine.

    Shapes: hidden states (T/sp, B, H) -> (T/sp, B, H); first weight ((N+2G)*D, H), second (H, N*D).
    Communication: two all_to_all_single a chunk, backward as many. Forward begins with one all-reduce of a
    few integers, which compares what the ranks bring.
    Gradient: of this rank's tokens; the parameters' gradients of all ranks add up to those of one process.
    Raises: ValueError, on every rank of the group, for settings and shapes that do not fit, an attention
    mask, dropout, and a key-value cache.

    Source: §9.14; DeepSpeed `sequence/fpdt_layer.py::FPDT_Attention` @ 0.19.8.
    Differs: DeepSpeed needs flash-attn and a GPU, makes four exchanges a chunk each way and has barriers of
    the whole world; it drops attention in forward with numbers that its backward does not know.
    """

    def __init__(
        self,
        config: Any,
        first_weight: Tensor,
        first_bias: Tensor | None,
        second_weight: Tensor,
        second_bias: Tensor | None,
        sequence_process_group: ProcessGroup | None,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        if (gather_idx, scatter_idx) != (0, 2):
            raise ValueError(
                f"gather_idx={gather_idx}, scatter_idx={scatter_idx}: the sequence is dimension 0, the "
                f"heads are dimension 2; leave both out (§9.14)"
            )
        check_settings(config, first_weight, second_weight, sequence_process_group, chunk_size)
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_width: int = config.kv_channels
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        self.spg, self.chunk_size, self.return_bias = sequence_process_group, chunk_size, return_bias
        self.store = HostStore() if enable_offloading else None

    def bind(self, grid: PipelineParallelGrid) -> None:
        """Take the group of the seq axis where the constructor got none."""
        self.spg = grid.group("seq") if self.spg is None else self.spg

    def forward(
        self,
        layernorm_output: Tensor,
        attention_mask: Tensor | None = None,
        inference_params: Any = None,
        rotary_pos_emb: Rotary | None = None,
        cpu_offloading: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the output's bias to add later, or None where it is added already.

        `rotary_pos_emb` is cos and sin of the whole sequence in its true order, (T, 1, 1, R) each.
        """
        self._agree(layernorm_output, attention_mask, inference_params, rotary_pos_emb)
        ranks = ranks_of(self.spg)
        dealt = deal_heads(
            self.num_heads, self.num_kv_heads, ranks, what="sequence_parallel_size", section="§9.14"
        )
        local, places = places_of(layernorm_output.shape[0], self.chunk_size, ranks)
        store = self.store if cpu_offloading and len(places) > 1 else None
        shape = self.num_heads, self.num_kv_heads, self.head_width
        is_recorded = torch.is_grad_enabled()
        setup = Setup(self.spg, dealt, *shape, local, places, rotary_pos_emb, store, is_recorded)
        mixed = attention_of_chunks(layernorm_output, self.qkv_linear_weight, self.qkv_linear_bias, setup)
        if self.return_bias:
            return F.linear(mixed, self.qkv_dense_weight), self.qkv_dense_bias
        return F.linear(mixed, self.qkv_dense_weight, self.qkv_dense_bias), None

    def _agree(self, hidden: Tensor, mask: Any, cache: Any, rotary: Rotary | None) -> None:
        """Before anything is exchanged: do all ranks bring the same, and does it fit?"""
        error: Exception | None = None
        try:
            check_hidden(hidden, self.qkv_linear_weight.shape[1], self.chunk_size, self.spg)
            check_extras(mask, cache, rotary, hidden.shape[0] * ranks_of(self.spg), self.head_width)
        except ValueError as refusal:
            error = refusal
        raise_on_all(error, hidden, self.spg, chunk_size=self.chunk_size)
