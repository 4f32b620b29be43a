"""The load-balancing loss of a mixture of experts whose layers lie on several stages (§9.9 §9.4).

It is a product of two means over the tokens of all layers, so it is no sum of losses of the layers. What
travels from stage to stage are the sums behind those means: how often each expert was chosen, and the
probabilities that it got.

Legend: E experts, K choices of a token.

Source: transformers `models/mixtral/modeling_mixtral.py::load_balancing_loss_func` @ 5.24.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Router:
    """The gates of a model, and how their logits become a loss.

    `kind` is the class of the gates, `index` where their output has the logits.
    """

    kind: type[nn.Module]
    index: int
    num_experts: int
    choices: int
    coefficient: float

    @contextmanager
    def watching(self, block: nn.Module) -> Iterator[list[Tensor]]:
        """The logits (tokens, E) of the gates that run in a block meanwhile."""
        found: list[Tensor] = []

        def note(_: nn.Module, args: Any, output: Any) -> None:
            found.append(output[self.index] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for module in block.modules():
                if isinstance(module, self.kind):
                    hooks.callback(module.register_forward_hook(note).remove)
            yield found


def router_of(model: nn.Module) -> Router | None:
    """The router whose loss the model adds to its own; None for a model that adds none.

    Raises: ValueError for one whose loss is not the usual one.
    """
    config: Any = model.config
    if not getattr(config, "output_router_logits", False):
        return None
    recorded = getattr(model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    kind, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
    numbers: list[Any] = [
        getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    ]
    is_usual = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    if not isinstance(kind, type) or not is_usual or None in numbers:
        raise ValueError(
            f"{type(model).__name__} is asked for its router's loss and computes it in a way that is not "
            "known here; set config.output_router_logits=False, or write its layers as LayerSpecs (§9.9)"
        )
    return Router(kind, index, int(numbers[0]), int(numbers[1]), float(numbers[2]))


def sums_of_block(logits: list[Tensor], router: Router, mask: Tensor | None) -> Tensor:
    """How often each expert was chosen, and the probabilities it got, over the tokens that are no padding.

    Shapes: logits (tokens, E) of each gate, mask (B, T) -> (2, E).
    """
    total: Tensor = torch.zeros((), device=logits[0].device) if logits else torch.zeros(())
    for rows in logits:
        probabilities = F.softmax(rows, dim=-1)
        chosen = F.one_hot(probabilities.topk(router.choices, dim=-1).indices, router.num_experts).sum(1)
        wide = torch.promote_types(probabilities.dtype, torch.float32)
        both = torch.stack((chosen.to(wide), probabilities.to(wide)))  # (2, tokens, E)
        if mask is not None:
            both = both * mask.reshape(-1, 1).to(wide)
        total = total + both.sum(1)
    return total


def balancing_loss(sums: Tensor, num_tokens: Tensor | int, num_layers: int) -> Tensor:
    """E times the sum over experts of: the share of tokens that chose it, times its mean probability.

    Shapes: sums (2, E) over `num_layers` layers of `num_tokens` tokens each -> 0-dim.
    """
    means = sums / (num_tokens * num_layers)
    return sums.shape[1] * (means[0] * means[1]).sum()
