"""§9.10 A rank that is killed, stopped, fails or runs other code in each instruction, and disks that fail.

Guards against: a job that waits for ever, a table without the rank, the stage, the instruction or the
micro-batch of the fault, an exit code of zero, processes that stay behind, a last checkpoint that is lost.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_job
import pytest
from fault_job import INSTRUCTIONS, RANKS, STRUCK, Fault
from rings import everyday
from test_s09_10_hang import DEVICE, line_of, needs_proc, runs, until
from torch import nn
from world import WorldError

import ds_lite
from ds_lite import launch

pytestmark = needs_proc
SOON_S, LIMIT_S, DEADLINE_S = 10.0, 3.0, 6.0
TORCHRUN_S = 40.0  # its agent gives a stopped process half a minute to end
SCRIPT = Path(fault_job.__file__)

KILLED = [Fault("kill", name) for name in INSTRUCTIONS]
STOPPED = [Fault("stop", name) for name in INSTRUCTIONS]
RAISED = [Fault("raise", "ForwardPass"), Fault("raise", "OptimizerStep"), Fault("loss"), Fault("data")]
OTHERS = [Fault("fewer"), Fault("shape")]
NEEDS_LIMIT = ("stop", "fewer")  # nobody hears of it: only time tells

# Where the table finds the rank at fault: its instruction, and micro-batch where the fault chose one.
PLACES = {
    "loss": ("ForwardPass", str(STRUCK)),
    "data": ("LoadData", "-"),
    "fewer": (r"\w+", r"\S+"),
    "shape": (r"\(caller's code\)", "-"),
}
WORDS = {
    "raise": "a fault: raise",
    "loss": "a fault: loss",
    "data": "a fault: data",
    "shape": r"is float32\(3, 4\) on rank 1 and float32\(4, 4\) on rank 0",
}


def name_of(fault: Fault) -> str:
    return "-".join(filter(None, (fault.kind, fault.instruction)))


def named(faults: list[Fault], *daily: str) -> list[Any]:
    return everyday([pytest.param(fault, id=name_of(fault)) for fault in faults], daily.__contains__)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def over_in_time(marks: Path, patience_s: float) -> None:
    """The job ended within so many seconds of its fault, and none of its processes runs."""
    assert time.time() - float((marks / "struck").read_text()) < patience_s
    pids = [int((marks / f"pid{rank}").read_text()) for rank in range(RANKS)]
    until(lambda: not any(map(runs, pids)), 3.0)


def table_names(text: str, fault: Fault) -> None:
    """Stage, instruction and micro-batch of the rank at fault, and what happened there."""
    once = fault.instruction.startswith(("Reduce", "Optimizer"))
    instruction, micro_batch = PLACES.get(fault.kind, (fault.instruction, "-" if once else str(STRUCK)))
    status = {"kill": "vanished", "stop": r"\w+", "fewer": r"\w+"}.get(fault.kind, "failed")
    stage = fault.rank // 2
    place = "-  +-" if fault.kind == "shape" else rf"{stage} +pipe={stage} data=\d"
    line = line_of(fault.rank, text)
    assert re.search(rf"^{fault.rank} +{place} +{status} +{instruction} +{micro_batch} ", line), text
    assert re.search(WORDS.get(fault.kind, ""), text)


def patience(fault: Fault, limit_s: float) -> float:
    return SOON_S + (limit_s if fault.kind in NEEDS_LIMIT else 0.0)


# ------------------------------------------------------------------------------------------- the harness


@pytest.mark.parametrize(
    "fault",
    named(
        [*KILLED, *STOPPED, *RAISED, *OTHERS],
        *("kill-SendActivation", "kill-ReduceGrads", "stop-RecvGrad", "raise-OptimizerStep", "loss", "shape"),
    ),
)
def test_a_fault_ends_a_world(world: Any, marks: Path, fault: Fault) -> None:
    with pytest.raises(WorldError) as caught:
        world(
            fault_job.body,
            RANKS,
            fault,
            str(marks),
            deadline=DEADLINE_S if fault.kind in NEEDS_LIMIT else 60.0,
        )
    text = str(caught.value)
    if fault.kind in ("kill", *NEEDS_LIMIT):
        over_in_time(marks, patience(fault, DEADLINE_S))
    else:  # the processes live on and take the next test
        assert time.time() - float((marks / "struck").read_text()) < SOON_S
    table_names(text, fault)


def test_the_same_job_without_a_fault(world: Any, marks: Path) -> None:
    assert world(fault_job.body, RANKS, Fault(""), str(marks)) == [2] * RANKS
    assert not (marks / "struck").exists()


# ------------------------------------------------------------------------------------------ the launchers


def words(fault: Fault, marks: Path) -> list[str]:
    return ["--kind", fault.kind, "--instruction", fault.instruction, "--marks", str(marks)]


@pytest.mark.parametrize(
    "fault", named([*KILLED, *STOPPED, *RAISED, *OTHERS], "stop-OptimizerStep", "data", "fewer")
)
def test_a_fault_ends_a_script_of_the_launcher(marks: Path, tmp_path: Path, capfd: Any, fault: Fault) -> None:
    trace = tmp_path / "trace"
    status = launch.run_script(SCRIPT, words(fault, marks), nproc=RANKS, trace_dir=trace, limit_s=LIMIT_S)
    over_in_time(marks, patience(fault, LIMIT_S))
    assert status == 1
    text = (trace / "hang_table.txt").read_text()
    assert text.strip() in capfd.readouterr().err
    table_names(text, fault)


@pytest.mark.parametrize(
    "fault", named([Fault("kill", "BackwardPass"), Fault("stop", "ForwardPass"), Fault("loss")], "loss")
)
def test_a_fault_ends_a_torchrun(marks: Path, tmp_path: Path, fault: Fault) -> None:
    trace = tmp_path / "trace"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    limited = ["--trace", str(trace), "--limit", str(LIMIT_S)]
    done = subprocess.run(
        [*torchrun, *meeting, str(SCRIPT), *words(fault, marks), *limited],
        env={**os.environ, **DEVICE, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode != 0
    over_in_time(marks, TORCHRUN_S if fault.kind == "stop" else patience(fault, LIMIT_S))
    table_names((trace / "hang_table.txt").read_text(), fault)


# ---------------------------------------------------------------------------------------------- checkpoints


def the_last_one_loads(world: Any, marks: Path) -> None:
    steps = world(fault_job.loads, RANKS, str(marks))
    assert [step for step, _ in steps] == [1] * RANKS
    assert steps[0][1] == steps[1][1] != 0.0 and steps[2][1] == steps[3][1] != 0.0, "replicas agree"


def ends_a_world(world: Any, marks: Path, fault: Fault, said: str) -> None:
    with pytest.raises(WorldError) as caught:
        world(fault_job.body, RANKS, fault, str(marks))
    assert time.time() - float((marks / "struck").read_text()) < SOON_S
    for rank in range(RANKS):
        assert re.search(r"failed|vanished", line_of(rank, str(caught.value)))
    assert re.search(said, str(caught.value)), caught.value


def test_a_full_disk_at_save_leaves_the_last_checkpoint(world: Any, marks: Path) -> None:
    """By a limit on the size of files, on one rank alone."""
    ends_a_world(world, marks, Fault("full"), r"SaveCheckpoint(.|\n)*File too large")
    the_last_one_loads(world, marks)
    assert sorted(path.name for path in (marks / "saved").iterdir() if path.is_dir()) == ["good"], (
        "no half of one"
    )


def test_a_corrupt_checkpoint_is_named_on_every_rank(world: Any, marks: Path) -> None:
    ends_a_world(world, marks, Fault("corrupt"), r"LoadCheckpoint(.|\n)*layer_02-model_states\.pt")


@pytest.mark.full
@pytest.mark.parametrize("kind, said", [("full", "File too large"), ("corrupt", "layer_02-model_states.pt")])
def test_they_end_a_script_of_the_launcher(
    marks: Path, tmp_path: Path, capfd: Any, kind: str, said: str
) -> None:
    fault, trace = Fault(kind), tmp_path / "trace"
    assert launch.run_script(SCRIPT, words(fault, marks), nproc=RANKS, trace_dir=trace, limit_s=LIMIT_S) == 1
    over_in_time(marks, SOON_S)
    table, printed = (trace / "hang_table.txt").read_text(), capfd.readouterr().err
    assert said in printed and table.strip() in printed
    for rank in range(RANKS):
        assert re.search("failed +(Save|Load)Checkpoint", line_of(rank, table))


# ------------------------------------------------------------------------------------------ other replicas


def other_replica(rank: int, kind: str) -> None:
    """Data ranks 0 to 2 of one stage; rank 1 has a tensor more, or one of another shape or dtype."""
    layers: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if rank == 1:
        layers[1] = {"shape": nn.Linear(4, 3), "dtype": nn.Linear(4, 4).double(), "more": nn.Linear(4, 4)}[
            kind
        ]
        layers += [nn.Linear(4, 4)] if kind == "more" else []
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    ds_lite.initialize(model=nn.Sequential(*layers), config=config)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("shape", r"tensor 2 of stage 0 is float32\(3, 4\) on rank 1 and float32\(4, 4\) on rank 0"),
        ("dtype", r"tensor 2 .* is float64\(4, 4\) on rank 1 and float32\(4, 4\) on rank 0"),
        ("more", r"tensor 4 .* is float32\(4, 4\) on rank 1 and nothing on rank 0"),
    ],
    ids=["shape", "dtype", "more"],
)
def test_replicas_that_differ_are_refused_on_every_rank(world: Any, kind: str, said: str) -> None:
    world.raises(ValueError, said, other_replica, 3, kind)


def test_each_instruction_is_struck() -> None:
    """All ten, by both signals."""
    from ds_lite.pipe.engine import PipelineEngine

    known = {kind.__name__ for kind in PipelineEngine._INSTRUCTION_MAP}
    of: Callable[[list[Fault]], set[str]] = lambda faults: {fault.instruction for fault in faults}  # noqa: E731
    assert of(KILLED) == of(STOPPED) == known
