"""The files of a checkpoint: written with checksums, and checked before use (§9.1).

    DIR/latest               the tag of the newest checkpoint
    DIR/TAG/manifest.json    every file with its size and sha256; every tensor with its file, shape and dtype
    DIR/TAG/*_states.pt      what torch.save wrote: tensors and plain types

Nothing is unpickled: torch.load runs with weights_only, the rest is JSON. `publishing.py` says how
a save becomes visible at once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

MANIFEST, LATEST = "manifest.json", "latest"
ENGINE_FILE = "engine_states.pt"
_FORMAT = 1
_CHUNK = 2**20


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """Where a tensor of the module is; shape and dtype before any cut, None for a layer's extra state."""

    file: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass
class Manifest:
    """The table of contents: `tensors` by state-dict name, `optimizer` the file of each parameter's state.

    `layout` says which grid saved it, for the reader; `excluded` are frozen parameters that were left out.
    """

    layout: dict[str, int]
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------- what may go in


def check_name(value: object, what: str = "tag") -> str:
    """A tag or file name as text, if it can stand beside the others in one folder.

    Raises: ValueError for one that is empty or long, hidden, a path, "latest", or hard to see.
    """
    name = str(value)
    is_hidden = name.startswith(".") or name != name.strip() or not name.isprintable()
    if not name or is_hidden or set(name) & set("/\\") or name == LATEST or len(name.encode()) > 200:
        raise ValueError(
            f"{what}={name[:200]!r} is not a plain name in a folder; use 1 to 200 bytes of printable text "
            f"without slashes, a leading dot or blanks at the ends, and not {LATEST!r} (§9.1)"
        )
    return name


def plain(value: Any, name: str) -> Any:
    """A copy that torch.load(weights_only=True) reads back: NumPy scalars are numbers, tensors on the CPU.

    Raises: ValueError that names the key of anything else, e.g. an object or a NumPy array.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{name}[{index}]") for index, item in enumerate(value))
    if type(value) is dict:
        return {plain(k, f"a key of {name}"): plain(item, f"{name}[{k!r}]") for k, item in value.items()}
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception:  # whatever pickling or the restricted unpickler raises
        raise ValueError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded again "
            f"without running code from the file; make it of numbers, text, tensors, lists and dicts (§9.1)"
        ) from None


# ----------------------------------------------------------------------------------------------- writing


class _Hashing:
    """A file for torch.save that hashes what is meant to be in it. The first error is kept until the end."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        try:
            self.file.write(data)
        except OSError as error:  # an exception must not cross the writer below torch.save
            self.error = self.error or error
        return len(data)

    def flush(self) -> None:
        """torch.save asks for it; `write_states` flushes."""


def write_states(folder: str, name: str, content: Any) -> FileRecord:
    """torch.save into a new file that is on the disk when this returns.

    Raises: OSError, with the path, if the file cannot be written.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, "wb") as file:
            hashing = _Hashing(file)
            torch.save(content, hashing)  # type: ignore[arg-type]  # write and flush are enough
            if hashing.error is not None:
                raise hashing.error
            to_disk(file)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}; earlier checkpoints are untouched, free some space or "
            f"choose another folder (§9.1)",
        ) from None
    return FileRecord(hashing.bytes, hashing.digest.hexdigest())


def write_manifest(folder: str, manifest: Manifest) -> None:
    """JSON whose first line is the checksum of all that follows it."""
    body = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1)[2:].encode()
    with open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(_first_line(body) + b"\n" + body)
        to_disk(file)


def _first_line(body: bytes) -> bytes:
    return b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode()


def to_disk(file: Any) -> None:
    """Return when what was written to the open file would survive a loss of power."""
    file.flush()
    os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------- reading


def read_latest(load_dir: str) -> str | None:
    """What `latest` says; None if there is no such file.

    Raises: ValueError if it cannot be read or does not hold a tag.
    """
    path = os.path.join(load_dir, LATEST)
    try:
        with open(path, "rb") as file:
            return check_name(file.read(_CHUNK).decode().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read a tag from {path}: {error}; write the tag into it, or pass tag= one of "
            f"{tags_in(load_dir)} (§9.1)"
        ) from None


def tags_in(load_dir: str) -> list[str]:
    """The tags that a folder has checkpoints for."""
    names = sorted(os.listdir(load_dir)) if os.path.isdir(load_dir) else []
    return [
        name
        for name in names
        if not name.startswith(".") and os.path.exists(os.path.join(load_dir, name, MANIFEST))
    ]


def read_manifest(folder: str) -> Manifest:
    """Raises: ValueError if the manifest is missing, altered, or of another format."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as file:
            first, _, body = file.read().partition(b"\n")
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; every checkpoint of ds_lite has one, so copy the folder "
            f"whole or load another tag (§9.1)"
        ) from None
    if first != _first_line(body):
        raise damaged(path, "its checksum is not that of its text")
    content = json.loads(b"{" + body)
    if content.pop("format") != _FORMAT:
        raise ValueError(f"{path} has another format than {_FORMAT}; load it with a newer ds_lite (§9.1)")
    content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
    content["tensors"] = {name: _tensor_record(**record) for name, record in content["tensors"].items()}
    return Manifest(**content)


def _tensor_record(file: str, shape: list[int] | None, dtype: str | None) -> TensorRecord:
    return TensorRecord(file, None if shape is None else tuple(shape), dtype)


def damaged(path: str, what: str) -> ValueError:
    """The error for a file that is not what was saved."""
    return ValueError(
        f"{path} is damaged: {what}; copy the checkpoint again or load another tag, nothing was loaded (§9.1)"
    )


def verify(folder: str, name: str, record: FileRecord) -> None:
    """Read a file once and compare it with its record.

    Raises: ValueError, with the path, for a file that is missing, shorter, longer or altered.
    """
    path, digest, size = os.path.join(folder, name), hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise damaged(path, f"cannot read it ({error.strerror})") from None
    if size != record.bytes:
        raise damaged(path, f"it has {size} bytes and was saved with {record.bytes}")
    if digest.hexdigest() != record.sha256:
        raise damaged(path, "its sha256 is not that of the manifest")


def load_states(folder: str, name: str, *, mapped: bool = True) -> Any:
    """What `write_states` wrote, on the CPU; `mapped` tensors are read from the disk as they are used."""
    path = os.path.join(folder, name)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the disk, or the restricted unpickler
        raise ValueError(f"cannot load {path}: {error}; load another tag (§9.1)") from error
