"""Lab 1, a plausible mistake. An axis with neighbours on one node is thought to stay inside."""

from pathlib import Path

RIGHT = """\
    links: dict[tuple[int, int], list[list[int]]] = {}
"""
WRONG = """\
    links: dict[tuple[int, int], list[list[int]]] = {}
    first = [*comm_lists(axes, dims, axis)[0], prod(dims)]
    if first[1] - first[0] < ranks_per_node:
        return links
"""

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
