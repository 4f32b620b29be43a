"""Lab 1, a plausible mistake. After the last place of an axis nobody comes; the end stays where it is."""

from pathlib import Path

RIGHT = "    return group[place % len(group)]"
WRONG = "    return group[min(max(place, 0), len(group) - 1)]"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
