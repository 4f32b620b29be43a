"""Domino for a model that knows nothing of it: each block runs its batch in parts that take turns (§9.15).

`"tensor_parallel": {"tp_size": 4, "domino": true}` does this to every block that AutoTP has cut. The code of
the block stays as it is: it runs once for each part, and where a part has started a sum over the ranks
(`turns.py`) the next part goes on. Such a change of place in the middle of a function is a greenlet's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite.domino.interleave import Steps, interleave
from ds_lite.tensor_parallel.layers import LinearAllreduce
from ds_lite.tensor_parallel.turns import Turns

PARTS = 2
_MIXES_SAMPLES = (nn.modules.batchnorm._BatchNorm,)


def run_blocks_in_parts(model: nn.Module, parts: int = PARTS) -> str:
    """Change every block of the model; says what was changed and what was not, and why.

    A block is an item of a list of equal modules in which AutoTP has cut a layer by rows. The first call of
    each also runs the batch whole, without gradients, and compares.

    Raises: ValueError for a model without such blocks, and if greenlet is not installed.
    """
    _need_greenlet()
    changed, left = [], {}
    for name, block in blocks_of(model):
        reason = _why_not(block)
        if reason is None:
            block.forward = _InParts(block, name, parts)
            changed.append(name)
        else:
            left[name] = reason
    if not changed:
        found = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "no list of blocks is cut"
        raise ValueError(
            f"domino=true, but no block of {type(model).__name__} can run in parts ({found}); write false, "
            f"or use ds_lite.domino.DominoTransformer (§9.15)"
        )
    said = f"{len(changed)} blocks of {type(model).__name__} run their batch in {parts} parts"
    return said + "".join(f"; {name} does not: {reason}" for name, reason in left.items())


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The cut items of the outermost lists of equal modules, by name."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if not isinstance(module, nn.ModuleList) or is_inside or len({type(one) for one in module}) != 1:
            continue
        found += [(f"{name}.{index}", one) for index, one in enumerate(module) if _is_cut(one)]
    return found


def _is_cut(block: nn.Module) -> bool:
    return any(isinstance(module, LinearAllreduce) for module in block.modules())


def _why_not(block: nn.Module) -> str | None:
    """Why a batch cannot go through this block in parts."""
    for name, module in block.named_modules():
        if isinstance(module, _MIXES_SAMPLES):
            return f"{name} is a {type(module).__name__}, which looks at all samples of a batch"
    return None


class _InParts:
    """The forward of one block, in parts of the batch."""

    def __init__(self, block: nn.Module, name: str, parts: int) -> None:
        self.block, self.name, self.parts = block, name, parts
        self.plain: Callable[..., Any] = block.forward
        self._has_compared = self._has_told = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        first = args[0] if args else next(iter(named.values()))
        samples = first.shape[0] if isinstance(first, Tensor) and first.dim() >= 2 else 0
        reason = f"its batch is {samples}" if samples < 2 else _opaque((args, named))
        if reason is not None:
            self._tell_once(reason)
            return self.plain(*args, **named)
        if not self._has_compared:
            self._has_compared = True
            self._compare(args, named, samples)
        if getattr(self.block, "gradient_checkpointing", False) and self.block.training:
            # transformers would recompute inside of each part, whose turns would mix what is saved for whom
            recompute: Any = self.block._gradient_checkpointing_func
            return recompute(lambda *args: self._in_parts(args, named, samples), *args)
        return self._in_parts(args, named, samples)

    def _in_parts(self, args: tuple[Any, ...], named: dict[str, Any], samples: int) -> Any:
        sizes = [len(piece) for piece in torch.arange(samples).tensor_split(min(self.parts, samples))]
        pieces = _split((args, named), samples, sizes)
        turns = Turns()
        with turns.taken(), _without_checkpoints(self.block):
            results = interleave(
                [
                    _steps(partial(self.plain, *own, **own_named), turns, part)
                    for part, (own, own_named) in enumerate(pieces)
                ]
            )
        assert not len(turns.pending), "the block is done, and a sum is under way"
        return _joined(results, sizes)

    def _compare(self, args: tuple[Any, ...], named: dict[str, Any], samples: int) -> None:
        """Does the batch in parts give what it gives whole?"""
        modes = {module: module.training for module in self.block.modules()}
        self.block.eval()
        try:
            with torch.no_grad():
                whole, parts = self.plain(*args, **named), self._in_parts(args, named, samples)
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not _is_same(whole, parts):
            raise ValueError(
                f"{self.name} gives another result when its batch of {samples} runs in {self.parts} parts; "
                "its samples depend on each other, or an argument belongs to the batch in a way that is not "
                "seen; write domino=false (§9.15)"
            )

    def _tell_once(self, reason: str) -> None:
        if not self._has_told:
            self._has_told = True
            print(f"ds_lite: {self.name} runs in the plain order: {reason} (§9.15)", flush=True)


@contextmanager
def _without_checkpoints(block: nn.Module) -> Iterator[None]:
    before = getattr(block, "gradient_checkpointing", None)
    if not before:
        yield
        return
    block.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        block.gradient_checkpointing = before


def _opaque(value: Any, name: str = "an argument") -> str | None:
    """What may hold something of the batch and cannot be cut, such as a cache of keys and values."""
    if isinstance(value, dict):
        found = (_opaque(item, str(key)) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        found = (_opaque(item, name) for item in value)
    elif value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype)):
        return None
    else:
        return f"{name} is a {type(value).__name__}, which cannot be cut; a cache goes with use_cache=False"
    return next((reason for reason in found if reason is not None), None)


def _steps(function: Callable[[], Any], turns: Turns, part: int) -> Steps[Any]:
    """A function as a generator: it yields where the function calls `turns.pause`."""
    from greenlet import getcurrent, greenlet

    main = getcurrent()
    green = greenlet(function)

    def go_on() -> Any:
        turns.part, turns.pause = part, main.switch
        green.parent = main
        return green.switch()

    try:
        result = go_on()
        while not green.dead:
            yield
            result = go_on()
        return result
    finally:
        if not green.dead:
            green.throw()  # another part has failed


def _split(value: Any, samples: int, sizes: Sequence[int]) -> list[Any]:
    """The same nest for each part; a tensor (B, ...) of two dimensions or more is cut, all else is shared."""
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == samples:
        return list(value.split(list(sizes)))
    if isinstance(value, dict):
        columns = {key: _split(item, samples, sizes) for key, item in value.items()}
        return [{key: pieces[part] for key, pieces in columns.items()} for part in range(len(sizes))]
    if isinstance(value, (tuple, list)):
        rows = [_split(item, samples, sizes) for item in value]
        return [type(value)(pieces[part] for pieces in rows) for part in range(len(sizes))]
    return [value] * len(sizes)


def _joined(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The whole output from those of the parts."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(list(results)) if first.dim() and len(first) == sizes[0] else first
    if isinstance(first, dict):
        return type(first)(**{key: _joined([one[key] for one in results], sizes) for key in first})
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(column, sizes) for column in zip(*results))
    return first


def _is_same(whole: Any, parts: Any) -> bool:
    if isinstance(whole, Tensor):
        if not isinstance(parts, Tensor) or whole.shape != parts.shape:
            return False
        if not whole.is_floating_point():
            return torch.equal(whole, parts)
        largest = float(whole.nan_to_num().abs().max()) if whole.numel() else 0.0
        slack = torch.finfo(whole.dtype).eps ** 0.5 * largest
        return torch.allclose(whole, parts, rtol=0, atol=slack, equal_nan=True)
    if isinstance(whole, dict):
        return all(_is_same(whole[key], parts[key]) for key in whole)
    if isinstance(whole, (tuple, list)):
        return all(_is_same(one, other) for one, other in zip(whole, parts, strict=True))
    return True


def _need_greenlet() -> None:
    try:
        import greenlet
    except ImportError:
        raise ValueError(
            "domino=true lets the parts of a batch take turns in the middle of a model's code, which needs "
            "greenlet: pip install 'ds-lite[domino]' (§9.15)"
        ) from None
    assert greenlet
