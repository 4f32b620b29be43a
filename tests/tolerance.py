"""The named tolerances, and the two comparisons every test uses: `assert_close` and its control `differs`.

EXACT: data was only moved. LAW: N processes against one, in float64. FP32, BF16: rounding of that format.
"""

from __future__ import annotations

from dataclasses import dataclass

import measured
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """How far apart two tensors may lie, relative to the larger of 1 and the largest expected value."""

    name: str
    value: float
    dtype: torch.dtype | None = None  # demanded of both tensors


EXACT = Tolerance("EXACT", 0.0)
LAW = Tolerance("LAW", 1e-10, torch.float64)
FP32 = Tolerance("FP32", 1e-5)
BF16 = Tolerance("BF16", 2e-2)

NOTICEABLE = 1e-6  # rounding in float64 stays far below, a real fault lies far above


def assert_close(actual: Tensor, expected: Tensor, tolerance: Tolerance, msg: str = "") -> None:
    """Fail unless shape and dtype agree and |actual - expected| <= tol * max(1, max|expected|) everywhere.

    NaN is close to nothing, not even to NaN; an infinity is close to the same infinity.
    """
    __tracebackhide__ = True
    name = f"{msg}: " if msg else ""
    for role, value in (("actual", actual), ("expected", expected)):
        if not isinstance(value, Tensor):
            raise AssertionError(f"{name}{role} is {value!r} of type {type(value).__name__}, not a tensor")
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}dtype {actual.dtype}, expected {expected.dtype}")
    if tolerance.dtype not in (None, actual.dtype):
        raise AssertionError(
            f"{name}dtype {actual.dtype}, but {tolerance.name} is defined for {tolerance.dtype}"
        )
    if not actual.numel():
        return
    distance = _distance(actual, expected)
    finite = _wide(expected)[torch.isfinite(_wide(expected))]
    scale = max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
    allowed = tolerance.value * scale
    worst = int(distance.argmax())
    measured.note(tolerance.name, tolerance.value, distance.flatten()[worst].item() / scale)
    if distance.flatten()[worst].item() > allowed:
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
        raise AssertionError(
            f"{name}differs by {distance.flatten()[worst].item():.3e} at {place}: "
            f"{actual[place].item()!r}, expected {expected[place].item()!r}; "
            f"{tolerance.name} allows {allowed:.1e}; "
            f"{int((distance > allowed).sum())} of {actual.numel()} elements are off"
        )


def differs(actual: Tensor | None, expected: Tensor | None) -> bool:
    """The negative control: something lies more than 1e-6 apart, or shape or presence disagree."""
    if actual is None or expected is None:
        return actual is not expected
    if actual.shape != expected.shape:
        return True
    return bool((_distance(actual, expected) > NOTICEABLE).any())


def _wide(x: Tensor) -> Tensor:
    return x.detach().cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in float64; infinite where one of the two is NaN, zero where both are the same infinity."""
    wide_a, wide_b = _wide(a), _wide(b)
    distance = (wide_a - wide_b).abs()
    distance[wide_a == wide_b] = 0.0
    return distance.nan_to_num(nan=float("inf"), posinf=float("inf"))
