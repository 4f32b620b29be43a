"""What `initialize` would refuse, in its order and its words; else the job that it would form (§9.6 §9.7).

The functions asked are those that `PipelineModule`, `initialize` and AutoTP ask, in the same order: the model
as layers, the stages, the config, the axes, the plan of the cut. None of them needs a process group.

Differs: what only a model that was cut can tell is not foreseen: domino on blocks that cannot run in parts, a
plan that leaves every layer whole, a plan for layers that cut themselves, an optimizer that cannot work on
shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from ds_lite.config import Batch, load_config, refuse_what_is_not_built, resolve_batch
from ds_lite.config_keys import DSConfig
from ds_lite.forming import facts_of, heads_of, with_degree_of_model
from ds_lite.layout import Facts, check_stages, layout_of, stages_of
from ds_lite.moe.spread import stacks_of
from ds_lite.optimizers import check_optimizer
from ds_lite.pipe.building import (
    Layer,
    LayerSpec,
    TiedLayerSpec,
    build_for_inspection,
    check_layers,
    check_shared,
    check_ties,
    layer_name,
    parameter_count,
)
from ds_lite.pipe.causal_lm.hull import Hull
from ds_lite.pipe.causal_lm.layers import layers_of, names_of
from ds_lite.pipe.module import PipelineModule
from ds_lite.pipe.partition import partition_layers
from ds_lite.precision import compute_dtype
from ds_lite.sequence.models import kind_of
from ds_lite.tags import tags_of
from ds_lite.tensor_parallel.auto_tp import plan_of
from ds_lite.tensor_parallel.partition_config import config_of
from ds_lite.tensor_parallel.plan import Plan
from ds_lite.tensor_parallel.policy import make_plan
from ds_lite.topology import ProcessTopology

Config = Mapping[str, Any] | str | PathLike[str]


@dataclass(frozen=True)
class Stages:
    """The layers of a pipeline: stage s has layers bounds[s] .. bounds[s+1]-1; `ties` are layers by key."""

    layers: tuple[Layer, ...]
    bounds: tuple[int, ...]
    ties: Mapping[str, tuple[int, ...]]

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if layer < stop)

    def stages_of_tie(self, key: str) -> tuple[int, ...]:
        """The stages that hold a tied module."""
        return tuple(sorted({self.stage_of(layer) for layer in self.ties[key]}))

    def modules_of(self, layer: int) -> dict[str, str]:
        """The modules of a layer that was made from a model: a key in the pipeline, the model's name."""
        spec: Any = self.layers[layer]
        return dict(names_of(*spec.module_args))


@dataclass(frozen=True)
class Job:
    """A legal job: the config, the axes, and what is known of the model.

    `model` is the whole one, without values, if its layers can be told: a plain module, or with `hull` the
    one that a pipeline is made from. `plan` says how AutoTP cuts it. `knows` says that its layers cut
    themselves, so nobody can tell the parts before they have.
    """

    config: DSConfig
    topology: ProcessTopology
    batch: Batch
    model: nn.Module | None = None
    hull: Hull | None = None
    stages: Stages | None = None
    plan: Plan | None = None
    ep_sizes: tuple[int, ...] = ()
    knows: bool = False

    def size(self, axis: str) -> int:
        """How many ranks share an axis; 1 for one that is missing."""
        return max(1, self.topology.get_dim(axis))

    @property
    def is_known(self) -> bool:
        """Whether parameters and messages of each rank can be told."""
        return self.model is not None and not self.knows


