"""Tensors between neighbouring stages, each message preceded by its description (§9.10 §9.11).

The sender decides and ships the decision. One header of integers travels ahead of every message: how many
tensors, and for each its dtype, its shape and whether a gradient takes part. The receiver allocates exactly
what the header says, so shapes, dtypes and tuple lengths may change from one micro-batch to the next. A stage
that fails sends its error in place of a header, so that its neighbours raise it too instead of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_lite import comm, trace
from ds_lite.agreement import error_from_ints, error_to_ints
from ds_lite.comm import ProcessGroup, Work
from ds_lite.grid import PipelineParallelGrid

# The position in this list is what travels; append only.
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}

_MAGIC = 0x0D51173
_TENSOR, _TUPLE, _ERROR = range(3)
_HEADER_INTS = 64  # enough for a tuple of ten 4-D tensors; what does not fit follows in a second message
_FRONT = 2  # magic, length of the description


@dataclass(frozen=True)
class TensorNote:
    """What a header says of one tensor; `flag`: needs a gradient (way down), is here (way up)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    flag: bool


@dataclass(frozen=True)
class Message:
    """One stage's output, or the gradients for it: tensors, whether they were a tuple, a flag for each."""

    tensors: tuple[Tensor, ...]
    flags: tuple[bool, ...]
    is_tuple: bool


@dataclass
class Arriving:
    """A message whose header is known and whose receives are posted; `wait` before reading."""

    message: Message
    _works: list[Work]
    _peer: int

    def wait(self) -> Message:
        if self._works:  # the hang table then says for whom and for what this rank waits
            show(self._peer, self.message.tensors)
            for work in self._works:
                work.wait()
            trace.current().detail(-1)
            self._works.clear()
        return self.message


@dataclass
class Pending:
    """Sends under way; the tensors stay alive and unchanged until `wait`."""

    works: list[Work] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        self.tensors.clear()


def show(peer: int, tensors: Sequence[Tensor]) -> None:
    """Say in the hang table with whom this rank exchanges what; of several tensors the first that travels."""
    trace.current().detail(peer, next((tensor.shape for tensor in tensors if tensor.numel()), ()))


class StageLink:
    """The way to one neighbouring stage and back.

    Communication: per message one header (64 integers) and one message per non-empty tensor.
    """

    def __init__(self, peer: int, group: ProcessGroup, device: torch.device) -> None:
        self.peer, self.group, self.device = peer, group, device
        self._header_device = comm.control_device()

    def send(self, message: Message) -> Pending:
        """Start sending; computation may go on, the tensors must not change before `wait`.

        Raises: TypeError for a dtype that cannot travel.
        """
        numbers = [_TUPLE if message.is_tuple else _TENSOR, len(message.tensors)]
        raws = []  # all of them before the header, which promises them
        for tensor, flag in zip(message.tensors, message.flags, strict=True):
            numbers += [_dtype_index(tensor.dtype), int(flag), tensor.dim(), *tensor.shape]
            value = tensor.detach().resolve_conj().resolve_neg().contiguous()
            if not flag and value.data_ptr() == tensor.data_ptr():
                value = value.clone()  # may be a layer's own buffer, which its next forward changes
            raws.append(_as_bytes(value))
        pending = Pending()
        self._send_numbers(numbers, pending)
        for raw in raws:
            if raw.numel():
                pending.works.append(comm.isend(raw, self.peer, self.group))
                pending.tensors.append(raw)
        return pending

    def send_error(self, error: BaseException) -> Pending:
        """Send an exception where the neighbour expects a header."""
        pending = Pending()
        self._send_numbers([_ERROR, *error_to_ints(error)], pending)
        return pending

    def _send_numbers(self, numbers: Sequence[int], pending: Pending) -> None:
        first = [_MAGIC, len(numbers), *numbers[: _HEADER_INTS - _FRONT]]
        header = torch.tensor(first + [0] * (_HEADER_INTS - len(first)), dtype=torch.int64)
        parts = [header]
        if rest := numbers[_HEADER_INTS - _FRONT :]:
            parts.append(torch.tensor(rest, dtype=torch.int64))
        for part in [part.to(self._header_device) for part in parts]:
            pending.works.append(comm.isend(part, self.peer, self.group, operation="send_header"))
            pending.tensors.append(part)

    def receive(self) -> Arriving:
        """Wait for the next header, post the receives it announces, return without waiting for them.

        Raises: the neighbour's error, as its own class or as RuntimeError.
        """
        kind, count, *numbers = self._receive_numbers()
        if kind == _ERROR:
            raise NeighbourError(self.peer, error_from_ints([count, *numbers]))
        notes = _read_notes(count, numbers)
        tensors = tuple(torch.empty(note.shape, dtype=note.dtype, device=self.device) for note in notes)
        works = [comm.irecv(_as_bytes(tensor), self.peer, self.group) for tensor in tensors if tensor.numel()]
        return Arriving(
            Message(tensors, tuple(note.flag for note in notes), kind == _TUPLE), works, self.peer
        )

    def _receive_numbers(self) -> list[int]:
        header = torch.empty(_HEADER_INTS, dtype=torch.int64, device=self._header_device)
        comm.irecv(header, self.peer, self.group, operation="recv_header").wait()
        magic, length, *numbers = header.tolist()
        if magic != _MAGIC:
            raise RuntimeError(
                f"rank {self.peer} sent something that is not a message header (first integer {magic}); "
                f"do both stages run the same schedule and version? (§9.10)"
            )
        if length > _HEADER_INTS - _FRONT:
            rest = header.new_empty(length - (_HEADER_INTS - _FRONT))
            comm.irecv(rest, self.peer, self.group, operation="recv_header").wait()
            numbers += rest.tolist()
        return numbers[:length]


