"""§9.14 `sequence_parallel_size` and nothing else: what is reached, what is given back, what is refused.

Guards against: attentions that see one rank's tokens, in forward or where blocks are recomputed; a torch
function that stays replaced; models that number or mix their tokens out of reach; one rank's refusal that the
others wait for; a batch of the loader that is cut twice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import KeepWide
from sequence_models import BATCH, MODELS, build, one_process, padded, tokens
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite import comm
from ds_lite.checkpointing import checkpoint
from ds_lite.sequence.auto_sp import auto_wrap_model_for_sp
from ds_lite.sequence.context import current, first_token
from ds_lite.sequence.data import UlyssesSPDataLoaderAdapter, part_of

pytest.importorskip("transformers", reason="not proved here: sequence parallelism of transformers' models")
pytestmark = pytest.mark.xdist_group("sequence")

TORCHS = F.scaled_dot_product_attention


def config_of(sp: int, zero: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "sequence_parallel_size": sp,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def spread(model: nn.Module, sp: int, zero: int = 0, **more: Any) -> Any:
    return ds_lite.initialize(model=model, config=config_of(sp, zero, **more))[0]


class Block(nn.Module):
    """Attention by any function, and a linear layer, on the residual stream."""

    def __init__(self, attend: Any, *, recompute: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.attend, self.recompute, self.causal = attend, recompute, causal

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x) if self.recompute and self.training else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(self.attend(q, k, v, self.causal).transpose(1, 2).flatten(2))


def by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (scores.masked_fill(~mask, -torch.inf) if causal else scores).softmax(-1) @ v


def tower(*blocks: Block) -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(5, 12), *blocks))


def floats(seed: int, length: int = 7) -> Tensor:
    return torch.randn(BATCH, length, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --------------------------------------------------------------------------------- what is reached, and when


def recomputed(rank: int, sp: int) -> None:
    """The attentions of recomputed blocks exchange in backward, where a forward's patch is long gone."""
    truth = tower(Block(by_torch), Block(by_torch))
    engine = spread(tower(Block(by_torch, recompute=True), Block(by_torch, recompute=True)), sp)
    x = floats(1)
    truth(x).square().mean().backward()
    with comm.record() as forward:
        loss = engine(x).square().mean()
    with comm.record() as backward:
        engine.backward(loss)
    for name, weight in truth.named_parameters():
        assert_close(engine.gradients.full(name), weight.grad, LAW, name)
    again = backward.total(operation="all_to_all").calls
    assert again == 2 * 2 + 2 * 2, "two exchanges of two blocks recomputed, and two backward"
    assert forward.total(operation="all_to_all").calls > 0


def test_recomputed_blocks_exchange_again(world: Any) -> None:
    world(recomputed, 3, 3)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_eager", "bert_classifier", "vit"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_own_recomputation(world: Any, name: str, reentrant: bool) -> None:
    world(recomputed_by_transformers, 2, name, reentrant)


def recomputed_by_transformers(rank: int, name: str, reentrant: bool) -> None:
    with KeepWide():
        model = MODELS[name]
        truth, module = (model.make(4, 4) for _ in range(2))
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        engine, batch = spread(module, 2), model.batch(0, 9)
        loss, _ = one_process(model, truth, batch)
        loss.backward()
        got = engine(**batch)
        own = F.cross_entropy(got.logits, batch["labels"]) if model.loss == "own" else got.loss
        assert_close(own.detach(), loss.detach(), LAW, "loss")
        engine.backward(own)
        for key, weight in truth.named_parameters():
            wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
            found = engine.gradients.full(key)
            assert_close(torch.zeros_like(weight) if found is None else found, wanted, LAW, key)


class Explodes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert F.scaled_dot_product_attention is not TORCHS
        raise KeyError("in the middle")


