"""§9.1 Damaged files. Guards against: a damaged file that is trained on, a load that stops halfway."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_models import copied, is_same, make_engine, scratch_folder, train
from small_models import linear

from ds_lite.saving import files

FAULTS = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "shorter": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "altered": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "another": lambda data: data[::-1],
}


def damage(path: str, change: Any) -> None:
    data = change(Path(path).read_bytes())
    os.unlink(path) if data is None else Path(path).write_bytes(data)


def damaged_files(rank: int, folder: str) -> None:
    """Every fault of every file is named, on every rank, and the engine stays as it was."""
    from ds_lite import comm

    engine = make_engine(zero=1)
    train(engine)
    engine.save_checkpoint(folder, "good")
    train(engine)
    expected, other = copied(engine), make_engine(zero=1)
    files = sorted(os.listdir(f"{folder}/good"))
    assert len(files) == 11
    for file in files:
        whole = Path(folder, "good", file).read_bytes()
        for fault, change in FAULTS.items():
            comm.barrier()
            if rank == 0:
                damage(f"{folder}/good/{file}", change)
            comm.barrier()
            with pytest.raises(ValueError, match=re.escape(f"good/{file}")):
                engine.load_checkpoint(folder)
            assert is_same(engine, expected), f"{file} {fault}: something was loaded"
            if "optim" in file:
                assert other.load_checkpoint(folder, load_optimizer_states=False)[0] == f"{folder}/good"
            comm.barrier()
            if rank == 0:
                Path(folder, "good", file).write_bytes(whole)
    comm.barrier()
    assert engine.load_checkpoint(folder)[0] == f"{folder}/good"


def test_a_damaged_file_is_found_and_named(world: Any) -> None:
    with scratch_folder() as folder:
        world(damaged_files, 2, folder)


def every_byte(rank: int, folder: str) -> None:
    """One flipped bit at every place, and a cut at every third."""
    engine = make_engine(linear(2, 1, 1))
    engine.save_checkpoint(folder, "good")
    recorded = files.read_manifest(f"{folder}/good").files

    def check(name: str) -> None:
        if name in recorded:
            files.verify(f"{folder}/good", name, recorded[name])
        else:
            files.read_manifest(f"{folder}/good")

    for name in (*recorded, "manifest.json"):
        path = Path(folder, "good", name)
        whole = path.read_bytes()
        for place in range(len(whole)):
            flipped = bytes([whole[place] ^ (1 << place % 8)])
            faults = [whole[:place] + flipped + whole[place + 1 :], whole[:place]]
            for data in faults[: 2 - bool(place % 3)]:
                path.write_bytes(data)
                with pytest.raises(ValueError, match=re.escape(f"{path} is damaged")):
                    check(name)
        path.write_bytes(whole)
        check(name)


def test_every_byte_counts(world: Any) -> None:
    with scratch_folder() as folder:
        world(every_byte, 1, folder, deadline=120.0)


def test_nothing_from_a_file_is_executed() -> None:
    """A pickle that calls a function is refused, also with a right checksum."""

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, ("echo executed",)

    with scratch_folder() as folder:
        record = files.write_states(folder, "layer_00-model_states.pt", {"a": Attack()})
        files.verify(folder, "layer_00-model_states.pt", record)
        with pytest.raises(ValueError, match=r"cannot load .*layer_00-model_states.pt"):
            files.load_states(folder, "layer_00-model_states.pt")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not proved: this system has no full device")
def test_a_full_disk_is_told_with_the_path() -> None:
    with pytest.raises(OSError, match="cannot write /dev/full: No space left on device; earlier checkpoints"):
        files.write_states("/dev", "full", {"a": torch.zeros(100_000)})
