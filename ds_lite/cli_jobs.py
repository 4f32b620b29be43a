"""The `ds-lite` commands about jobs of several processes: start a lab, grade a class, read a job that hangs
(§9.2 §9.10)."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_lite.cli_text import one_line_errors, show


def lab(
    number: Annotated[int, typer.Argument(help="Number of the lab.")],
    nproc: Annotated[int, typer.Option(min=1, help="Processes to start.")] = 4,
    impl: Annotated[str, typer.Option(help="Whose code: student, solution, or a FILE.py.")] = "student",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: a check, not an experiment.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for results [default: runs/labNN].")] = None,
    skip_predictions: Annotated[
        bool, typer.Option("--skip-predictions", help="Start although some are missing.")
    ] = False,
) -> None:
    """Run a lab on this machine and pass on its verdict as the exit status (§9.2, §9.10)."""
    with one_line_errors():
        script = _lab_script(number)
        folder = out or Path("runs") / f"lab{number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        from ds_lite.launch import run_script

        arguments = ["--impl", impl, "--out", str(folder)]
        arguments += ["--quick"] * quick + ["--skip-predictions"] * skip_predictions
        status = run_script(script, arguments, nproc=nproc, trace_dir=folder / "trace")
    raise typer.Exit(status)


def grade(
    folder: Annotated[Path, typer.Argument(help="Folder with labNN_name/student.py files, one folder each.")],
    nproc: Annotated[int, typer.Option(min=1, help="Processes for each lab.")] = 4,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for each file.")] = 300.0,
    json: Annotated[Path, typer.Option(help="Where the grades go.")] = Path("runs/grades.json"),
    skip_predictions: Annotated[
        bool, typer.Option("--skip-predictions", help="Do not ask for predictions.")
    ] = False,
) -> None:
    """Run all student files of a class and show how far each has come (§9.16)."""
    from ds_lite import grading

    with one_line_errors():
        files = grading.find(folder)
    grades = []
    with Console(stderr=True).status("") as status:
        for place, one in enumerate(files, 1):
            status.update(f"{place} of {len(files)}: {one.student}, lab {one.lab}")
            grades.append(grading.grade(one, nproc=nproc, limit_s=limit, skip_predictions=skip_predictions))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("student", "lab", "step", "pass", "hint"):
        table.add_column(name, overflow="fold" if name == "hint" else "ellipsis")
    for done in grades:
        word = Text("pass", style="green") if done.passed else Text("no", style="red")
        table.add_row(Text(done.student), str(done.lab), done.step or "all", word, Text(done.hint))
    Console(highlight=False).print(table)
    grading.write(grades, json)
    show(Text(f"{sum(one.passed for one in grades)} of {len(grades)} pass   written to {json}"))
    raise typer.Exit(0 if all(one.passed for one in grades) else 1)


def hang(
    folder: Annotated[
        Path, typer.Argument(help="Trace folder: trace_dir of init_distributed, runs/labNN/trace.")
    ],
    pause: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the job.")] = 1.0,
    svg: Annotated[Path | None, typer.Option(help="Write where each rank stands as a picture.")] = None,
) -> None:
    """Say who waits for whom in a job that hangs now, or that did, from its trace files (§9.10)."""
    from ds_lite import hang as reading
    from ds_lite import hang_picture, hang_words, trace_file

    with one_line_errors():
        before = reading.read_job(folder)
        time.sleep(pause)
        job = reading.read_job(folder)
        said = hang_words.report(before, job)
        if svg is not None:
            svg.parent.mkdir(parents=True, exist_ok=True)
            svg.write_text(hang_picture.svg(job, title=said[0]), encoding="utf-8")
    parts = [trace_file.table(job.rows.values(), job.now), "\n".join(said), hang_picture.text(job)]
    show(Text("\n\n".join(filter(None, parts))))
    if svg is not None:
        show(Text(f"wrote {svg}"))


def lab_number(folder: str) -> int:
    """Which lab a folder holds."""
    return int(Path(folder).name[3:5])


def _lab_script(number: int) -> Path:
    """`labs/labNN_*/lab.py`, in the repository that holds the package or else in the current folder."""
    places = [Path(__file__).resolve().parents[1] / "labs", Path.cwd() / "labs"]
    for place in places:
        scripts = sorted(place.glob(f"lab{number:02d}_*/lab.py"))
        if scripts:
            return scripts[0]
    known = sorted(
        {path.parent.name[3:5] for place in places for path in place.glob("lab[0-9][0-9]_*/lab.py")}
    )
    raise ValueError(
        f"lab {number} is not there; "
        + (
            f"choose from {[int(one) for one in known]}"
            if known
            else "labs live in the repository, start there"
        )
    )
