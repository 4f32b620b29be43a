"""What ZeRO holds and what it costs: ds_lite, torch's ZeroRedundancyOptimizer and DeepSpeed (§9.1).

    python labs/bench/zero.py                                   # a few minutes on two cores
    python labs/bench/zero.py --quick --json table.json
    python labs/bench/zero.py --deepspeed-python OTHER/bin/python

First the bytes that a rank holds under ZeRO 0, 1 and 2, in float32 with Adam, against the formulas: 4P of
parameters, 4P of gradients, 8P of states; stage 1 divides the states over the dp replicas, stage 2 the
gradients too and has one bucket besides. Counted are all storages alive of 64 KiB and more. Stages 0 and 1
keep the gradients' buffers from step to step, as torch does with `gradient_as_bucket_view`.

Then seconds of one ZeRO-1 step of two replicas, as in `pipeline.py`: all engines live in worker processes
of one thread each, only one works at a time, a round is one step of each, and a ratio is formed inside its
round. A step is forward, backward and optimizer over m micro-batches, with each rank's loss known. Before
anything is timed, the first losses must agree with one process.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Annotated, Any

import typer
from crew import Contestant, Crew
from pipeline import CHECKED_STEPS, QUIET, Round, Spread, check_losses, has_deepspeed, measure
from pipeline_worker import Task
from rich.console import Console
from rich.table import Table
from zero_worker import BUCKET, REPLICAS, SMALL_BUCKET

WORKER = Path(__file__).with_name("zero_worker.py")
SIZES = {"num_micro_batches": 2, "num_blocks": 20, "width": 256, "tokens": 64, "micro_batch_size": 2}
WITHIN = 0.03  # how far the bytes may be from the formula


class ZeroCrew(Crew):
    """The processes of one contestant of this benchmark; the loss is the mean over the replicas."""

    def _start(self, rank: int) -> subprocess.Popen[str]:
        mine = self.contestant
        task = json.dumps(asdict(Task(mine.engine, rank, mine.world_size, str(self.folder), **SIZES)))
        path = os.pathsep.join([str(mine.source), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
        pipe, command = subprocess.PIPE, [mine.python, str(WORKER), task]
        with open(self._log(rank), "w") as log:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    def step(self) -> tuple[float, float]:
        start = perf_counter()
        losses = [answer["loss"] for answer in self.ask("step")]
        return perf_counter() - start, mean(losses)


@contextmanager
def zero_crews(contestants: list[Contestant]) -> Iterator[dict[str, Crew]]:
    """Start every contestant, and leave none of their processes behind."""
    with tempfile.TemporaryDirectory(prefix="ds_lite-bench-") as folder, ExitStack() as stack:
        started: dict[str, Crew] = {}
        for index, contestant in enumerate(contestants):
            crew = started[contestant.name] = ZeroCrew(contestant, Path(folder) / str(index))
            stack.callback(crew.end)
            crew.answers()  # ready; one after another, so that nobody starts beside somebody who works
        yield started


# -------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Bytes:
    """Of the rank that holds most, in bytes a parameter: after a step, and at most in backward."""

    stage: int
    replicas: int
    after: float
    after_formula: float
    peak: float
    peak_formula: float

    @property
    def is_right(self) -> bool:
        pairs = (self.after, self.after_formula), (self.peak, self.peak_formula)
        return all(abs(found / formula - 1) <= WITHIN for found, formula in pairs)


def count_bytes(replicas: int) -> list[Bytes]:
    """ZeRO 0, 1 and 2 in turn in the same processes."""
    with zero_crews([Contestant("held", "held", replicas)]) as started:
        by_rank = [answer["held"] for answer in started["held"].ask("held")]
    return [_bytes_of([stages[stage] for stages in by_rank], stage, replicas) for stage in (0, 1, 2)]


def _bytes_of(ranks: list[dict[str, int]], stage: int, replicas: int) -> Bytes:
    count = ranks[0]["parameters"]
    states = 8 / replicas if stage >= 1 else 8
    gradients = 4 / replicas + 4 * SMALL_BUCKET / count if stage == 2 else 4
    after, peak = (max(rank[key] for rank in ranks) / count for key in ("after", "peak"))
    kept = 4 if stage < 2 else 0  # the gradients' buffers, for the next step
    return Bytes(stage, replicas, after, 4 + states + kept, peak, 4 + states + gradients)


def show_bytes(rows: list[Bytes]) -> None:
    table = Table("ZeRO", title=f"bytes a parameter of one rank, float32 with Adam, within {WITHIN:.0%}")
    for heading in ("replicas", "after a step", "formula", "most in backward", "formula", "verdict"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = row.after, row.after_formula, row.peak, row.peak_formula
        verdict = "right" if row.is_right else "WRONG"
        table.add_row(str(row.stage), str(row.replicas), *(f"{number:.2f}" for number in numbers), verdict)
    Console(width=max(Console().width, 110)).print(table)


# ---------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Row:
    """What the table says of one contestant; the ratio is of times, so above 1 is slower than ds_lite."""

    name: str
    processes: int
    step_s: float
    best_s: float
    to_ds_lite: Spread


def rows_of(contestants: list[Contestant], rounds: list[Round]) -> list[Row]:
    rows = []
    for contestant in contestants:
        mine = [r.seconds[contestant.name] for r in rounds]
        relative = Spread.of([r.seconds[contestant.name] / r.seconds["ds_lite"] for r in rounds])
        rows.append(Row(contestant.name, contestant.world_size, median(mine), min(mine), relative))
    return rows


def show_times(rows: list[Row], missing: list[str], rounds: list[Round]) -> None:
    title = (
        f"ZeRO-1: {SIZES['num_blocks']} blocks of width {SIZES['width']}, m={SIZES['num_micro_batches']} "
        f"micro-batches of {SIZES['micro_batch_size']} x {SIZES['tokens']} tokens a replica, "
        f"buckets of {BUCKET:,} elements, {len(rounds)} rounds"
    )
    table = Table("engine", title=title)
    for heading in ("processes", "step s: median", "best", "time / ds_lite"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name, str(row.processes), f"{row.step_s:.3f}", f"{row.best_s:.3f}", str(row.to_ds_lite)
        )
    for name in missing:
        table.add_row(name, "-", "not installed", "-", "-")
    Console(width=max(Console().width, 110)).print(table)
    others = [r.foreign for r in rounds]
    quiet = sum(each < QUIET for each in others)
    print(f"undisturbed rounds: {quiet} of {len(rounds)}; other programs took {median(others):.2f} cores")


def verdicts(rows: list[Row]) -> dict[str, bool]:
    """Whether ds_lite is no slower than each other engine of two replicas, by the median of the ratios."""
    others = [row for row in rows if row.processes > 1 and not row.name.startswith("ds_lite")]
    return {row.name: row.to_ds_lite.median >= 1 for row in others}


def contestants_of(deepspeed_python: str | None, beside: list[Path]) -> list[Contestant]:
    """In the order of a round."""
    found = [
        Contestant("one process", "one_process", 1),
        Contestant("ds_lite", "ds_lite", REPLICAS),
        Contestant("torch ZeroRedundancyOptimizer", "torch_zero", REPLICAS),
        *(Contestant(f"ds_lite at {path}", "ds_lite", REPLICAS, source=path.resolve()) for path in beside),
    ]
    if deepspeed_python is not None:
        found.append(Contestant("DeepSpeed", "deepspeed", REPLICAS, python=deepspeed_python))
    return found


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each engine that count.")] = 21,
    patience: Annotated[float, typer.Option(help="Seconds to spend on finding quiet rounds.")] = 300.0,
    quick: Annotated[bool, typer.Option("--quick", help="Five rounds, however loud.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every time and ratio here.")] = None,
    deepspeed_python: Annotated[
        str, typer.Option(help="The interpreter that has DeepSpeed.")
    ] = sys.executable,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another checkout whose ds_lite runs too.")
    ] = None,
) -> None:
    """Count the bytes of each ZeRO stage, then time one step of the same model in every engine."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that ending it ends its workers
    rounds, patience = (5, 0.0) if quick else (rounds, patience)
    held = [row for replicas in (2, 4) for row in count_bytes(replicas)]
    show_bytes(held)
    missing = [] if has_deepspeed(deepspeed_python) else ["DeepSpeed"]
    contestants = contestants_of(None if missing else deepspeed_python, beside or [])
    with zero_crews(contestants) as started:
        losses = check_losses(started)
        made = measure(started, rounds, patience)
    rows = rows_of(contestants, made)
    show_times(rows, missing, made)
    print(f"the first {CHECKED_STEPS} losses agree: {', '.join(f'{x:.5f}' for x in losses['ds_lite'])}")
    found = verdicts(rows)
    for name, is_no_slower in found.items():
        print(f"ds_lite is no slower than {name}: {'yes' if is_no_slower else 'NO'}")
    if json_file is not None:
        machine = {"python": platform.python_version(), "torch": version("torch"), "cores": os.cpu_count()}
        report: dict[str, Any] = {"bytes": list(map(asdict, held)), "rows": list(map(asdict, rows))}
        report |= {"rounds": list(map(asdict, made)), "losses": losses, "verdicts": found}
        report |= {"missing": missing, "machine": machine, "sizes": SIZES}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if not all(row.is_right for row in held):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
