"""§9.14 Models, batches and callers that are not as simple as they look: equal to one process, or refused.

Guards against: positions that a model counts in its own way, hooks that go on outside the engine, losses and
parameters among the outputs, ranks that lack a gradient, masks and faults of one rank only, backwards of a
forward before the last, callers who go backward by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import KeepWide
from sequence_models import BATCH, MODELS, VOCABULARY, build, hf, one_process, padded, tokens
from shard_checks import pattern
from test_s09_14_auto_sp import Block, Explodes, by_torch, floats, spread, tower
from tolerance import LAW, assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.checkpointing import checkpoint
from ds_lite.sequence.data import UlyssesSPDataLoaderAdapter, sequence_loss
from ds_lite.sequence.layer import DistributedAttention

pytest.importorskip("transformers", reason="not proved here: sequence parallelism of transformers' models")
pytestmark = pytest.mark.xdist_group("sequence")

F64 = torch.float64


def same(engine: Any, truth: nn.Module, x: Tensor, name: str = "") -> None:
    """Output and gradients of a generic model, from the mean square of its output."""
    got, want = engine(x), truth(x)
    assert_close(got.detach(), want.detach(), LAW, f"{name} output")
    truth.zero_grad()
    want.square().mean().backward()
    engine.backward(got.square().mean())
    for key, weight in truth.named_parameters():
        found = engine.gradients.full(key)
        wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert_close(torch.zeros_like(weight) if found is None else found, wanted, LAW, f"{name} {key}")


# --------------------------------------------------------------------------------------------- positions

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}


def roberta(rank: int) -> None:
    make = hf(
        "RobertaForMaskedLM", "RobertaConfig", **SMALL, intermediate_size=12, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
    )  # fmt: skip
    batch = tokens(0, 9)
    batch["input_ids"] = batch["input_ids"].clamp(min=2)
    with pytest.raises(ValueError, match=r"RobertaForMaskedLM .* of one process.*Give it positions"):
        spread(make(4, 4), 2)(**batch)
    own = 2 + torch.arange(9).expand(BATCH, -1)  # after its padding_idx of 1
    got = spread(make(4, 4), 2)(**batch, position_ids=own)
    logits = make(4, 4)(input_ids=batch["input_ids"]).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert_close(got.loss.detach(), wanted.detach(), LAW, "with the positions of its own rule")


def opt(rank: int) -> None:
    make = hf(
        "OPTForCausalLM", "OPTConfig", **SMALL, ffn_dim=12, max_position_embeddings=32, dropout=0.0,
        word_embed_proj_dim=16,
    )  # fmt: skip
    engine, truth = spread(make(4, 4), 2), make(4, 4)
    batch = tokens(0, 9)
    loss, _ = one_process(MODELS["llama"], truth, batch)
    assert_close(engine(**batch).loss.detach(), loss.detach(), LAW, "without padding")
    mask = torch.ones(BATCH, 9, dtype=torch.long)
    mask[1, :3] = 0
    with pytest.raises(ValueError, match="OPTForCausalLM counts positions by its attention mask"):
        engine(**tokens(1, 9), attention_mask=mask)


def rope(rank: int) -> None:
    llama = hf(
        "LlamaForCausalLM", "LlamaConfig", **SMALL, intermediate_size=12, max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"frequencies depend on the length of the sequence \(.*dynamic"):
        spread(llama(4, 4), 2)


def cached(rank: int) -> None:
    """A model that gives its cache whether it is asked to or not."""
    make = hf(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", **SMALL, intermediate_size=12, num_local_experts=2,
        num_experts_per_tok=1, num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    with KeepWide():
        batch = tokens(0, 9)
        truth, model = make(4, 4), make(4, 4)
        for one in (truth, model):
            one.set_experts_implementation("eager")  # type: ignore[operator]  # grouped products: no float64
        loss, _ = one_process(MODELS["llama"], truth, batch)
        assert_close(spread(model, 2)(**batch).loss.detach(), loss.detach(), LAW, "loss")


@pytest.mark.parametrize("body", [roberta, opt, rope, cached], ids=lambda body: body.__name__)
def test_models_of_transformers_with_ways_of_their_own(world: Any, body: Callable[[int], None]) -> None:
    world(body, 2)


# ------------------------------------------------------------------------------- outside, before and after


def outside(rank: int, name: str) -> None:
    """After a backward the module is what it was: for validation, export, another engine."""
    with KeepWide():
        model = MODELS[name]
        truth, engine = model.make(4, 4), spread(model.make(4, 4), 2)
        batch = model.batch(0, 9)
        got = engine(**batch)
        engine.backward(F.cross_entropy(got.logits, batch["labels"]))
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        assert_close(engine.module(**inputs).logits, truth(**inputs).logits, LAW, "after backward")
        again = spread(engine.module, 2)
        assert_close(again(**batch).logits.detach(), truth(**inputs).logits.detach(), LAW, "a second engine")


@pytest.mark.parametrize("name", ["vit", "bert_classifier"])
def test_the_module_is_whole_outside_the_engine(world: Any, name: str) -> None:
    world(outside, 2, name)


def stale(rank: int) -> None:
    """Two forwards of other lengths before the first backward, recomputed."""
    truth = tower(Block(by_torch), Block(by_torch))
    engine = spread(tower(Block(by_torch, recompute=True), Block(by_torch, recompute=True)), 2)
    long, short = floats(1, 8), floats(2, 7)
    first = engine(long)
    with torch.no_grad():
        engine(short)
    (truth(long).square().mean()).backward()
    engine.backward(first.square().mean())
    for key, weight in truth.named_parameters():
        assert_close(engine.gradients.full(key), weight.grad, LAW, key)


def own_backward(rank: int, reentrant: bool) -> None:
    """loss.backward() and engine.step(), with recomputation: the routes open for that backward too."""
    with KeepWide():
        model = MODELS["gpt2"]
        truth, module = model.make(4, 4), model.make(4, 4)
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        engine, batch = spread(module, 2), model.batch(0, 9)
        before = F.scaled_dot_product_attention
        engine(**batch).loss.backward()
        assert F.scaled_dot_product_attention is before
        engine.step()
        loss, _ = one_process(model, truth, batch)
        loss.backward()
        for (key, weight), other in zip(truth.named_parameters(), module.parameters(), strict=True):
            assert_close(other.detach(), (weight - 0.1 * weight.grad).detach(), LAW, key)


def toggled(rank: int) -> None:
    """Recomputation that is switched on later, and one backward of two forwards."""
    with KeepWide():
        model = MODELS["gpt2"]
        truth, engine = model.make(4, 4), spread(model.make(4, 4), 2)
        batches = [model.batch(i, 9 - i) for i in range(2)]
        engine.backward(engine(**batches[0]).loss)
        engine.zero_grad() if hasattr(engine, "zero_grad") else engine.gradients.clear()
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        engine.backward(sum(engine(**batch).loss for batch in batches))
        sum(one_process(model, truth, batch)[0] for batch in batches).backward()  # type: ignore[union-attr]
        for key, weight in truth.named_parameters():
            assert_close(engine.gradients.full(key), weight.grad, LAW, key)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_callers_own_backward_recomputes_on_parts_too(world: Any, reentrant: bool) -> None:
    world(own_backward, 2, reentrant)


@pytest.mark.parametrize("body", [stale, toggled], ids=lambda body: body.__name__)
def test_backwards_in_another_order_than_forwards(world: Any, body: Callable[[int], None]) -> None:
    world(body, 2)


# ----------------------------------------------------------------------------------------------- outputs


@dataclass
class Answer:
    y: Tensor


class Gives(nn.Module):
    """A tower whose output is put together by `how`."""

    def __init__(self, how: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.tower, self.scale, self.how = (
            tower(Block(by_torch)),
            nn.Parameter(torch.ones(1, 4, dtype=F64)),
            how,
        )

    def forward(self, x: Tensor) -> Any:
        return self.how(self.tower(x), self.scale)


OUTPUTS = {
    "a loss beside": (lambda y, s: (y, y.mean()), "gives one number, made of this rank's tokens alone"),
    "a loss in a dict": (lambda y, s: {"y": y, "loss": y.mean()}, "gives one number"),
    "a class of one's own": (lambda y, s: Answer(y), "gave a Answer, in which tokens cannot be found"),
}


def bad_output(rank: int, case: str) -> None:
    how, words = OUTPUTS[case]
    with pytest.raises(ValueError, match=words):
        spread(build(lambda: Gives(how)), 2)(floats(1))


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_of_which_nobody_knows_the_whole_are_refused(world: Any, case: str) -> None:
    world(bad_output, 2, case)


def parameter_beside(rank: int, length: int) -> None:
    """A parameter whose second dimension is as long as a rank's part stays what it is."""
    make = lambda: build(lambda: Gives(lambda y, s: (y, s)))  # noqa: E731
    engine, truth, x = spread(make(), 2), make(), floats(1, length)
    y, scale = engine(x)
    want, same_scale = truth(x)
    assert_close(y.detach(), want.detach(), LAW)
    assert_close(scale.detach(), same_scale.detach(), LAW)


