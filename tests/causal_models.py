"""Causal language models in pipelines against the same model in one process (§9.9)."""

from __future__ import annotations

from typing import Any

import torch
from families import Family, KeepWide
from torch import Tensor, nn
from torch.nn import functional as F

LLAMA_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_KV = "num_key_value_heads"
_POSITIONS = (("max_position_embeddings", 32),)

MODELS: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", kv=_KV),
    "llama tied": Family(
        "LlamaForCausalLM", "LlamaConfig", kv=_KV, settings=(("tie_word_embeddings", True),)
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", kv=_KV),
    "mistral": Family("MistralForCausalLM", "MistralConfig", kv=_KV, settings=(("sliding_window", 3),)),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        names=("n_embd", "n_inner", "n_layer", "n_head"),
        settings=(("n_positions", 32),),
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", settings=_POSITIONS),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        kv=_KV,
        settings=(("head_dim", 4), ("sliding_window", 3), ("query_pre_attn_scalar", 4)),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        kv=_KV,
        settings=(
            ("num_local_experts", 4),
            ("num_experts_per_tok", 2),
            ("output_router_logits", True),
            ("router_aux_loss_coef", 0.3),
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        kv=_KV,
        settings=(
            ("num_experts", 6),
            ("num_experts_per_tok", 2),
            ("moe_intermediate_size", 12),
            ("shared_expert_intermediate_size", 20),
            ("output_router_logits", True),
            ("router_aux_loss_coef", 0.3),
        ),
    ),
}


def batches(
    count: int, samples: int, tokens: int, seed: int = 0, *, padded: bool = True
) -> list[dict[str, Tensor]]:
    """Distinct micro-batches; of each the first sample begins with padding, the last one ends with it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, 41, (samples, tokens), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            mask = torch.ones_like(ids)
            mask[0, :2] = mask[-1, -2:] = 0
            batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        found.append(batch)
    return found


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss on one micro-batch, its cross entropy in the dtype of the logits."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    outputs: Any = model(**inputs, use_cache=False)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    config: Any = model.config
    if getattr(config, "output_router_logits", False):
        loss = loss + config.router_aux_loss_coef * outputs.aux_loss
    return loss


def one_process(model: nn.Module, given: list[dict[str, Tensor]]) -> Tensor:
    """The mean loss over all micro-batches, and its gradients in the model."""
    losses = []
    for batch in given:
        loss = loss_of(model, batch) / len(given)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def weights_of(truth: nn.Module, name: str, *, gradient: bool = False) -> Tensor:
    """A weight of the whole model, or its gradient; one expert of a stack goes by its number."""
    stack, expert, rest = name.partition(".experts.experts.")
    number, _, key = rest.partition(".")
    weight = truth.get_parameter(f"{stack}.experts.{key}" if expert else name)
    values = (
        weight.detach() if not gradient else torch.zeros_like(weight) if weight.grad is None else weight.grad
    )
    return values[int(number)] if expert else values


__all__ = ["MODELS", "KeepWide", "batches", "loss_of", "one_process", "weights_of"]
