"""`ds-lite conformance`: run the suite, show it live, end with a table, leave a report (§9.1-9.16)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ds_lite.cli_text import one_line_errors
from ds_lite.conformance import asked as asking
from ds_lite.conformance import in_a_job, running, table
from ds_lite.conformance.results import Results


def conformance(
    nproc: Annotated[int | None, typer.Option(min=1, help="No test uses more ranks.")] = None,
    backend: Annotated[
        str, typer.Option(help="auto: NCCL where each rank has a GPU, else staged or gloo; or one of them.")
    ] = "auto",
    impl: Annotated[str, typer.Option(help="Whose code: a name in tests/adapters, FILE.py, a module.")] = (
        "ds_lite"
    ),
    sections: Annotated[str | None, typer.Option(help="Such as 9.10,9.12 [default: all].")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for JSON, JUnit and one HTML page.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Also the cases that take long.")] = False,
    jobs: Annotated[str, typer.Option(help="Processes of pytest side by side; auto, or a number.")] = "auto",
    host_name: Annotated[bool, typer.Option("--host-name", help="Name this machine in the report.")] = False,
) -> None:
    """Run the suite: does every parallel path here compute what one process computes? (§9.1-9.16)"""
    with one_line_errors():
        wanted = asking.checked(
            sections=sections, nproc=nproc, backend=backend, impl=impl, full=full, jobs=jobs
        )
        if report is not None:
            report.mkdir(parents=True, exist_ok=True)
    if in_a_job.serves():
        raise typer.Exit(in_a_job.serve(wanted.root))
    raise typer.Exit(run(wanted, report, host_name=host_name))


def run(asked: asking.Asked, report: Path | None = None, *, host_name: bool = False) -> int:
    """Run what was asked for, print the table, fill the folder; the exit status.

    Ctrl-C ends the tests; table and report then hold what was seen until then.
    """
    console = Console(highlight=False)
    with TemporaryDirectory(prefix="ds_lite-") as scratch:
        folder = Path(scratch) if report is None else report.resolve()
        results = watch(asked, folder, console)
        table.show_end(results, console, again=running.again(asked))
        if results.broken:
            console.print(_tail(folder / "pytest.txt"), markup=False)
        if report is not None:
            console.print(Text(f"report: {_write_report(asked, results, folder, console, host_name)}"))
    return results.exit_status


def watch(asked: asking.Asked, folder: Path, console: Console) -> Results:
    """Run the tests and show how they go on; Ctrl-C ends them early."""
    results = Results(asked.sections)
    files = asked.files()
    console.print(
        Text(f"{len(files)} test files, implementation {asked.impl}, backend {asked.backend}", style="bold")
    )
    try:
        with (
            table.progress(results, console) as show,
            closing(running.events(asked, folder)) as events,
        ):
            for event in events:
                show(results.add(event))
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def _write_report(
    asked: asking.Asked, results: Results, folder: Path, console: Console, host_name: bool
) -> Path:
    from ds_lite.conformance import machine, report
    from ds_lite.conformance.bandwidth import Rate, measure, read
    from ds_lite.launch import JobFailed

    rates: list[Rate] = []
    ranks = _ranks(asked)
    why_not = "the run was stopped" if results.interrupted else "it takes two ranks"
    if not results.interrupted and ranks > 1:
        try:
            with console.status("measuring bus bandwidth"):
                on_cpu = asked.backend == "gloo"
                rates = read(folder) if in_a_job.ranks() > 1 else measure(ranks, on_cpu=on_cpu)
        except (JobFailed, OSError, KeyboardInterrupt) as error:
            why_not = str(error).partition("\n")[0] or "it was stopped"
            console.print(Text(f"bus bandwidth was not measured: {why_not}", style="yellow"))
    return report.write(
        folder,
        asked,
        results,
        machine.facts(asked.backend, host_name=host_name),
        rates,
        why_no_rates=why_not,
    )


def _ranks(asked: asking.Asked) -> int:
    """For the bandwidth: as many as were asked for; else the job's, one for each GPU, or four on CPUs."""
    import torch

    if in_a_job.ranks() > 1:
        return in_a_job.ranks()
    gpus = torch.cuda.device_count() if asked.backend != "gloo" and torch.cuda.is_available() else 0
    return asked.nproc or gpus or 4


def _tail(path: Path, lines: int = 30) -> str:
    """What pytest said last."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