@pytest.mark.parametrize("length", [7, 8])
def test_what_is_no_part_is_not_gathered(world: Any, length: int) -> None:
    world(parameter_beside, 2, length)


# ---------------------------------------------------------------------------------- layers of torch, our own


class WithAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(5, 36), nn.Linear(12, 6), attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 3)) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = (
            self.attention(q, k, v, 0)
            if isinstance(self.attention, DistributedAttention)
            else self.attention(q, k, v)
        )
        return self.out(mixed.flatten(2))


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Groups:
    """The seq group, once there is one."""

    def __init__(self) -> None:
        from ds_lite.sequence.groups import initialize_sequence_parallel

        self.grid = initialize_sequence_parallel(2)


def distributed(rank: int) -> None:
    group = Groups().grid.group("seq")
    engine = spread(build(lambda: WithAttention(DistributedAttention(Causal(), group, 2, 1))), 2)
    truth = build(lambda: WithAttention(Causal()))
    for length in (8, 7):
        same(engine, truth, floats(length, length), f"{length} tokens")
        engine.step()
        with torch.no_grad():
            for weight in truth.parameters():
                weight -= 0.1 * weight.grad


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.up(x))


def encoder(rank: int) -> None:
    engine, truth = spread(build(Encoder), 2), build(Encoder)
    same(engine, truth, floats(1, 7))
    engine.eval(), truth.eval()
    with torch.no_grad():
        assert_close(engine(floats(2, 7)), truth(floats(2, 7)), LAW, "in eval, where torch has a faster path")


