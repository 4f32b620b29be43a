"""§9.2 §9.10 Draw what stages did when: as text, tick by tick, and as a picture.

The text is drawn from a schedule alone, one column per step. The picture takes spans with a start and an
end in any unit, so the same function draws the virtual clock of `simulate` and the wall clock of a
trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from math import floor, log10

from ds_lite.pipe.instructions import BackwardPass, ForwardPass, PipeInstruction
from ds_lite.pipe.schedule import PipeSchedule

KINDS = ("forward", "backward", "communication", "closing", "other", "stuck")

_KIND_OF_NAME = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "communication",
    "RecvActivation": "communication",
    "SendGrad": "communication",
    "RecvGrad": "communication",
    "ReduceTiedGrads": "closing",
    "ReduceGrads": "closing",
    "OptimizerStep": "closing",
}
# light and dark fill of a box, light and dark ink on it; told apart by brightness as well as by hue
_FILLS = {
    "forward": ("#2b6cb0", "#63a8ea", "#ffffff", "#0b1520"),
    "backward": ("#f2a73b", "#f6bd67", "#1c2430", "#0b1520"),
    "communication": ("#1f8f6b", "#4fc3a1", "#ffffff", "#0b1520"),
    "closing": ("#a3397f", "#d98cc0", "#ffffff", "#0b1520"),
    "other": ("#8a929d", "#9aa3ae", "#ffffff", "#0b1520"),
    "stuck": ("#b3261e", "#ff8a80", "#ffffff", "#0b1520"),
}
_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "communication": "transfer",
    "closing": "reduce and step",
    "other": "other",
    "stuck": "stands here now",
}
_MARGIN, _TOP, _ROW, _BOX, _STRIP = 16, 76, 38, 24, 5  # pixels; a transfer is a strip under the boxes


@dataclass(frozen=True)
class Span:
    """What one stage or rank did from `start` to `end`, in any unit; `kind` (of `KINDS`) is its colour."""

    stage: int
    label: str
    kind: str
    micro_batch_id: int | None
    start: float
    end: float
    buffer_id: int | None = None


def kind_of(instruction_name: str) -> str:
    """The kind of span an instruction makes.

    >>> kind_of("SendGrad"), kind_of("LoadMicroBatch")
    ('communication', 'other')
    """
    return _KIND_OF_NAME.get(instruction_name, "other")


def timeline_text(schedule_class: type[PipeSchedule], num_stages: int, num_micro_batches: int) -> str:
    """One row per stage, one column per tick: F and B with the micro-batch number, a dot for no pass.

    >>> from ds_lite.pipe.schedule import TrainSchedule
    >>> print(timeline_text(TrainSchedule, num_stages=2, num_micro_batches=2))
    stage 0 | F0  . F1 B0  . B1
    stage 1 |  . F0 B0 F1 B1  .
    ticks 6   busy 4   bubble 2/6 = 1/3 = (S-1)/(m+S-1)

    Source: §9.2.
    """
    rows = [_cells(schedule_class(num_micro_batches, num_stages, stage)) for stage in range(num_stages)]
    width = max(len(cell) for row in rows for cell in row)
    digits = len(str(num_stages - 1))
    lines = [
        f"stage {stage:>{digits}} |" + "".join(f" {cell:>{width}}" for cell in row)
        for stage, row in enumerate(rows)
    ]
    return "\n".join([*lines, _tick_summary(rows, num_micro_batches)])


def timeline_svg(
    spans: Sequence[Span],
    *,
    title: str,
    unit: str = "ticks",
    row_name: str = "stage",
    description: str = "",
    width: int = 960,
) -> str:
    """A self-contained SVG picture of spans, one row per stage, readable on light and on dark pages.

    Units: `unit` only labels the axis; the axis starts at the earliest span.
    Raises: ValueError without spans, for an unknown kind and for a span that ends before it starts.

    >>> picture = timeline_svg([Span(0, "ForwardPass", "forward", 3, 0.0, 1.5)], title="One pass", unit="ms")
    >>> picture.startswith("<svg"), ">3</text>" in picture
    (True, True)

    Source: §9.2.
    """
    _check_spans(spans)
    frame, name = _Frame(spans, row_name, width), escape(title)
    description = description or (
        f"{frame.num_rows} rows, one per {row_name}, over {frame.length:g} {unit}. "
        f"A box is a pass of the micro-batch whose number it shows; empty parts of a row are idle."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {frame.height}" width="{width}" '
        f'height="{frame.height}" role="img" class="tl" aria-label="{name}">',
        f"<title>{name}</title><desc>{escape(description)}</desc>",
        f"<style>{_style()}</style>",
        f'<rect class="tl-page" width="{width}" height="{frame.height}" rx="8"/>',
        f'<text class="tl-title" x="{_MARGIN}" y="30">{name}</text>',
        *_legend({span.kind for span in spans if _is_visible(span)}),
        *_rows(frame, row_name),
        *_axis(frame, unit),
        *(_box(frame, span, row_name, unit) for span in sorted(spans, key=_paint_order) if _is_visible(span)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _cells(schedule: PipeSchedule) -> list[str]:
    return ["".join(_letter(instruction) for instruction in step) or "." for step in schedule]


def _letter(instruction: PipeInstruction) -> str:
    if not isinstance(instruction, (ForwardPass, BackwardPass)):
        return ""
    number = instruction.micro_batch_id
    number = instruction.buffer_id if number is None else number
    return f"{'F' if isinstance(instruction, ForwardPass) else 'B'}{number}"


def _tick_summary(rows: Sequence[Sequence[str]], num_micro_batches: int) -> str:
    ticks, num_stages = max(len(row) for row in rows), len(rows)
    busy = [sum(cell != "." for cell in row) for row in rows]
    if len(set(busy)) > 1:  # the stages differ, so there is no one formula
        return f"ticks {ticks}   busy {','.join(map(str, busy))}"
    idle = Fraction(ticks - busy[0], ticks)
    terms = [f"{ticks - busy[0]}/{ticks}"]
    if str(idle) != terms[0]:
        terms.append(str(idle))
    if idle == Fraction(num_stages - 1, num_micro_batches + num_stages - 1):
        terms.append("(S-1)/(m+S-1)")
    return f"ticks {ticks}   busy {busy[0]}   bubble {' = '.join(terms)}"


def _check_spans(spans: Sequence[Span]) -> None:
    if not spans:
        raise ValueError("spans is empty; a picture shows at least one, run the schedule first (§9.2)")
    for span in spans:
        if span.kind not in KINDS:
            raise ValueError(
                f"kind={span.kind!r} of {span} has no colour; choose one of {list(KINDS)} (§9.2)"
            )
        if not span.end >= span.start or span.stage < 0:
            raise ValueError(
                f"{span} ends before it starts or has a negative stage; correct its numbers (§9.2)"
            )


class _Frame:
    """Where things go: rows downward, time to the right, all in pixels."""

    def __init__(self, spans: Sequence[Span], row_name: str, width: int) -> None:
        self.start = min(span.start for span in spans)
        self.length = max(span.end for span in spans) - self.start
        self.num_rows = max(span.stage for span in spans) + 1
        self.left = _MARGIN + 12 + 7 * len(f"{row_name} {self.num_rows - 1}")
        self.right = width - _MARGIN - 8
        self.bottom = _TOP + _ROW * self.num_rows
        self.height = self.bottom + 44

    def x(self, time: float) -> float:
        share = (time - self.start) / self.length if self.length else 0.0
        return self.left + share * (self.right - self.left)

    def y(self, stage: int) -> int:
        return _TOP + _ROW * stage


def _is_visible(span: Span) -> bool:
    return span.end > span.start or span.kind == "closing"  # a free closing step is still worth a mark


def _paint_order(span: Span) -> tuple[bool, float]:
    return span.kind == "closing", span.start


def _style() -> str:
    rules = [
        ".tl text{font:12px system-ui,sans-serif;fill:#1c2430}",
        ".tl .tl-title{font-size:17px;font-weight:600}",
        ".tl .tl-number{font-size:11px;text-anchor:middle}",
        ".tl .tl-middle{text-anchor:middle}.tl .tl-end{text-anchor:end}",
        ".tl-page{fill:#ffffff}.tl-idle{fill:#e9edf2}.tl-grid{stroke:#c3ccd6;stroke-width:1}",
    ]
    dark = [
        ".tl text{fill:#e6e9ee}.tl-page{fill:#14181f}.tl-idle{fill:#262e3a}.tl-grid{stroke:#465160}",
    ]
    for kind, (fill, dark_fill, ink, dark_ink) in _FILLS.items():
        rules.append(f".tl-{kind}{{fill:{fill}}}.tl .tl-on-{kind}{{fill:{ink}}}")
        dark.append(f".tl-{kind}{{fill:{dark_fill}}}.tl .tl-on-{kind}{{fill:{dark_ink}}}")
    return "".join(rules) + "@media (prefers-color-scheme:dark){" + "".join(dark) + "}"


def _legend(kinds: set[str]) -> list[str]:
    parts, x = [], float(_MARGIN)
    entries = [(f"tl-{kind}", _LEGEND[kind]) for kind in KINDS if kind in kinds] + [("tl-idle", "idle")]
    for style, word in entries:
        parts.append(f'<rect class="{style}" x="{x:g}" y="44" width="14" height="14" rx="3"/>')
        parts.append(f'<text x="{x + 20:g}" y="55">{word}</text>')
        x += 20 + 6.6 * len(word) + 18
    return parts


def _rows(frame: _Frame, row_name: str) -> list[str]:
    parts = []
    for stage in range(frame.num_rows):
        y = frame.y(stage)
        parts.append(f'<text x="{_MARGIN}" y="{y + 17}">{escape(row_name)} {stage}</text>')
        parts.append(
            f'<rect class="tl-idle" x="{frame.left}" y="{y}" width="{frame.right - frame.left}" '
            f'height="{_BOX}" rx="3"/>'
        )
    return parts


def _axis(frame: _Frame, unit: str) -> list[str]:
    step = _round_step(frame.length / 12)
    y = frame.bottom
    caption = f"time in {escape(unit)}, {frame.length:.4g} in all"
    parts = [f'<text class="tl-end" x="{frame.right}" y="{y + 34}">{caption}</text>']
    for number in range(floor(frame.length / step + 1e-9) + 1):
        x = frame.x(frame.start + number * step)
        parts.append(f'<line class="tl-grid" x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{y + 2}"/>')
        parts.append(f'<text class="tl-middle" x="{x:.1f}" y="{y + 16}">{number * step:g}</text>')
    return parts


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... times a power of ten."""
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _box(frame: _Frame, span: Span, row_name: str, unit: str) -> str:
    x, y = frame.x(span.start), frame.y(span.stage)
    width = max(frame.x(span.end) - x, 3.0 if span.kind == "closing" else 0.5)
    gap = 1.0 if width > 4 else 0.0  # neighbours of one colour stay apart
    is_strip = span.kind == "communication"
    top, height = (y + _BOX + 2, _STRIP) if is_strip else (y, _BOX)
    number = "" if span.micro_batch_id is None else str(span.micro_batch_id)
    tip = f"{row_name} {span.stage}: {span.label}" + (f", micro-batch {number}" if number else "")
    tip += f", {span.start - frame.start:g} to {span.end - frame.start:g} {unit}"
    box = (
        f'<rect class="tl-{span.kind}" x="{x + gap / 2:.2f}" y="{top}" width="{width - gap:.2f}" '
        f'height="{height}" rx="{2 if width > 4 and not is_strip else 0}"><title>{escape(tip)}</title></rect>'
    )
    words = escape(span.label) if span.kind == "stuck" else number  # which instruction is the question there
    if words and not is_strip and width >= 7 * len(words) + 4:
        box += (
            f'<text class="tl-number tl-on-{span.kind}" x="{x + width / 2:.2f}" y="{y + 16}">{words}</text>'
        )
    return box
