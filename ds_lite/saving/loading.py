"""Go on from a checkpoint, whatever layout saved it (§9.1 §9.3).

After the checks of `checks.py` each rank reads the layers it holds, one file after the other, and
keeps its own part of each tensor: of the module's, and of what its optimizer steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ds_lite.saving.checks import LoadOptions, LoadPlan
from ds_lite.saving.engine_view import EngineView
from ds_lite.saving.files import Manifest, check_name, load_states, read_latest, read_manifest, tags_in
from ds_lite.saving.groups import set_options
from ds_lite.saving.optimizer import (
    follow_parameters,
    is_master_of,
    part_of,
    places_of,
    set_state,
    set_target,
)
from ds_lite.saving.publishing import find_checkpoint
from ds_lite.saving.ranks import agree, from_rank_zero, in_the_trace, together
from ds_lite.saving.state import (
    AXES,
    put,
    set_engine_state,
    set_generator_states,
    set_loss_scale,
    whole_shape,
)

Path = str | os.PathLike[str]


def load_checkpoint(
    engine: EngineView, load_dir: Path, tag: str | None, options: LoadOptions
) -> tuple[str | None, dict[str, Any]]:
    """Go on from `load_dir/tag`, by default from what `latest` names. Every rank calls it.

    Returns the folder and the client_state. Without a tag and without a file `latest` nothing is loaded, rank
    0 says so, and the result is (None, {}).

    Communication: gathers names and shapes of all stages; under ZeRO one all-gather per bucket.
    Raises: ValueError, on every rank, for a checkpoint that is not there, is damaged, or is of another model,
    optimizer or schedule; the engine is as it was then. Also what `custom_load_fn` raises, and ValueError for
    a file that cannot be read any more after the checks; the engine may be half loaded then.

    Source: §9.1; DeepSpeed `runtime/engine.py::load_checkpoint` @ 0.19.8.
    Differs: returns the folder, not a file in it, and {} where DeepSpeed returns None; a pipeline takes
    `custom_load_fn` too; with `load_optimizer_states=False` masters are made from the loaded weights.
    """
    with in_the_trace(engine.trace, "LoadCheckpoint"):
        directory = os.fspath(load_dir)
        name = together(lambda: None if tag is None else check_name(tag))
        flags = {key: value for key, value in vars(options).items() if key != "custom_load_fn"}
        agree("load_checkpoint", tag=name, custom=options.custom_load_fn is not None, **flags)
        found = from_rank_zero(lambda: _find(directory, name))
        if found is None:
            return None, {}
        tag, folder, manifest = found
        plan = LoadPlan(engine, os.path.join(directory, folder), manifest, options)
        _carry_out(plan)
        return os.path.join(directory, tag), plan.saved["client_state"]


def _find(directory: str, tag: str | None) -> tuple[str, str, Manifest] | None:
    """Rank 0: the tag, the folder's name and its manifest; None if there is no `latest` to follow."""
    tag = tag or read_latest(directory)
    if tag is not None:
        folder = find_checkpoint(directory, tag)
        return tag, os.path.basename(folder), read_manifest(folder)
    there = f"its checkpoints are {tags_in(directory)}" if os.path.isdir(directory) else "it does not exist"
    print(
        f"ds_lite: NOTHING WAS LOADED: {directory} has no file `latest` ({there}). The run starts from its "
        f"initial weights; pass tag= to load a checkpoint.",
        flush=True,
    )
    return None


def _carry_out(plan: LoadPlan) -> None:
    """Read this rank's tensors, then make all ranks' parameters follow what the optimizers hold.

    Communication: under ZeRO one all-gather per bucket.
    """
    engine = plan.engine
    together(lambda: _load_tensors(plan))
    engine.gradients.publish()
    engine.forget_batch()
    if plan.options.module_only:
        return
    set_engine_state(engine, plan.saved)
    if plan.optimizer is not None:
        set_loss_scale(engine, plan.saved)
    if (scheduler := plan.scheduler) is not None:
        together(lambda: scheduler.load_state_dict(plan.schedule))
    layout = {axis: engine.grid.size(axis) for axis in AXES}
    if layout == plan.saved["layout"]:
        set_generator_states(plan.saved["generators"][engine.global_rank], engine.device)
    else:
        plan.say(
            f"random generators go on from this run's seeds: saved by {plan.saved['layout']}, now {layout}"
        )


def _load_tensors(plan: LoadPlan) -> None:
    if plan.options.custom_load_fn is not None:
        _load_by_hand(plan, plan.options.custom_load_fn)
    else:
        _load_module(plan)
    if plan.optimizer is not None:
        _load_optimizer(plan, plan.optimizer)


def _load_module(plan: LoadPlan) -> None:
    """Tensors in place, so that a ZeRO buffer stays the storage; masters in the precision of the file."""
    by_id = {id(place.parameter): place for place in plan.places.values()}
    tensors = plan.manifest.tensors
    for file, names in _by_file((tensors[name].file, name) for name in plan.state if name in tensors):
        content = load_states(plan.folder, file)
        for name in names:
            put(plan.engine.module, name, plan.state[name], content[name])
        trained = {name: by_id[id(plan.state[name])] for name in names if id(plan.state[name]) in by_id}
        follow_parameters(trained.values())
        for name, place in trained.items():
            set_target(place, content[name])


def _load_by_hand(plan: LoadPlan, load: Callable[..., Any]) -> None:
    """`load(src=, dst=)` with all tensors of the checkpoint, cut where the parameter here is cut."""
    source: dict[str, Any] = {}
    for file, names in _by_file((record.file, name) for name, record in plan.manifest.tensors.items()):
        content = load_states(plan.folder, file)
        for name in names:
            here, value = plan.state.get(name), content[name]
            fits = isinstance(here, Tensor) and whole_shape(here) == plan.manifest.tensors[name].shape
            source[name] = part_of(here, value) if here is not None and fits else value
    load(src=source, dst=plan.engine.module)
    places_of(plan.engine.module, plan.engine.gradients.buckets)  # raises for a parameter that was exchanged
    follow_parameters(plan.places.values())


def _load_optimizer(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> None:
    """State and masters of what this rank steps, then the options of its groups."""
    group_of = {id(target): group for group in optimizer.param_groups for target in group["params"]}
    held = {
        name: (place, place.piece.target)
        for name, place in plan.places.items()
        if place.piece is not None and id(place.piece.target) in group_of
    }
    for _, target in held.values():
        optimizer.state.pop(target, None)
    files = plan.manifest.optimizer
    for file, names in _by_file((files[name], name) for name in held if name in files):
        content = load_states(plan.folder, file)
        for name in names:
            place, target = held[name]
            master = content[name].get("master")
            if master is not None and (not plan.by_hand or is_master_of(place, master)):
                set_target(place, master)
            set_state(optimizer, group_of[id(target)], name, place, content[name])
    set_options(optimizer, plan.chosen)


def _by_file(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    """(file, names in it), each file once."""
    files: dict[str, list[str]] = {}
    for file, name in pairs:
        files.setdefault(file, []).append(name)
    return files.items()
