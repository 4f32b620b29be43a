"""§9.1 §9.2 Every optimizer and schedule of torch goes on from a checkpoint. Guards against: a state entry
that comes back in another shape, type or place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from saving_models import make_engine, scratch_folder, train
from tolerance import EXACT, assert_close, differs
from torch import Tensor, nn

from ds_lite.saving import files

ELEMENTWISE = {
    "Adadelta": {},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {"t0": 1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
WHOLE_ONLY = {"Adagrad": {}, "Adafactor": {}}


def every_optimizer(rank: int, folder: str) -> None:
    for zero, kinds in ((0, {**ELEMENTWISE, **WHOLE_ONLY}), (1, ELEMENTWISE)):
        for kind, options in kinds.items():
            config = {"zero": zero, "optimizer": {"type": kind, "params": {"lr": 1e-2, **options}}}
            engine = make_engine(**config)
            engine.module.norm.eval()
            train(engine, 2)
            engine.save_checkpoint(folder, f"{kind}-{zero}")
            other = make_engine(**config)
            other.load_checkpoint(folder, f"{kind}-{zero}")
            other.module.norm.eval()
            for mine, theirs in zip(
                other.optimizer.state.values(), engine.optimizer.state.values(), strict=True
            ):
                assert mine.keys() == theirs.keys(), kind
                for key, value in mine.items():
                    msg = f"{kind} zero={zero}: {key}"
                    assert type(value) is type(theirs[key]), msg
                    if isinstance(value, Tensor):
                        assert_close(value, theirs[key], EXACT, msg)
            assert train(other, 3, seed=2) == train(engine, 3, seed=2), f"{kind} zero={zero}"
            assert differs(torch.tensor(train(engine, 1)), torch.tensor(train(engine, 1))), "control: no step"


def test_every_optimizer_goes_on(world: Any) -> None:
    with scratch_folder() as folder:
        world(every_optimizer, 2, folder)


def test_the_state_of_every_torch_schedule_can_be_kept() -> None:
    schedules = torch.optim.lr_scheduler
    weight = nn.Parameter(torch.zeros(2))

    def make(kind: str) -> Any:
        optimizer = torch.optim.SGD([weight], lr=np.float64(0.1), momentum=0.9)
        needed = {
            "LambdaLR": {"lr_lambda": lambda step: np.cos(step)},
            "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
            "StepLR": {"step_size": 2},
            "MultiStepLR": {"milestones": [1, 2, 2]},
            "ExponentialLR": {"gamma": 0.5},
            "CosineAnnealingLR": {"T_max": 4},
            "CosineAnnealingWarmRestarts": {"T_0": 2},
            "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
            "OneCycleLR": {"max_lr": 0.2, "total_steps": 9},
        }
        if kind == "SequentialLR":
            parts = [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.5)]
            return schedules.SequentialLR(optimizer, parts, milestones=[2])
        return getattr(schedules, kind)(optimizer, **needed.get(kind, {}))

    for kind in schedules.__all__:
        if kind in ("LRScheduler", "ChainedScheduler", "SWALR"):
            continue
        schedule = make(kind)
        weight.grad = torch.ones(2)
        for _ in range(3):
            schedule.optimizer.step()
            schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        kept = files.plain(schedule.state_dict(), "state")
        files.plain(schedule.optimizer.param_groups[0]["lr"], "lr")
        again = make(kind)
        again.load_state_dict(kept)
        assert again.last_epoch == schedule.last_epoch == 3, kind