def form(
    config: Config,
    world_size: int,
    model: nn.Module | Sequence[Layer] | None = None,
    *,
    num_stages: int | None = None,
    partition_method: str = "parameters",
) -> Job:
    """The job that a config and a model would form on so many ranks.

    `model` is a module, values or not, which should be made for this: a transformers model gets the name of
    another attention function. With `num_stages` it is what `from_model` makes a pipeline of, or a list of
    layers. Without a model only what the config decides is checked.

    Raises: ValueError or TypeError with the words of `PipelineModule`, `initialize` and AutoTP.
    """
    hull = stages = None
    if num_stages is not None and isinstance(model, nn.Module):
        _give_buffers_values(model)
        hull = Hull(model)
    layers = layers_of(hull) if hull is not None else None if isinstance(model, nn.Module) else model
    topology = None
    if num_stages is not None:
        checked_layers = None if layers is None else check_layers(layers, PipelineModule)
        topology = stages_of(num_stages, world_size)
        if checked_layers is not None:
            stages = _stages(checked_layers, num_stages, partition_method)
    checked = load_config(config)
    refuse_what_is_not_built(checked)
    compute_dtype(checked)
    check_optimizer(None, checked)
    if isinstance(model, nn.Module):
        checked = with_degree_of_model(model, checked)
        if checked.sequence_parallel_size > 1:
            kind_of(model, counts_routers=hull is not None)
    facts = _facts(checked, model, num_stages or 1, topology)
    axes = layout_of(checked, facts, world_size)
    return _job(checked, axes, facts, model, hull, stages)


def _job(
    config: DSConfig,
    axes: ProcessTopology,
    facts: Facts,
    model: nn.Module | Sequence[Layer] | None,
    hull: Hull | None,
    stages: Stages | None,
) -> Job:
    batch = resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        max(1, axes.get_dim("data")),
    )
    sizes = set(facts.ep_sizes)
    if config.expert_parallel.enabled:
        sizes.add(config.expert_parallel.autoep_size)
    job = Job(config, axes, batch, stages=stages, ep_sizes=tuple(sorted(sizes)))
    if not isinstance(model, nn.Module):
        return job
    knows = _cuts_itself(model)
    plan = None if knows or config.tensor_parallel.degree == 1 else _plan(model, config)
    return replace(job, model=model, hull=hull, plan=plan, knows=knows)


def _plan(model: nn.Module, config: DSConfig) -> Plan:
    """What AutoTP would carry out."""
    tensor = config.tensor_parallel
    return make_plan(
        model,
        tensor.degree,
        grain=tensor.grain,
        partition_config=config_of(tensor.partition_config, tensor.preset_model),
        vocab_parallel=bool(tensor.vocab_parallel_lm_head),
    )


def _cuts_itself(model: nn.Module) -> bool:
    """Whether layers of the model know the grid, or were cut already: AutoTP leaves such a model alone."""
    has_bind = any(callable(getattr(module, "bind", None)) for module in model.modules())
    is_tagged = any(tags_of(parameter).model != "full" for parameter in model.parameters())
    return has_bind or is_tagged or plan_of(model) is not None


def _facts(
    config: DSConfig,
    model: nn.Module | Sequence[Layer] | None,
    num_stages: int,
    topology: ProcessTopology | None,
) -> Facts:
    """What `forming.facts_of` says of the same model; without one nothing that forbids anything."""
    if model is None:
        experts = (config.expert_parallel.autoep_size,) if config.expert_parallel.enabled else ()
        return Facts("the model", "model", num_stages, experts=experts, topology=topology)
    if isinstance(model, nn.Module):
        plain = facts_of(model, config)
        if topology is None:
            return plain
        return Facts(plain.name, "model", num_stages, heads_of(model), plain.experts, topology=topology)
    built = [build_for_inspection(one) if isinstance(one, LayerSpec) else one for one in model]
    modules = [one for one in built if isinstance(one, nn.Module)]
    stacks = [len(stack.gate_up_proj) for one in modules for _, stack in stacks_of(one)]  # type: ignore[arg-type]
    spread = tuple(stacks) if config.expert_parallel.enabled else ()
    return Facts("PipelineModule", "specs", num_stages, experts=spread, topology=topology)


def _stages(layers: list[Layer], num_stages: int, method: str) -> Stages:
    """The cut of a list of layers, with what the constructor of PipelineModule refuses."""
    names = [layer_name(layer) for layer in layers]
    check_stages(num_stages, len(names))
    bounds = partition_layers(method, names, lambda: [parameter_count(layer) for layer in layers], num_stages)
    uses: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            uses.setdefault(layer.key, []).append(index)
    stages = Stages(tuple(layers), tuple(bounds), {key: tuple(places) for key, places in uses.items()})
    check_shared(layers, stages.stage_of)
    check_ties(layers)
    return stages


def _give_buffers_values(model: nn.Module) -> None:
    """Zeros for buffers on the meta device: the hull runs two tokens on the CPU to see who calls whom."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
