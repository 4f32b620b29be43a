"""Does a block give for parts of a batch what it gives for the whole? (§9.15)

Nothing in the code of a foreign block says so. So it runs both ways, without gradients and without dropout,
whenever its arguments look new: in another mode, or with other tensors that belong to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ds_lite.domino.nests import copied, is_of_batch, is_same, tensors, to_half_of_the_digits

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}


@dataclass(frozen=True)
class Verdict:
    """Why a block cannot run in parts, or None; and which tensors of its result are of the batch."""

    reason: str | None
    are_of_batch: tuple[bool, ...] = ()


def looks(args: Any, samples: int, is_training: bool) -> tuple[Any, ...]:
    """What a trial holds for: which tensors are cut, and the mode."""
    return is_training, *((x.dim(), is_of_batch(x, samples)) for x in tensors(args))


@torch.no_grad()
def try_parts(
    block: nn.Module,
    whole: Callable[[Any], Any],
    in_parts: Callable[[Any], list[Any]],
    args: Any,
    samples: int,
) -> Verdict:
    """Run the block whole and in parts on copies of its arguments, and compare.

    What the block leaves behind is compared too: attributes and buffers that it sets, what it writes into its
    arguments.
    """
    with _unchanged(block) as kept, torch.random.fork_rng(), _WithoutDropout():
        given = copied(args)
        result = whole(given)
        if (kept_name := kept.changed()) is not None:
            return Verdict(f"it keeps something of the batch in {kept_name}")
        if not is_same(given, args, lambda one, other: one is other):
            return Verdict("it writes into its arguments")
        try:
            parts = in_parts(copied(args))
        except Exception as failure:
            return Verdict(f"a part of the batch fails with {type(failure).__name__}: {failure}")
    return _compared(result, parts, samples)


def _compared(result: Any, parts: list[Any], samples: int) -> Verdict:
    wholes, pieces = list(tensors(result)), [list(tensors(part)) for part in parts]
    if any(len(piece) != len(wholes) for piece in pieces):
        return Verdict("a part of the batch gives other results")
    flags = []
    for whole, *own in zip(wholes, *pieces, strict=True):
        is_cut = is_of_batch(whole, samples) and sum(len(x) for x in own if x.dim()) == samples
        flags.append(is_cut)
        together = [torch.cat(own)] if is_cut else own  # what is not of the batch is the same in each part
        if any(x.shape != whole.shape or not to_half_of_the_digits(whole, x) for x in together):
            return Verdict(
                "it gives another result in parts: its samples depend on each other, or an argument "
                "belongs to the batch in a way that is not seen"
            )
    return Verdict(None, tuple(flags))


class _Kept:
    """Tensors that the modules of a block hold under some name, and the values of its buffers."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.before = block, self._attributes(block)
        self.buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}

    @staticmethod
    def _attributes(block: nn.Module) -> dict[str, int]:
        return {
            f"{name}.{key}".lstrip("."): id(value)
            for name, module in block.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor)
        }

    def changed(self) -> str | None:
        """The first name that has another tensor now, or another value in a buffer."""
        now = self._attributes(self.block)
        for name in now:
            if self.before.get(name) != now[name]:
                return name
        buffers = dict(self.block.named_buffers())
        return next((name for name, old in self.buffers.items() if not torch.equal(buffers[name], old)), None)

    def restore(self) -> None:
        for name, buffer in self.block.named_buffers():
            buffer.copy_(self.buffers[name])


@contextmanager
def _unchanged(block: nn.Module) -> Iterator[_Kept]:
    kept = _Kept(block)
    try:
        yield kept
    finally:
        kept.restore()


class _WithoutDropout(TorchFunctionMode):
    """Modes stay as they are, for what else depends on them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            named = {**named, "dropout_p": 0.0} if "dropout_p" in named else named
        return func(*args, **named)
