"""Save: every layer's whole tensors, one layer after the other, then the publication (§9.1 §9.3)."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ds_lite.agreement import raise_together
from ds_lite.saving.engine_view import EngineView
from ds_lite.saving.files import (
    ENGINE_FILE,
    FileRecord,
    Manifest,
    TensorRecord,
    check_name,
    load_states,
    write_manifest,
    write_states,
)
from ds_lite.saving.groups import Group, groups_of_the_model, same
from ds_lite.saving.names import named_as_the_model
from ds_lite.saving.optimizer import Place, Sheet, describe, merged, places_of, whole_state
from ds_lite.saving.parts import Part, parts_of
from ds_lite.saving.publishing import Publication
from ds_lite.saving.ranks import agree, from_rank_zero, gathered, in_the_trace, together
from ds_lite.saving.state import (
    AXES,
    STAGE,
    check_cuts,
    engine_state,
    generator_states,
    module_state,
    scheduler_state,
    whole_part,
    whole_shape,
)

__all__ = ["save_checkpoint", "save_whole_model"]

Path = str | os.PathLike[str]


def save_checkpoint(
    engine: EngineView,
    save_dir: Path,
    tag: str | None,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> bool:
    """Write `save_dir/tag` (default global_stepN) and let `latest` name it. Every rank calls it.

    Returns True.

    Communication: for each parameter's value, master and state tensors one all-reduce over the data axis
    under ZeRO, and one all-gather over the model axis where it was cut.
    Raises: on every rank, ValueError for a tag that is no plain name or differs between ranks, for anything
    that could not be loaded again, and for something else in the checkpoint's place; OSError where a file
    cannot be written, RemoteError on the other ranks then. Earlier checkpoints stay as they are.

    Source: §9.1; DeepSpeed `runtime/engine.py::save_checkpoint` @ 0.19.8.
    Differs: DeepSpeed writes each rank's optimizer state, which the same layout reads, into the final folder.
    """
    with in_the_trace(engine.trace, "SaveCheckpoint"):
        name = together(lambda: check_name(f"global_step{engine.global_steps}" if tag is None else tag))
        agree("save_checkpoint", tag=name, save_latest=save_latest, frozen_left_out=exclude_frozen_parameters)
        snapshot = together(lambda: _Snapshot(engine, client_state, exclude_frozen_parameters))
        snapshot.take_in(gathered(snapshot.sheet, engine.grid.group(*STAGE)))
        publication = Publication(os.fspath(save_dir), name)
        from_rank_zero(publication.check_place)
        from_rank_zero(publication.start)
        try:
            together(publication.check_visible)
            report = _write_stage(engine, publication.folder, snapshot)
            reports = gathered((report, generator_states(engine.device)))
            from_rank_zero(lambda: _finish(engine, publication, snapshot, reports, save_latest))
        except Exception:
            if engine.global_rank == 0:
                publication.discard()
            raise
        if (begun := engine.micro_batches_begun()) and engine.global_rank == 0:
            print(
                f"ds_lite: saved {name} as of the last step; the gradients of {begun} micro-batches since "
                f"then are not in it",
                flush=True,
            )
    return True


def save_whole_model(engine: EngineView, save_dir: Path, filename: str, exclude_frozen: bool) -> bool:
    """One file with the whole state dict, on the CPU in the module's own dtypes, for torch.load anywhere.

    The stages write their layers beside it and rank 0 copies them together from the disk, so no rank needs
    the memory for more than a layer. Every rank calls it; returns True.

    Communication: one all-gather over the model axis per parameter that was cut.
    Raises: as `save_checkpoint`.

    Source: §9.1; DeepSpeed `runtime/engine.py::save_16bit_model` @ 0.19.8.
    """
    with in_the_trace(engine.trace, "SaveModel"):
        name = together(lambda: check_name(filename, "save_filename"))
        agree("save_16bit_model", save_filename=name, frozen_left_out=exclude_frozen)
        snapshot = together(lambda: _Snapshot(engine, None, exclude_frozen))
        publication = Publication(os.fspath(save_dir), name)
        from_rank_zero(publication.start)
        try:
            together(publication.check_visible)
            reports = gathered(_write_stage(engine, publication.folder, snapshot))
            from_rank_zero(lambda: _join_files(engine.module, publication, reports))
        except Exception:
            if engine.global_rank == 0:
                publication.discard()
            raise
    return True


class _Snapshot:
    """What this rank brings to a save, checked before anything is written; no client_state: weights only."""

    def __init__(self, engine: EngineView, client_state: dict[str, Any] | None, exclude_frozen: bool) -> None:
        module = engine.module
        self.state = module_state(module)
        check_cuts(self.state, engine.grid.size("model"))
        self.excluded = [
            name
            for name, value in self.state.items()
            if exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad
        ]
        names = [name for name in self.state if name not in self.excluded]
        self.parts = parts_of(module, names, engine.grid)
        self.places: dict[str, Place] = {}
        self.sheet = Sheet()
        self.engine: dict[str, Any] = {}
        self.scheduler: dict[str, Any] | None = None
        if client_state is not None:
            self.places = places_of(module, engine.gradients.buckets)
            for bucket in engine.gradients.buckets:
                bucket.follow()  # what somebody wrote into the parameters
            self.sheet = describe(engine.optimizer, self.places)
            self.engine = engine_state(engine, client_state)
            self.scheduler = scheduler_state(engine.lr_scheduler)
        self.stepped: set[str] = set()

    def take_in(self, sheets: list[Sheet]) -> None:
        """What the optimizers of the whole stage hold, in place of this rank's."""
        self.sheet = merged(sheets)
        self.stepped = {name for group in self.sheet.groups for name in group.names}


