"""The parameters that one rank would hold: their shapes and tags, in the engine's order (§9.3 §9.9 §9.13).

What `apply_plan` and `spread_experts` do to a module's weights is told here for each kind of placement,
without doing it; the result is parameters on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from ds_lite.explain.legal import Job
from ds_lite.explain.places import Place
from ds_lite.pipe.causal_lm.layers import TIE
from ds_lite.precision import compute_dtype
from ds_lite.tags import tag
from ds_lite.tensor_parallel.kinds import is_stack_of_experts
from ds_lite.tensor_parallel.plan import Placement

_Model = Literal["sharded", "full", "partial"]
_Part = tuple[tuple[int, ...], _Model]  # a shape, and what the model axis does to it


def pieces_of(place: Place) -> list[nn.Parameter]:
    """This rank's parameters, in the order of `named_parameters` of the engine's module."""
    job = place.job
    assert job.is_known and job.model is not None
    cutter = _Cutter(job, place.coordinates["model"])
    if job.hull is None or job.stages is None:
        return list(cutter.walk(job.model, ""))
    stages, stage, found = job.stages, place.coordinates["pipe"], list[nn.Parameter]()
    here = range(stages.bounds[stage], stages.bounds[stage + 1])
    tied = {layer: key for key, layers in stages.ties.items() for layer in layers}
    for layer in sorted(here, key=lambda one: one not in tied):  # `tied_modules` is the first child
        for name in stages.modules_of(layer).values():
            key = TIE if layer in tied else None
            found += cutter.walk(job.hull.module(name), name, tied=key)
    return found


class _Cutter:
    """What one tensor-parallel rank keeps of a model; each weight once, wherever it is used."""

    def __init__(self, job: Job, tp_rank: int) -> None:
        assert job.model is not None
        self.job, self.rank = job, tp_rank
        modules = dict(job.model.named_modules())
        plan = [] if job.plan is None else list(job.plan)
        self._placement = {id(modules[one.name]): one for one in plan}
        self._partial = {
            id(part) for one in plan if one.kind == "partial" for part in modules[one.name].modules()
        }
        self._dtype = compute_dtype(job.config)
        self._seen: set[int] = set()

    def walk(self, module: nn.Module, name: str, tied: str | None = None) -> Iterator[nn.Parameter]:
        """The parameters of a module and all below it."""
        for _, part in module.named_modules():
            if self.job.config.expert_parallel.enabled and is_stack_of_experts(part):
                yield from self._experts(part)
                continue
            later: list[nn.Parameter] = []
            for key, weight in part.named_parameters(recurse=False):
                if id(weight) in self._seen:
                    continue
                self._seen.add(id(weight))
                first, *others = self._parts(part, key, weight)
                yield self._made(weight, *first, tied=tied)
                later += [self._made(weight, *other, tied=tied) for other in others]
            yield from later  # the key and value rows of a fused weight come after what was there

    def _made(self, weight: nn.Parameter, shape: tuple[int, ...], model: _Model, **tags: Any) -> nn.Parameter:
        dtype = self._dtype if self._dtype is not None and weight.is_floating_point() else weight.dtype
        made = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), weight.requires_grad)
        tag(made, model=model, **tags)
        return made

    def _parts(self, module: nn.Module, key: str, weight: nn.Parameter) -> list[_Part]:
        """What the plan makes of one weight; two parts of a fused one whose key and value rows are shared."""
        how, shape = self._placement.get(id(module)), tuple(weight.shape)
        if id(module) in self._partial:
            return [(shape, "partial")]
        if how is None or not how.ranges:
            return [(shape, "full")]
        if how.kind == "shared":
            return self._shared(how, key, shape)
        if how.kind == "row" and key == "bias":
            return [(shape, "full")]
        dim, width = how.dim, how.width(self.rank)
        if how.kind == "experts" and key == "gate_up_proj":
            dim, width = 1, 2 * width
        elif key == "bias" and how.kind != "heads":
            dim = 0
        return [(_resized(shape, dim, width), "sharded")]

    def _shared(self, how: Placement, key: str, shape: tuple[int, ...]) -> list[_Part]:
        assert how.layout is not None and self.job.plan is not None
        around = self.job.plan.heads_around(how.name)
        assert around is not None
        if "q" not in how.layout.parts:
            return [(shape, "partial")]
        heads, dim = around.heads, 0 if key == "bias" else how.dim
        start, stop = heads.deal(self.job.plan.ranks).query[self.rank]
        shared = shape[dim] - heads.query * heads.width
        query = _resized(shape, dim, (stop - start) * heads.width)
        return [(query, "sharded"), (_resized(shape, dim, shared), "partial")]

    def _experts(self, stack: nn.Module) -> Iterator[nn.Parameter]:
        """Each expert's weights on their own, of those that this rank keeps."""
        own = dict(stack.named_parameters(recurse=False))
        size = self.job.config.expert_parallel.autoep_size
        parts = {key: self._parts(stack, key, weight)[0] for key, weight in own.items()}
        for _ in range(len(own["gate_up_proj"]) // size):
            for key, (shape, model) in parts.items():
                yield self._made(own[key], shape[1:], model, owner="expert", ep_size=size)


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
