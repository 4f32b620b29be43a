"""Models and batches for sequence parallelism: small, random, all sizes different (§9.14)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import toy

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

BATCH, VOCABULARY = 3, 17


@dataclass(frozen=True)
class Model:
    """A model, how it is fed, and what one process makes of it.

    `loss` is "causal", "token", or "outside": computed here from whole outputs.
    """

    make: Callable[[int, int], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    loss: str


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Random weights of order 0.3 in float64, biases too; no dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=0.5, std=0.2)
            else:
                nn.init.normal_(parameter, std=0.3)
    return model.train()


def hf(class_name: str, config_name: str, **settings: Any) -> Callable[[int, int], nn.Module]:
    def make(heads: int, kv_heads: int) -> nn.Module:
        import transformers

        values = {
            key: value(heads, kv_heads) if callable(value) else value for key, value in settings.items()
        }
        attention = values.pop("attn_implementation", "sdpa")
        config = getattr(transformers, config_name)(**values)
        config._attn_implementation = attention
        return build(lambda: getattr(transformers, class_name)(config))

    return make


def _llama(class_name: str, config_name: str, **settings: Any) -> Callable[[int, int], nn.Module]:
    return hf(
        class_name,
        config_name,
        vocab_size=VOCABULARY,
        hidden_size=lambda n, g: 4 * n,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=lambda n, g: n,
        num_key_value_heads=lambda n, g: g,
        max_position_embeddings=32,
        **settings,
    )


_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": lambda n, g: 4 * n,
    "n_layer": 2,
    "n_head": lambda n, g: n,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": lambda n, g: 4 * n,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": lambda n, g: n,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_VIT = {
    "hidden_size": lambda n, g: 4 * n,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": lambda n, g: n,
    "image_size": 6,
    "patch_size": 2,
    "num_labels": 5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, length: int) -> dict[str, Tensor]:
    """Ids, and labels of which some are ignored, among them all of the first sample's second half."""
    ids = torch.randint(VOCABULARY, (BATCH, length), generator=_generator(seed))
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=_generator(seed + 1)) < 0.3] = -100
    labels[0, length // 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def padded(seed: int, length: int) -> dict[str, Tensor]:
    """Sequences of other lengths in one batch."""
    batch = tokens(seed, length)
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, length - 3 :] = 0
    mask[2, 2:] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask}


def packed(seed: int, length: int) -> dict[str, Tensor]:
    """Two documents in each sequence; positions start again where the second one does."""
    ends = torch.tensor([3, 5, length - 2]).unsqueeze(1)
    places = torch.arange(length).expand(BATCH, -1)
    return {**tokens(seed, length), "position_ids": torch.where(places < ends, places, places - ends)}


def sentences(seed: int, length: int) -> dict[str, Tensor]:
    kinds = torch.randint(2, (BATCH, length), generator=_generator(seed + 2))
    return {**padded(seed, length), "token_type_ids": kinds}


def classified(seed: int, length: int) -> dict[str, Tensor]:
    labels = torch.randint(2, (BATCH,), generator=_generator(seed + 3))
    return {**{k: v for k, v in padded(seed, length).items() if k != "labels"}, "labels": labels}


def images(seed: int, length: int) -> dict[str, Tensor]:
    pixels = torch.randn((BATCH, 3, 6, 6), generator=_generator(seed), dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH,), generator=_generator(seed + 1))}


def bytes_(seed: int, length: int) -> dict[str, Tensor]:
    return {"tokens": tokens(seed, length)["input_ids"]}


def _toy(heads: int, kv_heads: int) -> nn.Module:
    shape = toy.Shape(
        width=4 * heads,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_blocks=2,
        context=32,
        vocabulary=VOCABULARY,
    )
    return build(lambda: toy.GPT(shape))


MODELS = {
    "llama": Model(_llama("LlamaForCausalLM", "LlamaConfig"), padded, "causal"),
    "llama_eager": Model(
        _llama("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager"), padded, "causal"
    ),
    "llama_packed": Model(_llama("LlamaForCausalLM", "LlamaConfig", attention_bias=True), packed, "causal"),
    "qwen2": Model(_llama("Qwen2ForCausalLM", "Qwen2Config"), tokens, "causal"),
    "mistral": Model(_llama("MistralForCausalLM", "MistralConfig", sliding_window=4), padded, "causal"),
    "mistral_packed": Model(
        _llama("MistralForCausalLM", "MistralConfig", sliding_window=3, attn_implementation="eager"),
        packed,
        "causal",
    ),
    "gpt2": Model(hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), tokens, "causal"),
    "gpt2_eager": Model(
        hf("GPT2LMHeadModel", "GPT2Config", **_GPT2, attn_implementation="eager"), padded, "causal"
    ),
    "bert": Model(hf("BertForMaskedLM", "BertConfig", **_BERT), sentences, "token"),
    "bert_classifier": Model(hf("BertForSequenceClassification", "BertConfig", **_BERT), classified, "own"),
    "llama_classifier": Model(
        _llama("LlamaForSequenceClassification", "LlamaConfig", pad_token_id=0), classified, "own"
    ),
    "vit": Model(hf("ViTForImageClassification", "ViTConfig", **_VIT), images, "own"),
    "toy": Model(_toy, bytes_, "outside"),
}


def token_loss(logits: Tensor, labels: Tensor, *, is_causal: bool) -> Tensor:
    """Mean cross entropy in the dtype of the logits."""
    if is_causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def outside_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """What a script computes of whole outputs: here the next byte."""
    return token_loss(logits, batch["tokens"], is_causal=True)


def one_process(model: Model, module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, logits) of the whole batch on one process."""
    named = dict(batch)
    if model.loss == "outside":
        logits = module(**named)
        return outside_loss(logits, batch), logits
    if model.loss == "own":
        outputs = module(**named)
        return F.cross_entropy(outputs.logits, batch["labels"]), outputs.logits
    labels = named.pop("labels")
    outputs = module(**named, use_cache=False) if model.loss == "causal" else module(**named)
    return token_loss(outputs.logits, labels, is_causal=model.loss == "causal"), outputs.logits