@pytest.mark.parametrize("body", [distributed, encoder], ids=lambda body: body.__name__)
def test_layers_that_attend_by_themselves(world: Any, body: Callable[[int], None]) -> None:
    world(body, 2)


class Sometimes(nn.Module):
    """Tokens above a limit, which some ranks do not have, go through another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower(Block(by_torch), Block(by_torch))
        self.rare = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y, is_rare = self.tower(x), x[..., :1] > 2.5
        return y + torch.where(is_rare, self.rare(y), 0) if bool(is_rare.any()) else y


def lacks_a_gradient(rank: int, zero: int) -> None:
    more = {"zero_optimization": {"stage": zero, "reduce_bucket_size": 200}}
    engine, truth = spread(build(Sometimes), 2, zero, **more), build(Sometimes)
    x = floats(3, 8).clamp(max=2.0)
    x[:, 6, 0] = 3.0  # on the second rank only
    same(engine, truth, x)
    engine.step()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_rank_may_lack_a_gradient(world: Any, zero: int) -> None:
    world(lacks_a_gradient, 2, zero)


# ------------------------------------------------------------------------------------------------ refused


class Masked(nn.Module):
    """Drops a mask that masks nothing, as some models do: on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.block = nn.Linear(5, 12), Block(by_torch)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        own = None if bool(mask.all()) else mask[:, None, None, :].bool()
        self.block.attend = lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, own)
        return self.block(self.up(x))


