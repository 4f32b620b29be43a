"""How fast is the pipeline? One process, ds_lite, torch's Schedule1F1B and DeepSpeed in turn (§9.2 §9.10).

    python labs/bench/pipeline.py                                   # a few minutes on two cores
    python labs/bench/pipeline.py --quick --json table.json
    python labs/bench/pipeline.py --deepspeed-python OTHER/bin/python

Seconds of a shared machine mean little; ratios of runs that alternate mean much. So all engines live in
worker processes of one thread each, only one engine works at a time, and a round is one step of each, begun
by another one each time. A ratio is formed inside its round; the table shows the median of these, with the
lowest and the highest. A round beside which other programs kept a core busy says nothing about overlap:
rounds wait for a quiet machine as long as `--patience` allows, and the quietest count.

A step is forward, backward and optimizer over m micro-batches, with the loss known: on every rank for ds_lite
and DeepSpeed, on the last stage for torch. Before anything is timed, the first losses must agree.

The bubble limit is one process's time with only the pipeline's ramps idle: T1 (m+S-1)/(m S).
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Annotated

import typer
from bystanders import Reading, foreign_cores, wait_until_quiet
from crew import Contestant, Crew, crews
from pipeline_worker import Task
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

NUM_STAGES = 2
CHECKED_STEPS = 3
QUIET = 0.1  # cores: a round beside less than this counts as undisturbed
LOSS_TOLERANCE = 1e-4  # relative, float32 after a few steps; a wrong gradient is off by far more

# ----------------------------------------------------------------------------------------- measuring


def check_losses(all_crews: dict[str, Crew]) -> dict[str, list[float]]:
    """The first losses of every contestant, warm-up at once.

    Raises: RuntimeError if they differ between contestants, or do not change from step to step.
    """
    losses = {name: [crew.step()[1] for _ in range(CHECKED_STEPS)] for name, crew in all_crews.items()}
    truth = next(iter(losses.values()))
    if min(abs(a - b) / abs(a) for a, b in zip(truth, truth[1:])) < 10 * LOSS_TOLERANCE:
        raise RuntimeError(
            f"the losses hardly change, so they cannot tell a right step from a wrong one: {truth}"
        )
    for name, found in losses.items():
        if max(abs(a - b) / abs(a) for a, b in zip(truth, found)) > LOSS_TOLERANCE:
            raise RuntimeError(
                f"{name} does not train the same model: losses {found}, one process has {truth}"
            )
    return losses


@dataclass(frozen=True)
class Round:
    """Seconds of one step of each contestant, and the cores that other programs took meanwhile."""

    seconds: dict[str, float]
    foreign: float


def measure(all_crews: dict[str, Crew], rounds: int, patience_s: float) -> list[Round]:
    """The quietest `rounds`, out of as many as it takes for these to be undisturbed, or as time allows."""
    pids = [os.getpid(), *(process.pid for crew in all_crews.values() for process in crew.processes)]
    made: list[Round] = []
    deadline = perf_counter() + patience_s
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        quiet = bar.add_task("undisturbed rounds", total=rounds)
        while len(made) < rounds or perf_counter() < deadline:
            wait_until_quiet(pids, limit_cores=QUIET, deadline=deadline)
            before = Reading.now(pids)
            # Who runs behind one process, which leaves a core idle, is slower than behind two.
            order = Random(len(made)).sample([*all_crews], len(all_crews))
            seconds = {name: all_crews[name].step()[0] for name in order}
            made.append(Round(seconds, foreign_cores(before, Reading.now(pids))))
            bar.update(quiet, completed=sum(each.foreign < QUIET for each in made))
            if bar.finished:
                break
    return sorted(made, key=lambda each: each.foreign)[:rounds]


@dataclass(frozen=True)
class Spread:
    """Ratios of one contestant, one a round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """What the table says of one contestant; both ratios are times, so lower is faster."""

    name: str
    processes: int
    step_s: float
    best_s: float
    to_ds_lite: Spread
    to_bubble_limit: Spread | None


