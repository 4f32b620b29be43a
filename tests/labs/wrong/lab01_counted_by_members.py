"""Lab 1, a plausible mistake. Each pair of members counts, so a group stands on a link more than once."""

from pathlib import Path

RIGHT = """\
        nodes = sorted({rank // ranks_per_node for rank in group})
        for pair in combinations(nodes, 2):
            links.setdefault(pair, []).append(group)
"""
WRONG = """\
        for pair in combinations([rank // ranks_per_node for rank in group], 2):
            if pair[0] != pair[1]:
                links.setdefault(pair, []).append(group)
"""

_text = (Path(__file__).resolve().parents[3] / "labs/lab01_ranks/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
