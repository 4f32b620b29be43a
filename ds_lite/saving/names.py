"""A whole state dict under the names of the model that it came from (§9.9 §9.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_lite.pipe.module import PipelineModule

_ONE_EXPERT = re.compile(r"(.*\.experts)\.experts\.(\d+)\.(.*)")  # as `moe/spread.py` names them


def named_as_the_model(module: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a pipeline that `from_model` made get their names back, spread experts become a stack.

    `whole` has the parameters of all stages and of all experts.
    """
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in whole.items():
        name = module.original_name(name) if isinstance(module, PipelineModule) else name
        one = _ONE_EXPERT.fullmatch(name)
        if one is None:
            found[name] = value
        else:
            stacks.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = value
    for name, experts in stacks.items():
        found[name] = torch.stack([experts[number] for number in sorted(experts)])
    hull = module.hull if isinstance(module, PipelineModule) else None
    if hull is not None and hull.pieces.is_tied:
        found[f"{hull.pieces.head}.weight"] = found[f"{hull.pieces.embedding}.weight"]
    return found
