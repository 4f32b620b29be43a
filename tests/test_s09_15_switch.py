"""§9.15 `"domino": true`: blocks that AutoTP has cut run their batch in parts, and nothing else changes.

Guards against: a part that continues with another's state, an argument of the batch that is not cut, sums
that are left when a part fails, blocks whose samples depend on each other, silence where nothing was done.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from domino_models import DOMINO, SWITCHES, switched
from families import KeepWide
from rings import everyday
from sequence_models import MODELS, one_process
from shard_checks import pattern
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_lite
from ds_lite import comm
from ds_lite.domino.blocks import run_blocks_in_parts
from ds_lite.tags import cut_of
from ds_lite.tensor_parallel import LinearAllreduce, LinearLayer
from ds_lite.tensor_parallel.turns import running

pytest.importorskip("transformers", reason="not proved here: Domino on transformers' models")
pytest.importorskip("greenlet", reason="not proved here: Domino on models that know nothing of it")
pytestmark = pytest.mark.xdist_group("sequence")


def equals_one_process(
    rank: int, name: str, heads: int, kv_heads: int, zero: int, recompute: str, tp: int = 2
) -> None:
    with KeepWide():
        model = MODELS[name]
        truth = model.make(heads, kv_heads)
        calls = []
        for switches in SWITCHES:
            module = model.make(heads, kv_heads)
            if recompute:
                module.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})  # type: ignore[operator]
            engine = ds_lite.initialize(model=module, config=switched(switches, zero, tp=tp))[0]
            batch = model.batch(0, 9)
            labels = batch.pop("labels")
            if model.loss == "causal":
                batch["use_cache"] = False  # type: ignore[assignment]
            truth.zero_grad()
            plain = {key: x for key, x in batch.items() if key != "use_cache"}
            loss, _ = one_process(model, truth, {**plain, "labels": labels})
            loss.backward()
            engine(**batch)  # the first call compares
            with comm.record() as ledger:
                logits = engine(**batch).logits
                shifted = (logits[:, :-1], labels[:, 1:]) if model.loss == "causal" else (logits, labels)
                got = F.cross_entropy(shifted[0].flatten(0, 1), shifted[1].flatten())
                engine.backward(got)
            calls.append(ledger.total(axis="model", operation="all_reduce"))
            assert_close(got.detach(), loss.detach(), LAW, "loss")
            for key, weight in truth.named_parameters():
                wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
                found = engine.gradients.full(key)
                assert_close(torch.zeros_like(weight) if found is None else found, wanted, LAW, key)
            engine.step()
        plain, domino, overlap, both = calls
        assert overlap == plain, "the sums are the same ones"
        assert domino.calls == both.calls > plain.calls, "the blocks' sums are made for each part"
        if recompute != "again":  # torch stops a recomputation as soon as it has what it needs
            assert domino.sent == both.sent == plain.sent, "of as many bytes"
        assert running() is None


CASES = [
    ("llama", 4, 2, 0, ""),
    ("llama_eager", 6, 3, 2, ""),
    ("mistral_packed", 8, 4, 1, ""),
    ("gpt2", 5, 5, 0, ""),
    ("gpt2", 4, 4, 0, "again"),
    ("gpt2", 4, 4, 0, "reentrant"),
    ("bert", 6, 6, 2, ""),
    ("qwen2", 6, 3, 0, ""),
    ("llama", 8, 2, 1, "", 4),  # key and value heads are replicated
    ("gpt2", 8, 8, 0, "", 4),
]


def name_of(case: tuple[Any, ...]) -> str:
    return "-".join(str(part) for part in case if part != "")


NAMED = [pytest.param(case, id=name_of(case)) for case in CASES]
DAILY = ("llama-4-2-0", "mistral_packed-8-4-1", "gpt2-4-4-0-again", "bert-6-6-2", "llama-8-2-1-4")


@pytest.mark.parametrize("case", everyday(NAMED, DAILY.__contains__))
def test_blocks_in_parts_equal_one_process(world: Any, case: tuple[Any, ...]) -> None:
    world(equals_one_process, 4, *case)


class Block(nn.Module):
    """Attention-less: norm, up, activation, down, residual; what stands in between can be changed."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.between = between or nn.Identity()
        self.fault: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        y = self.down(inner)
        if self.fault is not None and len(x) == 1:
            raise self.fault
        return self.between(x + y)


