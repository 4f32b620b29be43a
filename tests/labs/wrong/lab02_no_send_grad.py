"""Lab 2, a plausible mistake. The gradient of the input stays on the stage that made it."""

from pathlib import Path

RIGHT = "if tick - 1 in backwards and not is_first:"
WRONG = "if False:"

_text = (Path(__file__).resolve().parents[3] / "labs/lab02_pipeline/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
