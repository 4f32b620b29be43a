"""How the ranks of a job form a grid, and what must be equal on them before layers are cut (§9.3 §9.7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.config import load_config
from ds_lite.config_keys import DSConfig
from ds_lite.domino.blocks import run_blocks_in_parts
from ds_lite.foreign_tags import adopt_tags
from ds_lite.grid import PipelineParallelGrid
from ds_lite.layout import Facts, axes_of, check_axes, layout_of
from ds_lite.moe.layer import moe_layers
from ds_lite.moe.spread import spread_experts, stacks_of
from ds_lite.mpu import MpuGrid, mpu_fault
from ds_lite.pipe.module import PipelineModule
from ds_lite.replicas import make_replicas_equal
from ds_lite.sequence.models import is_transformers
from ds_lite.tags import tags_of
from ds_lite.tensor_parallel.auto_tp import auto_tp, plan_of
from ds_lite.tensor_parallel.fused_layer import SharedQueryKeyValue
from ds_lite.tensor_parallel.partition_config import config_of
from ds_lite.tensor_parallel.sharded import ShardedLayer
from ds_lite.tensor_parallel.tp_shard import AutoTPMeta


def form_grid(model: nn.Module, config: DSConfig, mpu: Any) -> PipelineParallelGrid:
    """The grid of this job, with the batch numbers checked against it before any group is made.

    Communication: creates the process groups, unless a foreign `mpu` brings them.
    Raises: ValueError for axes that do not fit the world, the config or each other.
    """
    if mpu is not None and not isinstance(model, PipelineModule):
        adopt_tags(model)
        grid: PipelineParallelGrid = MpuGrid(mpu)
        check_axes({axis: grid.size(axis) for axis in ("data", "seq", "model")}, config)
        _check_degree(grid.size("model"), config)
        return grid
    topology = layout_of(config, facts_of(model, config), comm.get_world_size())
    if isinstance(model, PipelineModule) and topology is not model.topology():
        model.take_topology(topology)
    grid = PipelineParallelGrid(topology)
    if mpu is not None:
        raise_together(mpu_fault(mpu, grid))  # it may be wrong on some ranks only
    return grid


def facts_of(model: nn.Module, config: DSConfig) -> Facts:
    """What legality depends on, of a model as it is before it is cut; equal on all ranks.

    Communication: for a list of LayerSpecs with expert_parallel one all-gather over the world.
    """
    whole, name = whole_of(model), type(whole_of(model)).__name__
    stacks = [len(stack.gate_up_proj) for _, stack in stacks_of(whole)]  # type: ignore[arg-type]
    spread = tuple(stacks) if config.expert_parallel.enabled else ()
    if not isinstance(model, PipelineModule):
        sizes = tuple(sorted({layer.ep_size for layer in moe_layers(model)}))
        return Facts(name, heads=heads_of(whole), experts=spread, ep_sizes=sizes)
    is_listed = whole is model
    if is_listed and config.expert_parallel.enabled:
        stages: list[Any] = [()] * comm.get_world_size()  # each rank knows the layers of its own stage
        comm.all_gather_object(stages, spread)
        spread = tuple(sorted(set().union(*stages)))
    return Facts(
        name,
        "specs" if is_listed else "model",
        model.num_stages,
        None if is_listed else heads_of(whole),
        spread,
        topology=model.topology(),
        is_given=model.has_given_topology,
    )


def heads_of(model: nn.Module) -> tuple[int, int] | None:
    """Query heads, key and value heads, as the configuration of a transformers model has them."""
    meta = AutoTPMeta.from_model_config(getattr(model, "config", None))
    if meta.num_attention_heads is None or not is_transformers(model):
        return None
    return meta.num_attention_heads, meta.num_kv_heads or meta.num_attention_heads


def _check_degree(size: int, config: DSConfig) -> None:
    if config.tensor_parallel.is_given and config.tensor_parallel.degree != size:
        raise ValueError(
            f"tensor_parallel asks for {config.tensor_parallel.degree} ranks and the mpu has {size} in its "
            f"tensor-parallel group; remove the key or make them equal (§9.7)"
        )


def with_mesh(config: DSConfig, mesh_param: Any) -> DSConfig:
    """The config with the degrees of a mesh (data, seq), if there is one.

    Raises: ValueError for what is no pair of positive integers, or contradicts the config.
    """
    if mesh_param is None:
        return config
    numbers = tuple(mesh_param) if isinstance(mesh_param, (tuple, list)) else ()
    if len(numbers) != 2 or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(
            f"mesh_param={mesh_param!r} is not (data-parallel size, sequence-parallel size); give two "
            "positive integers, or sequence_parallel_size in the config (§9.14)"
        )
    asked = (config.data_parallel_size, config.sequence_parallel_size)
    if asked[0] not in (None, numbers[0]) or asked[1] not in (1, numbers[1]):
        raise ValueError(
            f"mesh_param={mesh_param!r}, but the config has data_parallel_size={asked[0]} and "
            f"sequence_parallel_size={asked[1]}; make them equal, or leave one out (§9.14)"
        )
    return config.model_copy(update={"data_parallel_size": numbers[0], "sequence_parallel_size": numbers[1]})


def with_degree_of_model(model: nn.Module, config: DSConfig) -> DSConfig:
    """The config for a model that `tp_model_init` may have cut, which brings its degree along.

    Raises: ValueError for a config that names another one.
    """
    plan, tensor = plan_of(model), config.tensor_parallel
    if plan is None:
        return config
    if tensor.is_given and tensor.degree != plan.ranks:
        raise ValueError(
            f"tensor_parallel asks for {tensor.degree} ranks, but tp_model_init has cut the model for "
            f"{plan.ranks}; make them equal, or leave the degree out of the config (§9.13)"
        )
    return config.model_copy(update={"tensor_parallel": tensor.model_copy(update={"tp_size": plan.ranks})})


def form_expert_groups(model: nn.Module, grid: PipelineParallelGrid, config: DSConfig) -> None:
    """Give the MoE layers the config, and make the groups that any of them anywhere asks for.

    Communication: one all-reduce of a few numbers; with MoE layers an all-gather of their ep_sizes, and
    groups are created.
    Raises: ValueError, on every rank, for an ep_size that does not divide the data x seq ranks.
    """
    layers = list(moe_layers(model))
    for layer in layers:
        layer.configure(config)
    spread = [config.expert_parallel.autoep_size] if config.expert_parallel.enabled else []
    if not raise_together(None, anyone=bool(layers or spread)):
        return
    asked: list[Any] = [None] * comm.get_world_size()  # another stage may have other layers
    comm.all_gather_object(asked, [layer.ep_size for layer in layers] + spread)
    raise_together(_other_ep_sizes(asked, grid.ranks("data", "seq", "model")))
    grid.make_expert_groups(sorted(set().union(*asked)), data_first=config.use_data_before_expert_parallelism)


def _other_ep_sizes(asked: Sequence[list[int]], stage: Sequence[int]) -> ValueError | None:
    """What is wrong if the ranks of a stage do not have the same MoE layers."""
    first = stage[0]
    for rank in stage:
        if asked[rank] != asked[first]:
            return ValueError(
                f"the MoE layers of global rank {first} have ep_size {asked[first]}, those of rank {rank} "
                f"{asked[rank]}; build the same model on every rank of a stage (§9.4)"
            )
    return None


def state_of(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, after every layer has said again what its parameters are: copies forget it."""
    for module in model.modules():
        if callable(tag_parameters := getattr(module, "tag_parameters", None)):
            tag_parameters()
    return [*model.parameters(), *model.buffers()]


