"""One model in any legal layout, against one process: what is drawn, what is run, what is said (§9.6).

A `Layout` is a model family, sizes in which no two dimensions are equal, the axes and the options. `check`
runs it on the ranks of a world; a difference names the step, the first parameter and the ranks behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from causal_models import MODELS, KeepWide, batches, one_process, weights_of
from hypothesis import strategies as st
from tolerance import BF16, LAW, assert_close
from torch import Tensor
from torch.nn import functional as F

import ds_lite
from ds_lite.config import load_config
from ds_lite.layout import Facts, layout_of
from ds_lite.pipe import PipelineModule
from ds_lite.tags import tags_of, whole
from ds_lite.tensor_parallel.policy import make_plan

LR, STEPS = 0.1, 2
RECOMPUTED = {"gpt2"}  # families without float32 inside, which `KeepWide` cannot widen in backward
WITH_EXPERTS = {"mixtral": 4, "qwen2_moe": 6}
TOO_ROUGH = {*WITH_EXPERTS, "gemma2"}  # in bfloat16: choices of experts flip, capped scores saturate


@dataclass(frozen=True)
class Layout:
    """`pp` 0 is a plain module; else a pipeline of so many stages. `ep` 0 leaves experts where they are."""

    family: str
    pp: int = 0
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 0
    zero: int = 0
    heads: int = 4
    kv_heads: int = 2
    samples: int = 2
    tokens: int = 7
    micro_batches: int = 2
    padded: bool = True
    clipping: float = 0.0
    recompute: int = 0
    domino: bool = False
    overlap: bool = False
    bf16: bool = False

    @property
    def world_size(self) -> int:
        return max(1, self.pp) * self.dp * self.sp * self.tp

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in changed.items())

    def alone(self) -> Layout:
        """The same micro-batches on one process."""
        one = dict(pp=0, dp=1, sp=1, tp=1, ep=0, zero=0, recompute=0, domino=False, overlap=False)
        return replace(self, **one, micro_batches=self.micro_batches * self.dp)

    def config(self) -> dict[str, Any]:
        """The ds_config, and nothing else says how the model is spread."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.samples,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": {"stage": self.zero},
            "sequence_parallel_size": self.sp,
            "gradient_clipping": self.clipping,
        }
        if self.tp > 1:
            config["tensor_parallel"] = {
                "autotp_size": self.tp,
                "domino": self.domino,
                "tp_overlap_comm": self.overlap,
            }
        if self.ep:
            config["expert_parallel"] = {"enabled": True, "autoep_size": self.ep}
        if self.bf16:
            config["bf16"] = {"enabled": True}
        return config

    def refusal(self) -> str | None:
        """Why this layout is not legal, as `initialize` would say; None if it is."""
        experts = WITH_EXPERTS.get(self.family)
        facts = Facts(
            self.family,
            "model" if self.pp else "plain",
            max(1, self.pp),
            (self.heads, self.kv_heads),
            (experts,) if experts and self.ep else (),
        )
        try:
            layout_of(load_config(self.config()), facts, self.world_size)
            if self.tp > 1:
                make_plan(MODELS[self.family].make_empty(self.heads, self.kv_heads), self.tp)
        except ValueError as refusal:
            return str(refusal)
        if experts and not self.pp and self.sp > 1:
            return "a plain module's router sees this rank's tokens alone"
        return None


