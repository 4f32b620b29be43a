"""The optimizer and the learning-rate schedule of an engine: given, made by a function, or named (§9.2)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ds_lite.config_keys import DSConfig, Optimizer
from ds_lite.lr_schedules import build_scheduler
from ds_lite.pipe.module import PipelineModule
from ds_lite.tags import is_elsewhere


def make_optimizer(
    model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None, config: DSConfig
) -> torch.optim.Optimizer | None:
    """The optimizer that was given, made by a function from the parameters, or named in the config.

    Raises: ValueError for options that do not fit.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _move_state(optimizer)
        return optimizer
    parameters = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if parameters and isinstance(parameters[0], tuple):  # of named_parameters()
        parameters = [parameter for _, parameter in parameters]
    if not parameters or not isinstance(parameters[0], dict):
        # A group may be empty, a list of parameters may not: a stage without parameters is fine.
        parameters = [{"params": [p for p in parameters if p.requires_grad]}]
    if callable(optimizer):
        return optimizer(parameters)
    return None if config.optimizer is None else _named(config.optimizer, parameters)


def check_optimizer(optimizer: Any, config: DSConfig) -> None:
    """Refuse, before anything is sent, what `make_optimizer` would refuse on every rank.

    Raises: ValueError for an optimizer that the config names wrongly; TypeError for one that is not one.
    """
    is_optimizer = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    if not is_optimizer and not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; pass an Optimizer, a function or None (§9.2)"
        )
    if optimizer is None and config.optimizer is not None:
        _named(config.optimizer, [{"params": [nn.Parameter(torch.zeros(1, 1))]}])


def _named(wanted: Optimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    kind, options = _optimizer_class(wanted.type, dict(wanted.params))
    try:
        return kind(parameters, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer.params do not fit {kind.__name__}: {error}; correct the config (§9.2)"
        ) from None


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """To where the parameters went: they may have been moved since the state was made."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = value.to(parameter.device)


def stale_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ValueError | None:
    """The error to raise if the optimizer was built before parameters were replaced; else None.

    An optimizer may hold some of the model's parameters only, and a stage's optimizer those of other stages.
    It may not miss trainable ones while it holds tensors that no layer has: these would never train.
    """
    if optimizer is None:
        return None
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    known = _all_parameters(model)
    strangers = [p for key, p in held.items() if key not in known and not is_elsewhere(p)]
    if missing and strangers:
        return ValueError(
            f"the optimizer holds {len(strangers)} tensors that are no longer in the model, and not the "
            f"trainable parameters {_listed(missing)}, which would never train; build the optimizer after "
            f"the layers were replaced, or pass a function that builds it (§9.3)"
        )
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        shapes = [tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1]
        if wrong := [shape for shape in shapes if shape != tuple(parameter.shape)]:
            return ValueError(
                f"the optimizer has state of shape {wrong[0]} for {name}, which was cut to "
                f"{tuple(parameter.shape)}; give initialize an optimizer that has not stepped yet (§9.3)"
            )
    return None


def outside(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Trainable tensors that the optimizer holds and no layer has, e.g. a temperature of the loss."""
    known = _all_parameters(model)
    groups = optimizer.param_groups if optimizer is not None else []
    held = [parameter for group in groups for parameter in group["params"]]
    return [p for p in held if p.requires_grad and id(p) not in known and not is_elsewhere(p)]


def _all_parameters(model: nn.Module) -> set[int]:
    """Of all layers, also those of other stages that were given as modules."""
    elsewhere = model.parameters_elsewhere() if isinstance(model, PipelineModule) else []
    return {id(parameter) for parameter in (*model.parameters(), *elsewhere)}


def _listed(names: list[str], at_most: int = 6) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


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


def make_scheduler(
    lr_scheduler: Any, optimizer: torch.optim.Optimizer | None, config: DSConfig, takes_metrics: bool
) -> Any:
    """The schedule that was given, made by a function from the optimizer, or named in the config.

    Raises: ValueError for a schedule without an optimizer, and for ReduceLROnPlateau where `train_batch` has
    no number to give it (`takes_metrics` False).
    """
    made = _scheduler(lr_scheduler, optimizer, config)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau) and not takes_metrics:
        raise ValueError(
            "ReduceLROnPlateau watches a number that train_batch() cannot give it; choose a schedule over "
            "steps (§9.2)"
        )
    return made


def _scheduler(lr_scheduler: Any, optimizer: torch.optim.Optimizer | None, config: DSConfig) -> Any:
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
