"""What an engine says on rank 0 after a step (§9.2)."""

from __future__ import annotations

from collections.abc import Sequence

from ds_lite.trace import Trace


def step_line(step: int, loss: float, rates: Sequence[float], norm: float) -> str:
    """The line of `steps_per_print`."""
    rate = ", ".join(f"{rate:.3g}" for rate in rates)
    return f"ds_lite: step {step}  loss {loss:.4f}  lr {rate}  norm {norm:.3g}"


def times(trace: Trace) -> str:
    """Milliseconds by instruction since the last call, for `wall_clock_breakdown`."""
    seconds: dict[str, float] = {}
    for event in trace.events():
        seconds[event.instruction] = seconds.get(event.instruction, 0.0) + event.end - event.start
    trace.forget_events()
    return "".join(f"  {name} {value * 1e3:.1f} ms" for name, value in seconds.items())


def skip_line(step: int, norm: float, skipped: int, scales: tuple[float, float] | None) -> str:
    """The line of a step whose gradients were not finite; `scales` are the loss scale before and after."""
    scale = f"; loss scale {scales[0]:g} -> {scales[1]:g}" if scales else ""
    return f"ds_lite: step {step} skipped: the gradient norm is {norm}{scale}; {skipped} skipped so far"