@dataclass
class _Report:
    """What a rank has written. Most write nothing and keep one for their part in the collectives.

    The first rank of a stage speaks for the stage in all but its files.
    """

    is_first: bool
    folder: str
    stage: int
    excluded: list[str]
    groups: list[Group]
    scheduler: dict[str, Any] | None
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    def write(self, name: str, content: Any) -> None:
        """After the first error nothing more is written, but the rank goes on to take part in collectives."""
        try:
            if self.error is None:
                self.files[name] = write_states(self.folder, name, content)
        except Exception as error:
            self.error = error


def _write_stage(engine: EngineView, folder: str, snapshot: _Snapshot) -> _Report | None:
    """Write the parts of this stage, each as two files; the report is on the ranks that wrote some.

    Raises: on every rank what the lowest rank that failed could not write.
    """
    is_first = engine.grid.ranks(*STAGE)[0] == engine.global_rank
    groups = snapshot.sheet.groups
    stage = engine.grid.get_stage_id()
    report = _Report(is_first, folder, stage, snapshot.excluded, groups, snapshot.scheduler)
    for part in snapshot.parts:
        _write_values(report, snapshot, part)
        if engine.optimizer is not None:
            _write_states_of(report, engine.optimizer, snapshot, part)
    raise_together(report.error)
    return report if is_first or report.files else None


def _write_values(report: _Report, snapshot: _Snapshot, part: Part) -> None:
    content = whole_part(snapshot.state, part.names, keep=part.is_mine)
    if part.is_mine:
        report.write(file := f"{part.label}-model_states.pt", content)
        records = {name: _record(file, snapshot.state[name], value) for name, value in content.items()}
        report.tensors.update(records)


def _write_states_of(
    report: _Report, optimizer: torch.optim.Optimizer, snapshot: _Snapshot, part: Part
) -> None:
    """What the optimizer holds for the parameters of a part."""
    content: dict[str, dict[str, Any]] = {}
    for name in (name for name in part.names if name in snapshot.stepped):
        kinds = snapshot.sheet.elements.get(name, {})
        joined = whole_state(optimizer, snapshot.places[name], kinds, keep=part.is_mine)
        content[name] = {**joined, "numbers": snapshot.sheet.numbers.get(name, {})}
    if part.is_mine and content:
        report.write(file := f"{part.label}-optim_states.pt", content)
        report.optimizer.update(dict.fromkeys(content, file))


def _record(file: str, value: Any, whole: Any) -> TensorRecord:
    dtype = str(whole.dtype).removeprefix("torch.") if isinstance(whole, torch.Tensor) else None
    return TensorRecord(file, whole_shape(value), dtype)


def _finish(
    engine: EngineView,
    publication: Publication,
    snapshot: _Snapshot,
    reports: list[tuple[_Report | None, dict[str, Any]]],
    save_latest: bool,
) -> None:
    """Rank 0: the engine's file, the manifest, and then all of it at once becomes the checkpoint."""
    written = [report for report, _ in reports if report is not None]
    stages = sorted((report for report in written if report.is_first), key=lambda report: report.stage)
    layout = {axis: engine.grid.size(axis) for axis in AXES}
    schedulers = [stage.scheduler for stage in stages]
    if all(same(scheduler, schedulers[0]) for scheduler in schedulers):
        del schedulers[1:]
    optimizer = None
    if engine.optimizer is not None:
        groups = [asdict(group) for group in groups_of_the_model(stage.groups for stage in stages)]
        optimizer = {"class": type(engine.optimizer).__name__, "groups": groups}
    content = {
        **snapshot.engine,
        "layout": layout,
        "optimizer": optimizer,
        "schedulers": schedulers,  # one, or one a stage where the stages have different groups
        "generators": [generators for _, generators in reports],
    }
    manifest = Manifest(layout)
    for report in sorted(written, key=lambda report: report.stage):
        manifest.files.update(report.files)
        manifest.tensors.update(report.tensors)
        manifest.optimizer.update(report.optimizer)
        manifest.excluded += [name for name in report.excluded if name not in manifest.excluded]
    manifest.files[ENGINE_FILE] = write_states(publication.folder, ENGINE_FILE, content)
    write_manifest(publication.folder, manifest)
    publication.publish(with_latest=save_latest)


def _join_files(module: nn.Module, publication: Publication, reports: list[_Report | None]) -> None:
    """Rank 0: one file from the stages' files, whose tensors stay on the disk until they are copied."""
    whole: dict[str, Any] = {}
    for report in (report for report in reports if report is not None):
        for file in report.files:
            whole.update(load_states(publication.folder, file))
    write_states(publication.folder, publication.tag, named_as_the_model(module, whole))
    publication.publish_file()
