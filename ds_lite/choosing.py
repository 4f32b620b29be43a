"""What to use when: the fastest layout that fits, from bytes, operations and links (§9.6).

A layout's step is estimated by counting: bytes that a rank stores, multiplications, bytes that it sends along
each axis, and over which link. Nothing is hidden under anything, so a time is an upper estimate of what the
layout costs; the order of layouts is what counts. `ds-lite explain` counts bytes exactly, for one config.

Legend: P parameters, H width, F width of the MLP, N heads, G key and value heads, D head width, V vocabulary,
E experts, K choices, T tokens, m micro-batches of one sequence each.

Source: §9.6, whose own table is lost. Activations are what a block keeps for backward in bfloat16; the bubble
is (pp - 1) / m of the work (§9.2); bytes are those of §9.1 to §9.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("pp", "dp", "sp", "tp")


@dataclass(frozen=True)
class Model:
    """A decoder with gated MLPs; with more than one expert each MLP is a mixture."""

    name: str
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 1
    choices: int = 1

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def attention(self) -> int:
        """Parameters of the projections of one layer: 2 H (N + G) D."""
        return 2 * self.width * (self.heads + self.kv_heads) * self.head_width

    @property
    def expert(self) -> int:
        """Parameters of one expert, or of the one MLP: 3 H F."""
        return 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        """All of them, without norms."""
        layer = self.attention + self.experts * self.expert + (self.experts > 1) * self.width * self.experts
        return self.layers * layer + 2 * self.vocabulary * self.width


@dataclass(frozen=True)
class Machine:
    """Units: memory in bytes, flops in operations a second that dense layers reach, links in bytes a second
    and GPU, one way."""

    gpus_per_node: int
    memory: float
    flops: float
    inside: float
    between: float


@dataclass(frozen=True)
class Layout:
    """One way to use pp*dp*sp*tp GPUs; experts are spread over `ep` of the dp*sp."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 1
    recomputes: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    @property
    def axes(self) -> int:
        """How many ways of cutting it combines; recomputing counts as one."""
        return sum(getattr(self, axis) > 1 for axis in (*AXES, "ep")) + self.recomputes

    def __str__(self) -> str:
        sizes = [f"{axis}{getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) > 1]
        return (
            " x ".join(sizes or ["one GPU"])
            + f", ZeRO-{self.zero}"
            + (", recompute" if self.recomputes else "")
        )


@dataclass(frozen=True)
class Estimate:
    """Units: bytes of one GPU, seconds of one step. `sent` is by axis."""

    layout: Layout
    stored: float
    activations: float
    compute: float
    bubble: float
    sent: dict[str, float]

    @property
    def memory(self) -> float:
        return self.stored + self.activations

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + sum(self.sent.values())


def rank_parameters(model: Model, layout: Layout) -> tuple[float, float]:
    """Parameters on a GPU of the first stage: (dense, experts'). AutoTP keeps the embedding whole."""
    layers = model.layers / layout.pp
    ends = (2 if layout.pp == 1 else 1) * model.vocabulary * model.width
    mixture = model.experts > 1
    dense = layers * (model.attention + (not mixture) * model.expert) / layout.tp + ends
    return dense, mixture * layers * model.experts * model.expert / layout.ep / layout.tp


def stored(model: Model, layout: Layout) -> float:
    """Bytes: 2 a weight, 4 a gradient, 12 for master and AdamW, of which ZeRO divides 12 or 16."""
    total, replicas = 0.0, layout.dp * layout.sp
    for parameters, ranks in zip(
        rank_parameters(model, layout), (replicas, replicas // layout.ep), strict=True
    ):
        of_gradients = 4 / (ranks if layout.zero == 2 else 1)
        total += parameters * (2 + of_gradients + 12 / (ranks if layout.zero else 1))
    return total


def activations(model: Model, layout: Layout, tokens: int, micro_batches: int) -> float:
    """Bytes on the first stage, which keeps min(pp, m) micro-batches (§9.2); with recomputation a layer
    keeps its input, and one layer at a time the rest. A stage that is the last one has the logits too."""
    here = tokens / layout.sp
    cut = 2 * (model.heads + model.kv_heads) * model.head_width + 3 * model.choices * model.inner
    whole_layer = 2 * here * (4 * model.width + cut / layout.tp)
    kept = 2 * here * model.width if layout.recomputes else whole_layer
    logits = 6 * here * model.vocabulary if layout.pp == 1 else 0
    flying = min(layout.pp, micro_batches)
    return flying * model.layers / layout.pp * kept + layout.recomputes * whole_layer + logits


def slowest_stage(layers: int, head: float, stages: int) -> float:
    """The work of the busiest stage, in layers: whole layers, the output layer counting as `head` of them.

    >>> slowest_stage(32, 0.6, 1), slowest_stage(32, 0.6, 4), slowest_stage(32, 0.6, 8)
    (32.6, 8.6, 4.6)
    """
    if stages == 1:
        return layers + head
    fewest = range(1, layers - stages + 2)  # layers of the last stage
    return min(max(math.ceil((layers - last) / (stages - 1)), last + head) for last in fewest)


def compute(model: Model, layout: Layout, machine: Machine, tokens: int, micro_batches: int) -> float:
    """Seconds of a step's products on the busiest stage: 2 operations a parameter and token forward, twice
    that backward, once more if recomputed; causal attention adds 2 T N D a token."""
    passes = 4 if layout.recomputes else 3
    layer = 2 * (model.attention + model.choices * model.expert) + 2 * tokens * model.heads * model.head_width
    head = (
        3 * 2 * model.vocabulary * model.width * layout.tp / (passes * layer)
    )  # every tp rank has all of it
    share = passes * layer / layout.tp * slowest_stage(model.layers, head, layout.pp)
    return micro_batches * tokens / layout.sp * share / machine.flops


def sending(
    model: Model, layout: Layout, machine: Machine, tokens: int, micro_batches: int
) -> dict[str, float]:
    """Seconds by axis. An axis whose group leaves the node goes at the speed between nodes."""
    layers, here = model.layers / layout.pp, tokens / layout.sp
    hidden = 2 * here * model.width
    heads = 2 * here * 2 * (model.heads + model.kv_heads) * model.head_width / layout.tp
    passes = 3 if layout.recomputes else 2
    dense, experts = rank_parameters(model, layout)
    replicas = layout.dp * layout.sp
    often = micro_batches if layout.zero == 2 else 1  # ZeRO-2 reduces each micro-batch
    weights = 2 if layout.zero else 4  # gathered in bfloat16, or the second half of an all-reduce
    wire = {
        "tp": micro_batches * layers * 2 * passes * 2 * _share(layout.tp) * hidden,
        "sp": micro_batches * layers * passes * _share(layout.sp) * heads,
        "ep": (model.experts > 1)
        * micro_batches
        * layers
        * 2
        * passes
        * _share(layout.ep)
        * model.choices
        * hidden,
        "pp": (layout.pp > 1) * micro_batches * 2 * hidden,
        "dp": _share(replicas) * dense * (4 * often + weights)
        + _share(replicas // layout.ep) * experts * (4 * often + weights),
    }
    return {axis: size / _link(layout, machine, axis) for axis, size in wire.items() if size}


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks  # what leaves a rank


def _link(layout: Layout, machine: Machine, axis: str) -> float:
    """Tensor-parallel ranks are neighbours, then the sequence's, then replicas, then stages (§9.11)."""
    spans = {
        "tp": layout.tp,
        "sp": layout.tp * layout.sp,
        "ep": layout.tp * layout.ep,
        "dp": layout.tp * layout.sp * layout.dp,
        "pp": layout.world,
    }
    return machine.inside if spans[axis] <= machine.gpus_per_node else machine.between


def estimate(model: Model, layout: Layout, machine: Machine, tokens: int, sequences: int) -> Estimate:
    """A step of `sequences` sequences of `tokens` tokens.

    Raises: ValueError for sequences that the replicas do not divide.
    """
    if sequences % layout.dp:
        raise ValueError(f"{sequences} sequences do not divide by dp={layout.dp}; choose a multiple (§9.6)")
    m = sequences // layout.dp
    busy = compute(model, layout, machine, tokens, m)
    return Estimate(
        layout,
        stored(model, layout),
        activations(model, layout, tokens, m),
        busy,
        busy * (layout.pp - 1) / m,
        sending(model, layout, machine, tokens, m),
    )


def layouts(model: Model, world: int, sequences: int) -> Iterator[Layout]:
    """Every layout that `initialize` takes, in powers of two: heads by kv groups, stages of whole layers;
    ZeRO-2 without stages only, where it costs one reduction a micro-batch."""
    sizes = [2**power for power in range(world.bit_length()) if world % 2**power == 0]
    for pp in (size for size in sizes if model.layers % size == 0):
        for tp in (size for size in sizes if model.kv_heads % size == 0 and world % (pp * size) == 0):
            for sp in (size for size in sizes if model.kv_heads % (tp * size) == 0):
                dp = world // (pp * tp * sp)
                if dp < 1 or pp * tp * sp * dp != world or sequences % dp:
                    continue
                spread = [size for size in sizes if model.experts % size == 0 and dp * sp % size == 0]
                for ep in spread if model.experts > 1 else [1]:
                    for zero in (1, 2) if pp == 1 else (1,):
                        for recomputes in (False, True):
                            yield Layout(pp, dp, sp, tp, ep, zero, recomputes)


def ranked(
    model: Model, world: int, machine: Machine, tokens: int, sequences: int, **fixed: int
) -> list[Estimate]:
    """Estimates of all layouts with the sizes in `fixed`, those that fit first, then by time."""
    chosen = [
        one
        for one in layouts(model, world, sequences)
        if all(getattr(one, name) == size for name, size in fixed.items())
    ]
    found = [estimate(model, one, machine, tokens, sequences) for one in chosen]
    return sorted(found, key=lambda one: (one.memory > machine.memory, one.seconds))


def choose(
    model: Model, world: int, machine: Machine, tokens: int, sequences: int, *, within: float = 0.03
) -> Estimate:
    """The layout with the fewest axes among those that fit and are nearly the fastest.

    Raises: ValueError if none fits.
    """
    found = ranked(model, world, machine, tokens, sequences)
    fitting = [one for one in found if one.memory <= machine.memory]
    if not fitting:
        least = min((one.memory for one in found), default=math.inf)
        raise ValueError(
            f"{model.name} does not fit on {world} GPUs: every layout needs {least / 2**30:.0f} GiB or more "
            f"of {machine.memory / 2**30:.0f}; take more GPUs (§9.6)"
        )
    good = [one for one in fitting if one.seconds <= (1 + within) * fitting[0].seconds]
    return min(good, key=lambda one: (one.layout.axes, one.seconds))


def reasons(best: Estimate, model: Model, machine: Machine, tokens: int, sequences: int) -> dict[str, str]:
    """For each axis in use: the best that can be had without it."""
    said = {}
    for axis in (*AXES, "ep"):
        if getattr(best.layout, axis) == 1:
            continue
        rest = ranked(model, best.layout.world, machine, tokens, sequences, **{axis: 1})
        if not rest:
            said[axis] = "nothing divides"
        elif rest[0].memory > machine.memory:
            least = min(one.memory for one in rest)
            said[axis] = f"does not fit, {least / 2**30:,.0f} GiB at least"
        else:
            said[axis] = f"{rest[0].seconds / best.seconds:.2f} times the time"
    return said
