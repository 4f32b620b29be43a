"""Lab 1: two pictures, the ranks in their nodes with the groups of each axis, and bus bandwidth by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log2, log10
from pathlib import Path
from typing import Any

from collectives import in_words

from ds_lite.conformance.bandwidth import Rate

# Told apart by brightness as well as by hue; a group also has a letter, an axis a mark of its own.
_COLOURS = ("#2b6cb0", "#f2a73b", "#1f8f6b", "#a3397f", "#5b4bb5", "#c0582b", "#3d8fa8", "#7a7f2a")
_INKS = ("#ffffff", "#1c2430", "#ffffff", "#ffffff", "#ffffff", "#ffffff", "#ffffff", "#ffffff")
_STYLE = (
    ".rk text{font:12px system-ui,sans-serif;fill:#1c2430}.rk .rk-title{font-size:17px;font-weight:600}"
    ".rk .rk-head{font-weight:600;font-size:13px}.rk .rk-mid{text-anchor:middle}.rk .rk-end{text-anchor:end}"
    ".rk .rk-small{font-size:10px}.rk-page{fill:#fff}.rk-node{fill:#eef1f5;stroke:#8a929d}"
    ".rk-grid{stroke:#d5dbe2}.rk-in{fill:none;stroke:#5d6877;stroke-width:2}"
    ".rk-out{fill:none;stroke:#c22a1f;stroke-width:2.5;stroke-dasharray:6 4}.rk .rk-red{fill:#b3261e}"
    "@media (prefers-color-scheme:dark){.rk text{fill:#e6e9ee}.rk-page{fill:#14181f}.rk-node{fill:#262e3a}"
    ".rk-grid{stroke:#384250}.rk-in{stroke:#9aa6b5}.rk-out{stroke:#ff7b70}.rk .rk-red{fill:#ff8a80}}"
)
_MARGIN = 20


def _page(width: int, height: int, title: str, description: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" class="rk" aria-label="{escape(title)}">'
    )
    top = [
        head,
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc><style>{_STYLE}</style>",
        f'<rect class="rk-page" width="{width}" height="{height}" rx="8"/>',
        f'<text class="rk-title" x="{_MARGIN}" y="30">{escape(title)}</text>',
    ]
    return "\n".join([*top, *parts, "</svg>"]) + "\n"


# ------------------------------------------------------------------------------------------ ranks and links

_STEP, _CELL, _GAP = 72, 52, 28  # pixels from rank to rank, of a rank, between nodes


def write_ranks(folder: Path, code: Any, mesh: tuple[list[str], list[int]], ranks_per_node: int) -> str:
    """One band an axis: the ranks in a row, nodes as boxes, an arc between neighbours of a group."""
    lists = {axis: code.comm_lists(*mesh, axis) for axis in mesh[0]}
    world = sum(map(len, lists[mesh[0][0]]))
    parts: list[str] = [*_key(mesh[0])]
    y = 84
    for axis, groups in lists.items():
        reach = max((b - a for group in groups for a, b in zip(group, group[1:])), default=0)
        arcs = 26 + 10 * min(reach, 12)
        shared = code.shared_links(*mesh, axis, ranks_per_node)
        parts += _band(code, mesh, axis, groups, shared, ranks_per_node, y, arcs)
        y += 30 + arcs + _CELL + 46
    title = (
        f"Who talks to whom: {' x '.join(f'{a}={d}' for a, d in zip(*mesh))}, {ranks_per_node} ranks a node"
    )
    width = 2 * _MARGIN + max(600, 9 * len(title), int(_x(world - 1, ranks_per_node)) + _CELL)
    told = "Each band shows one axis: ranks of one letter form a group, an arc joins neighbours in a group."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ranks.svg").write_text(_page(width, y, title, told, parts), encoding="utf-8")
    return str(folder / "ranks.svg")


def _x(rank: int, ranks_per_node: int) -> float:
    """The left side of a rank, from the margin."""
    return 12 + rank * _STEP + rank // ranks_per_node * _GAP


def _key(axes: Sequence[str]) -> list[str]:
    return [
        f'<path class="rk-in" d="M{_MARGIN},52 h34"/><text x="{_MARGIN + 42}" y="56">inside a node</text>',
        f'<path class="rk-out" d="M{_MARGIN + 150},52 h34"/>'
        f'<text x="{_MARGIN + 192}" y="56">crosses nodes</text>',
        f'<text x="{_MARGIN + 300}" y="56">5 B: rank 5, group B; below it {escape(",".join(axes))}</text>',
    ]


def _band(
    code: Any,
    mesh: tuple[list[str], list[int]],
    axis: str,
    groups: list[list[int]],
    shared: dict[tuple[int, int], list[list[int]]],
    ranks_per_node: int,
    y: int,
    arcs: int,
) -> Iterator[str]:
    """The heading, the nodes, the arcs above the ranks, the ranks."""
    on_link = max(map(len, shared.values()), default=0)
    link = f"the link {'-'.join(map(str, next(iter(shared))))}" if len(shared) == 1 else "a link, at most"
    words = f"{on_link} of {len(groups)} groups share {link}" if shared else "all inside the nodes"
    head = f"{escape(axis)}: {len(groups)} groups of {len(groups[0])}"
    yield f'<text class="rk-head" x="{_MARGIN}" y="{y}">{head}</text>'
    yield f'<text class="{"rk-red" if shared else ""}" x="{_MARGIN + 170}" y="{y}">{words}</text>'
    top = y + 14 + arcs
    world = sum(map(len, groups))
    for node in range(ceil(world / ranks_per_node)):
        first, last = node * ranks_per_node, min((node + 1) * ranks_per_node, world) - 1
        left = _MARGIN + _x(first, ranks_per_node) - 8
        right = _MARGIN + _x(last, ranks_per_node) + _CELL + 8
        yield (
            f'<rect class="rk-node" x="{left:g}" y="{top - 8}" width="{right - left:g}" '
            f'height="{_CELL + 36}" rx="6"/>'
        )
        middle = (left + right) / 2
        yield f'<text class="rk-mid" x="{middle:g}" y="{top + _CELL + 20}">node {node}</text>'
    for group in groups:
        for a, b in zip(group, group[1:]):
            yield _arc(a, b, ranks_per_node, top)
    for letter, group in enumerate(groups):
        for rank in group:
            yield _rank(code.coordinate(*mesh, rank), rank, letter, _MARGIN + _x(rank, ranks_per_node), top)


def _arc(a: int, b: int, ranks_per_node: int, top: int) -> str:
    left, right = (_MARGIN + _x(rank, ranks_per_node) + _CELL / 2 for rank in (a, b))
    height = (18 + 10 * min(b - a, 12)) * 4 / 3  # a cubic curve rises to three quarters of its handles
    kind = "out" if a // ranks_per_node != b // ranks_per_node else "in"
    return (
        f'<path class="rk-{kind}" d="M{left:g},{top} C{left:g},{top - height:.1f} '
        f'{right:g},{top - height:.1f} {right:g},{top}"><title>{a} - {b}</title></path>'
    )


def _rank(place: dict[str, int], rank: int, letter: int, x: float, y: int) -> str:
    colour, ink = _COLOURS[letter % len(_COLOURS)], _INKS[letter % len(_INKS)]
    middle = x + _CELL / 2
    where = ",".join(map(str, place.values()))
    name = chr(ord("A") + letter % 26)
    return (
        f'<rect x="{x:g}" y="{y}" width="{_CELL}" height="{_CELL}" rx="5" fill="{colour}"/>'
        f'<text class="rk-mid rk-head" x="{middle:g}" y="{y + 23}" style="fill:{ink}">{rank} {name}</text>'
        f'<text class="rk-mid rk-small" x="{middle:g}" y="{y + 41}" style="fill:{ink}">{where}</text>'
    )


# ------------------------------------------------------------------------------------------- bus bandwidth

_WIDE, _HIGH = 230, 130  # pixels of the drawing area of one operation


def write_bandwidth(folder: Path, rates: list[Rate]) -> str:
    """A panel an operation, a line an axis; both scales are logarithmic."""
    axes = list(dict.fromkeys(rate.axis for rate in rates))
    operations = list(dict.fromkeys(rate.operation for rate in rates))
    sizes = sorted({rate.size for rate in rates})
    low = floor(log10(min(rate.bus for rate in rates)))
    high = max(low + 1, ceil(log10(max(rate.bus for rate in rates))))
    parts, x = [], float(_MARGIN)
    of = {rate.axis: rate.ranks for rate in rates}
    for number, axis in enumerate(axes):
        words = f"{axis}, {of[axis]} ranks"
        parts.append(_mark(number, x + 6, 52))
        parts.append(f'<text x="{x + 18:g}" y="56">{escape(words)}</text>')
        x += 18 + 7 * len(words) + 22
    for number, operation in enumerate(operations):
        left, top = _MARGIN + 44 + number % 3 * (_WIDE + 70), 98 + number // 3 * (_HIGH + 74)
        own = [rate for rate in rates if rate.operation == operation]
        parts += _panel(operation, own, axes, sizes, (low, high), left, top)
    width, height = 3 * (_WIDE + 70) + _MARGIN + 10, 98 + ceil(len(operations) / 3) * (_HIGH + 74) - 12
    device = "GPUs" if rates[0].device == "cuda" else "CPUs"
    title = f"Bus bandwidth by axis and message size, tensors on {device}"
    told = (
        "One panel for each collective, one line for each axis; all groups of an axis work at the same time."
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bandwidth.svg").write_text(_page(width, height, title, told, parts), encoding="utf-8")
    return str(folder / "bandwidth.svg")


def _panel(
    operation: str,
    rates: list[Rate],
    axes: list[str],
    sizes: list[int],
    decades: tuple[int, int],
    left: int,
    top: int,
) -> Iterator[str]:
    low, high = decades
    first, span = log2(sizes[0]), max(1.0, log2(sizes[-1]) - log2(sizes[0]))
    bottom, inset = top + _HIGH, 24

    def at(rate: Rate) -> tuple[float, float]:
        x = left + inset + (log2(rate.size) - first) / span * (_WIDE - 2 * inset)
        return x, bottom - (log10(rate.bus) - low) / (high - low) * _HIGH

    yield f'<text class="rk-head" x="{left}" y="{top - 12}">{escape(operation)}</text>'
    yield f'<text class="rk-end rk-small" x="{left + _WIDE}" y="{top - 12}">GB/s</text>'
    for power in range(low, high + 1):
        y = bottom - (power - low) / (high - low) * _HIGH
        yield f'<line class="rk-grid" x1="{left}" y1="{y:.1f}" x2="{left + _WIDE}" y2="{y:.1f}"/>'
        yield f'<text class="rk-end" x="{left - 6}" y="{y + 4:.1f}">{10.0**power:g}</text>'
    for size in sizes:
        x = left + inset + (log2(size) - first) / span * (_WIDE - 2 * inset)
        yield f'<text class="rk-mid" x="{x:.1f}" y="{bottom + 17}">{in_words(size)}</text>'
    middle = left + _WIDE / 2
    yield f'<text class="rk-mid rk-small" x="{middle:g}" y="{bottom + 32}">bytes in the message, X</text>'
    for number, axis in enumerate(axes):
        points = [at(rate) for rate in sorted(rates, key=lambda rate: rate.size) if rate.axis == axis]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{_COLOURS[number]}" stroke-width="2"/>'
        yield from (_mark(number, x, y) for x, y in points)


def _mark(number: int, x: float, y: float) -> str:
    """A circle, a square, a triangle or a diamond."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"',
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
        f'<path d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z"',
        f'<path d="M{x:.1f},{y - 6:.1f} l5,6 l-5,6 l-5,-6 z"',
    )
    return f'{shapes[number % 4]} fill="{_COLOURS[number % len(_COLOURS)]}"/>'