@st.composite
def layouts(draw: Any) -> Layout:
    """Any legal layout of at most 8 ranks; the first values are the simplest, so failures shrink to them."""
    family = draw(st.sampled_from(list(MODELS)))
    heads = draw(st.sampled_from([4, 6, 8]))
    has_kv = MODELS[family].kv is not None
    kv_heads = draw(st.sampled_from([n for n in (2, 3, 4, 6) if heads % n == 0])) if has_kv else heads
    axes = {axis: 1 for axis in ("pp", "dp", "sp", "tp")}
    for axis in draw(st.permutations(list(axes))):
        taken = axes["pp"] * axes["dp"] * axes["sp"] * axes["tp"]
        axes[axis] = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n * taken <= 8]))
    is_plain = axes["pp"] == 1 and draw(st.booleans())
    precision = draw(st.sampled_from([False, False, False, family not in TOO_ROUGH]))
    return Layout(
        family,
        **{**axes, "pp": 0 if is_plain else axes["pp"]},
        ep=draw(st.sampled_from([0, 1, 2, 3, 4])) if family in WITH_EXPERTS else 0,
        zero=draw(st.sampled_from([0, 1, 2])),
        heads=heads,
        kv_heads=kv_heads,
        samples=draw(st.sampled_from([2, 3, 1])),
        tokens=draw(st.sampled_from([7, 9, 11])),
        micro_batches=draw(st.sampled_from([1, 2, 3])),
        padded=draw(st.booleans()),
        clipping=draw(st.sampled_from([0.0, 0.05])),
        recompute=draw(st.sampled_from([0, 1, 2])) if family in RECOMPUTED and not is_plain else 0,
        domino=axes["tp"] > 1 and axes["sp"] == 1 and draw(st.booleans()),
        overlap=axes["tp"] > 1 and draw(st.booleans()),
        bf16=precision,
    )


# ------------------------------------------------------------------------------------------------ the run


def compare(world: Any, found: list[Layout], deadline: float = 60.0) -> None:
    """Each layout against one process, in worlds of its size."""
    for size in sorted({layout.world_size for layout in found}):
        rows = [asdict(layout) for layout in found if layout.world_size == size]
        rounded = [asdict(layout.alone()) for layout in found if layout.world_size == size and layout.bf16]
        truths = world(observe, 1, rounded, deadline=deadline)[0] if rounded else []
        world(check, size, rows, truths, deadline=deadline)


def check(rank: int, rows: list[dict[str, Any]], truths: Sequence[list[tuple[float, float]]] = ()) -> None:
    """Each layout of this world's size; for those in bfloat16 `truths` has what one process rounds to."""
    rounded = iter(truths)
    for row in rows:
        layout = Layout(**row)
        try:
            if layout.bf16:
                _check_rounded(layout, next(rounded))
            else:
                with KeepWide():
                    _check(layout)
        except Exception as failure:
            raise type(failure)(f"[{layout}] {failure}") from failure