class Tower(nn.Module):
    def __init__(self, *between: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(one) for one in between)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower(*between: nn.Module | None) -> Tower:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Tower(*between).double()


class Centred(nn.Module):
    """Every sample looks at the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def start(model: nn.Module, samples: int = 3) -> Any:
    return ds_lite.initialize(model=model, config=switched(DOMINO, samples=samples))[0]


class Train(nn.Module):
    """Every sample looks at the others, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if self.training else x


class Keeps(nn.Module):
    """Leaves something of the batch behind."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.square().mean()
        return x


class Aux(nn.Module):
    """A number of the batch beside the tokens, in training alone."""

    def forward(self, x: Tensor) -> Any:
        return x * 1.0, x.square().mean() if self.training else x.new_zeros(())


class Counts(nn.Module):
    """A buffer that changes with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Pair(NamedTuple):
    hidden: Tensor
    table: Tensor


class Named(nn.Module):
    """Something that all samples share, beside what each has; under names."""

    def forward(self, x: Tensor) -> Pair:
        return Pair(x * 1.0, x.new_ones(1, 4))


@dataclass(frozen=True)
class Hard:
    """What stands behind the block, and why it cannot run in parts; empty: it can."""

    make: type[nn.Module]
    reason: str = ""


HARD = {
    "samples": Hard(Centred, "its samples depend on each other"),
    "samples in training": Hard(Train, "its samples depend on each other"),
    "an attribute": Hard(Keeps, "it keeps something of the batch in between.seen"),
    "a number beside": Hard(Aux, "another result in parts|its samples depend"),
    "a buffer": Hard(Counts, "it keeps something of the batch in between.calls"),
    "a named tuple": Hard(Named),
}


class Firsts(nn.Module):
    """The first of what a block gives, and a number beside it."""

    def __init__(self, inner: Tower) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner.blocks[0](x)
        if not isinstance(y, tuple):
            return y
        return y[0] + (y[1] if y[1].dim() == 0 else 0)


def hard_block(rank: int, name: str) -> str:
    hard = HARD[name]
    told = io.StringIO()
    truth, model = Firsts(tower(hard.make())).train(), Firsts(tower(hard.make())).train()
    engine = start(model)
    with redirect_stdout(told):
        for samples in (3, 4):
            x = pattern(samples, 4, 8)
            wanted, got = truth(x), engine(x)
            assert_close(got.detach(), wanted.detach(), LAW, f"{name}, {samples} samples")
            truth.zero_grad()
            engine.zero_grad()
            wanted.square().sum().backward()
            got.square().sum().backward()
            down = truth.inner.blocks[0].down.bias.grad
            found = engine.module.inner.blocks[0].down.bias.grad
            assert_close(found, down, LAW, f"{name}: gradient, {samples} samples")
    if name == "a buffer":
        assert engine.module.inner.blocks[0].between.calls == 2, "a trial changes nothing"
    assert running() is None
    return told.getvalue()


@pytest.mark.parametrize("name", list(HARD))
def test_blocks_whose_parts_give_something_else_run_whole(world: Any, name: str) -> None:
    told, _ = world(hard_block, 2, name)
    if HARD[name].reason:
        assert re.search(rf"blocks\.0 runs in the plain order: .*({HARD[name].reason})", told), told
    else:
        assert "plain order" not in told


# ------------------------------------------------------------------- contexts that a block opens inside


