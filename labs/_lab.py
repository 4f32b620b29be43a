"""What all labs share: options, predictions, hints, the last table, the verdict.

A lab is one script that every process runs. `Lab` loads the learner's code, refuses to start before the
predictions are filled in, collects rows, and ends with one table and an exit status: 0 if every row passes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_lite import comm

EXIT_NOT_PASSED = 1


class Hint(Exception):
    """Something the learner's code does that a correct one does not, and the idea to look at again."""


@dataclass(frozen=True)
class Row:
    """One line of the last table; `passed` is None for what is only reported."""

    quantity: str
    predicted: str
    measured: str
    target: str
    passed: bool | None
    agrees: bool  # what was predicted with what was measured


class Lab:
    """One run of a lab on this process. Options: --impl, --out, --quick, --skip-predictions."""

    def __init__(self, number: int, folder: Path, *, unlocks: str) -> None:
        self.number, self.folder = number, folder
        options = _parser(number).parse_args()
        self.impl, self.quick, self.skips_predictions = (
            str(options.impl),
            bool(options.quick),
            bool(options.skip_predictions),
        )
        self.out = Path(options.out or Path("runs") / f"lab{number:02d}")
        self.is_main = comm.get_rank() == 0
        self.unlocks = unlocks  # what is beyond the predictions, for the message that asks for them
        self.rows: list[Row] = []
        self.settings: dict[str, Any] = {}
        self._console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
        self.code = self._load()
        self.predictions: dict[str, Any] = dict(getattr(self.code, "PREDICTIONS", {}))

    def _load(self) -> ModuleType:
        path = self.folder / f"{self.impl}.py" if self.impl in ("student", "solution") else Path(self.impl)
        if not path.is_file():
            self.leave(f"--impl {self.impl}: {path} is not a file; give student, solution or a path")
        spec = importlib.util.spec_from_file_location(f"lab{self.number:02d}_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    # ------------------------------------------------------------------------------------- speaking

    def say(self, text: str = "", style: str = "") -> None:
        """Print on rank 0, at once."""
        if self.is_main:
            self._console.print(Text(text, style=style), soft_wrap=True)

    def heading(self, text: str) -> None:
        self.say()
        self.say(text, style="bold")

    def leave(self, message: str, *, step: str = "", hint: str = "") -> NoReturn:
        """End the lab on every process: all of them come here, for the same reason.

        labNN.json then holds the step that is not done, and the hint.
        """
        if comm.get_rank() == 0:
            Console(stderr=True, highlight=False).print(Text(message, style="red"), soft_wrap=True)
            self._write_json({"verdict": "unfinished", "step": step, "hint": hint or message})
        _leave_together(EXIT_NOT_PASSED)

    # -------------------------------------------------------------------------------- the learner's part

    def demand_predictions(self) -> None:
        """Predict before you look: refuse to go on while a prediction is None."""
        missing = [name for name, value in self.predictions.items() if value is None]
        if missing and not self.skips_predictions:
            names, file = ", ".join(missing), Path(self.code.__file__ or "").name
            self.leave(
                f"Lab {self.number}, step 1: PREDICTIONS in {file} still holds None for {names}.\n"
                f"Write down what you expect before {self.unlocks}; a wrong guess costs nothing and is "
                f"marked in the table. (--skip-predictions starts without.)",
                step="1",
                hint=f"no prediction of {names}",
            )

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run a piece of the learner's code; what it lacks or gets wrong ends the lab with a hint.

        Only for checks that come to the same end on every process.
        """
        try:
            yield
        except NotImplementedError as error:
            found = re.search(r"step (\w+)", str(error))
            step = found.group(1) if found else name.removeprefix("step ")
            self.leave(f"{error}", step=step, hint="not written yet")
        except Hint as hint:
            said = f"Lab {self.number}, {name}: not yet.\nHint: {hint}"
            self.leave(said, step=name.removeprefix("step "), hint=str(hint))

    # ------------------------------------------------------------------------------------- the table

    def row(
        self,
        quantity: str,
        measured: Any,
        *,
        target: str,
        passed: bool | None,
        prediction: str | None = None,
    ) -> None:
        """Add a line to the last table; `prediction` is a key of PREDICTIONS."""
        guess = self.predictions.get(prediction) if prediction is not None else None
        agrees = guess is None or _shown(guess) == _shown(measured) or _close(guess, measured)
        shown = "-" if guess is None else _shown(guess)
        self.rows.append(Row(quantity, shown, _shown(measured), target, passed, agrees))

    def finish(self) -> NoReturn:
        """Print the table, write labNN.json, leave with the verdict of rank 0."""
        passed = [all(row.passed is not False for row in self.rows)]
        comm.broadcast_object_list(passed, src=0)
        if self.is_main:
            self._console.print()
            self._console.print(_table(self.rows))
            if off := sum(not row.agrees for row in self.rows):
                self.say(
                    f"{off} of your predictions differ (≠) from what was measured. They do not count against "
                    f"you; explain each in one sentence."
                )
            content = {
                "verdict": "pass" if passed[0] else "fail",
                "settings": self.settings,
                "rows": [asdict(row) for row in self.rows],
            }
            path = self._write_json(content)
            self.say(f"verdict: {'pass' if passed[0] else 'FAIL'}   written to {path}", style="bold")
        _leave_together(0 if passed[0] else EXIT_NOT_PASSED)

    def _write_json(self, end: dict[str, Any]) -> Path:
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"lab{self.number:02d}.json"
        content = {
            "lab": self.number,
            "impl": self.impl,
            "quick": self.quick,
            "processes": comm.get_world_size(),
            "device": str(comm.device_of_this_rank().type),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            **end,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path


def _leave_together(status: int) -> NoReturn:
    """Nobody leaves before rank 0 has said why: a launcher gives the others only moments."""
    sys.stdout.flush()
    comm.barrier()
    raise SystemExit(status)


def _parser(number: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Lab {number}; see its README.md")
    parser.add_argument("--impl", default="student", help="student, solution, or the path of a file")
    parser.add_argument("--out", help=f"folder for results [default: runs/lab{number:02d}]")
    parser.add_argument("--quick", action="store_true", help="a few steps: a check, not an experiment")
    parser.add_argument("--skip-predictions", action="store_true", help="start although some are missing")
    return parser


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(_shown(item) for item in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _close(guess: Any, measured: Any) -> bool:
    """A ratio predicted to two digits is predicted."""
    numbers = isinstance(guess, (int, float)) and isinstance(measured, (int, float))
    return numbers and abs(guess - measured) <= 0.005 * max(abs(measured), 1e-9) + (
        0.0 if isinstance(measured, int) else 5e-3
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("quantity")
    for name in ("predicted", "measured", "target"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    styles = {True: ("pass", "green"), False: ("FAIL", "bold red"), None: ("reported", "dim")}
    for row in rows:
        word, style = styles[row.passed]
        guess = Text(
            row.predicted if row.agrees else f"{row.predicted} ≠", style="" if row.agrees else "yellow"
        )
        table.add_row(row.quantity, guess, row.measured, row.target, Text(word, style=style))
    return table
