"""From an optimizer and a config to buckets: who keeps masters, who keeps shards (§9.1 §9.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ds_lite.agreement import raise_together
from ds_lite.buckets import Bucket, group_by_kind
from ds_lite.config_keys import DSConfig
from ds_lite.gradients import Routes
from ds_lite.pipe.module import PipelineModule
from ds_lite.precision import MasterBucket, master_dtype
from ds_lite.tags import is_elsewhere, tags_of
from ds_lite.zero import ShardedBucket

_STATE_FROM_THE_START = ("Adagrad",)
# These look at whole matrices or at all parameters at once; on a shard they compute something else.
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


def make_buckets(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, routes: Routes, config: DSConfig
) -> list[Bucket]:
    """Buckets for all trainable parameters; the optimizer gets shards or masters to step in their place.

    Parameters that the optimizer does not hold get replicated buckets: their gradients count in the norm.
    Those that it holds for layers of other stages are left to these.

    Communication: one small all-reduce, so that what is refused on one rank is refused on all.
    Raises: ValueError for a parameter that cannot be reduced, and for an optimizer that shards or masters
    cannot be put under.
    """
    stage, limit = config.zero_optimization.stage, int(config.zero_optimization.reduce_bucket_size)
    elsewhere = (
        {id(p) for p in module.parameters_elsewhere()} if isinstance(module, PipelineModule) else set()
    )

    def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.requires_grad and id(p) not in elsewhere]

    groups = optimizer.param_groups if optimizer is not None else []
    for group in groups:
        group["params"] = [p for p in group["params"] if not is_elsewhere(p)]
    held = trainable(parameter for group in groups for parameter in group["params"])
    everything = {id(p): p for p in (*held, *trainable(module.parameters()))}.values()
    replaces = stage >= 1 or any(master_dtype(parameter, config) for parameter in held)
    fault = next(_faults(optimizer, stage, replaces, held), None)
    raise_together(fault or next(_unreducible(everything, routes), None))

    buckets: list[Bucket] = []
    for group in groups if replaces else []:
        mine = [_bucket(run, routes, config) for run in group_by_kind(trainable(group["params"]), limit)]
        group["params"] = [piece.target for bucket in mine for piece in bucket.pieces]
        buckets += mine
    taken = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    rest = group_by_kind([parameter for parameter in everything if id(parameter) not in taken], limit)
    return [*buckets, *(Bucket(run, routes.of(tags_of(run[0]))) for run in rest)]


def _bucket(run: list[nn.Parameter], routes: Routes, config: DSConfig) -> Bucket:
    tags, stage = tags_of(run[0]), config.zero_optimization.stage
    route, dtype = routes.of(tags), master_dtype(run[0], config)
    if stage >= 1 and not tags.keeps_whole:
        return ShardedBucket(run, route, dtype, stage=stage)
    return Bucket(run, route) if dtype is None else MasterBucket(run, route, dtype)


def _unreducible(parameters: Iterable[nn.Parameter], routes: Routes) -> Iterator[ValueError]:
    for parameter in parameters:
        if parameter.is_complex():
            yield ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; gradients are reduced "
                f"as real numbers, so keep real and imaginary part as torch.view_as_real does (§9.1)"
            )
        try:
            routes.of(tags_of(parameter))
        except ValueError as error:
            yield error


def _faults(
    optimizer: torch.optim.Optimizer | None, stage: int, replaces: bool, held: Sequence[nn.Parameter]
) -> Iterator[ValueError]:
    """What speaks against stepping parts or masters instead of whole parameters."""
    name, is_cut = type(optimizer).__name__, any(tags_of(p).model == "sharded" for p in held)
    if name in _NOT_ELEMENTWISE and (stage >= 1 or is_cut):
        where = "ZeRO shards" if stage >= 1 else "the parts of tensor-parallel layers"
        yield ValueError(
            f"optimizer {name} does not act on each element alone, so it cannot work on {where}; use it with "
            f"zero_optimization.stage 0 and whole layers, or an optimizer such as AdamW (§9.1)"
        )
    if optimizer is None or not replaces:
        return
    if name in _STATE_FROM_THE_START:
        yield ValueError(
            f"optimizer {name} makes its state when it is built, before ZeRO or float32 masters can take the "
            f"parameters' place; use zero_optimization.stage 0 in float32 with it, or an optimizer such as "
            f"AdamW (§9.1)"
        )
    if optimizer.state:
        yield ValueError(
            f"optimizer {name} already holds state for {len(optimizer.state)} parameters; give initialize an "
            f"optimizer that has not stepped yet, or a function that builds one (§9.1)"
        )