class Opens(nn.Module):
    """A block that opens a context around a region."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.how = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), how

    def forward(self, x: Tensor) -> Tensor:
        def mlp(x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(self.norm(x))))

        if self.how in ("reentrant", "checkpoint"):
            return x + checkpoint(mlp, x, use_reentrant=self.how == "reentrant")
        if self.how == "no_grad":
            with torch.no_grad():
                y = mlp(x)
            return x + y + mlp(x)
        assert VARIABLE.get() == "set"
        return x + mlp(x)


VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


def opens_inside(rank: int, how: str) -> None:
    def make() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model = Tower()
            model.blocks = nn.ModuleList([Opens(how), Opens(how)])
            return model.double().train()

    token, told = VARIABLE.set("set"), io.StringIO()
    model = make()
    for block in model.blocks:
        block.up, block.down = LinearLayer(block.up), LinearAllreduce(block.down)
    truth, engine = make(), start(model)
    x = pattern(3, 4, 8).requires_grad_()
    with redirect_stdout(told):
        for model in (truth, engine):
            y = model(x)
            assert torch.is_grad_enabled()
            y.square().sum().backward()
    assert "plain order" not in told.getvalue(), told.getvalue()
    for name, one in truth.named_parameters():
        other = engine.module.get_parameter(name)
        found = other.grad if (cut := cut_of(other)) is None else cut.gather(other.grad)
        assert_close(found, one.grad, LAW, f"{how}: {name}")
    VARIABLE.reset(token)


@pytest.mark.parametrize("how", ["reentrant", "checkpoint", "no_grad", "a variable"])
def test_contexts_inside_a_block_stay_with_their_part(world: Any, how: str) -> None:
    world(opens_inside, 2, how)


def asks_for_more(rank: int) -> None:
    """Attentions and router logits are noted once for each module, so such a call runs whole."""
    with KeepWide():
        for name, key in (("llama_eager", "attentions"), ("llama", "hidden_states")):
            options = {f"output_{key}": True}
            truth = MODELS[name].make(4, 2)
            engine = ds_lite.initialize(model=MODELS[name].make(4, 2), config=switched(DOMINO, samples=2))[0]
            batch = MODELS[name].batch(0, 6)
            batch.pop("labels")
            for _ in range(2):
                wanted, got = (model(**batch, use_cache=False, **options) for model in (truth, engine))
                assert_close(got.logits.detach(), wanted.logits.detach(), LAW)
                assert len(got[key]) == len(wanted[key])
                if key == "hidden_states":
                    for one, other in zip(got[key], wanted[key], strict=True):
                        assert_close(one.detach(), other.detach(), LAW)


def test_a_call_that_asks_for_more_runs_whole(world: Any) -> None:
    world(asks_for_more, 2)


def normed(rank: int) -> None:
    with pytest.raises(ValueError, match=r"between is a BatchNorm1d, which looks at all samples of a batch"):
        start(tower(nn.BatchNorm1d(4)))
    lonely = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).double()
    with pytest.raises(ValueError, match=r"no block of Sequential .* \(no list of blocks is cut\)"):
        run_blocks_in_parts(lonely)


def test_blocks_that_cannot_run_in_parts_are_named(world: Any) -> None:
    world(normed, 2)


def alone(rank: int) -> None:
    """One sample has no parts: the plain order, and a word about it."""
    truth, engine = tower(None), start(tower(None), samples=1)
    x = pattern(1, 4, 8)
    with comm.record() as ledger:
        y = engine(x)
    assert_close(y.detach(), truth(x).detach(), LAW)
    assert ledger.total(axis="model", operation="all_reduce").calls == 1


def test_a_batch_of_one_runs_in_the_plain_order(world: Any) -> None:
    world(alone, 2)


def fails(rank: int) -> None:
    """The second part fails while the first one's sum is under way; the next batch is right."""
    truth, engine = tower(None, None), start(tower(None, None))
    x = pattern(3, 4, 8)
    engine(x)
    block = engine.module.blocks[1]
    block.fault = KeyError("in the second part")
    with pytest.raises(KeyError, match="in the second part"):
        engine(x)
    assert running() is None
    block.fault = None
    y = engine(x)
    assert_close(y.detach(), truth(x).detach(), LAW)
    assert differs(y.detach(), x)


def test_a_part_that_fails_leaves_nothing_behind(world: Any) -> None:
    world(fails, 2)


def refused(rank: int) -> None:
    with pytest.raises(
        ValueError, match="domino=true in a PipelineModule of LayerSpecs or beside sequence_parallel_size"
    ):
        ds_lite.initialize(
            model=MODELS["llama"].make(4, 4), config={**switched(DOMINO), "sequence_parallel_size": 2}
        )


def test_what_is_not_built_is_refused(world: Any) -> None:
    world(refused, 4)