def restored(rank: int) -> None:
    engine = spread(tower(Block(by_torch)), 2)
    seen = []
    engine.module[1].register_forward_pre_hook(lambda *_: seen.append(F.scaled_dot_product_attention))
    y = engine(floats(1))
    assert seen[-1] is not TORCHS and F.scaled_dot_product_attention is TORCHS, "after forward"
    y.register_hook(lambda g: seen.append(F.scaled_dot_product_attention))
    engine.backward(y.square().mean())
    assert seen[-1] is not TORCHS and F.scaled_dot_product_attention is TORCHS, "after backward"
    engine.step()
    engine.module.append(Explodes())
    with pytest.raises(KeyError, match="in the middle"):
        engine(floats(1))
    assert F.scaled_dot_product_attention is TORCHS and current() is None, "after an exception"


def test_torchs_attention_is_back_after_forward_backward_and_exceptions(world: Any) -> None:
    world(restored, 2)


def two_engines(rank: int) -> None:
    """Two models of other heads, their forwards, then their backwards; and one that is not spread."""
    with KeepWide():
        models = {name: (MODELS[name], MODELS[name].make(heads, kv)) for name, heads, kv in PAIR}
        truths = {name: MODELS[name].make(heads, kv) for name, heads, kv in PAIR}
        engines = {name: spread(module, 2) for name, (_, module) in models.items()}
        batches = {name: model.batch(5, 8) for name, (model, _) in models.items()}
        losses = {name: engine(**batches[name]).loss for name, engine in engines.items()}
        outside = MODELS["llama"].make(6, 2)
        outside.set_attn_implementation("ds_lite_sequence_sdpa")  # type: ignore[operator]
        plain = MODELS["llama"].make(6, 2)
        ids = {"input_ids": batches["llama"]["input_ids"]}
        assert_close(outside(**ids).logits, plain(**ids).logits, EXACT, "no engine runs: torch's attention")
        for name, engine in engines.items():
            loss, _ = one_process(models[name][0], truths[name], batches[name])
            loss.backward()
            engine.backward(losses[name])
            for key, weight in truths[name].named_parameters():
                assert_close(engine.gradients.full(key), weight.grad, LAW, f"{name} {key}")


PAIR = [("llama", 6, 3), ("qwen2", 4, 1)]


def test_two_engines_in_one_process(world: Any) -> None:
    world(two_engines, 2)


def says(rank: int) -> tuple[str, str]:
    engine = spread(MODELS["llama"].make(4, 2), 2)
    return str(engine.sequence), str(auto_wrap_model_for_sp(tower(Block(by_torch)), engine.grid.group("seq")))


def test_what_was_reached_is_said(world: Any, capfd: Any) -> None:
    for llama, other in world(says, 2):
        assert llama == (
            "sequences of LlamaForCausalLM are cut over 2 ranks at the batch; its attention is reached "
            "through transformers' registry (sdpa)"
        )
        assert other.endswith("its attention is reached through F.scaled_dot_product_attention")


# --------------------------------------------------------------------------------------------- other batches


def from_the_loader(rank: int, zero: int) -> None:
    """Two samples a batch, of other lengths, drawn by all ranks; the engine takes what the adapter cut."""
    with KeepWide():
        model = MODELS["llama"]
        truth, engine = model.make(6, 3), spread(model.make(6, 3), 2, zero)
        batches = [padded(40 + i, length) for i, length in enumerate((9, 8))]
        group, me = engine.grid.group("seq"), engine.grid.coordinate("seq")
        adapter = UlyssesSPDataLoaderAdapter(batches, me, group, 2)
        for whole, mine in zip(batches, adapter, strict=True):
            loss, logits = one_process(model, truth, whole)
            truth.zero_grad()
            loss.backward()
            got = engine(**mine)
            assert_close(got.loss.detach(), loss.detach(), LAW, "loss")
            own = part_of(whole["input_ids"].shape[1], me, 2).of(logits)
            assert_close(got.logits.detach(), own.detach(), LAW, "logits")
            engine.backward(got.loss)
            for key, weight in truth.named_parameters():
                assert_close(engine.gradients.full(key), weight.grad, LAW, key)
            engine.step()
            with torch.no_grad():
                for weight in truth.parameters():
                    weight -= 0.1 * weight.grad


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a10_what_the_adapter_has_cut_is_taken_as_it_is(world: Any, zero: int) -> None:
    world(from_the_loader, 2, zero)


