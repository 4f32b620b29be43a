"""Tiny models of transformers' architectures, their inputs, and the all-reduces that each should cost.

Models are made from configurations alone. Sizes differ from each other, biases and norms are not at their
usual zeros and ones, and a batch holds a padded sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY, WIDTH_OF_HEAD, INNER, TOKENS, LAYERS = 41, 4, 20, 7, 2
WIDE = torch.float64


@dataclass(frozen=True)
class Family:
    """How a model is made: class, configuration class, and settings beside the common ones.

    `names` says how the configuration calls (width, inner columns, layers, heads); None leaves one out. With
    `kv` it takes a number of key and value heads under that name. The counts of all-reduces are for two
    layers: forward one for each closing layer, backward one for each distinct input of opening layers.
    """

    model: str
    config: str
    forward: int = 4
    backward: int = 4
    settings: tuple[tuple[str, Any], ...] = ()
    names: tuple[str | None, ...] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    kv: str | None = None
    refused: str = ""  # what is said if it cannot be cut

    def make(self, heads: int, kv_heads: int, *, dtype: torch.dtype = WIDE) -> nn.Module:
        """The same weights on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = self.make_empty(heads, kv_heads).to(dtype)
            with torch.no_grad():
                for weight in model.parameters():
                    noise = 0.3 * torch.randn_like(weight)
                    weight.copy_(weight + noise if weight.dim() == 1 else noise)
        return model

    def make_empty(self, heads: int, kv_heads: int) -> nn.Module:
        """Whatever the class makes of its weights."""
        import transformers

        transformers.utils.logging.disable_progress_bar()  # it would leave a thread behind
        values = (heads * WIDTH_OF_HEAD, INNER, LAYERS, heads)
        settings = {name: value for name, value in zip(self.names, values, strict=True) if name is not None}
        settings |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if self.kv is not None:
            settings[self.kv] = kv_heads
        config = getattr(transformers, self.config)(**{**settings, **dict(self.settings)})
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model = getattr(transformers, self.model)(config)
        if any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters()):
            model.set_experts_implementation("eager")  # grouped products have no float64
        return model.eval()

    @property
    def sees_images(self) -> bool:
        return self.model.startswith("ViT")

    def inputs(self, seed: int = 3, dtype: torch.dtype = WIDE) -> dict[str, Tensor]:
        """A batch of two; the second sample ends with two padded tokens."""
        generator = torch.Generator().manual_seed(seed)
        if self.sees_images:
            return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator, dtype=dtype)}
        ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.model.startswith("T5"):
            inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
        return inputs


def loss_of(logits: Tensor) -> Tensor:
    """Mean cross entropy in the logits' own dtype, for labels that follow from the shape."""
    rows = logits.flatten(0, -2)
    labels = torch.arange(len(rows), device=rows.device) * 7 % rows.shape[1]
    return -rows.log_softmax(dim=-1).gather(1, labels.unsqueeze(1)).mean()


