"""One small byte-level GPT, its text and its batches: what chapters, labs and tests train (§9.2 §9.3 §9.9).

The model exists in several forms from the same layers: `GPT` is the plain module for one process,
`layer_specs` the list that `PipelineModule` cuts. Layer i starts from seed `seed + i` in both, so one seed
means one model:

    GPT(Shape(), seed=1234)
    PipelineModule(layer_specs(Shape()), num_stages=2, loss_fn=loss_fn, seed_layers=True, base_seed=1234)

A third list is cut over the model axis too. Its parameters have the same names and the same initial weights,
which are whole until `initialize` binds the layers to their groups (§9.3):

    parallel_layer_specs(shape)        whole logits on every rank, for `loss_fn`
    vocab_parallel_layer_specs(shape)  a part of the logits, for `VocabParallelCrossEntropy(shape.vocabulary)`

Legend: B sequences in a micro-batch, T context, H width, N heads, G key and value heads, D head width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ds_lite.pipe import LayerSpec, TiedLayerSpec
from ds_lite.pipe.building import rng_restored, set_random_seed
from ds_lite.toy_layers import (
    MLP,
    Attention,
    Block,
    Embedding,
    Positions,
    Shape,
    head,
    into_stream,
    linear,
    loss_fn,
)
from ds_lite.toy_parallel import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelMLP,
    gathering_head,
    vocab_parallel_head,
)
from ds_lite.toy_text import MicroBatch, Text, batches, load_text, micro_batch

__all__ = [
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "MicroBatch",
    "Positions",
    "Shape",
    "Text",
    "batches",
    "head",
    "into_stream",
    "layer_specs",
    "linear",
    "load_text",
    "loss_fn",
    "micro_batch",
    "parallel_layer_specs",
    "vocab_parallel_layer_specs",
]


def layer_specs(shape: Shape) -> list[LayerSpec]:
    """The model as a list of recipes: embedding, positions, blocks, last norm, and the embedding as head."""
    return [
        TiedLayerSpec("embed", Embedding, shape),
        LayerSpec(Positions, shape),
        *(LayerSpec(Block, shape) for _ in range(shape.num_blocks)),
        LayerSpec(nn.LayerNorm, shape.width),
        TiedLayerSpec("embed", Embedding, shape, forward_fn=head),
    ]


def parallel_layer_specs(shape: Shape) -> list[LayerSpec]:
    """`layer_specs` from layers that are cut over the model axis; every rank has the whole logits.

    Communication: over the model axis, per block two all-reduces of B·T·H elements forward and two backward;
    one for the embedding forward; one all-gather of the logits forward and one all-reduce backward.

    Source: §9.3.
    """
    return _parallel_specs(shape, gathering_head)


def vocab_parallel_layer_specs(shape: Shape) -> list[LayerSpec]:
    """`parallel_layer_specs` without the all-gather: each rank has its part of the vocabulary's logits.

    The loss is `VocabParallelCrossEntropy(shape.vocabulary)`.
    """
    return _parallel_specs(shape, vocab_parallel_head)


def _parallel_specs(shape: Shape, head_fn: Callable[[nn.Module, Tensor], Tensor]) -> list[LayerSpec]:
    return [
        TiedLayerSpec("embed", ParallelEmbedding, shape),
        LayerSpec(Positions, shape),
        *(LayerSpec(Block, shape, ParallelAttention, ParallelMLP) for _ in range(shape.num_blocks)),
        LayerSpec(nn.LayerNorm, shape.width),
        TiedLayerSpec("embed", ParallelEmbedding, shape, forward_fn=head_fn),
    ]


class GPT(nn.Module):
    """The same model as a plain module, for one process.

    >>> import torch
    >>> small = GPT(Shape(width=8, num_heads=2, num_blocks=1, context=4))
    >>> small(torch.zeros(1, 4, dtype=torch.long)).shape
    torch.Size([1, 4, 256])
    >>> list(small.parameters_by_layer())[:3]
    ['tied_modules.embed.weight', '1.weight', '2.norm1.weight']
    """

    def __init__(self, shape: Shape, *, seed: int = 1234) -> None:
        super().__init__()
        built = []
        for index, spec in enumerate(layer_specs(shape)[:-1]):  # the head owns nothing
            with rng_restored():
                set_random_seed(seed + index)
                built.append(spec.build())
        self.embedding, self.positions, *blocks, norm = built
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm  # after the blocks: modules are registered in the order in which they run

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.positions(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return head(self.embedding, self.norm(x))

    def parameters_by_layer(self) -> dict[str, nn.Parameter]:
        """Every parameter under the name that a PipelineModule gives it."""
        layers = [self.positions, *self.blocks, self.norm]
        named = {f"tied_modules.embed.{name}": p for name, p in self.embedding.named_parameters()}
        for index, layer in enumerate(layers, start=1):
            named |= {f"{index}.{name}": p for name, p in layer.named_parameters()}
        return named
