"""Lab 1, a plausible mistake. Groups are cut from consecutive ranks, whatever the axis."""

from pathlib import Path

RIGHT = """\
    if axis not in axes:
        return []
    groups: dict[tuple[int, ...], list[int]] = {}
"""
WRONG = """\
    if axis not in axes:
        return []
    if axis:
        size = dims[list(axes).index(axis)]
        return [list(range(r, r + size)) for r in range(0, prod(dims), size)]
    groups: dict[tuple[int, ...], list[int]] = {}
"""

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
