"""What a load will do, checked on every rank before anything changes (§9.1 §9.3).

Names and shapes are compared with the manifest, every file with its checksum, the optimizer and the schedule
with what was saved. After an error the engine is as it was, so a script may catch it and try another tag.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_lite.saving.engine_view import EngineView
from ds_lite.saving.files import ENGINE_FILE, Manifest, load_states, verify
from ds_lite.saving.groups import Group, chosen_options, groups_of, groups_of_a_stage
from ds_lite.saving.optimizer import names_of_targets, places_of
from ds_lite.saving.parts import expert_names
from ds_lite.saving.ranks import gathered, some, together
from ds_lite.saving.state import STAGE, module_state, whole_shape


@dataclass(frozen=True)
class LoadOptions:
    """What `load_checkpoint` restores; DeepSpeed's arguments."""

    module_strict: bool = True
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None


class LoadPlan:
    """One load on this rank: what is there, what is wanted, and what goes where.

    `optimizer` and `scheduler` are None where they are left alone. `saved` is the engine's file, `chosen` are
    the options by parameter group, `schedule` is the state of this stage's schedule.

    Communication: gathers names, shapes and groups; every rank makes it at the same point.
    Raises: ValueError, on every rank, for what is damaged or does not fit.
    """

    def __init__(self, engine: EngineView, folder: str, manifest: Manifest, options: LoadOptions) -> None:
        self.engine, self.folder, self.manifest, self.options = engine, folder, manifest, options
        self.by_hand = options.custom_load_fn is not None
        is_whole = not options.module_only
        self.optimizer = engine.optimizer if is_whole and options.optimizer_states else None
        self.scheduler = engine.lr_scheduler if is_whole and options.lr_scheduler_states else None
        self.saved: dict[str, Any] = {}
        self.chosen: list[dict[str, Any]] = []
        self.schedule: dict[str, Any] = {}
        together(self._take_stock)
        if not self.by_hand:
            self._check_names()
        together(self._verify_files)
        groups = groups_of_a_stage(gathered(together(self._own_groups), engine.grid.group(*STAGE)))
        together(lambda: self._read_engine(groups))

    def say(self, what: str) -> None:
        """Tell the reader, once."""
        if self.engine.global_rank == 0:
            print(f"ds_lite: loading {self.folder}: {what}", flush=True)

    def _take_stock(self) -> None:
        if not os.path.isdir(self.folder):
            raise ValueError(
                f"{self.folder} is not visible on rank {self.engine.global_rank}, but on rank 0; all ranks "
                f"name one folder on a shared file system (§9.1)"
            )
        self.state = module_state(self.engine.module)
        self.places = places_of(self.engine.module, self.engine.gradients.buckets)

    def _own_groups(self) -> list[Group]:
        """Empty if the optimizer is left alone."""
        return groups_of(self.optimizer, names_of_targets(self.places)) if self.optimizer is not None else []

    def _check_names(self) -> None:
        """Compare the names and shapes of all stages with the manifest; the same verdict on every rank."""
        is_first = self.engine.grid.ranks(*STAGE)[0] == self.engine.global_rank
        experts = expert_names(self.engine.module)
        own = {name: _kind(value) for name, value in self.state.items() if is_first or name in experts}
        here = {name: kind for names in gathered(own) for name, kind in names.items()}
        saved = {name: (r.shape, _is_float(r.dtype)) for name, r in self.manifest.tensors.items()}
        wrong = [
            f"{name} is {_words(saved[name])} in the checkpoint and {_words(kind)} here"
            for name, kind in here.items()
            if name in saved and saved[name] != kind
        ]
        if wrong:
            raise ValueError(
                f"{self.folder} does not fit the model: {some(wrong)}; build the model that was saved (§9.1)"
            )
        missing = [name for name in here if name not in saved and name not in self.manifest.excluded]
        extra = [name for name in saved if name not in here]
        if (missing or extra) and self.options.module_strict:
            raise ValueError(
                f"{self.folder} is of another model: missing in the checkpoint {some(missing)}, not in this "
                f"model {some(extra)}; build the model that was saved or pass load_module_strict=False (§9.1)"
            )
        left = [name for name in here if name not in saved]
        if left or extra:
            self.say(f"not in the checkpoint and left as they are: {some(left)}; not used: {some(extra)}")

    def _verify_files(self) -> None:
        """Every file that some rank will read, each on one rank."""
        left_out = set() if self.optimizer is not None else set(self.manifest.optimizer.values())
        needed = sorted(set(self.manifest.files) - left_out)
        for name in needed[self.engine.global_rank :: self.engine.world_size]:
            verify(self.folder, name, self.manifest.files[name])

    def _read_engine(self, groups: list[Group]) -> None:
        self.saved = load_states(self.folder, ENGINE_FILE, mapped=False)
        if self.optimizer is not None:
            self._check_optimizer()
            stepped = [name for group in groups for name in group.names]
            self._check_states([name for name in stepped if name in self.places])  # not others' experts
            self.chosen = chosen_options(
                groups, [Group(**group) for group in self.saved["optimizer"]["groups"]]
            )
        if self.scheduler is not None:
            self.schedule = self._chosen_schedule()
        elif self.engine.lr_scheduler is None and any(self.saved["schedulers"]):
            self.say("the state of its lr_scheduler is not used, since this engine has none")

    def _check_optimizer(self) -> None:
        saved, kind = self.saved["optimizer"], type(self.optimizer).__name__
        if saved is None or saved["class"] != kind:
            had = "no optimizer" if saved is None else f"the optimizer {saved['class']}"
            raise ValueError(
                f"{self.folder} was saved with {had} and this engine has {kind}; use the same, or pass "
                f"load_optimizer_states=False to start with fresh states (§9.1)"
            )

    def _check_states(self, names: list[str]) -> None:
        """Whether there are states for what this stage's optimizers step."""
        files, tensors = self.manifest.optimizer, self.manifest.tensors
        shapes = {name: whole_shape(self.places[name].parameter) for name in names}
        for name, here in shapes.items():
            if name in files and name in tensors and tensors[name].shape != here:
                raise ValueError(
                    f"the optimizer states of {name} in {self.folder} have the shape {tensors[name].shape} "
                    f"and the parameter here {here}; pass load_optimizer_states=False (§9.1)"
                )
        fresh = [name for name in names if name not in files and self.places[name].parameter.numel()]
        if fresh and self.options.module_strict and not self.by_hand:
            raise ValueError(
                f"{self.folder} has no optimizer states for {some(fresh)}, which were frozen or missing when "
                f"it was saved; pass load_module_strict=False to start those afresh, or "
                f"load_optimizer_states=False for all (§9.1)"
            )
        if fresh:
            self.say(f"no optimizer states for {some(fresh)}, which start afresh")

    def _chosen_schedule(self) -> dict[str, Any]:
        """The state of this stage's schedule."""
        states, stages = self.saved["schedulers"], self.engine.grid.size("pipe")
        if len(states) not in (1, stages):
            raise ValueError(
                f"{self.folder} has a schedule of its own for each of {len(states)} stages, whose parameter "
                f"groups differ, and this run has {stages}; use as many, or pass "
                f"load_lr_scheduler_states=False (§9.2)"
            )
        chosen = states[self.engine.grid.get_stage_id()] if len(states) > 1 else states[0]
        kind = type(self.scheduler).__name__
        if chosen is None or chosen["class"] != kind:
            had = "no lr_scheduler" if chosen is None else f"the lr_scheduler {chosen['class']}"
            raise ValueError(
                f"{self.folder} was saved with {had} and this engine has {kind}; use the same, or pass "
                f"load_lr_scheduler_states=False (§9.2)"
            )
        state: dict[str, Any] = chosen["state"]
        return state


def _kind(value: Any) -> tuple[tuple[int, ...] | None, bool]:
    return whole_shape(value), isinstance(value, Tensor) and _is_float(str(value.dtype))


def _is_float(dtype: str | None) -> bool:
    if dtype is None:
        return False
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return kind.is_floating_point or kind.is_complex


def _words(kind: tuple[tuple[int, ...] | None, bool]) -> str:
    shape, is_float = kind
    return "extra state" if shape is None else f"{shape} of {'floats' if is_float else 'integers'}"
