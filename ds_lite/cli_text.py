"""How the `ds-lite` command speaks: lines that are never wrapped, named rows, one red line for a mistake."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can correct becomes one red line and status 2; faults of ours keep their traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        complain(str(error))
        raise typer.Exit(2) from None


def complain(message: str) -> None:
    """One red line on stderr."""
    Console(stderr=True).print(Text(f"error: {' '.join(message.split())}", style="red"), soft_wrap=True)


def show(text: Text) -> None:
    """Print; pictures keep their lines whole, however narrow the terminal."""
    Console().print(text, soft_wrap=True)


def show_rows(rows: dict[str, list[str]]) -> None:
    """Names in bold on the left, their values in lines beside them."""
    width = max(map(len, rows))
    for name, values in rows.items():
        for place, value in enumerate(values):
            show(Text.assemble((f"{'' if place else name:{width}}", "bold"), "  ", value))
