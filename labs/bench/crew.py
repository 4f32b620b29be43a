"""The processes of one engine under measurement, which wait for a word and answer with a line of JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeline_worker import Task

LIMIT_S = 300.0  # for one answer: a step, or the imports at the start

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("pipeline_worker.py")


@dataclass(frozen=True)
class Contestant:
    """One row of the table: which engine, how many processes, which interpreter, which ds_lite."""

    name: str
    engine: str
    world_size: int
    python: str = sys.executable
    source: Path = ROOT


class Crew:
    """The processes of one contestant, waiting for a word on their standard input."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self.contestant, self.folder = contestant, folder
        folder.mkdir()
        self.processes = [self._start(rank) for rank in range(contestant.world_size)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        mine = self.contestant
        task = json.dumps(asdict(Task(mine.engine, rank, mine.world_size, str(self.folder))))
        path = os.pathsep.join([str(mine.source), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
        pipe, command = subprocess.PIPE, [mine.python, str(WORKER), task]
        with open(self._log(rank), "w") as log:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def ask(self, word: str) -> list[dict[str, Any]]:
        """Say one word to every process; their answers, by rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """One answer of every process.

        Raises: RuntimeError with the log of a process that ended or says nothing for too long.
        """
        found = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
            line = process.stdout.readline() if ready else ""
            if not line:
                what = "ended" if ready else f"gave no answer in {LIMIT_S:g} s"
                tail = "\n".join(self._log(rank).read_text().splitlines()[-25:])
                raise RuntimeError(f"{self.contestant.name}: rank {rank} {what}\n{tail}")
            found.append(json.loads(line))
        return found

    def step(self) -> tuple[float, float]:
        """Make one step; seconds until its last process is done, and the loss."""
        start = perf_counter()
        losses = [answer["loss"] for answer in self.ask("step")]
        return perf_counter() - start, next(loss for loss in losses if loss is not None)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def crews(contestants: list[Contestant]) -> Iterator[dict[str, Crew]]:
    """Start every contestant, and leave none of their processes behind."""
    with tempfile.TemporaryDirectory(prefix="ds_lite-bench-") as folder, ExitStack() as stack:
        started = {}
        for index, contestant in enumerate(contestants):
            crew = started[contestant.name] = Crew(contestant, Path(folder) / str(index))
            stack.callback(crew.end)
            crew.answers()  # ready; one after another, so that nobody starts beside somebody who works
        yield started
