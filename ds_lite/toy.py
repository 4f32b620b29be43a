"""One small byte-level GPT, its text and its batches: what chapters, labs and tests train (§9.2 §9.9).

The model exists twice from the same layers: `GPT` is the plain module for one process, `layer_specs` the list
that `PipelineModule` cuts. Layer i starts from seed `seed + i` in both, so one seed means one model:

    GPT(Shape(), seed=1234)
    PipelineModule(layer_specs(Shape()), num_stages=2, loss_fn=loss_fn, seed_layers=True, base_seed=1234)

The text is the standard library's own source, which every machine with Python has. A batch is a function of
(seed, step, number of the micro-batch), so every layout of processes sees the same bytes.

Legend: B sequences in a micro-batch, T context, H width, N heads, D head width, V vocabulary.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.pipe import LayerSpec, TiedLayerSpec
from ds_lite.pipe.building import rng_restored, set_random_seed

__all__ = ["GPT", "Shape", "Text", "batches", "layer_specs", "load_text", "loss_fn", "micro_batch"]

MicroBatch = tuple[Tensor, Tensor]
_STD = 0.02  # of initial weights, as in GPT-2


@dataclass(frozen=True)
class Shape:
    """The sizes of a toy model; the defaults make 1.05 million parameters, as heavy in front as behind.

    Raises: ValueError if the heads do not divide the width.
    """

    width: int = 144
    num_heads: int = 4
    num_blocks: int = 4
    context: int = 64
    vocabulary: int = 256  # a token is a byte

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            fitting = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            raise ValueError(
                f"width={self.width} is not divisible by num_heads={self.num_heads}; "
                f"choose from {fitting} (§9.2)"
            )


# -------------------------------------------------------------------------------------------- the layers


def linear(inputs: int, outputs: int, *, std: float = _STD) -> nn.Linear:
    """A linear layer with small normal weights, and biases that are not zero: a forgotten one must show."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.normal_(layer.bias, std=_STD)
    return layer


def into_stream(inputs: int, shape: Shape) -> nn.Linear:
    """A linear layer that adds to the residual stream: smaller, as 2 * num_blocks of them add up."""
    return linear(inputs, shape.width, std=_STD / (2 * shape.num_blocks) ** 0.5)


class Embedding(nn.Module):
    """Bytes to vectors; `head` reads the same table the other way round."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.width).normal_(std=_STD))  # (V, H)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, H)
        return F.embedding(tokens, self.weight)


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    """Vectors to logits by the embedding's own table: (B, T, H) -> (B, T, V)."""
    assert isinstance(embedding, Embedding)
    return F.linear(x, embedding.weight)


class Positions(nn.Module):
    """Adds a learned vector for each place in the context."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.context, shape.width).normal_(std=_STD))  # (T, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Attention(nn.Module):
    """Causal self-attention. Queries, keys and values stay three weights: each can be cut by heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.query = linear(shape.width, shape.width)
        self.key = linear(shape.width, shape.width)
        self.value = linear(shape.width, shape.width)
        self.out = into_stream(shape.width, shape)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.num_heads, -1)
        q, k, v = (
            project(x).unflatten(-1, heads).transpose(1, 2)  # (B, T, H) -> (B, N, T, D)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = linear(shape.width, 4 * shape.width)
        self.down = into_stream(4 * shape.width, shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a feed-forward part on the residual stream; other forms of the two can be passed in."""

    def __init__(
        self,
        shape: Shape,
        attention: Callable[[Shape], nn.Module] = Attention,
        feed_forward: Callable[[Shape], nn.Module] = MLP,
    ) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(shape.width), attention(shape)
        self.norm2, self.feed_forward = nn.LayerNorm(shape.width), feed_forward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, computed in the dtype of the logits.

    Shapes: logits (B, T, V), labels (B, T) -> 0-dim.
    """
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


# ------------------------------------------------------------------------------------ the model, twice


def layer_specs(shape: Shape) -> list[LayerSpec]:
    """The model as a list of recipes: embedding, positions, blocks, last norm, and the embedding as head."""
    return [
        TiedLayerSpec("embed", Embedding, shape),
        LayerSpec(Positions, shape),
        *(LayerSpec(Block, shape) for _ in range(shape.num_blocks)),
        LayerSpec(nn.LayerNorm, shape.width),
        TiedLayerSpec("embed", Embedding, shape, forward_fn=head),
    ]


class GPT(nn.Module):
    """The same model as a plain module, for one process.

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
        self.embedding, self.positions, *blocks, self.norm = built
        self.blocks = nn.ModuleList(blocks)

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


# -------------------------------------------------------------------------------------------- the text

# Tables, tests and other people's packages; what remains is code that reads like code.
_SKIPPED = {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}


@dataclass(frozen=True)
class Text:
    """Bytes as two 1-D uint8 tensors; no file is in both."""

    train: Tensor
    validation: Tensor


def load_text(limit: int = 4_000_000, folder: str | os.PathLike[str] | None = None) -> Text:
    """The Python source below `folder` (default: the standard library), every tenth file for validation.

    Files come in alphabetical order of their paths until `limit` bytes are read. The text differs a little
    between Python versions.

    Raises: ValueError if there is no source to read.
    """
    root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(_source_files(root)):
        data = path.read_bytes()[: limit - size]
        parts[number % 10 == 9].append(data)
        size += len(data)
        if size >= limit:
            break
    if not all(parts):
        raise ValueError(
            f"found {sum(map(len, parts))} Python files in {root}, and the text needs ten; pass another "
            f"folder with .py files to load_text (§9.2)"
        )
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, validation)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED and "test" not in name)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py"))


# ----------------------------------------------------------------------------------------- the batches


def micro_batch(data: Tensor, *, seed: int, step: int, index: int, size: int, context: int) -> MicroBatch:
    """Micro-batch number `index` of the global batch of `step`: inputs, and the same bytes one place on.

    Shapes: data 1-D uint8 -> inputs (B, T), labels (B, T), both int64.
    Raises: ValueError if the data is not longer than one context.

    >>> inputs, labels = micro_batch(torch.arange(9).byte(), seed=0, step=0, index=0, size=1, context=8)
    >>> labels.tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8]]
    """
    if len(data) <= context:
        raise ValueError(
            f"the text has {len(data)} bytes and context={context} needs {context + 1}; give more (§9.2)"
        )
    starts = np.random.default_rng((seed, step, index)).integers(0, len(data) - context, size)
    rows = torch.stack([data[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(
    data: Tensor,
    *,
    num_micro_batches: int,
    size: int,
    context: int,
    replica: int = 0,
    seed: int = 0,
    first_step: int = 0,
) -> Iterator[MicroBatch]:
    """The micro-batches of one replica, step after step without end: numbers r*m to r*m+m-1 of each step."""
    for step in count(first_step):
        for i in range(num_micro_batches):
            index = replica * num_micro_batches + i
            yield micro_batch(data, seed=seed, step=step, index=index, size=size, context=context)
