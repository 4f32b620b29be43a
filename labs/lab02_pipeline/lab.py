"""Lab 2: fill the pipeline (§9.2 §9.10). README.md has the steps; 2 or 4 processes.

    torchrun --nproc-per-node 4 labs/lab02_pipeline/lab.py --impl solution
    python -m ds_lite lab 2 --nproc 4 --impl solution
    python labs/lab02_pipeline/lab.py        one process: your stream and a rehearsal of run_stage, no more

Legend: S stages, m micro-batches, B sequences in one, T context, H width, s a stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import stage_run
import training
from _lab import Hint, Lab
from pictures import write_pictures
from stream_check import as_schedule, check_stream
from training import GLOBAL_SEQUENCES, NUM_MICRO_BATCHES, NUM_STAGES, TARGET_LOSS, Measured, Training

import ds_lite
from ds_lite import comm
from ds_lite.pipe.schedule import GPipeSchedule, PipeSchedule
from ds_lite.pipe.simulate import simulate
from ds_lite.pipe.timeline import timeline_text

LAW = 1e-10  # float64, N processes against one
SIM_STAGES, SIM_MICRO_BATCHES = 4, 8


def main() -> None:
    ds_lite.init_distributed(verbose=False)
    lab = Lab(2, Path(__file__).resolve().parent, unlocks="the simulator and the engine tell you")
    lab.demand_predictions()
    schedule = part_a(lab)
    rehearsal(lab)
    if (world := comm.get_world_size()) not in (2, 4):
        lab.leave(
            f"That was all that {world} process(es) can show; lab 2 goes on with 2 or 4, such as --nproc 4"
        )
    part_b(lab)
    part_c(lab, schedule)
    lab.finish()


# ---------------------------------------------------------------------------------- A: the stream, drawn


def part_a(lab: Lab) -> type[PipeSchedule]:
    """The learner's stream against the real one, then on the virtual clock beside GPipe."""
    S, m = SIM_STAGES, SIM_MICRO_BATCHES
    lab.heading("A  Your 1F1B stream")
    mine = as_schedule(lab.code.stream)
    with lab.step("step 5a"):
        try:
            compared = check_stream(lab.code.stream)
        except Hint:
            _try_to_draw(lab, mine)
            raise
    lab.say(timeline_text(mine, S, m))
    lab.say(f"equal to the real schedule in {compared} streams, every S and m up to 8")
    run, gpipe = simulate(mine, S, m), simulate(GPipeSchedule, S, m)
    lab.say(
        f"GPipe, all forwards first: bubble {gpipe.bubble_of_total:.3f}, the same; in flight "
        f"{_listed(gpipe.peak_live_buffers)} instead of {_listed(run.peak_live_buffers)}.\n"
        f"1F1B does not shrink the bubble, it shrinks the memory."
    )
    lab.row(
        "ticks (S=4, m=8)",
        int(run.end_time),
        target="= 2(m+S-1)",
        passed=run.end_time == 22,
        prediction="ticks",
    )
    lab.row(
        "bubble, idle/total",
        run.bubble_of_total,
        target="= 3/11",
        passed=run.bubble_of_total == (S - 1) / (m + S - 1),
        prediction="bubble_of_total",
    )
    lab.row(
        "bubble, idle/ideal",
        run.bubble_of_ideal,
        target="= 3/8",
        passed=run.bubble_of_ideal == (S - 1) / m,
        prediction="bubble_of_ideal",
    )
    lab.row(
        "peak buffers, stage 0..3",
        run.peak_live_buffers,
        target="= S-s",
        passed=list(run.peak_live_buffers) == [S - s for s in range(S)],
        prediction="peak_buffers",
    )
    lab.row(
        "the same under GPipe",
        gpipe.peak_live_buffers,
        target="= m",
        passed=list(gpipe.peak_live_buffers) == [m] * S and gpipe.bubble_of_total == run.bubble_of_total,
        prediction="peak_buffers_gpipe",
    )
    return mine


def _try_to_draw(lab: Lab, mine: type[PipeSchedule]) -> None:
    """A wrong stream may still be drawn, and often shows what is wrong."""
    try:
        lab.say(timeline_text(mine, SIM_STAGES, SIM_MICRO_BATCHES))
    except Exception:  # whatever the learner's code returns
        lab.say("(cannot be drawn)")


# --------------------------------------------------------------------------- B: the stage, over processes


def rehearsal(lab: Lab) -> None:
    """run_stage() with all stages as threads of one process: a mistake becomes a hint, not a hang."""
    lab.heading("B  Your run_stage(), float64")
    with lab.step("step 5b"):
        stage_run.rehearse(lab.code)
    lab.say("rehearsal, 3 stages in one process: the gradients of one process")


def part_b(lab: Lab) -> None:
    """run_stage() with one process a stage."""
    world = comm.get_world_size()
    report = stage_run.run_in_processes(lab.code, SIM_MICRO_BATCHES)
    lab.say(f"{world} stages, one process each: largest gradient difference {report.largest_difference:.1e}")
    lab.row(
        "max |grad - one process|, run_stage",
        report.largest_difference,
        target="<= LAW 1e-10",
        passed=report.largest_difference <= LAW,
    )
    limits = [min(world - s, SIM_MICRO_BATCHES) for s in range(world)]
    lab.row(
        f"peak buffers, run_stage, {world} stages",
        report.peak_live,
        target=f"= {_listed(limits)}",
        passed=report.peak_live == limits,
    )