def observe(rank: int, rows: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Loss and norm of each step, of each layout."""
    return [_observed(Layout(**row)) for row in rows]


def _check_rounded(layout: Layout, truth: list[tuple[float, float]]) -> None:
    """Against the same formats on one process: where sums are made in another order, they round apart."""
    for step, (found, wanted) in enumerate(zip(_observed(layout), truth, strict=True)):
        for got, expected, what in zip(found, wanted, ("loss", "norm"), strict=True):
            assert_close(torch.tensor(got), torch.tensor(expected), BF16, f"step {step}: the {what}")


def _observed(layout: Layout) -> list[tuple[float, float]]:
    model = MODELS[layout.family].make(layout.heads, layout.kv_heads, dtype=torch.float32)
    with torch.no_grad():  # at their usual size one process in bfloat16 is 2 % off the norm by itself
        for weight in model.parameters():
            weight.mul_(0.3 if weight.dim() > 1 else 1.0)
    engine = _engine(layout, model)
    mine = _mine(layout, engine)[0]
    found = []
    for _ in range(STEPS):
        loss = float(_gradients(layout, engine, mine))
        _take_step(layout, engine, mine)
        found.append((loss, float(engine.get_global_grad_norm())))
    return found


def _mine(layout: Layout, engine: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """This replica's micro-batches, and those of all."""
    replica, replicas = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    given = batches(layout.micro_batches * replicas, layout.samples, layout.tokens, padded=layout.padded)
    return given[layout.micro_batches * replica :][: layout.micro_batches], given


def _check(layout: Layout) -> None:
    truth, model = (MODELS[layout.family].make(layout.heads, layout.kv_heads) for _ in range(2))
    engine = _engine(layout, model)
    mine, given = _mine(layout, engine)
    for step in range(STEPS):
        truth.zero_grad()
        loss = one_process(truth, given)
        found = _gradients(layout, engine, mine)
        assert_close(found, loss, LAW, f"step {step}: the loss")
        _compare_gradients(engine, truth, f"step {step}")
        norm = _step(truth, layout.clipping)
        _take_step(layout, engine, mine)
        reported = torch.tensor(engine.get_global_grad_norm(), dtype=norm.dtype)
        assert_close(reported, norm, LAW, f"step {step}: the norm")
    for key, parameter in engine.module.named_parameters():
        there, got = _original(engine, key), whole(parameter)
        wanted = weights_of(truth, there)
        assert_close(got, wanted, LAW, f"weight {there} ({_behind(engine, parameter)})")


def _compare_gradients(engine: Any, truth: Any, when: str) -> None:
    for key, parameter in engine.module.named_parameters():
        there = _original(engine, key)
        wanted, got = weights_of(truth, there, gradient=True), engine.gradients.full(key)
        words = f"{when}: gradient of {there} ({_behind(engine, parameter)})"
        assert_close(torch.zeros_like(wanted) if got is None else got, wanted, LAW, words)


def _engine(layout: Layout, model: Any) -> Any:
    if layout.pp:
        model = PipelineModule.from_model(
            model,
            num_stages=layout.pp,
            partition_method="uniform",
            activation_checkpoint_interval=layout.recompute,
        )
    return ds_lite.initialize(model=model, config=layout.config())[0]


def _gradients(layout: Layout, engine: Any, mine: list[dict[str, Tensor]]) -> Tensor:
    """The mean loss of the batch; the reduced gradients stay in the engine."""
    if layout.pp:
        loss: Tensor = engine.compute_gradients(iter(mine))
        return loss
    losses = []
    for number, batch in enumerate(mine):
        loss = _loss(layout, engine, batch)
        engine.backward(loss)
        losses.append(loss.detach() / len(mine))
        if number + 1 < len(mine):
            engine.step()
    total = torch.stack(losses).sum()
    ds_lite.comm.all_reduce(total, group=engine.grid.group("data"))
    return total / engine.grid.get_data_parallel_world_size()


def _loss(layout: Layout, engine: Any, batch: dict[str, Tensor]) -> Tensor:
    if layout.sp > 1:
        loss: Tensor = engine(**batch, use_cache=False).loss
        return loss
    outputs = engine(**{key: x for key, x in batch.items() if key != "labels"}, use_cache=False)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    config = engine.module.config
    if getattr(config, "output_router_logits", False):
        loss = loss + config.router_aux_loss_coef * outputs.aux_loss
    return loss


def _take_step(layout: Layout, engine: Any, mine: list[dict[str, Tensor]]) -> None:
    if layout.pp:
        engine.train_batch(iter(mine))
    else:
        engine.step()


@torch.no_grad()
def _step(truth: Any, clipping: float) -> Tensor:
    """One step of SGD on one process, after clipping; the norm before it."""
    learnt = [weight for weight in truth.parameters() if weight.grad is not None]
    norm = torch.stack([weight.grad.square().sum() for weight in learnt]).sum().sqrt()
    factor = min(1.0, clipping / (float(norm) + 1e-6)) if clipping else 1.0
    for weight in learnt:
        weight -= LR * factor * weight.grad
    return norm


def _original(engine: Any, key: str) -> str:
    return engine.module.original_name(key) if isinstance(engine.module, PipelineModule) else key


def _behind(engine: Any, parameter: Any) -> str:
    """Whose sums stand behind a gradient, in words."""
    tags, grid = tags_of(parameter), engine.grid
    ranks = grid.expert(tags.ep_size).data_ranks if tags.owner == "expert" else grid.ranks("data", "seq")
    words = [f"{tags.owner}, {tags.model} on model ranks {grid.ranks('model')}", f"summed over {list(ranks)}"]
    if tags.tied:
        words.append(f"and over the stages of {tags.tied!r}, of pipe ranks {grid.ranks('pipe')}")
    return "; ".join(words)
