"""Lab 2, a plausible mistake. One more forward than S - s before the first backward."""

from pathlib import Path

RIGHT = "2 * num_stages - 1 - stage_id + 2 * i: i"
WRONG = "2 * num_stages + 1 - stage_id + 2 * i: i"

_text = (Path(__file__).resolve().parents[3] / "labs/lab02_pipeline/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
