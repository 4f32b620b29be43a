"""Lab 1, a plausible mistake. The groups are right, and come from the last to the first."""

from pathlib import Path

RIGHT = "    return list(groups.values())"
WRONG = "    return list(groups.values())[::-1]"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
