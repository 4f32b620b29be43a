"""Lab 2: the timeline of a real step and the simulated one, below one another in one SVG."""

from __future__ import annotations

import statistics
from pathlib import Path

import training
from training import NUM_MICRO_BATCHES, NUM_STAGES, Measured

from ds_lite.pipe.schedule import PipeSchedule
from ds_lite.pipe.simulate import simulate
from ds_lite.pipe.timeline import timeline_svg


def write_pictures(folder: Path, measured: Measured, schedule: type[PipeSchedule]) -> str:
    """One SVG: the measured step above, below it the same passes on the virtual clock."""
    computing = training.passes(measured.events)

    def median_ms(instruction: str) -> list[float]:
        return [
            1e3
            * statistics.median(
                e.end - e.start for e in computing if e.instruction == instruction and e.stage_id == s
            )
            for s in range(NUM_STAGES)
        ]

    forward, backward = median_ms("ForwardPass"), median_ms("BackwardPass")
    ideal = simulate(schedule, NUM_STAGES, NUM_MICRO_BATCHES, forward=forward, backward=backward)
    ranks = len({event.rank for event in measured.events})
    real = timeline_svg(
        training.spans(measured.events),
        title=f"Measured: one training step, {NUM_STAGES} stages x {ranks // NUM_STAGES} replicas "
        f"(ranks from {ranks // NUM_STAGES} on are stage 1)",
        unit="ms",
        row_name="rank",
    )
    virtual = timeline_svg(
        ideal.spans,
        title="Simulated: the same passes, each as long as its measured median, transfers free",
        unit="ms",
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "measured.svg").write_text(real, encoding="utf-8")
    (folder / "simulated.svg").write_text(virtual, encoding="utf-8")
    (folder / "timeline.svg").write_text(_stacked([real, virtual]), encoding="utf-8")
    return str(folder / "timeline.svg")


def _stacked(pictures: list[str]) -> str:
    """Pictures below one another, as one."""
    parts, y, width = [], 0, 0
    for picture in pictures:
        head = picture.split(">", 1)[0]
        w, h = (int(head.split(f' {name}="')[1].split('"')[0]) for name in ("width", "height"))
        parts.append(picture.replace("<svg ", f'<svg y="{y}" ', 1))
        y, width = y + h + 12, max(width, w)
    y -= 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}">\n'
        + "".join(parts)
        + "</svg>\n"
    )