class KeepWide(TorchFunctionMode):
    """transformers computes norms, softmaxes and routers in float32; here they stay in float64.

    Without it a difference of 1e-16 between two ways to add up flips a rounding to float32 now and then,
    which says nothing about the ways.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        wide = [WIDE if arg is torch.float32 else arg for arg in args]
        named = {key: WIDE if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wide, **named)


_N = ("n_embd", "n_inner", "n_layer", "n_head")
_NO_INNER = ("hidden_size", None, "n_layer", "n_head")
_LLAMA_KV = "num_key_value_heads"
_POSITIONS = (("max_position_embeddings", 32),)
_FALCON = ("hidden_size", "ffn_hidden_size", "num_hidden_layers", "num_attention_heads")


def _llama_like(name: str, backward: int = 4, forward: int = 4, **settings: Any) -> Family:
    given = (*_POSITIONS, *settings.items())
    return Family(f"{name}ForCausalLM", f"{name}Config", forward, backward, given, kv=_LLAMA_KV)


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("Llama", attention_bias=True, mlp_bias=True),
    "mistral": _llama_like("Mistral", sliding_window=None),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3", head_dim=6),
    "gemma2": _llama_like("Gemma2", head_dim=6),
    "phi": _llama_like("Phi", backward=2, qk_layernorm=True),
    "phi3": _llama_like("Phi3"),
    "starcoder2": _llama_like("Starcoder2", use_bias=True, sliding_window=None),
    "stablelm": _llama_like("StableLm", use_qkv_bias=True, partial_rotary_factor=0.5),
    "cohere": _llama_like("Cohere", backward=2, use_qk_norm=True),
    "mixtral": _llama_like(
        "Mixtral", backward=6, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2_moe": _llama_like(
        "Qwen2Moe",
        forward=6,
        backward=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=14,
        decoder_sparse_step=1,
    ),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", settings=(("n_positions", 32),), names=_N),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        settings=(("attention_types", [[["global", "local"], 1]]), ("window_size", 4), *_POSITIONS),
        names=("hidden_size", "intermediate_size", "num_layers", "num_heads"),
    ),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", 4, 2, (("n_positions", 32), ("rotary_dim", 2)), names=_N),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", settings=_POSITIONS),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        settings=_POSITIONS,
        names=("hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"),
    ),
    "bloom": Family("BloomForCausalLM", "BloomConfig", names=_NO_INNER),
    "falcon_new": Family(
        "FalconForCausalLM",
        "FalconConfig",
        settings=(("new_decoder_architecture", True), ("bias", True)),
        names=_FALCON,
        kv="num_kv_heads",
    ),
    "falcon_multi_query": Family(
        "FalconForCausalLM",
        "FalconConfig",
        4,
        2,
        (("multi_query", True), ("new_decoder_architecture", False), ("parallel_attn", True), ("bias", True)),
        _FALCON,
    ),
    "falcon_alibi": Family(
        "FalconForCausalLM",
        "FalconConfig",
        settings=(
            ("multi_query", False),
            ("new_decoder_architecture", False),
            ("parallel_attn", False),
            ("alibi", True),
            ("bias", True),
        ),
        names=_FALCON,
    ),
    "mpt": Family(
        "MptForCausalLM",
        "MptConfig",
        settings=(("max_seq_len", 32), ("expansion_ratio", 3)),
        names=("d_model", None, "n_layers", "n_heads"),
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        settings=(("n_positions", 32), ("multi_query", True)),
        names=_N,
    ),
    "gpt_bigcode_all_heads": Family(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        settings=(("n_positions", 32), ("multi_query", False)),
        names=_N,
    ),
    "codegen": Family(
        "CodeGenForCausalLM", "CodeGenConfig", 4, 2, (("n_positions", 32), ("rotary_dim", 2)), names=_N
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", settings=_POSITIONS),
    "roberta": Family(
        "RobertaForMaskedLM",
        "RobertaConfig",
        settings=(("pad_token_id", 1), ("bos_token_id", 0), *_POSITIONS),
    ),
    "distilbert": Family(
        "DistilBertForMaskedLM", "DistilBertConfig", names=("dim", "hidden_dim", "n_layers", "n_heads")
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        settings=(("image_size", 8), ("patch_size", 4), ("num_labels", 5)),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        10,
        11,
        (("d_kv", 5), ("decoder_start_token_id", 0)),
        ("d_model", "d_ff", "num_layers", "num_heads"),
    ),
    "t5_gated": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        10,
        11,
        (("d_kv", 5), ("decoder_start_token_id", 0), ("feed_forward_proj", "gated-gelu")),
        ("d_model", "d_ff", "num_layers", "num_heads"),
    ),
}

REFUSED: dict[str, Family] = {
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "Olmo2Config",
        settings=_POSITIONS,
        kv=_LLAMA_KV,
        refused="q_norm needs all columns",
    ),
    "stablelm_norms": Family(
        "StableLmForCausalLM",
        "StableLmConfig",
        settings=(("qk_layernorm", True), *_POSITIONS),
        kv=_LLAMA_KV,
        refused="q_layernorm needs all columns",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        settings=(("num_local_experts", 4), ("head_dim", 4), *_POSITIONS),
        kv=_LLAMA_KV,
        refused="sinks is a weight of its own|holds weights of an unknown kind",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        settings=(
            ("q_lora_rank", 8),
            ("kv_lora_rank", 8),
            ("qk_rope_head_dim", 4),
            ("qk_nope_head_dim", 4),
            ("v_head_dim", 4),
            ("n_routed_experts", 4),
            ("num_experts_per_tok", 2),
            ("moe_intermediate_size", 10),
            ("n_shared_experts", 1),
            ("first_k_dense_replace", 1),
            *_POSITIONS,
        ),
        kv=_LLAMA_KV,
        refused="no row-parallel attention output",
    ),
}
