"""Lab 2, a plausible mistake. The losses of m micro-batches are added, not averaged."""

from pathlib import Path

RIGHT = "outputs[i] = y / num_micro_batches if is_last else y"
WRONG = "outputs[i] = y"

_text = (Path(__file__).resolve().parents[3] / "labs/lab02_pipeline/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
