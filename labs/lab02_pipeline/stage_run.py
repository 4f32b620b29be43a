"""Lab 2, part B: does the learner's run_stage() make N stages compute what one process computes?

The same problem twice: first with all stages as threads of one process, where a mistake becomes a hint and
never a hang; then with one process a stage, over real messages.

Legend: S stages, m micro-batches, i a micro-batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _lab import Hint
from stage_check import SHAPE, SIZE, Gradients, Problem, StageWork, make_problem
from torch import Tensor

from ds_lite import comm

PATIENCE_S = 10.0


# --------------------------------------------------------------------------------------------- in threads


class ThreadLink:
    """Queues between threads; a stage that can never be served says so instead of waiting."""

    def __init__(self, num_stages: int) -> None:
        self.queues: dict[tuple[str, int], queue.Queue[tuple[int, Tensor]]] = {
            (what, to): queue.Queue()
            for what in ("activation", "gradient")
            for to in range(-1, num_stages + 1)
        }
        self.ended: set[int] = set()
        self.stop = threading.Event()

    def send(self, what: str, i: int, tensor: Tensor, to: int) -> None:
        self.queues[what, to].put((i, tensor.clone()))

    def recv(self, what: str, i: int, source: int) -> Tensor:
        me = source + 1 if what == "activation" else source - 1
        verb, remedy = (
            ("RecvActivation", "SendActivation") if what == "activation" else ("RecvGrad", "SendGrad")
        )
        for _ in range(int(PATIENCE_S / 0.02)):
            over = source in self.ended
            try:
                sent, tensor = self.queues[what, me].get(timeout=0.02)
            except queue.Empty:
                if self.stop.is_set():
                    raise _Stopped from None
                if over:
                    raise Hint(
                        f"stage {me} waits in {verb} for micro-batch {i}, and stage {source} has ended its "
                        f"stream "
                        f"without sending it; every {remedy} in the stream must send what the pass before it "
                        f"made"
                    ) from None
                continue
            if sent != i:
                raise Hint(
                    f"stage {me} expects the {what} of micro-batch {i} and stage {source} sent that of {sent}"
                )
            return tensor
        raise Hint(f"stage {me} waits in {verb} for micro-batch {i}, which stage {source} does not send")


class _Stopped(Exception):
    """Another stage has already failed."""


def rehearse(code: Any, num_stages: int = 3, num_micro_batches: int = 5) -> None:
    """All stages as threads. Raises: Hint for what a correct run_stage() does not do."""
    problem, link = make_problem(num_micro_batches, torch.device("cpu")), ThreadLink(num_stages)
    found: dict[int, Gradients] = {}
    errors: list[BaseException] = []

    def work(stage_id: int) -> None:
        try:
            found[stage_id] = StageWork(problem, stage_id, num_stages, link).run(code.run_stage, code.stream)
        except _Stopped:
            pass
        except BaseException as error:
            errors.append(error)
            link.stop.set()
        finally:
            link.ended.add(stage_id)

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
    "to {m} "
    "times the mean loss of the batch, so divide the loss by m, once, on the last stage",
    "over m": "the gradients are {m} times too small on a stage before the last: the loss is divided by m "
    "once, on "
    "the last stage alone; what arrives from there is divided already",
    "last only": "only the last micro-batch has left a gradient: add each backward's gradients to those "
    "before, "
    "do not overwrite them",
    "first only": "only the first micro-batch has left a gradient: add every backward's gradients",
    "wrong": "the gradients differ from one process's, by no simple factor; print those of one micro-batch "
    "on both "
    "sides and compare",
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
