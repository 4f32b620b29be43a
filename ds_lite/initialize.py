"""Config, grid, bind, engine: the one entry, in that order (§9.2).

What can be seen from values that are equal on all ranks is refused before the first group is made. What may
differ between ranks, such as the layers of a stage, is agreed first, so that all of them raise.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.config import load_config, refuse_what_is_not_built
from ds_lite.config_keys import DSConfig
from ds_lite.engine import Engine
from ds_lite.forming import (
    add_split_parameters,
    bind_layers,
    form_expert_groups,
    form_grid,
    hide_sums,
    sharded_layers,
    state_of,
    whole_of,
    with_degree_of_model,
    with_mesh,
)
from ds_lite.grid import PipelineParallelGrid
from ds_lite.optimizers import (
    check_optimizer,
    make_optimizer,
    make_scheduler,
    outside,
    stale_parameters,
)
from ds_lite.pipe.engine import PipelineEngine
from ds_lite.pipe.module import PipelineModule
from ds_lite.precision import compute_dtype
from ds_lite.replicas import make_replicas_equal
from ds_lite.sequence.groups import SequenceGrid
from ds_lite.sequence.host_store import HostStore
from ds_lite.sequence.models import Kind, kind_of
from ds_lite.sequence.offload import checkpoint_to_host

Config = Mapping[str, Any] | str | os.PathLike[str]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """Make the engine of a model: a PipelineEngine for a PipelineModule, else plain data parallelism.

    Returns (engine, optimizer, training_dataloader, lr_scheduler). `optimizer` and `lr_scheduler` may be
    objects, functions that make them from the parameters or from the optimizer, or names in the config.
    The config is a dict or a path, or `args.deepspeed_config`.

    Communication: creates the process groups, broadcasts weights over data, seq and model and along ties.
    Raises: ValueError or TypeError, on every rank, for what does not fit together.

    Source: §9.2; DeepSpeed `__init__.py::initialize` @ 0.19.8.
    Differs: `mpu` with a PipelineModule is accepted when it agrees with the module's own grid.
    """
    if model is None:
        raise ValueError("initialize needs a model; pass a PipelineModule or any torch module (§9.2)")
    checked = with_mesh(load_config(_the_one_config(args, config, config_params)), mesh_param)
    comm.init_distributed(dist_init_required=dist_init_required, verbose=False)
    refuse_what_is_not_built(checked)
    dtype = compute_dtype(checked)
    check_optimizer(optimizer, checked)
    checked = with_degree_of_model(model, checked)
    kind = _kind(model, checked, mpu)
    grid = form_grid(model, checked, mpu)
    model.to(comm.device_of_this_rank(), dtype)
    form_expert_groups(model, grid, checked)
    make_replicas_equal(state_of(model), grid)
    bind_layers(model, grid, checked)
    if checked.tensor_parallel.domino:
        hide_sums(model, checked)
    made = _optimizer(model, grid, optimizer, model_parameters, checked)
    engine = _make_engine(model, grid, checked, made)
    if kind is not None:
        engine.spread_sequences(kind)
    engine.lr_scheduler = _together(lambda: make_scheduler(lr_scheduler, made, checked, engine.takes_metrics))
    if training_data is not None:
        engine.set_dataloader(engine.deepspeed_io(training_data, collate_fn=collate_fn))
    idle = [*checked.unused, *_idle_here(model, checked)]
    if idle and comm.get_rank() == 0:
        print(f"ds_lite: config keys without effect here: {', '.join(idle)}", flush=True)
    return engine, made, engine.training_dataloader, engine.lr_scheduler


def _optimizer(
    model: nn.Module,
    grid: PipelineParallelGrid,
    given: Any,
    parameters: Iterable[Any] | None,
    config: DSConfig,
) -> torch.optim.Optimizer | None:
    """The optimizer, of parameters that the model has; what else it trains starts equal on all replicas."""
    made: torch.optim.Optimizer | None = _together(lambda: make_optimizer(model, given, parameters, config))
    add_split_parameters(model, made)
    raise_together(stale_parameters(model, made))
    make_replicas_equal(outside(model, made), grid)
    return made


def _together(make: Callable[[], Any]) -> Any:
    """What `make` returns; what it raises on one rank, a stage with other parameters, is raised on all."""
    made, error = None, None
    try:
        made = make()
    except Exception as failure:
        error = failure
    raise_together(error)
    return made


def _make_engine(
    model: nn.Module, grid: PipelineParallelGrid, config: DSConfig, optimizer: torch.optim.Optimizer | None
) -> Engine:
    if not isinstance(model, PipelineModule):
        return Engine(model, grid, config, optimizer)
    if config.pipeline.activation_checkpoint_interval > 0:
        model.set_checkpoint_interval(config.pipeline.activation_checkpoint_interval)
    if config.activation_checkpointing.cpu_checkpointing:
        model.activation_checkpoint_func = functools.partial(checkpoint_to_host, store=HostStore())
    return PipelineEngine(model, grid, config, optimizer)


def _idle_here(model: nn.Module, config: DSConfig) -> list[str]:
    """Keys that work for other modules than this one: its script recomputes what it wants, and how; layers
    that are not ds_lite's sum as they like."""
    if isinstance(model, PipelineModule):
        return []
    asked = {
        "activation_checkpointing.cpu_checkpointing": config.activation_checkpointing.cpu_checkpointing,
        "tensor_parallel.tp_overlap_comm": config.tensor_parallel.tp_overlap_comm
        and not sharded_layers(model),
    }
    return [key for key, is_idle in asked.items() if is_idle]


def _kind(model: nn.Module, config: DSConfig, mpu: Any) -> Kind | None:
    """How the model's sequences can be cut, if the config or the groups ask for it; the same on all ranks."""
    is_asked = config.sequence_parallel_size > 1 or isinstance(mpu, SequenceGrid)
    whole = whole_of(model)
    if not is_asked or isinstance(whole, PipelineModule):
        return None
    return kind_of(whole, counts_routers=isinstance(model, PipelineModule))


def _the_one_config(args: Any, config: Config | None, config_params: Config | None) -> Config:
    from_args = next(
        (path for name in ("deepspeed_config", "ds_lite_config") if (path := getattr(args, name, None))), None
    )
    given = [value for value in (from_args, config, config_params) if value is not None]
    if len(given) != 1:
        found = "none was given" if not given else f"{len(given)} were given"
        raise ValueError(
            f"initialize needs exactly one config, {found}; pass config= (a dict or a path), or "
            f"args.deepspeed_config from the command line (§9.2)"
        )
    return given[0]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and their ds_lite spellings, to a script's parser.

    Source: §9.2; DeepSpeed `__init__.py::add_config_arguments` @ 0.19.8.
    """
    group = parser.add_argument_group("ds_lite", "engine and configuration")
    for word in ("deepspeed", "ds_lite"):  # a script whose one word was changed reads args.ds_lite_config
        group.add_argument(f"--{word}", action="store_true", help="use the engine (the script decides)")
        group.add_argument(f"--{word}_config", type=str, default=None, help="path of a ds_config")
    return parser
