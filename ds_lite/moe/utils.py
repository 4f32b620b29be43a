"""What scripts ask of parameters of experts. The engine needs none of it: tags decide there (§9.4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_lite.moe.layer import moe_layers


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether the parameter belongs to an expert."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a parameter group was made for experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the model has MoE layers, and how many experts the first of them has."""
    first = next(moe_layers(m), None)
    return first is not None, 0 if first is None else first.num_experts


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(shared, of experts), each in the order given."""
    everything = list(params)
    return [p for p in everything if not is_moe_param(p)], [p for p in everything if is_moe_param(p)]


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups in which experts are apart."""
    given = list(model_parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return split_params_into_different_moe_groups_for_optimizer(groups)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """The groups without parameters of experts, then for each of them groups of experts with its options.

    A group of experts has "moe": True and the name of its ep_size. It holds at most `max_group_size`
    elements, and at least one parameter.

    Source: §9.4; DeepSpeed `moe/utils.py::split_params_into_different_moe_groups_for_optimizer` @ 0.19.8.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    shared: list[dict[str, Any]] = []
    of_experts: list[dict[str, Any]] = []
    for group in groups:
        dense, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": dense})
        by_name: dict[str, list[nn.Parameter]] = {}
        for parameter in experts:
            by_name.setdefault(str(getattr(parameter, "group_name", "")), []).append(parameter)
        for name, parameters in by_name.items():
            runs = _runs(parameters, max_group_size)
            of_experts += [{**group, "params": run, "moe": True, "name": name} for run in runs]
    return shared + of_experts


def _runs(parameters: list[nn.Parameter], max_elements: int | float) -> list[list[nn.Parameter]]:
    runs: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        if not runs or filled + parameter.numel() > max_elements:
            runs.append([])
            filled = 0
        runs[-1].append(parameter)
        filled += parameter.numel()
    return runs
