"""The learning rate schedules a ds_config may name, as functions of the step (§9.2).

`step` counts the optimizer steps already made: `lr(0, ...)` rules the first one. DeepSpeed's iteration is
`step - 1`, starting at -1, which is why a warm-up gives its lowest rate twice, at steps 0 and 1.
`base_lr` is the rate a parameter group was built with; fields ending in _lr or _mom may be lists over groups.

Source: §9.2; DeepSpeed `runtime/lr_schedules.py` @ 0.19.8.
Differs: an unknown warmup_type is refused (DeepSpeed warns and takes "log"); OneCycle also cycles the
`momentum` of SGD or RMSprop unless it is zero (DeepSpeed: betas only); load_state_dict sets the rate at once.
"""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler


class Schedule(BaseModel):
    """A pure function `lr(step, base_lr)`; a subclass gives it a shape."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    last_batch_iteration: Literal[-1] = -1  # a run resumes through load_state_dict

    def lr(self, step: int, base_lr: float) -> float:
        raise NotImplementedError


class Climb(Schedule):  # the rising part, which all warm-ups share
    warmup_num_steps: Annotated[PositiveInt, AfterValidator(lambda n: max(2, n))] = 1000  # log(1) is 0
    warmup_type: Literal["log", "linear"] = "log"

    def share(self, step: int) -> float:
        """How much of the climb is done, 0 to 1."""
        iteration = min(max(0, step - 1), self.warmup_num_steps)
        logarithmic = math.log(iteration + 1) / math.log(self.warmup_num_steps)
        return iteration / self.warmup_num_steps if self.warmup_type == "linear" else min(1.0, logarithmic)


class WarmupLR(Climb):
    """Rise to the maximum (`base_lr` if none is given), then stay.

    >>> rule = WarmupLR(warmup_num_steps=4, warmup_type="linear")
    >>> [rule.lr(step, 1.0) for step in range(7)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None

    def lr(self, step: int, base_lr: float) -> float:
        top = base_lr if self.warmup_max_lr is None else self.warmup_max_lr
        return self.warmup_min_lr + (top - self.warmup_min_lr) * self.share(step)


class WarmupDecayLR(WarmupLR):
    """Rise, then fall on a straight line that meets the minimum at iteration `total_num_steps`."""

    total_num_steps: int
    warmup_max_lr: float = 0.001

    def share(self, step: int) -> float:
        left = (self.total_num_steps - step + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        return super().share(step) if step <= self.warmup_num_steps else max(0.0, left)


class WarmupCosineLR(Climb):
    """Scale `base_lr` up from `warmup_min_ratio`, then down half a cosine; step 0 always has rate zero."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def lr(self, step: int, base_lr: float) -> float:
        after = step - self.warmup_num_steps
        if after <= 0:
            scale = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.share(step)
            return base_lr * scale if step else 0.0
        fallen = min(1.0, after / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * fallen)) / 2
        return base_lr * max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * height)


class LRRangeTest(Schedule):
    """Grow without end, to see at which rate training breaks."""

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, step: int, base_lr: float) -> float:
        grown = (math.floor if self.lr_range_test_staircase else float)(step / self.lr_range_test_step_size)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * grown)


class OneCycle(Schedule):
    """Rate up and down once while the momentum goes down and up; then both decay, if a decay is set."""

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: PositiveFloat = 2000
    cycle_second_step_size: NonNegativeFloat | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def phase(self, step: int) -> tuple[float, float]:
        """Height in the cycle, 0 to 1, and decay intervals since its end."""
        up, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        down = up if self.cycle_second_step_size is None else self.cycle_second_step_size
        if step >= up + down + 1:
            return 0.0, (step - up - down) / self.decay_step_size if self.decay_step_size else 0.0
        done, length = step % (up + down), up
        if done > up:
            done, length = up + down - done, down
            stairs = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        return (math.floor(done * stairs / length) / stairs if stairs > 0 else done / length), 0.0

    def lr(self, step: int, base_lr: float) -> float:
        height, decay = self.phase(step)
        rate = self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height
        return rate / (1 + self.decay_lr_rate * decay)

    def momentum(self, step: int) -> float:
        """The mirror image of the rate, except that step 0 has the minimum."""
        height, decay = self.phase(step)
        value = self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height
        return value * (1 + self.decay_mom_rate * decay) if step else self.cycle_min_mom


SCHEDULES = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}


class GroupScheduler(LRScheduler):
    """One schedule per parameter group. Its state is the iteration alone, as in DeepSpeed."""

    def __init__(self, optimizer: Optimizer, schedules: list[Schedule]) -> None:
        self.schedules = schedules
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [s.lr(self.last_epoch, float(b)) for s, b in zip(self.schedules, self.base_lrs, strict=True)]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        key = next((k for k in ("betas", "momentum") if self.optimizer.defaults.get(k)), None)
        for group, schedule in zip(self.optimizer.param_groups, self.schedules, strict=True):
            if key and isinstance(schedule, OneCycle) and schedule.cycle_momentum:
                momentum = schedule.momentum(self.last_epoch)
                group[key] = (momentum, 0.99) if key == "betas" else momentum  # DeepSpeed fixes 0.99

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_batch_iteration"]
        self._step_count = 0  # else torch warns that no optimizer step came before
        self.step()


def build_scheduler(name: str, params: dict[str, Any], optimizer: Optimizer) -> LRScheduler:
    """The scheduler that `scheduler: {type: name, params: params}` asks for; it has set its first rate.

    `name` is a key of SCHEDULES or a scheduler class of `torch.optim.lr_scheduler`.
    Raises: ValueError for an unknown name, or a parameter that is unknown, missing or out of range.
    """
    kinds: dict[str, Any] = {k: getattr(lr_scheduler, k) for k in lr_scheduler.__all__ if k != "LRScheduler"}
    kinds.update(SCHEDULES)
    _check_known("scheduler type", [name], list(kinds))
    known = {key: p for key, p in inspect.signature(kinds[name]).parameters.items() if key != "optimizer"}
    _check_known(f"{name} parameter", list(params), list(known))
    if missing := [key for key, p in known.items() if p.default is p.empty and key not in params]:
        raise ValueError(f"{name} lacks {', '.join(missing)}; add it to scheduler.params (§9.2)")
    if name not in SCHEDULES:
        return kinds[name](optimizer=optimizer, **params)
    groups = range(len(optimizer.param_groups))
    lists = {k: v for k, v in params.items() if k.endswith(("_lr", "_mom")) and isinstance(v, list | tuple)}
    for key, values in lists.items():
        if len(values) != len(groups):
            raise ValueError(f"{key}={values} needs {len(groups)} values, one a parameter group (§9.2)")
    own = [params | {key: values[i] for key, values in lists.items()} for i in groups]
    return GroupScheduler(optimizer, [SCHEDULES[name](**group_params) for group_params in own])


def _check_known(what: str, names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{what} {name!r} is unknown; the nearest is {nearest!r} of {known} (§9.2)")
