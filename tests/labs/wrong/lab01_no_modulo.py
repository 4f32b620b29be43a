"""Lab 1, a plausible mistake. A coordinate goes on counting beyond the size of its axis."""

from pathlib import Path

RIGHT = "rank // stride % dim for"
WRONG = "rank // stride for"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
