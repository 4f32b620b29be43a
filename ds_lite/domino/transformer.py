"""Transformer layers whose sums over the ranks run while another part of the batch is computed (§9.15).

The batch is cut into parts. Each part goes through the layers by itself, and where it has started a sum the
next one goes on:

    part 0   norm attention project*   .                         norm MLP*   .
    part 1                             norm attention project*   .           norm MLP*
                                       * starts a sum of half the batch, which ends while the other computes

Backward visits the same steps in reverse, so there the sums of the column layers hide under the other parts
(`pending.py` sees to the order). Bytes are those of plain tensor parallelism, in as many messages more as
there are parts.

Legend: T tokens, B sequences in the batch, H width, F width of the MLP, N heads, G key and value heads.

Source: §9.15; DeepSpeed `runtime/domino/transformer.py` @ 0.19.8.
Differs: DeepSpeed writes the order out for two halves and changes places more often, so that a sum hides
under a part of a layer only; it ignores the attention mask and the
gated MLP, drops attention in eval, and needs an even batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.checkpointing import checkpoint
from ds_lite.dealing import Ranges
from ds_lite.domino.async_linear import DominoAsyncColumnParallelLinear, RowParallelLinearNoComm
from ds_lite.domino.attention import CoreAttention, Rotate
from ds_lite.domino.interleave import Steps, interleave
from ds_lite.domino.weights import SharedWeights
from ds_lite.tensor_parallel.pending import Pending, finish_sum, start_sum, wait_in_backward

PARTS = 2
Key = tuple[int, int, str]  # part of the batch, layer, half of the layer


class Call(Pending):
    """One forward call: the sums that are under way, and the weights that its parts share."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = SharedWeights()

    def end_forward(self) -> None:
        self.weights.end_forward()
        assert not len(self), "forward is over, and a sum is under way"