def bind_layers(model: nn.Module, grid: PipelineParallelGrid, config: DSConfig) -> None:
    """Tell every module that has `bind` the grid: ties get their groups, layers keep their parts.

    Communication: what `PipelineModule.bind` does, then one all-reduce of a few numbers.
    Raises: on every rank, what one layer anywhere refuses; ValueError if the config asks for tensor
    parallelism and no layer anywhere was cut.
    """
    error: Exception | None = None
    try:
        _cut_automatically(model, grid, config)
        if config.expert_parallel.enabled:
            spread_experts(whole_of(model), grid, config.expert_parallel.autoep_size)
        for module in _in_order(model):
            if callable(bind := getattr(module, "bind", None)):
                bind(grid)
    except Exception as refusal:  # raised below, on all ranks: another stage may have no such layer
        error = refusal
    has_cut = any(tags_of(parameter).model == "sharded" for parameter in model.parameters())
    degree = config.tensor_parallel.degree
    if not raise_together(error, anyone=has_cut) and degree > 1:
        raise ValueError(
            f"tensor_parallel asks for {degree} ranks, but no layer of the model is cut; build it from the "
            f"layers of ds_lite.tensor_parallel, e.g. LinearLayer and LinearAllreduce, or name its linear "
            f"layers in tensor_parallel.partition_config (§9.3 §9.13)"
        )
    for module in sharded_layers(model):
        module.overlaps = module.overlaps or config.tensor_parallel.tp_overlap_comm