def rows_of(contestants: list[Contestant], rounds: list[Round]) -> list[Row]:
    """The table's rows."""
    m = Task("", 0, 1, "").num_micro_batches
    limits = [r.seconds["one process"] * (m + NUM_STAGES - 1) / (m * NUM_STAGES) for r in rounds]
    rows = []
    for contestant in contestants:
        mine = [r.seconds[contestant.name] for r in rounds]
        relative = Spread.of([r.seconds[contestant.name] / r.seconds["ds_lite"] for r in rounds])
        bubble = Spread.of([a / b for a, b in zip(mine, limits)]) if contestant.world_size > 1 else None
        rows.append(Row(contestant.name, contestant.world_size, median(mine), min(mine), relative, bubble))
    return rows


# ----------------------------------------------------------------------------------------- reporting


def show(rows: list[Row], missing: list[str], rounds: list[Round]) -> None:
    """The table."""
    size = Task("", 0, 1, "")
    title = (
        f"{size.num_blocks} blocks of width {size.width}, m={size.num_micro_batches} micro-batches of "
        f"{size.micro_batch_size} x {size.tokens} tokens, {len(rounds)} rounds"
    )
    table = Table("engine", title=title)
    for heading in ("processes", "step s: median", "best", "time / ds_lite", "time / bubble limit"):
        table.add_column(heading, justify="right")
    for row in rows:
        bubble = str(row.to_bubble_limit) if row.to_bubble_limit else "-"
        times = f"{row.step_s:.3f}", f"{row.best_s:.3f}"
        table.add_row(row.name, str(row.processes), *times, str(row.to_ds_lite), bubble)
    for name in missing:
        table.add_row(name, "-", "not installed", "-", "-", "-")
    Console(width=max(Console().width, 110)).print(table)
    others = [r.foreign for r in rounds]
    quiet = sum(each < QUIET for each in others)
    print(f"undisturbed rounds: {quiet} of {len(rounds)}; other programs took {median(others):.2f} cores")


def has_deepspeed(python: str) -> bool:
    """Whether that interpreter finds DeepSpeed, without importing it."""
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def contestants_of(deepspeed_python: str | None, beside: list[Path]) -> list[Contestant]:
    """In the order of a round."""
    found = [
        Contestant("one process", "one_process", 1),
        Contestant("ds_lite", "ds_lite", NUM_STAGES),
        Contestant("torch Schedule1F1B", "torch_1f1b", NUM_STAGES),
        *(Contestant(f"ds_lite at {path}", "ds_lite", NUM_STAGES, source=path.resolve()) for path in beside),
    ]
    if deepspeed_python is not None:
        found.append(Contestant("DeepSpeed", "deepspeed", NUM_STAGES, python=deepspeed_python))
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
    """Time one step of the same model in every engine, in alternation, and print the ratios."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that ending it ends its workers
    rounds, patience = (5, 0.0) if quick else (rounds, patience)
    missing = [] if has_deepspeed(deepspeed_python) else ["DeepSpeed"]
    contestants = contestants_of(None if missing else deepspeed_python, beside or [])
    with crews(contestants) as all_crews:
        losses = check_losses(all_crews)
        made = measure(all_crews, rounds, patience)
        traced = all_crews["ds_lite"].ask("trace")[0]
    rows = rows_of(contestants, made)
    show(rows, missing, made)
    events, each_s = traced["events"], traced["seconds"]
    traced["share"] = events * each_s / median(r.seconds["ds_lite"] for r in made)
    print(f"tracing: {events} events of {each_s * 1e6:.1f} us each, {traced['share']:.2%} of a step")
    print(f"the first {CHECKED_STEPS} losses agree: {', '.join(f'{x:.5f}' for x in losses['ds_lite'])}")
    if json_file is not None:
        machine = {"python": platform.python_version(), "torch": version("torch"), "cores": os.cpu_count()}
        report = {"rows": list(map(asdict, rows)), "rounds": list(map(asdict, made)), "losses": losses}
        report |= {"missing": missing, "tracing": traced, "machine": machine}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
