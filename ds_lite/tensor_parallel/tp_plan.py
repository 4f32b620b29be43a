"""What a transformers model says itself of its tensor-parallel plan (§9.13)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn


def style_of(model: nn.Module, name: str) -> str | None:
    """The style that the model's `tp_plan` names for a module, e.g. "colwise"; None if it names none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return None
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name):
            return str(style)
    return None
