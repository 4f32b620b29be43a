"""Lab 2, part B: does the learner's run_stage() make N stages compute what one process computes?

The same problem twice: first with all stages as threads of one process, where a mistake becomes a hint and
never a hang; then with one process a stage, over real messages.

Legend: S stages, m micro-batches, i a micro-batch.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _lab import Hint
from stage_check import SHAPE, SIZE, Gradients, Problem, StageWork, make_problem
from torch import Tensor

from ds_lite import comm

# --------------------------------------------------------------------------------------------- in threads


class ThreadLink:
    """Boxes between threads. When no stage can move any more, each of them learns who owes what to whom."""

    def __init__(self, num_stages: int) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[tuple[str, int], deque[tuple[int, Tensor]]] = defaultdict(deque)
        self.waiting: dict[int, tuple[str, int, int]] = {}  # stage: what, micro-batch, from which stage
        self.computed: set[tuple[str, int, int]] = set()  # what a stage has made: what, stage, micro-batch
        self.running = set(range(num_stages))
        self.has_failed = False

    def made(self, what: str, stage_id: int, i: int) -> None:
        with self.changed:
            self.computed.add((what, stage_id, i))

    def send(self, what: str, i: int, tensor: Tensor, to: int) -> None:
        with self.changed:
            self.boxes[what, to].append((i, tensor.clone()))
            self.changed.notify_all()

    def recv(self, what: str, i: int, source: int) -> Tensor:
        me = source + 1 if what == "activation" else source - 1
        with self.changed:
            self.waiting[me] = (what, i, source)
            while not self.boxes[what, me]:
                if self.has_failed:
                    raise _Stopped
                if self._nobody_moves():
                    raise Hint(self._who_owes())
                self.changed.wait()
            del self.waiting[me]
            sent, tensor = self.boxes[what, me].popleft()
        if sent != i:
            raise Hint(
                f"stage {me} expects the {what} of micro-batch {i} and stage {source} sent that of {sent}"
            )
        return tensor

    def end(self, stage_id: int, *, failed: bool) -> None:
        with self.changed:
            self.running.discard(stage_id)
            self.has_failed |= failed
            self.changed.notify_all()

    def _nobody_moves(self) -> bool:
        return all(
            stage in self.waiting and not self.boxes[self.waiting[stage][0], stage] for stage in self.running
        )

    def _who_owes(self) -> str:
        """The wait that nobody will end: its sender is over, or has made the thing and gone on."""

        def doubt(wait: tuple[int, tuple[str, int, int]]) -> tuple[bool, bool, bool, int]:
            stage, (what, i, source) = wait
            has_made = (what, source, i) in self.computed
            return (source in self.running, not has_made, what == "activation", stage)

        me, (what, i, source) = min(((stage, self.waiting[stage]) for stage in self.running), key=doubt)
        verb, remedy, passed = (
            ("RecvActivation", "SendActivation", "forward")
            if what == "activation"
            else ("RecvGrad", "SendGrad", "backward")
        )
        return (
            f"stage {me} waits in {verb} for micro-batch {i}, which stage {source} does not send; every "
            f"{remedy} in the stream must send what the {passed} before it made"
        )


class _Stopped(Exception):
    """Another stage has already failed."""


def rehearse(code: Any, num_stages: int = 3, num_micro_batches: int = 5) -> None:
    """All stages as threads. Raises: Hint for what a correct run_stage() does not do."""
    problem, link = make_problem(num_micro_batches, torch.device("cpu")), ThreadLink(num_stages)
    found: dict[int, Gradients] = {}
    errors: list[BaseException] = []

    def work(stage_id: int) -> None:
        failed = True
        try:
            found[stage_id] = StageWork(problem, stage_id, num_stages, link).run(code.run_stage, code.stream)
            failed = False
        except _Stopped:
            pass
        except BaseException as error:
            errors.append(error)
        link.end(stage_id, failed=failed)

    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    compare(problem, found, num_stages)


def compare(problem: Problem, found: dict[int, Gradients], num_stages: int) -> None:
    """Raises: Hint that says what the wrong gradients look like."""
    m = len(problem.micro_batches)
    patterns = {
        s: {
            name: _pattern(problem, s, name, found[s].get(name), m)
            for name in problem.stage(s, num_stages)[1]
        }
        for s in range(num_stages)
    }
    seen = {pattern for of_stage in patterns.values() for pattern in of_stage.values()} - {"right"}
    for pattern, hint in _PATTERNS.items():
        if pattern in seen:
            stage, name = next((s, n) for s in patterns for n, p in patterns[s].items() if p == pattern)
            raise Hint(f"{hint.format(m=m)} (first seen on stage {stage}, {name})")


_PATTERNS = {
    "missing": "a gradient is missing from what run_stage() returns; return every name that backward() gave",
    "times m": "the gradients are {m} times too large, the number of micro-batches: {m} mean losses add up "
    "to {m} times the mean loss of the batch, so divide the loss by m, once, on the last stage",
    "over m": "the gradients are {m} times too small on a stage before the last: the loss is divided by m "
    "once, on the last stage alone; what arrives from there is divided already",
    "last only": "only the last micro-batch has left a gradient: add each backward's gradients to those "
    "before, do not overwrite them",
    "first only": "only the first micro-batch has left a gradient: add every backward's gradients",
    "wrong": "the gradients differ from one process's, by no simple factor; print those of one micro-batch "
    "on both sides and compare",
}


def _pattern(problem: Problem, stage: int, name: str, mine: Tensor | None, m: int) -> str:
    """What a gradient looks like. A tied one is only a part of the truth: only its presence is checked."""
    if mine is None:
        return "missing"
    if name.startswith("tied_modules"):
        return "right"
    truth, parts = problem.truth[name], problem.parts
    candidates = [("right", truth), ("times m", truth * m), ("over m", truth / m), ("over m", truth / m**2)]
    for scale in (1, m):
        candidates += [("last only", parts[-1][name] / scale), ("first only", parts[0][name] / scale)]
    for word, value in candidates:
        if mine.shape == value.shape and (mine - value).abs().max() <= 1e-10 * max(
            1e-3, float(value.abs().max())
        ):
            return word
    return "wrong"


# ------------------------------------------------------------------------------------------- in processes


class ProcessLink:
    """Messages between processes; sends go on in the background until `finish`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pending = device, []

    def made(self, what: str, stage_id: int, i: int) -> None:
        """Nobody asks: the rehearsal has found what would hang."""

    def send(self, what: str, i: int, tensor: Tensor, to: int) -> None:
        self.pending.append((comm.isend(tensor, to), tensor))

    def recv(self, what: str, i: int, source: int) -> Tensor:
        x = torch.empty(SIZE, SHAPE.context, SHAPE.width, dtype=torch.float64, device=self.device)
        comm.recv(x, source)
        return x

    def finish(self) -> None:
        for work, _ in self.pending:
            work.wait()


