"""Which modules hold a weight that can be cut, and where their columns are (§9.13)."""

from __future__ import annotations

import inspect

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """A linear layer, or a convolution-style one that keeps its weight the other way round."""
    is_plain = type(module).forward is nn.Linear.forward or type(module).__name__ in _LIKE_LINEAR
    has_weight = isinstance(module._parameters.get("weight"), nn.Parameter)
    return (isinstance(module, nn.Linear) and is_plain and has_weight) or is_conv1d(module)


_LIKE_LINEAR = ("FalconLinear",)  # with code of their own for the same


def is_conv1d(module: nn.Module) -> bool:
    """The Conv1D of transformers: y = x @ weight + bias, with a weight of (in, out)."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2


def features(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer.

    >>> features(nn.Linear(3, 5))
    (3, 5)
    """
    first, second = module.weight.shape  # type: ignore[union-attr, misc]
    return (int(first), int(second)) if is_conv1d(module) else (int(second), int(first))


def is_stack_of_experts(module: nn.Module) -> bool:
    """The experts of one layer as 3-D weights: gate_up_proj (E, 2*I, H) and down_proj (E, H, I), no more."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {"gate_up_proj", "down_proj"} or any(weight.dim() != 3 for weight in own.values()):
        return False
    if not _is_gate_then_up(type(module)):
        return False
    up, down = own["gate_up_proj"].shape, own["down_proj"].shape
    return up[0] == down[0] and up[1] == 2 * down[2] and up[2] == down[1]


def _is_gate_then_up(kind: type[nn.Module]) -> bool:
    """Whether the code of the experts halves gate_up_proj's output, and multiplies the halves."""
    try:
        code = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return ".chunk(2, dim=-1)" in code and "self.act_fn(gate) * up" in code


def holds_linears(module: nn.Module) -> bool:
    """Whether a linear layer or a stack of experts stands somewhere in the module."""
    return any(is_linear(part) or is_stack_of_experts(part) for part in module.modules())
