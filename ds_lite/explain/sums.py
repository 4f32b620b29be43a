"""Which sums over the model axis a cut model would make: its own code, run once without values (§9.13 §9.3).

Layers that open a region share one sum in backward if they take the same tensor, and only the model's code
says whether they do. So a copy of it on the meta device runs on a few tokens, and its layers are watched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite.explain.legal import Job
from ds_lite.precision import compute_dtype
from ds_lite.tensor_parallel.kinds import is_stack_of_experts
from ds_lite.tensor_parallel.plan import Placement

_TOKENS = 8
_OPENS = ("column", "shared", "gathered", "experts")


@dataclass(frozen=True)
class Sum:
    """One collective for each micro-batch, in `module`.

    Units: bytes for each token. `is_whole` says that it covers all tokens also where ranks share a sequence.
    """

    module: str
    direction: str
    operation: str
    per_token: int
    is_whole: bool = False


def sums_of(job: Job) -> list[Sum] | None:
    """The sums of all stages; None for a model that does not run on token ids without values."""
    if job.plan is None or job.model is None:
        return []
    shadow = _shadow(job.model, compute_dtype(job.config))
    watch = _Watch(job.plan.ranks)
    modules = dict(shadow.named_modules())
    for placement in job.plan:
        watch.add(modules[placement.name], placement)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            shadow(input_ids=ids)
    except Exception:  # whatever a model raises because meta tensors have no values, or takes other inputs
        return None
    return watch.found


def _shadow(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy without values. Stacks of experts, whose work depends on values, give back what they get."""
    memo: dict[int, Any] = {
        id(x): nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=False)
        for x in model.parameters()
    }
    shadow = copy.deepcopy(model, memo).to("meta", dtype)
    if hasattr(config := getattr(shadow, "config", None), "pad_token_id"):
        config.pad_token_id = None  # type: ignore[union-attr]  # some look for padding among the ids
    for module in shadow.modules():
        if is_stack_of_experts(module):
            module.forward = _same  # type: ignore[assignment]
    return shadow


def _same(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(hidden)


class _Watch:
    """Notes what goes into and comes out of the layers that a plan cuts."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.found = ranks, list[Sum]()
        self._entered: list[Tensor] = []  # kept alive, so that no other tensor takes their place

    def add(self, module: nn.Module, placement: Placement) -> None:
        """Watch one module."""
        kind, name = placement.kind, placement.name
        if kind in _OPENS:
            module.register_forward_pre_hook(self._opener(name), with_kwargs=True)
        if kind == "gathered":
            widest = max(placement.width(rank) for rank in range(self.ranks))
            module.register_forward_hook(self._gathering(name, widest))
        if kind in ("row", "experts", "vocabulary"):
            module.register_forward_hook(self._closer(name, kind == "vocabulary"))

    def _opener(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            for x in (*args, *named.values()):
                is_new = isinstance(x, Tensor) and not any(x is one for one in self._entered)
                if is_new and x.is_floating_point():
                    self._entered.append(x)
                    self.found.append(Sum(name, "backward", "all_reduce", _per_token(x)))

        return enter

    def _closer(self, name: str, is_whole: bool) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Tensor) -> None:
            self.found.append(Sum(name, "forward", "all_reduce", _per_token(output), is_whole))

        return leave

    def _gathering(self, name: str, widest: int) -> Callable[..., None]:
        def gather(_: nn.Module, __: Any, output: Tensor) -> None:
            each = _per_token(output) // output.shape[-1] * widest * self.ranks
            self.found.append(Sum(name, "forward", "all_gather", each))

        return gather


def _per_token(x: Tensor) -> int:
    return x.numel() * x.element_size() // _TOKENS