def one_rank_masks(rank: int) -> None:
    engine = spread(build(Masked), 2)
    mask = torch.ones(BATCH, 8, dtype=torch.long)
    engine(floats(1, 8), mask)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="kind of attention mask differs between ranks"):
        engine(floats(1, 8), mask)


def wrapped(rank: int) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MODELS["llama"].make(4, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids=input_ids).logits

    with pytest.raises(ValueError, match=r"inner is a LlamaForCausalLM of transformers inside a module"):
        spread(Wrapper(), 2)
    with pytest.raises(ValueError, match=r"1 is a BatchNorm1d, which mixes tokens"):
        spread(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(7)).double(), 2)
    with pytest.raises(ValueError, match=r"in the middle"):
        spread(nn.Sequential(*tower(Block(by_torch)), Fails()), 2)(floats(1))


class Fails(Explodes):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 7:
            raise KeyError("in the middle")
        return x


def numbers(rank: int) -> None:
    """Ids, labels and lengths that only one rank would stumble over."""
    engine = spread(MODELS["gpt2"].make(4, 4), 2)
    engine(**tokens(0, 8))
    ids = tokens(0, 8)
    ids["input_ids"][0, 7] = VOCABULARY
    for batch, words in (
        (ids, "input_ids from . to 17 lie outside the vocabulary of 17"),
        ({**tokens(0, 8), "labels": torch.full((BATCH, 8), 40)}, "labels from 40 to 40 lie outside"),
        (tokens(0, 33), "position 32 lies outside the model's table of 32 positions"),
        ({**tokens(0, 8), "return_dict": False}, "return_dict=False hides"),
        ({**tokens(0, 8), "output_attentions": True}, "output_attentions cannot be honoured"),
        (tokens(5 + rank, 8), "checksum of input_ids differs between ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            engine(**batch)
            raise AssertionError(f"not refused: {words}")


def loaders(rank: int) -> None:
    """Batches that say they are cut."""
    batch = padded(0, 8)
    (mine,) = UlyssesSPDataLoaderAdapter([batch], rank, Groups().grid.group("seq"), 2)
    bert, llama = spread(MODELS["bert"].make(4, 4), 2), spread(MODELS["llama"].make(4, 4), 2)
    whole = {"input_ids": batch["input_ids"], "position_ids": torch.arange(8).expand(BATCH, -1)}
    for engine, given, words in (
        (bert, mine, "shift_labels for a model whose labels are not the next tokens"),
        (
            llama,
            {k: x for k, x in mine.items() if k != "position_ids"},
            "which needs position_ids and no labels",
        ),
        (
            llama,
            {**whole, "shift_labels": batch["labels"]},
            "all 2 ranks of a sequence brought the same tokens",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            engine(**given)


def failing_loader(rank: int) -> None:
    def batches() -> Any:
        yield tokens(0, 8)
        if rank == 1:
            raise OSError("a file is gone")
        yield tokens(1, 8)

    adapter = UlyssesSPDataLoaderAdapter(batches(), rank, Groups().grid.group("seq"), 2)
    with pytest.raises(ValueError, match="the loader failed: OSError: a file is gone"):
        list(adapter)


@pytest.mark.parametrize(
    "body", [one_rank_masks, wrapped, numbers, loaders, failing_loader], ids=lambda body: body.__name__
)
def test_what_one_rank_would_stumble_over_is_refused_on_all(world: Any, body: Callable[[int], None]) -> None:
    world(body, 2)


def test_a_loss_in_half_precision_is_added_up_in_float32() -> None:
    logits = pattern(1, 4096, 50).mul(8).half()
    labels = torch.arange(4096).remainder(50).unsqueeze(0)
    loss = sequence_loss(logits, labels, None)
    assert loss.dtype == torch.float32 and bool(loss.isfinite())
    truth = F.cross_entropy(logits.double()[0], labels[0])
    assert abs(loss.double() - truth) < 2e-2 * truth


def test_control_recomputation_is_torchs() -> None:
    x = floats(1).requires_grad_()
    checkpoint(torch.sin, x).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, x.detach().cos(), LAW)