class NeighbourError(Exception):
    """Another stage failed; `error` is what it raised and `peer` the rank that passed it on."""

    def __init__(self, peer: int, error: Exception) -> None:
        super().__init__(str(error))
        self.peer, self.error = peer, error


def can_travel(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype can be sent between stages."""
    return dtype in _DTYPE_INDEX


def _dtype_index(dtype: torch.dtype) -> int:
    if dtype not in _DTYPE_INDEX:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise TypeError(f"dtype {dtype} cannot travel between stages; use one of {names} (§9.10)")
    return _DTYPE_INDEX[dtype]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same storage as a flat uint8 tensor: bit-identical for every dtype, on every backend."""
    return tensor.view(-1).view(torch.uint8)


def _read_notes(count: int, numbers: list[int]) -> list[TensorNote]:
    notes, at = [], 0
    for _ in range(count):
        dtype, flag, ndim = numbers[at : at + 3]
        shape = tuple(numbers[at + 3 : at + 3 + ndim])
        notes.append(TensorNote(_DTYPES[dtype], shape, bool(flag)))
        at += 3 + ndim
    assert at == len(numbers), f"header of {len(numbers)} integers describes {at}"
    return notes


# ------------------------------------------------------------------- the chapter's two functions (§9.11)

_script_grid: PipelineParallelGrid | None = None  # for scripts only; the engine passes its links around


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Tell `send` and `recv` below which grid a script means when it gives none."""
    global _script_grid
    _script_grid = grid


def send(
    tensor: Tensor, dest_stage: int, async_op: bool = False, *, grid: PipelineParallelGrid | None = None
) -> None:
    """Send one tensor of known shape to a neighbouring stage and wait until it may be reused.

    Raises: ValueError if `dest_stage` is not a neighbour (the last stage and stage 0 are), if no grid is
    known, or for `async_op=True`.

    Source: §9.11; DeepSpeed `runtime/pipe/p2p.py::send` @ 0.19.8.
    """
    peer, group = _neighbour(dest_stage, grid, async_op)
    comm.isend(_as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()), peer, group).wait()


def recv(
    tensor: Tensor, src_stage: int, async_op: bool = False, *, grid: PipelineParallelGrid | None = None
) -> None:
    """Fill `tensor` with what a neighbouring stage sends; shape and dtype must be the sender's.

    Raises: as `send`.

    Source: §9.11; DeepSpeed `runtime/pipe/p2p.py::recv` @ 0.19.8.
    """
    peer, group = _neighbour(src_stage, grid, async_op)
    landing = (
        tensor.detach()
        if tensor.is_contiguous()
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )
    comm.irecv(_as_bytes(landing), peer, group).wait()
    if landing.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(landing)


def _neighbour(stage: int, grid: PipelineParallelGrid | None, async_op: bool) -> tuple[int, ProcessGroup]:
    grid = grid if grid is not None else _script_grid
    if grid is None:
        raise ValueError("no grid is known; pass grid=engine.grid or call init_process_groups(grid) (§9.11)")
    if async_op:
        raise ValueError("async_op=True is not offered here; use ds_lite.comm.isend and irecv (§9.11)")
    here, stages = grid.get_stage_id(), grid.get_pipe_parallel_world_size()
    if stages == 1 or not 0 <= stage < stages or (stage - here) % stages not in (1, stages - 1):
        raise ValueError(
            f"stage {here} of {stages} cannot talk to stage {stage}; only neighbours, and the last stage "
            f"with stage 0, exchange tensors (§9.11)"
        )
    return grid.stage_to_global(stage), grid.get_pipe_parallel_group()
