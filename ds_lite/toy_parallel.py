"""The layers of the toy GPT, cut over the model axis (§9.3).

Each is the whole layer of `toy_layers` with some of its linear layers replaced, so names and initial weights
are the same. Per block two all-reduces of B·T·H elements run forward and two backward.

Legend: as in `toy_layers`; tp ranks.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ds_lite.tags import tag
from ds_lite.tensor_parallel import (
    KeyValueLinear,
    LinearAllreduce,
    LinearLayer,
    VocabParallelEmbedding,
    enter,
    query_columns,
)
from ds_lite.toy_layers import MLP, Attention, Embedding, Shape


class ParallelEmbedding(VocabParallelEmbedding):
    """The table, its rows dealt over the ranks."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(Embedding(shape))


def gathering_head(embedding: nn.Module, x: Tensor) -> Tensor:
    """(B, T, H) -> (B, T, V) on every rank."""
    assert isinstance(embedding, VocabParallelEmbedding)
    return embedding.whole_logits(x)


def vocab_parallel_head(embedding: nn.Module, x: Tensor) -> Tensor:
    """(B, T, H) -> (B, T, V/tp)."""
    assert isinstance(embedding, VocabParallelEmbedding)
    return embedding.logits(x)


class ParallelAttention(Attention):
    """Attention over this rank's heads: queries, keys and values by columns, the output by rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        heads = (shape.num_heads, shape.kv_heads)
        columns = partial(query_columns, *heads, shape.head_width)
        self.query = LinearLayer(self.query, dealing=columns, input_is_entered=True)
        self.key, self.value = KeyValueLinear(self.key, *heads), KeyValueLinear(self.value, *heads)
        self.out = LinearAllreduce(self.out, dealing=columns)
        self.tag_parameters()

    def tag_parameters(self) -> None:
        """The norms are whole on each rank, but used for this rank's heads only."""
        for parameter in (*self.query_norm.parameters(), *self.key_norm.parameters()):
            tag(parameter, model="partial")

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.query, LinearLayer)
        return super().forward(enter(x, self.query.group, overlaps=self.query.overlaps))  # once for all


class ParallelMLP(MLP):
    """The first layer by columns, the second by rows: nothing is exchanged between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.up, self.down = LinearLayer(self.up), LinearAllreduce(self.down)