# ------------------------------------------------------------------------------- C: the engine, real text


def part_c(lab: Lab, schedule: type[PipeSchedule]) -> None:
    """Gradients of the engine, then the training, then what one step of it moved and how long it took."""
    plan = training.QUICK if lab.quick else training.FULL
    replicas = comm.get_world_size() // NUM_STAGES
    lab.heading(f"C  Your stream drives the engine: {NUM_STAGES} stages x {replicas} replicas")
    difference = training.gradient_difference(schedule)
    run = Training(lab, plan, schedule)
    parameters = sum(p.numel() for p in ds_lite.toy.GPT(plan.shape).parameters())
    lab.say(
        f"byte-level GPT, {parameters / 1e6:.2f} M parameters; {len(run.text.train) / 1e6:.1f} MB of the "
        f"standard library's source; {GLOBAL_SEQUENCES} x {plan.shape.context} bytes "
        f"a step, {plan.steps} steps"
    )
    run.run()
    loss = run.validation_loss()
    lab.say(f"on text it has not seen: {loss:.3f} nats/byte")
    measured = run.measure()
    lab.row(
        "max |grad - one process|, engine",
        difference,
        target="<= LAW 1e-10",
        passed=difference <= LAW,
    )
    _rows_of_traffic(lab, run, measured)
    lab.row(
        f"loss after {plan.steps} steps, nats/byte",
        loss,
        target=f"<= {TARGET_LOSS}" + (", not if --quick" if lab.quick else ""),
        passed=None if lab.quick else loss <= TARGET_LOSS,
    )
    _row_of_bubble(lab, run, measured)
    lab.settings = {
        "steps": plan.steps,
        "micro_batches": NUM_MICRO_BATCHES,
        "micro_batch_size": run.size,
        "stages": NUM_STAGES,
        "replicas": replicas,
        "parameters": parameters,
        "loss": loss,
    }
    if lab.is_main:
        lab.say(f"timelines: {write_pictures(lab.out, measured, schedule)}")


def _rows_of_traffic(lab: Lab, run: Training, measured: Measured) -> None:
    """Messages and bytes of one step per rank, from the ledgers of one rank of each stage."""
    ledger, m = measured.ledger, NUM_MICRO_BATCHES
    mine = (
        ledger.total(axis="pipe", operation="send", instruction="SendActivation"),
        ledger.total(axis="pipe", operation="send", instruction="SendGrad"),
        ledger.total(axis="data", operation="all_reduce", instruction="ReduceGrads").sent,
        [p.numel() for p in run.engine.module.parameters()],
    )
    everyone = [mine] * comm.get_world_size()
    comm.all_gather_object(everyone, mine)
    first, last = everyone[0], everyone[-1]
    size = run.size * run.plan.shape.context * run.plan.shape.width * 4  # B*T*H float32
    wanted = m * size
    for name, ends, traffic in (
        ("activations", "stage 0 to 1", first[0]),
        ("gradients", "stage 1 to 0", last[1]),
    ):
        lab.row(
            f"{name} sent, {ends}",
            traffic.calls,
            target=f"= m = {m}",
            passed=traffic.calls == m,
            prediction=f"{name}_sent",
        )
        lab.row(
            f"bytes of these {name}",
            traffic.sent,
            target=f"= 4mBTH = {wanted:,}",
            passed=traffic.sent == wanted,
        )
    half = len(everyone) // 2
    others = sum(sent.calls for sent, *_ in everyone[half:]) + sum(one[1].calls for one in everyone[:half])
    lab.row("messages in the other direction", others, target="= 0", passed=others == 0)
    replicas = run.replicas
    elements = sum(first[3]) + len(first[3])  # P of the stage, and a flag for each of its n tensors
    reduced = 2 * (replicas - 1) * 4 * elements // replicas
    lab.row(
        "bytes averaged over dp, stage 0",
        first[2],
        target=f"= 2(dp-1)/dp*4(P+n) = {reduced:,}",
        passed=abs(first[2] - reduced) < 8,
    )
    peaks = training.peak_live(measured.events, len(everyone))
    limits = [min(NUM_STAGES - s, m) for s in range(NUM_STAGES)]
    lab.row(
        "peak buffers, training, stage 0..1", peaks, target=f"= {_listed(limits)}", passed=peaks == limits
    )


def _row_of_bubble(lab: Lab, run: Training, measured: Measured) -> None:
    """A time, so a promise only where every rank has a GPU of its own."""
    formula = (NUM_STAGES - 1) / (NUM_MICRO_BATCHES + NUM_STAGES - 1)
    low, high = formula - 0.02, 0.8
    on_gpus = run.engine.device.type == "cuda"
    lab.row(
        "wall bubble, idle/total",
        measured.wall_bubble,
        target=f"{low:.2f}-{high:.2f}" if on_gpus else f"{formula:.3f}, on GPUs a band",
        passed=low <= measured.wall_bubble <= high if on_gpus and not lab.quick else None,
    )


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
