"""Lab 1, a plausible mistake. The place inside the group is returned where a global rank is wanted."""

from pathlib import Path

RIGHT = "    return group[place % len(group)]"
WRONG = "    return place % len(group)"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
