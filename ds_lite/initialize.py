"""Config, grid, bind, engine: the one entry, in that order (§9.2).

Everything that can be refused is refused before the first group is made, from values that are equal on all
ranks, so that each rank raises the same message.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.config import load_config, refuse_what_is_not_built, resolve_batch
from ds_lite.config_keys import DSConfig
from ds_lite.engine import Engine
from ds_lite.grid import PipelineParallelGrid
from ds_lite.lr_schedules import build_scheduler
from ds_lite.pipe.engine import PipelineEngine
from ds_lite.pipe.module import PipelineModule
from ds_lite.topology import PipeDataParallelTopology, ProcessTopology

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

    Communication: creates the process groups, broadcasts weights over the data axis and along ties.
    Raises: ValueError or TypeError, on every rank, for what does not fit together.

    Source: §9.2; DeepSpeed `__init__.py::initialize` @ 0.19.8.
    Differs: `mpu` with a PipelineModule is accepted when it agrees with the module's own grid.
    """
    if model is None:
        raise ValueError("initialize needs a model; pass a PipelineModule or any torch module (§9.2)")
    if mesh_param is not None:
        raise ValueError("mesh_param is not yet supported; give a PipelineModule a topology instead (§9.11)")
    checked = load_config(_the_one_config(args, config, config_params))
    comm.init_distributed(dist_init_required=dist_init_required, verbose=False)
    refuse_what_is_not_built(checked)
    topology = _topology_of(model, checked, mpu)
    grid = PipelineParallelGrid(topology)
    if mpu is not None:
        raise_together(_mpu_fault(mpu, grid))  # a wrong mpu may be right on some ranks
    model.to(comm.device_of_this_rank())
    for module in model.modules():
        if callable(bind := getattr(module, "bind", None)):
            bind(grid)
    made = _make_optimizer(model, optimizer, model_parameters, checked)
    engine = _make_engine(model, grid, checked, made)
    engine.lr_scheduler = _make_scheduler(lr_scheduler, made, checked)
    if training_data is not None:
        engine.set_dataloader(engine.deepspeed_io(training_data, collate_fn=collate_fn))
    if checked.unused and comm.get_rank() == 0:
        print(f"ds_lite: config keys without effect here: {', '.join(checked.unused)}", flush=True)
    return engine, made, engine.training_dataloader, engine.lr_scheduler


def _make_engine(
    model: nn.Module, grid: PipelineParallelGrid, config: DSConfig, optimizer: torch.optim.Optimizer | None
) -> Engine:
    if not isinstance(model, PipelineModule):
        return Engine(model, grid, config, optimizer)
    if config.pipeline.activation_checkpoint_interval > 0:
        model.set_checkpoint_interval(config.pipeline.activation_checkpoint_interval)
    return PipelineEngine(model, grid, config, optimizer)


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


def _topology_of(model: nn.Module, config: DSConfig, mpu: Any) -> ProcessTopology:
    """The axes of the job, with the batch numbers checked against them before any group is made."""
    if isinstance(model, PipelineModule):
        topology = model.topology()
    elif mpu is not None:
        raise ValueError(
            "mpu with a model that is not a PipelineModule is not yet supported; leave it out (§9.7)"
        )
    else:
        topology = PipeDataParallelTopology(num_pp=1, num_dp=comm.get_world_size())
    replicas = max(1, topology.get_dim("data"))
    for axis in ("seq", "model"):
        if topology.get_dim(axis) > 1:
            raise ValueError(
                f"topology axis {axis}={topology.get_dim(axis)} is not yet supported; use pipe and data "
                f"(§9.11)"
            )
    if config.data_parallel_size not in (None, replicas):
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} in the config, but the ranks form {replicas} "
            f"replicas; remove the key or change the topology (§9.2)"
        )
    resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        replicas,
    )
    return topology


def _mpu_fault(mpu: Any, grid: PipelineParallelGrid) -> ValueError | None:
    """An mpu beside a PipelineModule may only say what the module's grid says."""
    for name in ("data_parallel", "pipe_parallel", "pipeline_model_parallel", "tensor_model_parallel"):
        for what in ("rank", "world_size"):
            method = getattr(mpu, f"get_{name}_{what}", None)
            if method is not None and method() != (ours := getattr(grid, f"get_{name}_{what}")()):
                return ValueError(
                    f"mpu.get_{name}_{what}() is {method()} but the PipelineModule's grid says {ours}; pass "
                    f"an mpu of the same layout, or none (§9.7)"
                )
    return None


def _make_optimizer(
    model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None, config: DSConfig
) -> torch.optim.Optimizer | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    parameters = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if not parameters or not isinstance(parameters[0], dict):
        # A group may be empty, a list of parameters may not: a stage without parameters is fine.
        parameters = [{"params": [p for p in parameters if p.requires_grad]}]
    if callable(optimizer):
        return optimizer(parameters)
    if optimizer is not None:
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; pass an Optimizer, a function or None (§9.2)"
        )
    if config.optimizer is None:
        return None
    kind, options = _optimizer_class(config.optimizer.type, dict(config.optimizer.params))
    try:
        return kind(parameters, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer.params do not fit {kind.__name__}: {error}; correct the config (§9.2)"
        ) from None


def _optimizer_class(
    name: str, options: dict[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class in torch.optim by a case-insensitive name; `torch_adam` and `adam_w_mode` are DeepSpeed's."""
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        names = sorted(kind.__name__ for kind in known.values())
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {known[close[0]].__name__}? " if close else ""
        raise ValueError(f"optimizer.type={name!r} is not in torch.optim; {hint}choose from {names} (§9.2)")
    kind = known[name.lower()]
    if kind is torch.optim.LBFGS:
        raise ValueError(
            "optimizer LBFGS needs a closure that train_batch does not have; choose another (§9.2)"
        )
    options.pop("torch_adam", None)
    if options.pop("adam_w_mode", False) and kind is torch.optim.Adam:
        kind = torch.optim.AdamW
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    return kind, options


def _make_scheduler(lr_scheduler: Any, optimizer: torch.optim.Optimizer | None, config: DSConfig) -> Any:
    if lr_scheduler is not None and not callable(lr_scheduler):
        return lr_scheduler
    wanted = lr_scheduler is not None or config.scheduler is not None
    if wanted and optimizer is None:
        raise ValueError(
            "a learning-rate schedule needs an optimizer; name one in the config or pass it (§9.2)"
        )
    if lr_scheduler is not None:
        return lr_scheduler(optimizer)
    if config.scheduler is None:
        return None
    assert optimizer is not None
    return build_scheduler(config.scheduler.type, dict(config.scheduler.params), optimizer)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and their ds_lite spellings, to a script's parser.

    Source: §9.2; DeepSpeed `__init__.py::add_config_arguments` @ 0.19.8.
    """
    group = parser.add_argument_group("ds_lite", "engine and configuration")
    for word in ("deepspeed", "ds_lite"):  # a script whose one word was changed reads args.ds_lite_config
        group.add_argument(f"--{word}", action="store_true", help="use the engine (the script decides)")
        group.add_argument(f"--{word}_config", type=str, default=None, help="path of a ds_config")
    return parser
