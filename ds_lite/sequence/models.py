"""What kind of model it is: where its sequence is cut, what its labels mean, how its attention is reached
(§9.14).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ds_lite.sequence.layer import DistributedAttention
from ds_lite.sequence.routes import ATTENTIONS, PREFIX, register_with_transformers

Cut = Literal["tokens", "blocks"]
Loss = Literal["causal", "token"]

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Kind:
    """How a model is run on a part of its sequence.

    `cut` says where; `loss` what labels for each token mean: "causal" the token after it, "token" its own,
    None that the engine computes no loss. `accepts` are the names of its forward's arguments, `route` who
    reaches its attention, in words.
    """

    cut: Cut
    loss: Loss | None
    accepts: frozenset[str]
    route: str
    is_transformers: bool = False
    num_ids: int | None = None  # token ids that the model knows
    num_positions: int | None = None  # rows of its table of positions, if it has one


def kind_of(model: nn.Module, *, counts_routers: bool = False) -> Kind:
    """Look at a model, and register its attention if it comes from transformers.

    `counts_routers` says that the caller computes a router's loss of the tokens of all ranks.

    Raises: ValueError for a model whose attention takes no route, or that mixes tokens elsewhere.
    """
    accepts = frozenset(inspect.signature(model.forward).parameters)
    if is_transformers(model):
        return _of_transformers(model, accepts, counts_routers)
    _refuse_other_mixers(model)
    for name, module in model.named_modules():
        if is_transformers(module):
            raise ValueError(
                f"{name} is a {type(module).__name__} of transformers inside a module of another kind, which "
                "hides its masks and positions; give initialize the model itself (§9.14)"
            )
    own = sum(isinstance(module, DistributedAttention) for module in model.modules())
    route = f"{own} DistributedAttention layers" if own else "F.scaled_dot_product_attention"
    return Kind("tokens", None, accepts, route)


def is_transformers(model: nn.Module) -> bool:
    """Whether the model has a configuration that says which attention function it uses."""
    return hasattr(getattr(model, "config", None), "_attn_implementation")


def _of_transformers(model: nn.Module, accepts: frozenset[str], counts_routers: bool) -> Kind:
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder and a decoder, whose cross-attention is not exchanged; use a model with "
            "one stack of blocks (§9.14)"
        )
    base = _base_of(model, name)
    if getattr(config, "output_router_logits", False) and not counts_routers:
        raise ValueError(
            f"{name} adds its router's loss to the loss it computes, which sees this rank's tokens alone; "
            "set output_router_logits=False in its config (§9.14)"
        )
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise ValueError(
            f"{name} has layers of type {', '.join(sorted(others))}, which mix tokens outside an attention "
            f"that can be exchanged; {', '.join(sorted(_LAYER_TYPES))} can (§9.14)"
        )
    if any(kind in ("dynamic", "longrope") for kind in _rope_types(config)) and cut_of(model) == "tokens":
        raise ValueError(
            f"{name} has rotary positions whose frequencies depend on the length of the sequence "
            f"({', '.join(_rope_types(config))}), which a rank with a part of it does not know; choose "
            "another rope_type (§9.14)"
        )
    loss = _loss_of(name)
    cut = cut_of(model)
    if cut == "tokens":
        _refuse_other_mixers(model)
    register_with_transformers()
    model.set_attn_implementation(PREFIX + base)  # type: ignore[operator]
    return Kind(
        cut,
        loss if cut == "tokens" else None,
        accepts,
        f"transformers' registry ({base})",
        True,
        num_ids=getattr(config, "vocab_size", None),
        num_positions=_num_positions(model),
    )


def cut_of(model: nn.Module) -> Cut:
    """At the batch, unless the model makes its own tokens or looks at some of them only."""
    name = type(model).__name__
    makes_tokens = getattr(model, "main_input_name", "input_ids") != "input_ids"
    picks_tokens = _loss_of(name) is None and (name.split("For")[0] != name or _has_pooler(model))
    return "blocks" if makes_tokens or picks_tokens else "tokens"


def _rope_types(config: Any) -> list[str]:
    """The kinds of rotary positions that a config names, of all its layer types."""
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(str(value[key]) for key in ("rope_type", "type") if isinstance(value.get(key), str))
            for item in value.values():
                look(item)

    for name in ("rope_parameters", "rope_scaling"):
        look(getattr(config, name, None))
    return sorted(set(found))


def _num_positions(model: nn.Module) -> int | None:
    """Rows of the smallest table of positions; one of distances between tokens is none."""
    tables = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and ("position" in name or name.endswith("wpe"))
        and "relative" not in name
    ]
    return min(tables, default=None)


def _base_of(model: nn.Module, name: str) -> str:
    """The attention function that the model has now."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} computes its attention in its own code, which neither transformers' registry nor "
            "F.scaled_dot_product_attention reaches, so its sequence cannot be spread over ranks; use "
            "another architecture, e.g. Llama, Qwen2, Mistral, GPT-2 or BERT (§9.14)"
        )
    base = str(getattr(model.config, "_attn_implementation", None) or "sdpa").removeprefix(PREFIX)
    if base not in ATTENTIONS:
        raise ValueError(
            f"{name} uses attn_implementation={base!r}; eager and sdpa can be exchanged: pass one of them to "
            f"from_config or from_pretrained (§9.14)"
        )
    return base


def _loss_of(name: str) -> Loss | None:
    if "ForCausalLM" in name or "LMHead" in name:
        return "causal"
    return "token" if "ForMaskedLM" in name or "ForTokenClassification" in name else None


def _has_pooler(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "pooler" for name, _ in model.named_modules())


def _refuse_other_mixers(model: nn.Module) -> None:
    """Layers of torch that look at several tokens, and are no attention."""
    for name, module in model.named_modules():
        kernel: Any = getattr(module, "kernel_size", 1)
        is_wide = isinstance(module, nn.modules.conv._ConvNd) and any(size > 1 for size in kernel)
        is_norm_of_many = isinstance(module, nn.modules.batchnorm._NormBase)  # batch and instance norms
        if is_wide or is_norm_of_many or isinstance(module, nn.RNNBase):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which mixes tokens; only attention is exchanged "
                "between the ranks of a sequence (§9.14)"
            )