class DominoTransformerLayer(nn.Module):
    """Attention and MLP on the residual stream, cut over the tensor-parallel ranks.

    `config` has hidden_size, num_attention_heads, ffn_hidden_size, params_dtype, perform_initialization,
    init_method, output_layer_init_method; and, where they are not the defaults, kv_channels,
    num_query_groups, layernorm_epsilon, normalization ("LayerNorm", "RMSNorm"), add_bias_linear,
    gated_linear_unit, hidden_dropout, attention_dropout, apply_residual_connection_post_layernorm,
    recompute_granularity ("full" recomputes attention and MLP, without a sum, in backward).

    `mpu` has get_tensor_model_parallel_group and get_tensor_model_parallel_world_size. `self_attn_mask_type`
    is causal unless its name or itself is "padding".

    Shapes: hidden_states, a tuple of parts (T, B/parts, H) -> the same.
    Communication: each part starts two all-reduces of its size forward and two backward.
    Raises: ValueError for heads, groups or an MLP that the ranks do not divide, and a drop_path_rate.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
        layer_number: int,
        layer_type: Any = None,
        self_attn_mask_type: Any = "causal",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if drop_path_rate:
            raise ValueError(f"drop_path_rate={drop_path_rate} is not built; write 0 (§9.15)")
        self.layer_number, self.group = layer_number, mpu.get_tensor_model_parallel_group()
        sizes = _Sizes(config, mpu.get_tensor_model_parallel_world_size())
        has_bias = getattr(config, "add_bias_linear", True)
        self.residual_is_normed = getattr(config, "apply_residual_connection_post_layernorm", False)
        self.recomputes = getattr(config, "recompute_granularity", None) == "full"
        self.is_gated = sizes.is_gated
        self.input_layernorm, self.post_attention_layernorm = norm_of(config), norm_of(config)
        self.query_key_value = DominoAsyncColumnParallelLinear(
            sizes.width, sizes.fused, self.group, config, config.init_method, has_bias
        )
        self.core_attention = CoreAttention(
            sizes.head_width,
            sizes.queries_per_group,
            apply_rotary_pos_emb,
            is_causal=getattr(self_attn_mask_type, "name", self_attn_mask_type) != "padding",
            dropout=getattr(config, "attention_dropout", 0.0),
            group=self.group,
        )
        self.dense = self._row(sizes.heads, sizes.width, config, has_bias)
        self.linear_fc1 = DominoAsyncColumnParallelLinear(
            sizes.width, sizes.up, self.group, config, config.init_method, has_bias, ranges=sizes.ranges_up
        )
        self.linear_fc2 = self._row(sizes.inner, sizes.width, config, has_bias)
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout", 0.0))

    def _row(self, input_size: int, output_size: int, config: Any, has_bias: bool) -> RowParallelLinearNoComm:
        init = config.output_layer_init_method
        return RowParallelLinearNoComm(
            input_size, output_size, config, init, has_bias, skip_bias_add=True, _tp_group=self.group
        )

    def forward(
        self,
        hidden_states: tuple[Tensor, ...],
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
    ) -> tuple[Tensor, ...]:
        call = Call()
        sizes = [part.shape[1] for part in hidden_states]
        steps = [
            self.steps(part, mask, rotary, call, key)
            for key, (part, mask, rotary) in enumerate(
                zip(hidden_states, masks_of(attention_mask, sizes), rotary_of(rotary_pos_emb, sizes))
            )
        ]
        results = interleave(steps)
        call.end_forward()
        return tuple(results)

    def steps(self, x: Tensor, mask: Tensor | None, rotary: Any, call: Call, part: int) -> Steps[Tensor]:
        """One part of the batch through the layer; others go on at each yield."""

        def attention(normed: Tensor, key: Key) -> Tensor:
            columns, _ = self.query_key_value(normed, call, key, call.weights)
            return self.core_attention(columns, mask, rotary)

        def mlp(normed: Tensor, key: Key) -> Tensor:
            inner, _ = self.linear_fc1(normed, call, key, call.weights)
            return self.activation(inner)

        key = part, self.layer_number
        x = yield from self._half(x, self.input_layernorm, attention, self.dense, call, (*key, "attention"))
        return (
            yield from self._half(x, self.post_attention_layernorm, mlp, self.linear_fc2, call, (*key, "MLP"))
        )

    def _half(
        self,
        x: Tensor,
        norm: nn.Module,
        inner: Callable[[Tensor, Key], Tensor],
        row: RowParallelLinearNoComm,
        call: Call,
        key: Key,
    ) -> Steps[Tensor]:
        """x + row(inner(norm(x))), the sum of the row layer begun and waited for in between."""
        stream = norm(x)
        normed = wait_in_backward(stream, call, key)  # for the column layer alone

        def through(normed: Tensor) -> Tensor:
            return row(inner(normed, key), call.weights)[0]

        y = checkpoint(through, normed) if self.recomputes else through(normed)
        y = start_sum(y, call, (*key, "forward"), self.group)
        yield
        y = finish_sum(y, call, (*key, "forward"))
        y = y if row.bias is None else y + row.bias
        return (stream if self.residual_is_normed else x) + self.dropout(y)

    def activation(self, x: Tensor) -> Tensor:
        """GELU, or of a gated MLP SiLU of the first half times the second."""
        if not self.is_gated:
            return F.gelu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class DominoTransformer(nn.Module):
    """`config.num_layers` Domino layers and a last norm, on a whole batch.

    The batch is cut into `parts` parts of one size or nearly so; where it has fewer sequences, into as many
    as there are. With config.domino_intra_layer_overlap each layer waits for all its sums before the next
    one begins; by default the parts run on through all layers.

    Shapes: hidden_states (T, B, H), attention_mask broadcastable to (B, N, T, T) -> (T, B, H).
    Communication: as the layers.
    Raises: as the layers.

    Source: §9.15; DeepSpeed `runtime/domino/transformer.py::DominoTransformer` @ 0.19.8.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
        model_type: Any = None,
        layer_type: Any = None,
        self_attn_mask_type: Any = "causal",
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        drop_path_rate: float = 0.0,
        *,
        parts: int = PARTS,
    ) -> None:
        super().__init__()
        if parts < 1:
            raise ValueError(f"parts={parts} is not a number of parts; choose at least 1 (§9.15)")
        self.parts, self.overlaps_in_layers = parts, getattr(config, "domino_intra_layer_overlap", False)
        self.layers = nn.ModuleList(
            DominoTransformerLayer(
                config, mpu, apply_rotary_pos_emb, number, layer_type, self_attn_mask_type, drop_path_rate
            )
            for number in range(1, config.num_layers + 1)
        )
        self.final_layernorm = norm_of(config) if post_process and post_layer_norm else nn.Identity()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, rotary_pos_emb: Any = None
    ) -> Tensor:
        parts = hidden_states.tensor_split(min(self.parts, max(1, hidden_states.shape[1])), dim=1)
        if self.overlaps_in_layers:
            for layer in self.layers:
                parts = layer(parts, attention_mask, rotary_pos_emb)
        else:
            parts = self._all_layers(parts, attention_mask, rotary_pos_emb)
        return torch.cat([self.final_layernorm(part) for part in parts], dim=1)

    def _all_layers(self, parts: tuple[Tensor, ...], mask: Tensor | None, rotary: Any) -> tuple[Tensor, ...]:
        call = Call()

        def steps(x: Tensor, mask: Tensor | None, rotary: Any, part: int) -> Steps[Tensor]:
            for layer in self.layers:
                assert isinstance(layer, DominoTransformerLayer)
                x = yield from layer.steps(x, mask, rotary, call, part)
            return x

        sizes = [part.shape[1] for part in parts]
        given = zip(parts, masks_of(mask, sizes), rotary_of(rotary, sizes), strict=True)
        results = interleave([steps(*own, part) for part, own in enumerate(given)])
        call.end_forward()
        return tuple(results)


