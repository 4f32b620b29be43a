"""bf16 and fp16: float32 masters beside low-precision parameters, and the loss scale (§9.1 §9.3).

The model computes in the low precision; gradients are added up over micro-batches in float32, the optimizer
steps float32 masters, and the parameters are their rounded copies. fp16 also multiplies the loss, because
small gradients would vanish. In every precision a step whose gradients are not finite is skipped; whether
they are is read from the global norm, which is one number for all ranks, so every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ds_lite.buckets import Bucket, Piece, Route, versions
from ds_lite.comm import Work
from ds_lite.config_keys import DSConfig, Fp16

_LOW = (torch.float16, torch.bfloat16)


def compute_dtype(config: DSConfig) -> torch.dtype | None:
    """The dtype that the config asks the model to compute in; None leaves it as it is.

    Raises: ValueError if both precisions are enabled.
    """
    if config.fp16.enabled and config.bf16.enabled:
        raise ValueError("fp16.enabled and bf16.enabled are both true; keep one of them (§9.3)")
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


def master_dtype(parameter: nn.Parameter, config: DSConfig) -> torch.dtype | None:
    """float32 for a low-precision parameter of a run in bf16 or fp16; None if it is its own master."""
    wanted = compute_dtype(config) is not None and parameter.dtype in _LOW
    return torch.float32 if wanted else None


class MasterBucket(Bucket):
    """Low-precision parameters with whole float32 masters, which the optimizer steps (no ZeRO)."""

    def __init__(self, parameters: Sequence[nn.Parameter], route: Route, dtype: torch.dtype) -> None:
        super().__init__(parameters, route, dtype)
        self.pieces = [
            Piece(index, 0, size, nn.Parameter(parameter.detach().to(dtype)))
            for index, (parameter, size) in enumerate(zip(self.parameters, self.sizes, strict=True))
        ]
        self._versions = versions(self.parameters)

    @torch.no_grad()
    def follow(self) -> None:
        """A parameter that somebody wrote into, e.g. by `load_state_dict`, gives its master a new value."""
        for parameter, piece, known in zip(self.parameters, self.pieces, self._versions, strict=True):
            if parameter._version != known:
                piece.target.copy_(parameter)
        self._versions = versions(self.parameters)

    @torch.no_grad()
    def publish(self) -> Work | None:
        """Round the stepped masters into the parameters."""
        torch._foreach_copy_(list[Tensor](self.parameters), [piece.target for piece in self.pieces])
        self._versions = versions(self.parameters)
        return None


class LossScaler:
    """The number the loss is multiplied by: fixed, or halved on overflow and doubled after calm steps.

    Units: `window` in steps without overflow; `hysteresis` overflows are borne before the scale is halved,
    and filled up again when the scale grows (with `refills`, at every calm step).

    >>> scaler = LossScaler(initial=65536.0, window=2, hysteresis=1, minimum=1.0)
    >>> scaler.update(overflowed=True); scaler.scale
    32768.0
    >>> for _ in range(3):  # the step after two calm ones
    ...     scaler.update(overflowed=False)
    >>> scaler.scale
    65536.0

    Source: §9.3; DeepSpeed `runtime/fp16/loss_scaler.py::DynamicLossScaler` @ 0.19.8.
    Differs: at its minimum the scale stays there, and every skipped step is reported; DeepSpeed raises.
    """

    def __init__(
        self,
        *,
        initial: float,
        window: int,
        hysteresis: int,
        minimum: float,
        refills: bool = False,
        is_dynamic: bool = True,
    ) -> None:
        self.scale, self.window, self.minimum, self.is_dynamic = initial, window, minimum, is_dynamic
        self.hysteresis, self.patience, self.refills = hysteresis, hysteresis, refills
        self.calm_steps = 0

    @classmethod
    def from_config(cls, fp16: Fp16) -> LossScaler:
        """A fixed scale if `loss_scale` is given, else a dynamic one; 1 if fp16 is off."""
        if not fp16.enabled:
            return cls(initial=1.0, window=1, hysteresis=1, minimum=1.0, is_dynamic=False)
        return cls(
            initial=fp16.loss_scale or 2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            minimum=fp16.min_loss_scale,
            refills=fp16.consecutive_hysteresis,
            is_dynamic=not fp16.loss_scale,
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to differentiate, in float32, so that the product does not overflow."""
        return loss if self.scale == 1 and not self.is_dynamic else loss.float() * self.scale

    def update(self, *, overflowed: bool) -> None:
        """Count one step."""
        if not self.is_dynamic:
            return
        if overflowed:
            if self.patience > 1:
                self.patience -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            self.calm_steps = 0
            return
        if self.refills:  # only overflows in a row use the patience up
            self.patience = self.hysteresis
        if self.calm_steps > 0 and self.calm_steps % self.window == 0:
            self.patience = self.hysteresis
            self.scale *= 2
        self.calm_steps += 1

    def state_dict(self) -> dict[str, float | int]:
        """What a resumed run needs; settings come from its config."""
        return {"scale": self.scale, "patience": self.patience, "calm_steps": self.calm_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale, self.patience = float(state["scale"]), int(state["patience"])
        self.calm_steps = int(state["calm_steps"])
