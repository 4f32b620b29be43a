"""Lab 1, a plausible mistake. The place of a rank inside its node is taken for the node."""

from pathlib import Path

RIGHT = "nodes = sorted({rank // ranks_per_node for rank in group})"
WRONG = "nodes = sorted({rank % ranks_per_node for rank in group})"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
