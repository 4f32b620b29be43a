"""Lab 1, a plausible mistake. All ranks along data are taken for one list: only the group of rank 0."""

from pathlib import Path

RIGHT = "    return list(groups.values())"
WRONG = "    return next(iter(groups.values()))"

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
