"""Lab 1, a plausible mistake. A rank outside the mesh gets coordinates too."""

from pathlib import Path

RIGHT = "if not 0 <= rank < prod(dims):"
WRONG = "if False:"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