@dataclass(frozen=True)
class StageReport:
    """The run over processes, the same on every rank."""

    largest_difference: float  # to one process, relative to the larger of 1 and the largest truth
    peak_live: list[int]  # per stage


def run_in_processes(code: Any, num_micro_batches: int) -> StageReport:
    """One process a stage. The tied table's two gradients are summed here, as ReduceTiedGrads does."""
    num_stages, rank = comm.get_world_size(), comm.get_rank()
    link = ProcessLink(comm.device_of_this_rank())
    work = StageWork(make_problem(num_micro_batches, link.device), rank, num_stages, link)
    mine = work.run(code.run_stage, code.stream)
    link.finish()
    everyone: list[Any] = [None] * num_stages
    comm.all_gather_object(everyone, ({name: grad.cpu() for name, grad in mine.items()}, work.peak_live))
    total: Gradients = {}
    for gradients, _ in everyone:
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return StageReport(largest_difference(total, work.problem.truth), [peak for _, peak in everyone])


def largest_difference(mine: Gradients, truth: Gradients) -> float:
    """max |a - b| / max(1, max |b|) over all tensors; infinite if one is missing."""
    if set(mine) != set(truth):
        return float("inf")
    gaps: Sequence[float] = [
        float((mine[name].cpu() - truth[name].cpu()).abs().max() / truth[name].abs().max().clamp(min=1).cpu())
        for name in truth
    ]
    return max(gaps)
