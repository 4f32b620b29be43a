"""The attention of a Domino layer, from one fused projection to the input of the output layer (§9.15).

Legend: T tokens, B sequences in a part of the batch, H width, N heads, G key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.comm import ProcessGroup

Rotate = Callable[[Tensor, Any], Tensor]


class CoreAttention(nn.Module):
    """Softmax attention over this rank's heads, which lie kv group by kv group in the columns: N/G queries,
    a key, a value.

    `attention_mask` is True where a query may not look, as in Megatron-LM, or is added if it has floats; a
    causal layer looks at no later token either way. `rotate(x, positions)` turns (T, B, heads, D).
    Dropout stops in eval.

    Shapes: columns (T, B, (N + 2G) D / tp), mask broadcastable to (B, N, T, T) -> (T, B, N D / tp).
    """

    def __init__(
        self,
        head_width: int,
        queries_per_group: int,
        rotate: Rotate | None,
        *,
        is_causal: bool,
        dropout: float,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.head_width, self.queries_per_group, self.rotate = head_width, queries_per_group, rotate
        self.is_causal, self.dropout, self.group = is_causal, dropout, group

    def forward(self, columns: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None) -> Tensor:
        groups = columns.unflatten(-1, (-1, self.queries_per_group + 2, self.head_width))  # (T, B, G, ., D)
        q, k, v = groups.split([self.queries_per_group, 1, 1], dim=3)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))  # (T, B, N, D), (T, B, G, D) twice
        if rotary_pos_emb is not None:
            if self.rotate is None:
                raise ValueError("rotary_pos_emb without apply_rotary_pos_emb; pass that function (§9.15)")
            both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            q, k = (self.rotate(x, positions) for x, positions in zip((q, k), both))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (B, heads, T, D)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._mask(attention_mask, q),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and attention_mask is None,
            enable_gqa=self.queries_per_group > 1,
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, mask: Tensor | None, q: Tensor) -> Tensor | None:
        """What torch calls a mask: True where a query may look; of this rank's heads alone."""
        if mask is None:
            return None
        here, ranks = q.shape[1], 1 if self.group is None else comm.get_world_size(self.group)
        if mask.dim() >= 3 and mask.shape[-3] == here * ranks and ranks > 1:
            mask = mask.narrow(-3, comm.get_rank(self.group) * here, here)
        tokens = q.shape[2]
        past = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        if mask.is_floating_point():
            return mask.masked_fill(~past, float("-inf")) if self.is_causal else mask
        seen = ~mask.bool()
        return seen & past if self.is_causal else seen
