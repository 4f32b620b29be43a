"""Domino: tensor parallelism whose sums run while something else is computed (§9.15)."""

from ds_lite.domino.async_linear import DominoAsyncColumnParallelLinear, RowParallelLinearNoComm
from ds_lite.domino.transformer import DominoTransformer, DominoTransformerLayer

__all__ = [
    "DominoAsyncColumnParallelLinear",
    "DominoTransformer",
    "DominoTransformerLayer",
    "RowParallelLinearNoComm",
]