class _Sizes:
    """What each rank holds of a layer.

    Raises: ValueError for what the ranks do not divide.
    """

    def __init__(self, config: Any, ranks: int) -> None:
        self.width, heads = config.hidden_size, config.num_attention_heads
        groups = getattr(config, "num_query_groups", None) or heads
        self.head_width = getattr(config, "kv_channels", None) or self.width // heads
        self.is_gated = getattr(config, "gated_linear_unit", False)
        for name, value in (
            ("num_attention_heads", heads),
            ("num_query_groups", groups),
            ("ffn_hidden_size", config.ffn_hidden_size),
        ):
            if value % ranks:
                raise ValueError(
                    f"{name}={value} is not divisible by {ranks} tensor-parallel ranks; choose a multiple, "
                    "or a degree that divides it (§9.15)"
                )
        if heads % groups or (self.width % heads and getattr(config, "kv_channels", None) is None):
            raise ValueError(
                f"num_attention_heads={heads} does not go into hidden_size={self.width} and groups of "
                f"{groups}; make them divide (§9.15)"
            )
        self.queries_per_group = heads // groups
        self.heads = heads * self.head_width // ranks
        self.fused = self.heads + 2 * groups * self.head_width // ranks
        self.inner = config.ffn_hidden_size // ranks
        self.up = self.inner * (2 if self.is_gated else 1)
        self.ranges_up = self._gate_and_up(config.ffn_hidden_size, ranks) if self.is_gated else None

    def _gate_and_up(self, inner: int, ranks: int) -> Ranges:
        """Each rank holds its rows of the gate, and the same rows of what is gated."""
        step = inner // ranks
        return tuple(
            tuple((start + step * rank, start + step * (rank + 1)) for start in (0, inner))
            for rank in range(ranks)
        )


def norm_of(config: Any) -> nn.Module:
    """The norm that a config names, in its dtype."""
    kind = nn.RMSNorm if getattr(config, "normalization", "LayerNorm") == "RMSNorm" else nn.LayerNorm
    epsilon = getattr(config, "layernorm_epsilon", 1e-5)
    return kind(config.hidden_size, eps=epsilon, dtype=config.params_dtype)


def masks_of(mask: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
    """The mask of each part; one mask for the whole batch is everybody's."""
    if mask is None or mask.dim() < 4 or mask.shape[0] == 1:
        return [mask] * len(sizes)
    return list(mask.split(sizes))


def rotary_of(positions: Any, sizes: list[int]) -> list[Any]:
    """The rotary table of each part; one without a batch, (T, 1, 1, ...), is everybody's."""
    if isinstance(positions, tuple):
        return list(zip(*(rotary_of(one, sizes) for one in positions), strict=True))
    if not isinstance(positions, Tensor) or positions.dim() < 3 or positions.shape[1] != sum(sizes):
        return [positions] * len(sizes)
    return list(positions.split(sizes, dim=1))
