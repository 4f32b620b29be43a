"""An explanation as lines for a terminal (§9.6 §9.7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_lite.explain import Explanation
from ds_lite.explain.legal import Job
from ds_lite.explain.places import Reduction
from ds_lite.explain.traffic import Row

_FEW = 32  # a larger world is told by its rule, not rank by rank
_UNITS = ("B", "KiB", "MiB", "GiB")
_SHOWN = 8  # longer lists of ranks are cut short


class Line(NamedTuple):
    """One line; headings are bold, remarks dim."""

    text: str
    style: str = ""


def lines(said: Explanation) -> Iterator[Line]:
    """All of it: grid, groups, reductions, messages, bytes."""
    yield from _grid(said)
    yield Line("")
    yield Line(f"groups of rank {said.rank}", "bold")
    yield from _table([("over", "global ranks"), *((name, listed(g)) for name, g in said.groups.items())])
    yield Line("")
    yield from _reductions(said)
    yield Line("")
    if said.stored is None:
        yield Line(_unknown(said.job), "dim")
        return
    yield from _traffic(said)
    yield Line("")
    yield from _stored(said)


def _unknown(job: Job) -> str:
    if job.knows:
        return "messages and bytes are told for models whose layers do not cut themselves"
    return "messages and bytes are told for a model: --model, and --stages for a pipeline of it"


def _grid(said: Explanation) -> Iterator[Line]:
    job = said.job
    sizes = " x ".join(f"{axis}={job.topology.get_dim(axis)}" for axis in job.topology.get_axis_names())
    yield Line(f"{counted(len(said.coordinates), 'rank')}: {sizes}", "bold")
    batch, replicas = job.batch, counted(job.size("data"), "replica")
    micro_batches = counted(batch.gradient_accumulation_steps, "micro-batch", "micro-batches")
    yield Line(
        f"{counted(batch.train_batch_size, 'sample')} a step = {batch.micro_batch_size} in a micro-batch "
        f"* {micro_batches} * {replicas}"
    )
    axes = job.topology.get_axis_names()
    if len(said.coordinates) > _FEW:
        yield Line(f"rank = {' + '.join(f'{_stride(job, axis)} * {axis}' for axis in axes)}", "dim")
        return
    rows = [[str(rank), *(str(at[axis]) for axis in axes)] for rank, at in enumerate(said.coordinates)]
    yield from _table([("rank", *axes), *rows], right=range(len(axes) + 1))


def _stride(job: Job, axis: str) -> int:
    names = job.topology.get_axis_names()
    stride = 1
    for name in names[names.index(axis) + 1 :]:
        stride *= job.size(name)
    return stride


def _reductions(said: Explanation) -> Iterator[Line]:
    yield Line(f"gradients of rank {said.rank}: who sums what with whom", "bold")
    head = ("parameters", "summed over ranks", "divisor", "ZeRO shards over", "in the norm by")
    rows: list[Sequence[str]] = [head]
    for one in said.reductions:
        sums = _sums(one)
        shards = listed(one.shards, 3) if one.shards else "nobody"
        rows.append((one.kind, sums[0], str(one.divisor), shards, listed(one.counted_by, 3)))
        rows += [("", also, "", "", "") for also in sums[1:]]
    yield from _table(rows) if said.reductions else [Line("no parameters")]
    if any(len(_sums(one)) > 1 for one in said.reductions):
        yield Line("sums below each other are made in this order", "dim")


def _sums(one: Reduction) -> list[str]:
    """A line for each group, in the order of the sums; groups of one are left out."""
    found = [f"{axis} {listed(ranks, 3)}" for axis, ranks in one.sums if len(ranks) > 1]
    return found or ["itself alone"]


def _traffic(said: Explanation) -> Iterator[Line]:
    batches, job = said.batches, said.job
    mask = "with" if batches.has_mask else "without"
    m = job.batch.gradient_accumulation_steps
    yield Line(
        f"messages of rank {said.rank} in a step of {counted(m, 'micro-batch', 'micro-batches')}, each "
        f"{job.batch.micro_batch_size} x "
        f"{batches.tokens} tokens, {mask} a mask",
        "bold",
    )
    merged: dict[tuple[str, str, str, bool], tuple[int, int]] = {}
    for row in said.traffic:
        key = row.axis, row.operation, row.what, row.is_exact
        calls, payload = merged.get(key, (0, 0))
        merged[key] = calls + row.calls, payload + row.payload
    rows = [Row(axis, op, what, *sums, ok) for (axis, op, what, ok), sums in merged.items()]
    order = {row.axis: place for place, row in reversed(list(enumerate(rows)))}
    table = [("axis", "operation", "calls", "payload", "what")]
    for row in sorted(rows, key=lambda one: order[one.axis]):
        numbers = f"{row.calls:,}", ("" if row.is_exact else "about ") + size_of(row.payload)
        numbers = numbers if row.payload or row.is_exact else ("?", "?")
        table.append((row.axis, row.operation, *numbers, row.what))
    if len(table) == 1:
        yield Line("none: this rank has nobody to talk to")
        return
    yield from _table(table, right=(2, 3))
    yield Line(
        "payload is what this rank hands in, as the ledger counts it, not what the wire carries", "dim"
    )
    if any(not row.is_exact and row.payload for row in rows):
        yield Line(f"about: {'; '.join(_guesses(job))}", "dim")


def _guesses(job: Job) -> Iterator[str]:
    """Why some rows are no more than estimates."""
    if job.config.expert_parallel.enabled and job.config.expert_parallel.autoep_size > 1:
        yield "experts are taken to get equally many tokens"
    if job.hull is not None and job.config.pipeline.activation_checkpoint_interval:
        yield "recomputed layers sum and exchange up to once more"
    if job.config.tensor_parallel.domino:
        yield "domino decides in the first forward whether it makes each sum in parts"
    if job.hull is None and job.size("seq") > 1:
        yield "ranks of a sequence also agree on its batches"


def _stored(said: Explanation) -> Iterator[Line]:
    job, stored = said.job, said.stored
    assert stored is not None
    zero = job.config.zero_optimization.stage
    yield Line(f"bytes on each rank, with ZeRO {zero}, without activations", "bold")
    has_state = all(one.state is not None for one in stored.values())
    has_passing = any(one.passing for one in stored.values())
    by_stage = {stage: [one for (at, _), one in sorted(stored.items()) if at == stage] for stage, _ in stored}
    head = [
        "stage",
        "layers",
        "tp rank",
        "parameters",
        "gradients",
        "+ bucket",
        "masters",
        "optimizer",
        "sum",
    ]
    table: list[Sequence[str]] = [head]
    for stage, ranks in sorted(by_stage.items()):
        same = all(one == ranks[0] for one in ranks)
        for tp_rank, one in enumerate(ranks[:1] if same else ranks):
            before = map(size_of, (one.parameters, one.gradients, one.passing, one.masters))
            state = "?" if one.state is None else size_of(one.state)
            place = "all" if same else str(tp_rank)
            table.append((str(stage), _layers(job, stage), place, *before, state, size_of(one.total)))
    hidden = {5} if not has_passing else set()
    hidden |= set() if job.size("model") > 1 else {2}
    hidden |= set() if job.stages is not None else {1}
    shown = [[cell for place, cell in enumerate(row) if place not in hidden] for row in table]
    yield from _table(shown, right=range(len(shown[0])))
    if has_passing:
        yield Line("+ bucket: the gradients that a backward of ZeRO-2 holds until they are scattered", "dim")
    if not has_state:
        named = job.config.optimizer is not None
        why = "its state cannot be told without values" if named else "the config names none"
        yield Line(f"the optimizer's state is not in the sum: {why}", "dim")


def _layers(job: Job, stage: int) -> str:
    if job.stages is None:
        return ""
    start, stop = job.stages.bounds[stage : stage + 2]
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[Line]:
    """Columns side by side; those of `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for place, row in enumerate(rows):
        cells = [
            f"{cell:>{width}}" if column in right else f"{cell:{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  ".join(cells).rstrip(), "" if place else "bold")


def listed(ranks: Sequence[int], shown: int = _SHOWN) -> str:
    """Ranks in short, if there are more than are shown.

    >>> listed((0, 2, 4)), listed(tuple(range(64)))
    ('[0, 2, 4]', '[0, 1 ... 63]')
    """
    if len(ranks) <= shown:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]} ... {ranks[-1]}]"


def counted(count: int, what: str, several: str = "") -> str:
    """A number and its noun."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def size_of(count: int) -> str:
    """Bytes in a unit that leaves three or four digits.

    >>> size_of(0), size_of(1316), size_of(3 * 2**20), size_of(5 * 10**9)
    ('0', '1316 B', '3.00 MiB', '4.66 GiB')
    """
    if count < 10_000:
        return f"{count} B" if count else "0"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.2f} {_UNITS[power]}"
