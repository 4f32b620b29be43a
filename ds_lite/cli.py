"""The `ds-lite` command: find a section, draw a schedule, explain a config, run a lab (§9.2 §9.6 §9.10).

Each command checks what the user typed, asks the module that knows, and prints. A mistake is answered by one
red line on stderr and exit status 2.
"""

import json
import sys
from enum import Enum
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ds_lite.cli_jobs import grade, hang, lab, lab_number
from ds_lite.cli_text import complain, one_line_errors, show, show_rows
from ds_lite.conformance.command import conformance

app = typer.Typer(
    name="ds-lite",
    help="The readable engine of chapter 9: pipeline, data, tensor, expert and sequence parallelism.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SHOWN = 8  # more groups, or more ranks in a group, are cut short


class Kind(str, Enum):
    """Names of the schedules that can be drawn."""

    train = "train"
    inference = "inference"
    data_parallel = "data-parallel"
    gpipe = "gpipe"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `ds-lite` script: runs one command and exits with its status."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(given or ["--help"], prog_name="ds-lite", standalone_mode=False)
    except Exception as error:  # the parser's own complaints know how to print themselves
        if not hasattr(error, "format_message"):
            raise
        complain(error.format_message().replace("Value error, ", ""))
        status = 2
    sys.exit(status)


@app.command()
def where(
    section: Annotated[str, typer.Argument(help="Number of a section, such as 9.10 or 9.10.2.")],
) -> None:
    """Say where a section of the chapter lives: modules, commands to run, and DeepSpeed's own symbols."""
    from ds_lite.sections import find

    with one_line_errors():
        found = find(section)
    rows = {
        "modules": list(found.modules),
        "chapter": [f"python {found.chapter}"] if found.chapter else [],
        "tests": [f"python -m pytest {' '.join(found.tests)}"] if found.tests else [],
        "lab": [f"ds-lite lab {lab_number(found.lab)} --nproc 4"] if found.lab else [],
        "DeepSpeed": [f"deepspeed/{symbol}" for symbol in found.deepspeed],
    }
    show(Text(f"§{found.number} {found.title} · {found.chinese_title}", style="bold"))
    show_rows({name: values or ["not yet"] for name, values in rows.items()})


@app.command()
def schedule(
    stages: Annotated[int, typer.Option(min=1, help="Number of pipeline stages S.")],
    micro_batches: Annotated[int, typer.Option(min=1, help="Number of micro-batches m in a step.")],
    kind: Annotated[
        Kind, typer.Option(help="Which schedule of §9.10.1; gpipe is for comparison.")
    ] = Kind.train,
    forward: Annotated[float, typer.Option(help="Time of one forward pass of a stage.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of one backward pass of a stage.")] = 1.0,
    transfer: Annotated[float, typer.Option(help="Time of one message between two stages.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline as a picture to this file.")] = None,
) -> None:
    """Draw a pipeline schedule tick by tick and measure it on a virtual clock (§9.2, §9.10)."""
    from ds_lite.pipe import schedule as schedules
    from ds_lite.pipe.simulate import simulate
    from ds_lite.pipe.timeline import timeline_svg, timeline_text

    classes: dict[Kind, type[schedules.PipeSchedule]] = {
        Kind.train: schedules.TrainSchedule,
        Kind.inference: schedules.InferenceSchedule,
        Kind.data_parallel: schedules.DataParallelSchedule,
        Kind.gpipe: schedules.GPipeSchedule,
    }
    chosen = classes[kind]
    with one_line_errors():
        run = simulate(chosen, stages, micro_batches, forward=forward, backward=backward, transfer=transfer)
        picture = timeline_text(chosen, stages, micro_batches)
        if svg is not None:
            title = f"{chosen.__name__}, {stages} stages, {micro_batches} micro-batches"
            svg.parent.mkdir(parents=True, exist_ok=True)
            svg.write_text(timeline_svg(run.spans, title=title), encoding="utf-8")
    rows = {
        "end time": f"{run.end_time:g}   (forward {forward:g}, backward {backward:g}, transfer {transfer:g})",
        "busy per stage": " ".join(f"{time:g}" for time in run.busy),
        "idle per stage": " ".join(f"{time:g}" for time in run.idle),
        "bubble": f"{run.bubble_of_total:.3f} of the total time, {run.bubble_of_ideal:.3f} of the ideal time",
        "peak live micro-batches": " ".join(map(str, run.peak_live_buffers)),
        "deadlock": "none" if run.deadlock is None else str(run.deadlock),
    }
    show(Text(picture))
    show_rows({name: [value] for name, value in rows.items()})
    if svg is not None:
        show(Text(f"wrote {svg}"))


@app.command()
def topology(
    axes: Annotated[list[str], typer.Argument(help="Axes, outermost first: pipe=4 data=3 model=2.")],
    rank: Annotated[
        int | None, typer.Option(help="Show where this global rank sits, and its groups.")
    ] = None,
) -> None:
    """Show the process groups of a grid of ranks, or the place of one rank in it (§9.11)."""
    from ds_lite.topology import ProcessTopology

    with one_line_errors():
        names, sizes = zip(*(_axis(word) for word in axes))
        grid = ProcessTopology(axes=list(names), dims=list(sizes))
        place = None if rank is None else grid.get_coord(rank)
    rows: dict[str, list[str]] = {}
    for name, size in zip(names, sizes):
        if place is None:
            others = [[(other, at) for at in range(dim)] for other, dim in zip(names, sizes) if other != name]
            first = [_listed(grid.filter_match(**dict(at))) for at in islice(product(*others), SHOWN)]
            number = prod(sizes) // size
            more = [f"... {number} groups in all"] if number > SHOWN else []
            rows[name] = [" ".join([*first, *more])]
        else:
            fixed = {other: at for other, at in place._asdict().items() if other != name}
            rows[name] = [f"{getattr(place, name)} of {size}, in group {_listed(grid.filter_match(**fixed))}"]
    show(Text(f"{grid.world_size()} ranks" if rank is None else f"rank {rank} of {grid.world_size()}"))
    show_rows(rows)


app.command()(lab)


@app.command()
def autotp(
    model: Annotated[
        str, typer.Argument(help="Class of transformers, config.json or its folder, or package.module:Class.")
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 2,
    partition_config: Annotated[
        Path | None, typer.Option(help="JSON file with a plan of your own, as in the config.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Name of a known architecture's plan.")] = None,
    grain: Annotated[int, typer.Option(min=1, help="Deal columns of MLPs in units of so many.")] = 1,
    vocab_parallel: Annotated[bool, typer.Option(help="Cut the output layer over the vocabulary.")] = False,
    every: Annotated[
        bool, typer.Option("--every", help="One line for each module, also in equal blocks.")
    ] = False,
) -> None:
    """Show how AutoTP would cut a model: module, kind, shapes before and after, and why (§9.13)."""
    with one_line_errors():
        from ds_lite.tensor_parallel.empty_model import empty_model
        from ds_lite.tensor_parallel.partition_config import config_of
        from ds_lite.tensor_parallel.policy import make_plan

        given = None if partition_config is None else json.loads(partition_config.read_text(encoding="utf-8"))
        made = empty_model(model)
        plan = make_plan(
            made, tp, grain=grain, partition_config=config_of(given, preset), vocab_parallel=vocab_parallel
        )
    rows = [
        ("module", "kind", "before", "each rank", "why"),
        *(plan.rows(made) if every else plan.short_rows(made)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for place, row in enumerate(rows):
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip()
        show(Text(line, style="" if place else "bold"))
    total, kept = plan.shares(made)
    share = f"{min(kept):,}" if len(set(kept)) == 1 else f"{min(kept):,} to {max(kept):,}"
    show(Text(f"{total:,} parameters; each of {tp} ranks holds {share} ({max(kept) / total:.0%})"))


@app.command()
def explain(
    config: Annotated[Path, typer.Argument(help="A ds_config, as a JSON file.")],
    world: Annotated[int, typer.Option(min=1, help="Number of ranks.")],
    model: Annotated[str | None, typer.Option(help="A model, named as for autotp.")] = None,
    stages: Annotated[
        int | None, typer.Option(help="Pipeline stages, of PipelineModule.from_model or of a model to come.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose groups, reductions and messages.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 1024,
    mask: Annotated[bool, typer.Option("--mask", help="Batches bring an attention mask.")] = False,
    partition: Annotated[str, typer.Option(help="partition_method of PipelineModule.")] = "parameters",
) -> None:
    """Show what initialize would form: groups, reductions, messages, bytes; or why it refuses (§9.6)."""
    with one_line_errors():
        from ds_lite.explain import explain as explained
        from ds_lite.explain.text import lines
        from ds_lite.tensor_parallel.empty_model import empty_model

        made = None if model is None else empty_model(model)
        options = {"rank": rank, "tokens": tokens, "has_mask": mask, "partition_method": partition}
        said = explained(config, world, made, num_stages=stages, **options)  # type: ignore[arg-type]
    for line in lines(said):
        show(Text(line.text, style=line.style))


app.command()(grade)
app.command()(hang)
app.command()(conformance)


def _listed(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= SHOWN else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"


def _axis(word: str) -> tuple[str, int]:
    name, equals, size = word.partition("=")
    if not equals or not size.isdecimal():
        raise ValueError(f"{word!r} is not an axis; write name=size, such as pipe=4 (§9.11)")
    return name, int(size)
