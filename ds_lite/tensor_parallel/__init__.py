"""Tensor parallelism: layers, heads and losses that are cut over the model axis (§9.3 §9.13)."""

from ds_lite.dealing import HeadDeal, deal, deal_heads, query_columns
from ds_lite.tensor_parallel.cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from ds_lite.tensor_parallel.layers import (
    KeyValueLinear,
    LinearAllreduce,
    LinearLayer,
    ReplicatedLinear,
    VocabParallelEmbedding,
)
from ds_lite.tensor_parallel.regions import enter, gather, leave
from ds_lite.tensor_parallel.sharded import ShardedLayer

__all__ = [
    "HeadDeal",
    "KeyValueLinear",
    "LinearAllreduce",
    "LinearLayer",
    "ReplicatedLinear",
    "ShardedLayer",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "deal",
    "deal_heads",
    "enter",
    "gather",
    "leave",
    "query_columns",
    "vocab_parallel_cross_entropy",
]
