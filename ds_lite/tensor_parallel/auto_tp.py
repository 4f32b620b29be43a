"""AutoTP: a model that knows nothing of tensor parallelism is cut in place, after a plan (§9.13)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Ranges, repeated
from ds_lite.tags import Cut, tag
from ds_lite.tensor_parallel.attention import BIASES, cut_biases, enter_arguments, keep_heads
from ds_lite.tensor_parallel.fused_layer import SharedQueryKeyValue, SharedRows
from ds_lite.tensor_parallel.kinds import holds_linears, is_linear
from ds_lite.tensor_parallel.layers import (
    LinearAllreduce,
    LinearLayer,
    VocabParallelEmbedding,
)
from ds_lite.tensor_parallel.partition_config import AutoTPConfig
from ds_lite.tensor_parallel.plan import AttentionHeads, Placement, Plan
from ds_lite.tensor_parallel.policy import make_plan, tp_parser
from ds_lite.tensor_parallel.regions import enter, leave
from ds_lite.tensor_parallel.sharded import cut_once


def auto_tp(
    model: nn.Module,
    group: ProcessGroup,
    *,
    grain: int = 1,
    partition_config: AutoTPConfig | None = None,
    vocab_parallel: bool = False,
) -> Plan:
    """Plan for the ranks of a group and cut the model in place; returns the plan.

    Every rank holds the same whole model and keeps its part. A model that was cut for as many ranks stays as
    it is.

    Raises: as `make_plan`; ValueError for a model that was cut for another number of ranks.
    """
    ranks, before = comm.get_world_size(group), plan_of(model)
    if before is None:
        plan = make_plan(
            model, ranks, grain=grain, partition_config=partition_config, vocab_parallel=vocab_parallel
        )
        apply_plan(model, plan, group)
        return plan
    if before.ranks != ranks:
        raise ValueError(
            f"{type(model).__name__} was cut for {before.ranks} tensor-parallel ranks already and cannot be "
            f"cut for {ranks}; gather its state dict and load it into a new model (§9.13)"
        )
    return before


class AutoTP:
    """DeepSpeed's name for the parser.

    Source: §9.13; DeepSpeed `module_inject/auto_tp.py::AutoTP` @ 0.19.8.
    """

    tp_parser = staticmethod(tp_parser)


def apply_plan(model: nn.Module, plan: Plan, group: ProcessGroup) -> None:
    """Keep this rank's part of a model: its layers are replaced, one after the other."""
    model._ds_lite_plan = plan  # type: ignore[assignment]
    if plan.ranks == 1:
        return
    modules = dict(model.named_modules())
    holders = _holders(model)
    for attention in plan.attentions:
        _tell_heads(modules[attention.name], attention, comm.get_rank(group))
    has_table = any(isinstance(modules[name], nn.Embedding) for name in plan.names("heads"))
    for (
        name,
        arguments,
    ) in plan.arguments.items():  # a bias that a cut table made is of this rank's heads alone
        entering = [one for one in arguments if not (has_table and one in BIASES)]
        enter_arguments(modules[name], entering, group)
    for placement in plan:
        module = modules[placement.name]
        layer = _cut(module, placement, plan.heads_around(placement.name), group)
        for parent, key in holders[id(module)] if layer is not module else ():
            setattr(parent, key, layer)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan by which a model was cut; None for a whole one."""
    return getattr(model, "_ds_lite_plan", None)


def _holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each module is held; one may have several names."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            found.setdefault(id(child), []).append((parent, key))
    return found


def _cut(
    module: nn.Module, placement: Placement, attention: AttentionHeads | None, group: ProcessGroup
) -> nn.Module:
    """Carry out one line of a plan; returns the layer that takes the module's place."""
    kind, ranges = placement.kind, placement.ranges

    def dealing(_: int) -> Ranges:
        return ranges

    if kind in ("column", "gathered"):
        return LinearLayer(module, group, gather_output=kind == "gathered", dealing=dealing)
    if kind == "row":
        return LinearAllreduce(module, group, dealing=dealing)
    if kind == "vocabulary":
        return VocabParallelEmbedding(module, group, dealing=dealing)
    if kind == "shared":
        assert attention is not None and placement.layout is not None
        heads = attention.heads
        if "q" in placement.layout.parts:
            return SharedQueryKeyValue(module, placement.layout, heads, group)
        return SharedRows(module, ranges, group)
    if kind == "heads":
        for parameter in module.parameters(recurse=False):
            cut_once(parameter, Cut(placement.dim, ranges, group))
    elif kind == "partial":
        for parameter in module.parameters():
            tag(parameter, model="partial")
    elif kind == "experts":
        _cut_experts(module, placement, group)
    return module


def _cut_experts(module: nn.Module, placement: Placement, group: ProcessGroup) -> None:
    """Every expert on every rank, each with some of its inner columns."""
    total = int(module.down_proj.shape[2])  # type: ignore[union-attr, index]
    cut_once(module.down_proj, Cut(2, placement.ranges, group))  # type: ignore[arg-type]
    cut_once(module.gate_up_proj, Cut(1, repeated(placement.ranges, total, 2), group))  # type: ignore[arg-type]

    def enter_all(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The rows and the routing's weights: each rank brings a part of the gradient of both."""
        return tuple(_entered(arg, group) for arg in args), {k: _entered(v, group) for k, v in named.items()}

    module.register_forward_pre_hook(enter_all, with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: leave(output, group))


def _entered(value: Any, group: ProcessGroup) -> Any:
    return enter(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value


def _tell_heads(module: nn.Module, attention: AttentionHeads, rank: int) -> None:
    query, kv = attention.query[rank], attention.kv[rank]
    holding = [part for part in module.modules() if holds_linears(part) and not is_linear(part)]
    keep_heads(holding, attention.heads, query, kv)
    cut_biases(module, attention.heads.query, query)
