"""Lab 1, a plausible mistake. Only nodes that follow one another in a group count."""

from pathlib import Path

RIGHT = "for pair in combinations(nodes, 2):"
WRONG = "for pair in zip(nodes, nodes[1:]):"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
