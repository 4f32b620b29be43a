"""Lab 2, a plausible mistake. In a backward slot the stage sends first; its neighbour does so too."""

from pathlib import Path

RIGHT = """\
        if tick in backwards and not is_last:
            step.append((RecvGrad, backwards[tick]))
        if tick - 1 in forwards and not is_last:
            step.append((SendActivation, forwards[tick - 1]))
"""
WRONG = """\
        if tick - 1 in forwards and not is_last:
            step.append((SendActivation, forwards[tick - 1]))
        if tick in backwards and not is_last:
            step.append((RecvGrad, backwards[tick]))
"""

_text = (Path(__file__).resolve().parents[3] / "labs/lab02_pipeline/solution.py").read_text(encoding="utf-8")
assert RIGHT in _text, "the solution has changed; adapt RIGHT"
exec(compile(_text.replace(RIGHT, WRONG), __file__, "exec"))
