"""The toy GPT with a mixture of experts in every block, as a plain module and as a list of layers (§9.4).

l_aux has to reach the loss. In the plain module it is a second result; between the stages of a pipeline it
travels beside the activations, a running sum that each block adds to:

    tokens -> x -> (x, l_aux of block 0) -> (x, l_aux of blocks 0 and 1) -> ... -> (logits, sum of l_aux)

    MoEGPT(Shape(), Mixture(), seed=1234)
    PipelineModule(moe_layer_specs(Shape(), Mixture()), num_stages=2, loss_fn=MoELoss(0.01), seed_layers=True)

Legend: as in `toy_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ds_lite.moe.layer import MoE
from ds_lite.pipe import LayerSpec, TiedLayerSpec
from ds_lite.pipe.building import rng_restored, set_random_seed
from ds_lite.toy_layers import MLP, Attention, Embedding, Positions, Shape, head, loss_fn
from ds_lite.toy_parallel import ParallelAttention, ParallelMLP

Stream = tuple[Tensor, Tensor]  # activations (B, T, H) and the sum of l_aux so far, 0-dim


@dataclass(frozen=True)
class Mixture:
    """The sizes of every block's mixture; see `MoE`. The experts are MLPs."""

    num_experts: int = 4
    ep_size: int = 1
    k: int = 2
    capacity_factor: float = 1.25
    min_capacity: int | None = None
    drop_tokens: bool = True
    use_rts: bool = True
    top2_2nd_expert_sampling: bool = True

    def build(self, shape: Shape, *, cut_experts: bool = False) -> MoE:
        """The layer; with `cut_experts` every expert is cut over the model axis."""
        expert = ParallelMLP(shape) if cut_experts else MLP(shape)
        return MoE(shape.width, expert, **vars(self), enable_expert_tensor_parallelism=cut_experts)


class MoEBlock(nn.Module):
    """Attention and a mixture on the residual stream; takes x or (x, l_aux so far)."""

    def __init__(
        self,
        shape: Shape,
        mixture: Mixture,
        attention: Callable[[Shape], nn.Module] = Attention,
        *,
        cut_experts: bool = False,
    ) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(shape.width), attention(shape)
        self.norm2, self.moe = nn.LayerNorm(shape.width), mixture.build(shape, cut_experts=cut_experts)

    def forward(self, inputs: Tensor | Stream) -> Stream:
        x, before = inputs if isinstance(inputs, tuple) else (inputs, None)
        x = x + self.attention(self.norm1(x))
        y, l_aux, _ = self.moe(self.norm2(x))
        return x + y, l_aux if before is None else before + l_aux


class StreamNorm(nn.Module):
    """The last norm, on the activations alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Stream) -> Stream:
        x, l_aux = inputs
        return self.norm(x), l_aux


def stream_head(embedding: nn.Module, inputs: Stream) -> Stream:
    """(x, l_aux) -> (logits, l_aux)."""
    x, l_aux = inputs
    return head(embedding, x), l_aux


class MoELoss:
    """Mean cross entropy plus `coefficient` times the sum of l_aux over the blocks."""

    def __init__(self, coefficient: float = 0.01) -> None:
        self.coefficient = coefficient

    def __call__(self, outputs: Stream, labels: Tensor) -> Tensor:
        logits, l_aux = outputs
        return loss_fn(logits, labels) + self.coefficient * l_aux


def moe_layer_specs(shape: Shape, mixture: Mixture) -> list[LayerSpec]:
    """The model as a list of recipes, for a PipelineModule with an `MoELoss`."""
    return _specs(shape, LayerSpec(MoEBlock, shape, mixture))


def parallel_moe_layer_specs(shape: Shape, mixture: Mixture, *, cut_experts: bool = False) -> list[LayerSpec]:
    """`moe_layer_specs` with attention, and with `cut_experts` every expert, cut over the model axis.

    Experts that are not cut are whole on each rank, and each works on its share of the tokens.
    """
    return _specs(shape, LayerSpec(MoEBlock, shape, mixture, ParallelAttention, cut_experts=cut_experts))


def _specs(shape: Shape, block: LayerSpec) -> list[LayerSpec]:
    return [
        TiedLayerSpec("embed", Embedding, shape),
        LayerSpec(Positions, shape),
        *([block] * shape.num_blocks),
        LayerSpec(StreamNorm, shape.width),
        TiedLayerSpec("embed", Embedding, shape, forward_fn=stream_head),
    ]


class MoEGPT(nn.Module):
    """The same model as a plain module; returns (logits, sum of l_aux).

    >>> import torch
    >>> small = MoEGPT(Shape(width=8, num_heads=2, num_blocks=1, context=4), Mixture(num_experts=3))
    >>> logits, l_aux = small(torch.zeros(1, 4, dtype=torch.long))
    >>> logits.shape, l_aux.shape
    (torch.Size([1, 4, 256]), torch.Size([]))
    """

    def __init__(self, shape: Shape, mixture: Mixture, *, seed: int = 1234) -> None:
        super().__init__()
        built = []
        for index, spec in enumerate(moe_layer_specs(shape, mixture)[:-1]):  # the head owns nothing
            with rng_restored():
                set_random_seed(seed + index)
                built.append(spec.build())
        self.embedding, self.positions, *blocks, self.norm = built
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Stream:  # (B, T) -> (B, T, V) and ()
        inputs = self.positions(self.embedding(tokens))
        for block in self.blocks:
            inputs = block(inputs)
        return stream_head(self.embedding, self.norm(inputs))