def sharded_layers(model: nn.Module) -> list[ShardedLayer]:
    """The layers of ds_lite that hold a part of their weights."""
    return [module for module in model.modules() if isinstance(module, ShardedLayer)]


def hide_sums(model: nn.Module, config: DSConfig) -> None:
    """Domino on the blocks of a model that is cut over several ranks.

    Raises: ValueError for what cannot run in parts.
    """
    if config.tensor_parallel.degree == 1:
        return
    said = run_blocks_in_parts(whole_of(model))
    if comm.get_rank() == 0:
        print(f"ds_lite: {said}", flush=True)


def _cut_automatically(model: nn.Module, grid: PipelineParallelGrid, config: DSConfig) -> None:
    """AutoTP for a model that knows nothing of tensor parallelism."""
    tensor, whole = config.tensor_parallel, whole_of(model)
    knows = any(callable(getattr(module, "bind", None)) for module in whole.modules()) or any(
        tags_of(parameter).model != "full" for parameter in whole.parameters()
    )
    if tensor.degree == 1 or isinstance(whole, PipelineModule) or (knows and plan_of(whole) is None):
        if tensor.degree > 1 and (tensor.has_plan or tensor.vocab_parallel_lm_head):
            raise ValueError(
                "tensor_parallel names layers to cut, but the model is a PipelineModule or made of layers "
                "that cut themselves; remove partition_config, preset_model and vocab_parallel_lm_head, or "
                "make the pipeline by PipelineModule.from_model (§9.13)"
            )
        return
    auto_tp(
        whole,
        grid.group("model"),
        grain=tensor.grain,
        partition_config=config_of(tensor.partition_config, tensor.preset_model),
        vocab_parallel=bool(tensor.vocab_parallel_lm_head),
    )
    if isinstance(model, PipelineModule):
        model.adopt()


def whole_of(model: nn.Module) -> nn.Module:
    """The model that a pipeline was made from, with all its blocks; any other model itself."""
    return model.hull.model if isinstance(model, PipelineModule) and model.hull is not None else model


def add_split_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """An optimizer that was built before the model was cut also trains what was split from its parameters."""
    if optimizer is None:
        return
    held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for module in model.modules():
        for original, piece in module.split_parameters() if isinstance(module, SharedQueryKeyValue) else ():
            if id(original) in held and id(piece) not in held:
                held[id(original)]["params"].append(piece)


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Cut a model in place over `tp_size` neighbouring ranks, before `initialize` or without it.

    `config` is a `tensor_parallel` block, e.g. with a partition_config. All ranks start from the weights of
    the first one of their group. `initialize` takes over the degree.

    Communication: creates process groups, then one broadcast per tensor; every rank calls it.
    Raises: ValueError, on every rank, for a world that `tp_size` does not divide, and as `make_plan`.

    Source: §9.13; DeepSpeed `__init__.py::tp_model_init` @ 0.19.8.
    Differs: without `dtype` the model keeps its own.
    """
    comm.init_distributed(verbose=False)
    block = {**(config or {}), "tp_size": tp_size}
    checked = load_config({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": block})
    grid = PipelineParallelGrid(axes_of(1, 1, checked.tensor_parallel.degree, comm.get_world_size()))
    model.to(comm.device_of_this_rank(), dtype)
    make_replicas_equal(state_of(model), grid)
    bind_layers(model, grid, checked)
    return model


def _in_order(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself first, whose bind communicates, then MoE layers, then what these have not dropped."""
    first = [model, *(layer for layer in moe_layers(model) if layer is not model)]
    yield from first
    seen = {id(module) for module in first}
    yield from [module for module in model.modules() if id(module) not in seen]