def evaluated(rank: int) -> None:
    """Without labels logits come back whole; without gradients nothing else changes."""
    with KeepWide():
        model = MODELS["mistral"]
        truth, engine = model.make(6, 3), spread(model.make(6, 3), 2)
        batch = {key: value for key, value in padded(3, 9).items() if key != "labels"}
        engine.eval()
        truth.eval()
        with torch.no_grad():
            got = engine(**batch, output_hidden_states=True)
            want = truth(**batch, output_hidden_states=True)
        assert_close(got.logits, want.logits, LAW, "logits")
        for mine, whole in zip(got.hidden_states, want.hidden_states, strict=True):
            assert_close(mine, whole, LAW, "hidden states")
        assert got.past_key_values is None


def test_outputs_come_back_whole_without_labels(world: Any) -> None:
    world(evaluated, 2)


# -------------------------------------------------------------------------------------------------- refused


class NumbersItsTokens(nn.Module):
    def __init__(self, begin: Any) -> None:
        super().__init__()
        self.table, self.begin = nn.Embedding(32, 5), begin

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(self.begin() + torch.arange(x.shape[1]))


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Looks(nn.Module):
    """Each token gets the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x[:, :-1], (0, 0, 1, 0))


def of_transformers(name: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**settings)).double()


TINY = {"vocab_size": 17, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
MODELS_REFUSED: dict[str, tuple[Any, str]] = {
    "bloom": (
        lambda: of_transformers(
            "BloomForCausalLM", "BloomConfig", vocab_size=17, hidden_size=8, n_head=2, n_layer=1
        ),
        r"BloomForCausalLM computes its attention in its own code, .*use another architecture, e\.g\. Llama",
    ),
    "mpt": (
        lambda: of_transformers(
            "MptForCausalLM", "MptConfig", vocab_size=17, d_model=8, n_heads=2, n_layers=1
        ),
        r"MptForCausalLM computes its attention in its own code",
    ),
    "t5": (
        lambda: of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=17,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
        ),
        r"T5ForConditionalGeneration is an encoder and a decoder, whose cross-attention",
    ),
    "bart": (
        lambda: of_transformers(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=17,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
        ),
        r"BartForConditionalGeneration is an encoder and a decoder",
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Linear(5, 5), nn.Conv1d(5, 5, 3, padding=1)).double(),
        r"1 is a Conv1d, which mixes tokens",
    ),
    "recurrent": (lambda: nn.LSTM(5, 5).double(), r"LSTM, which mixes tokens"),
    "no attention": (
        lambda: nn.Sequential(nn.Linear(5, 5)).double(),
        r"no attention went through an exchange",
    ),
    "attention by hand": (lambda: tower(Block(by_hand)), r"no attention went through an exchange"),
    "one of two by hand": (
        lambda: tower(Block(by_torch), Block(by_hand)),
        r"outputs of Sequential for a few tokens, .* are not those of one process: .*first_token\(\)",
    ),
    "tokens numbered from 0": (
        lambda: build(lambda: nn.Sequential(NumbersItsTokens(int), *tower(Block(by_torch)))),
        r"It numbers each rank's tokens from 0",
    ),
    "looks at the token before": (
        lambda: build(lambda: nn.Sequential(Looks(), *tower(Block(by_torch)))),
        r"apart",
    ),
    "mean over tokens": (
        lambda: build(lambda: nn.Sequential(*tower(Block(by_torch, causal=False)), Pooled())),
        r"looks at other tokens in code that exchanges nothing",
    ),
}


def refuses(rank: int, case: str, words: str) -> None:
    model = MODELS_REFUSED[case][0]()
    with pytest.raises(ValueError, match=words):
        engine = spread(model, 2)
        engine(floats(2))
    assert F.scaled_dot_product_attention is TORCHS


@pytest.mark.parametrize("case", MODELS_REFUSED)
def test_models_that_cannot_be_spread_are_refused_on_every_rank(world: Any, case: str) -> None:
    world(refuses, 2, case, MODELS_REFUSED[case][1])


def accepts(rank: int) -> None:
    """Control of the refusals: the same models once they begin where they should, and attend by torch."""
    make = lambda begin: build(lambda: nn.Sequential(NumbersItsTokens(begin), *tower(Block(by_torch))))  # noqa: E731
    x = floats(2)
    got = spread(make(first_token), 2)(x)
    assert_close(got.detach(), make(int)(x).detach(), LAW)


def test_a_model_that_numbers_its_tokens_may_ask_where_they_begin(world: Any) -> None:
    world(accepts, 2)


def bad_batch(rank: int, case: str, words: str) -> None:
    sp = 4 if case != "world" else 3
    with pytest.raises(ValueError, match=words):
        heads = 3 if case == "heads" else 4
        engine = spread(MODELS["llama"].make(heads, heads), sp)
        batch = tokens(rank if case == "other data" else 0, 8 + (case == "lengths" and rank == 2))
        if case == "short":
            batch = tokens(0, 3)
        if case == "local mask":
            batch["attention_mask"] = torch.ones(BATCH, 5, dtype=torch.long)
        if case == "no tokens" and rank == 1:
            batch.pop("input_ids")
        if case == "logits_to_keep":
            batch["logits_to_keep"] = 1  # type: ignore[assignment]
        engine(**batch)
    assert F.scaled_dot_product_attention is TORCHS and current() is None


BATCHES_REFUSED = {
    "heads": r"sequence_parallel_size 4 does not fit num_heads=3",
    "world": r"world size 4 is not divisible by 1 stages \* 3 sequence-parallel ranks",
    "other data": r"sequence-parallel ranks .* got different data in their first batch",
    "lengths": r"tokens differs between ranks: \d here, from 8 to 9",
    "short": r"a sequence of 3 tokens does not fit sequence_parallel_size=4: each rank needs a token",
    "local mask": r"attention_mask has shape \(3, 5\), but the sequence has 8 tokens",
    "no tokens": r"has no input_ids",
    "logits_to_keep": r"logits_to_keep cannot be honoured",
}


@pytest.mark.parametrize("case", BATCHES_REFUSED)
def test_batches_that_cannot_be_cut_are_refused_on_every_rank(world: Any, case: str) -> None:
    world(bad_batch, 4, case, BATCHES_REFUSED[case])


def generic_labels(rank: int) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower(Block(by_torch))

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return self.tower(x).mean()

    engine = spread(Loss(), 2)
    with pytest.raises(ValueError, match="labels for a model whose loss nobody knows here"):
        engine(floats(1), labels=torch.zeros(BATCH, 7))
    with pytest.raises(ValueError, match="gives one number, made of this rank's tokens alone"):
        engine(floats(1))


def test_losses_that_only_the_model_knows_are_refused(world: Any) -> None:
    world(generic_labels, 2)


def other_implementation(rank: int) -> None:
    model = MODELS["llama"].make(4, 4)
    model.config._attn_implementation = "flex_attention"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="uses attn_implementation='flex_attention'; eager and sdpa can be"):
        spread(model, 2)


def test_an_implementation_that_cannot_be_exchanged_is_refused(world: Any) -> None:
    world(other_implementation, 2)


def another_way(rank: int) -> None:
    """An attention that later goes another way is noticed."""
    block = Block(by_torch)
    engine = spread(tower(block, Block(by_torch)), 2)
    engine(floats(1))
    block.attend = by_hand
    with pytest.raises(RuntimeError, match="1 attentions were exchanged in forward, the first time 2"):
        engine(floats(1))


def test_an_attention_that_is_missed_later_is_an_error(world: Any) -> None:
    world(another_way, 2)


def test_control_the_tower_sees_other_tokens() -> None:
    model, x = tower(Block(by_torch)), floats(1)
    assert differs(model(x)[:, 4:], model(x[:, 4:]))
