"""A Domino transformer and the same in plain torch, for tests of section 9.15."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.comm import ProcessGroup
from ds_lite.domino import DominoTransformer
from ds_lite.tags import whole

TOKENS, WIDTH, HEADS, HEAD_WIDTH, INNER, LAYERS = 5, 12, 4, 3, 20, 2
PLAIN, DOMINO, OVERLAP = {}, {"domino": True}, {"tp_overlap_comm": True}
SWITCHES: list[dict[str, bool]] = [PLAIN, DOMINO, OVERLAP, DOMINO | OVERLAP]


class Mpu:
    """As much of an mpu as the layers ask for."""

    def __init__(self, group: ProcessGroup | None, ranks: int) -> None:
        self._group, self._ranks = group, ranks

    def get_tensor_model_parallel_group(self) -> ProcessGroup | None:
        return self._group

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._ranks


def config_of(**changes: Any) -> SimpleNamespace:
    defaults = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": INNER,
        "num_layers": LAYERS,
        "params_dtype": torch.float64,
        "perform_initialization": True,
        "init_method": lambda weight: nn.init.normal_(weight, std=0.3),
        "output_layer_init_method": lambda weight: nn.init.normal_(weight, std=0.3),
    }
    return SimpleNamespace(**{**defaults, **changes})


def make(mpu: Any, config: Any, seed: int = 3, rotate: Any = None, **options: Any) -> DominoTransformer:
    """Biases and norms are not at their usual values; all ranks draw the same numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DominoTransformer(config, mpu, rotate, **options)
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                how = getattr(parameter, "_ds_lite_cut", None)
                full = torch.randn(how.whole_shape(parameter.shape) if how else parameter.shape) * 0.3 + 0.5
                values = how.take(full, torch.distributed.get_rank(how.group)) if how else full
                parameter.data.copy_(values.to(parameter.dtype))
                del name
    return model


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the first two numbers of each head; angles (T, 1, 1, 2) hold cos and sin."""
    cos, sin = angles[..., :1], angles[..., 1:]
    a, b, rest = x[..., :1], x[..., 1:2], x[..., 2:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as one process has it, ready for gradients."""
    return {name: whole(weight).requires_grad_() for name, weight in model.named_parameters()}


def plain(weights: dict[str, Tensor], config: Any, x: Tensor, mask: Tensor | None, angles: Any) -> Tensor:
    """The whole transformer on one process, written with torch's functions only."""
    groups = getattr(config, "num_query_groups", None) or HEADS
    for layer in range(config.num_layers):
        own = {key.split(".", 2)[2]: value for key, value in weights.items() if f"layers.{layer}." in key}
        normed = norm(x, own, "input_layernorm", config)
        columns = linear(normed, own, "query_key_value")
        by_group = columns.unflatten(-1, (groups, HEADS // groups + 2, HEAD_WIDTH))
        q, k, v = (by_group[..., i, :] for i in (slice(0, -2), slice(-2, -1), slice(-1, None)))
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        k, v = (part.repeat_interleave(HEADS // groups, dim=2) for part in (k, v))
        scores = torch.einsum("sbnd,tbnd->bnst", q, k) / HEAD_WIDTH**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later if mask is None else later | mask, -torch.inf)
        mixed = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), v).flatten(2)
        is_post = getattr(config, "apply_residual_connection_post_layernorm", False)
        x = (normed if is_post else x) + linear(mixed, own, "dense")
        normed = norm(x, own, "post_attention_layernorm", config)
        inner = linear(normed, own, "linear_fc1")
        if getattr(config, "gated_linear_unit", False):
            inner = F.silu(inner[..., :INNER]) * inner[..., INNER:]
        else:
            inner = F.gelu(inner)
        x = (normed if is_post else x) + linear(inner, own, "linear_fc2")
    return norm(x, weights, "final_layernorm", config)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(x: Tensor, weights: dict[str, Tensor], name: str, config: Any) -> Tensor:
    if getattr(config, "normalization", "LayerNorm") == "RMSNorm":
        return F.rms_norm(x, (WIDTH,), weights[f"{name}.weight"], 1e-5)
    return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def switched(switches: dict[str, bool], zero: int = 0, samples: int = 3, tp: int = 2) -> dict[str, Any]:
    """A ds_config."""
    return {
        "train_micro_batch_size_per_gpu": samples,
        "tensor_parallel": {"autotp_size": tp, **switches},
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
