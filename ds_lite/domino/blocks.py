"""Domino for a model that knows nothing of it: each block runs its batch in parts that take turns (§9.15).

`"tensor_parallel": {"tp_size": 4, "domino": true}` does this to every block that AutoTP has cut. The code of
the block stays as it is: it runs once for each part, and where a part has started a sum over the ranks
(`turns.py`) the next part goes on. Such a change of place in the middle of a function is a greenlet's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.domino.interleave import Steps, interleave
from ds_lite.domino.nests import joined, opaque, split
from ds_lite.domino.trial import Verdict, looks, try_parts
from ds_lite.moe.layer import MoE
from ds_lite.tensor_parallel.layers import LinearAllreduce
from ds_lite.tensor_parallel.turns import Turns

PARTS = 2
_MIXES_SAMPLES = (nn.modules.batchnorm._BatchNorm,)


def run_blocks_in_parts(model: nn.Module, parts: int = PARTS) -> str:
    """Change every block of the model; says what was changed and what was not, and why.

    A block is an item of a list of equal modules in which AutoTP has cut a layer by rows. Its first call, and
    any that looks new, also runs whole, without gradients, and compares (`trial.py`): a block whose parts
    give something else goes on in the plain order, and says so.

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
        if isinstance(module, MoE):
            return f"{name} is an MoE layer, whose capacity and l_aux are those of the whole batch"
    return None


class _InParts:
    """The forward of one block, in parts of the batch."""

    def __init__(self, block: nn.Module, name: str, parts: int) -> None:
        self.block, self.name, self.parts = block, name, parts
        self.plain: Callable[..., Any] = block.forward
        self._verdicts: dict[Any, Verdict] = {}
        self._told: set[str] = set()

    def __call__(self, *args: Any, **named: Any) -> Any:
        samples = _samples(args, named)
        reason = f"its batch is {samples}" if samples < 2 else _why_not_now() or opaque((args, named))
        if reason is None:
            looks_like = looks((args, named), samples, self.block.training)
            if looks_like not in self._verdicts:
                self._verdicts[looks_like] = self._try(args, named, samples)
            verdict = self._verdicts[looks_like]
            reason = verdict.reason
        if reason is not None:
            self._tell_once(reason)
            return self.plain(*args, **named)

        def run(*args: Any) -> Any:
            return joined(self._in_parts(args, named, samples), iter(verdict.are_of_batch))

        if getattr(self.block, "gradient_checkpointing", False) and self.block.training:
            # transformers would recompute inside of each part, whose turns would mix what is saved for whom
            return self.block._gradient_checkpointing_func(run, *args)  # type: ignore[operator]
        return run(*args)

    def _in_parts(self, args: tuple[Any, ...], named: dict[str, Any], samples: int) -> list[Any]:
        sizes = [len(piece) for piece in torch.arange(samples).tensor_split(min(self.parts, samples))]
        pieces = split((args, named), samples, sizes)
        turns = Turns()
        with turns.taken(), _without_checkpoints(self.block):
            results = interleave(
                [
                    _steps(partial(self.plain, *own, **own_named), turns, part)
                    for part, (own, own_named) in enumerate(pieces)
                ]
            )
        assert not len(turns.pending), "the block is done, and a sum is under way"
        return results

    def _try(self, args: tuple[Any, ...], named: dict[str, Any], samples: int) -> Verdict:
        return try_parts(
            self.block,
            lambda given: self.plain(*given[0], **given[1]),
            lambda given: self._in_parts(given[0], given[1], samples),
            (args, named),
            samples,
        )

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told and comm.get_rank() == 0:
            self._told.add(reason)
            print(f"ds_lite: {self.name} runs in the plain order: {reason} (§9.15)", flush=True)


@contextmanager
def in_plain_order(block: nn.Module) -> Iterator[None]:
    """The block runs its batch whole until the context ends, e.g. for hooks inside of it."""
    forward: Any = block.forward
    if not isinstance(forward, _InParts):
        yield
        return
    block.forward = forward.plain
    try:
        yield
    finally:
        block.forward = forward


def _samples(args: tuple[Any, ...], named: dict[str, Any]) -> int:
    """B, of the hidden states: what comes first, goes by their name, or is the first float of (B, T, H)."""
    candidates = [*args[:1], *([named["hidden_states"]] if "hidden_states" in named else named.values())]
    states = [x for x in candidates if isinstance(x, Tensor) and x.dim() >= 2 and x.is_floating_point()]
    return int(states[0].shape[0]) if states else 0


def _why_not_now() -> str | None:
    """transformers notes what the modules inside give, once each; parts would give it several times."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is not None and collector.get():
        return "its attentions, hidden states or router logits are asked for"
    return None


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


def _steps(function: Callable[[], Any], turns: Turns, part: int) -> Steps[Any]:
    """A function as a generator: it yields where the function calls `turns.pause`."""
    from greenlet import getcurrent, greenlet

    main = getcurrent()
    green = greenlet(function)
    green.gr_context = copy_context()  # else context variables would be at their defaults inside

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


def _need_greenlet() -> None:
    try:
        import greenlet
    except ImportError:
        raise ValueError(
            "domino=true lets the parts of a batch take turns in the middle of a model's code, which needs "
            "greenlet: pip install 'ds-lite[domino]' (§9.15)"
        ) from None
    assert greenlet
