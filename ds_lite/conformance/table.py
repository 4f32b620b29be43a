"""What a run of the suite shows in the terminal: progress by section, then the table and the failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ds_lite.conformance.results import Results, SectionResults

SHOWN_FAILURES = 20


@contextmanager
def progress(results: Results, console: Console) -> Iterator[Callable[[list[SectionResults]], None]]:
    """Yields what is to be called with the sections that an event has touched.

    On a terminal bars move; elsewhere each section is one line, when its last test is over.
    """
    if console.is_terminal:
        with _bars(console) as bars:
            tasks = {
                number: bars.add_task(_name(one), total=None, failed="")
                for number, one in results.sections.items()
            }
            yield lambda touched: _move(bars, tasks, touched)
    else:
        told: set[str] = set()
        yield lambda touched: _tell(console, told, touched)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _move(bars: Progress, tasks: dict[str, TaskID], touched: list[SectionResults]) -> None:
    for one in touched:
        done, total, failed = len(one.cases()), sum(one.expected.values()), len(one.cases("failed"))
        said = f"{done}/{total}" + (f" [red]{failed} failed[/red]" if failed else "")
        bars.update(tasks[one.section.number], completed=done, total=total or None, failed=said)


def _tell(console: Console, told: set[str], touched: list[SectionResults]) -> None:
    for one in touched:
        if one.is_over and one.section.number not in told:
            told.add(one.section.number)
            failed = len(one.cases("failed"))
            seconds = sum(case.seconds for case in one.cases())
            text = f"{_name(one)}: {_number(len(one.cases()), 'case')}, {failed} failed, {seconds:.0f} s"
            console.print(Text(text, style="red" if failed else ""), soft_wrap=True)


def _name(one: SectionResults) -> str:
    return f"§{one.section.number} {one.section.title.partition(':')[0]}"


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------------- at the end


def summary(results: Results) -> Table:
    """One line a section. A rule counts as checked if at least one of its cases was run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("section", max_width=34)
    for heading in ("rules", "passed", "failed", "not\nproved"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="top")
    table.add_column("why: reason (cases)")
    for one in results.sections.values():
        failed, checked = one.count("failed"), one.count("passed", "in part", "failed")
        table.add_row(
            _name(one),
            str(checked),
            Text(str(checked - failed), style="green" if checked > failed else ""),
            Text(str(failed), style="bold red" if failed else "dim"),
            Text(str(one.count("not proved")), style="yellow" if one.count("not proved") else "dim"),
            why_not(one),
        )
    return table


def why_not(one: SectionResults) -> str:
    """Reasons, the most frequent first, and how many cases each kept from being run."""
    reasons = [f"{reason} ({number})" for reason, number in one.reasons().most_common()]
    missing = sum(one.expected.values()) - len(one.cases())
    if missing > 0 or not one.expected:
        reasons.append(f"not reached ({missing})" if one.expected else "not reached")
    return "; ".join(reasons)


def show_end(results: Results, console: Console, *, again: str) -> None:
    """The table, the failures, the command that repeats one, and one line that says it all."""
    console.print(summary(results))
    failures = results.cases("failed")
    for case in failures[:SHOWN_FAILURES]:
        console.print(Text(f"FAILED {case.nodeid}", style="bold red"), soft_wrap=True)
        console.print(Text(f"       {case.why}"), soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"... and {len(failures) - SHOWN_FAILURES} more")
    if failures:
        console.print(Text(f"one of them again: {again} '{failures[0].nodeid}'"), soft_wrap=True)
    console.print(Text(verdict(results), style="bold red" if results.exit_status else "bold"), soft_wrap=True)


def verdict(results: Results) -> str:
    """One line: what was proved, what failed, what was not looked at."""
    cases = {outcome: len(results.cases(outcome)) for outcome in ("passed", "failed", "skipped")}
    ran = [rule for rule in results.rules() if rule.verdict != "not proved"]
    failed = sum(rule.verdict == "failed" for rule in ran)
    text = (
        f"{_number(len(ran), 'rule')} checked in {_number(cases['passed'] + cases['failed'], 'case')}: "
        f"{len(ran) - failed:,} passed, {failed:,} failed; "
        f"{_number(cases['skipped'], 'case')} not proved here"
    )
    if results.interrupted:
        text += "; stopped by Ctrl-C"
    return f"{text}; {results.broken}" if results.broken else text
