"""Collectives on an explicit group, each noted in the ledger (§9.11).

The only file that knows a backend. `init_distributed` starts gloo for CPU tensors and, where every
rank has a GPU of its own, NCCL for CUDA tensors; all other code names a group and a tensor.
A group carries the name of its mesh axis (`group_desc`), so each ledger row can say which axis paid.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # passed on as they are, for scripts that import this module as `dist`
    ProcessGroup,
    ReduceOp,
    Work,
    all_gather_object,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_backend,
    get_global_rank,
    is_initialized,
    scatter,
)

from ds_lite import trace
from ds_lite.ledger import Ledger, Traffic, note, record
from ds_lite.staging import staged

__all__ = [
    "Ledger",
    "ProcessGroup",
    "ReduceOp",
    "Traffic",
    "Work",
    "all_gather",
    "all_gather_in_place",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "control_device",
    "destroy_process_group",
    "device_of_this_rank",
    "gather",
    "get_backend",
    "get_global_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_initialized",
    "isend",
    "new_group",
    "record",
    "recv",
    "reduce_scatter_in_place",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


# ------------------------------------------------------------------------------------ start and groups


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=10),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    trace_dir: str | os.PathLike[str] | None = None,
    trace_limit: float | None = None,
    store: dist.Store | None = None,
) -> None:
    """Join the job: torchrun's environment, or `init_method` with `rank` and `world_size`, or alone.

    Does nothing when the process group is already up. `trace_dir` is the folder of the hang table;
    a rank that stays longer than `trace_limit` seconds in one instruction writes its row and leaves.
    `store` takes the place of `init_method`. `auto_mpi_discovery`, `distributed_port` and `config` are
    accepted for DeepSpeed's signature.

    Raises: ValueError if `dist_init_required=False` and nothing is initialised.

    Source: §9.2; DeepSpeed `comm/comm.py::init_distributed` @ 0.19.8.
    Differs: outside a launcher it starts a world of one process instead of failing.
    """
    if not dist.is_initialized():
        if dist_init_required is False:
            raise ValueError(
                "dist_init_required=False but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first or leave the argument out (§9.2)"
            )
        _start(_backend_string(dist_backend), timeout, init_method, rank, world_size, store)
        if verbose and dist.get_rank() == 0:
            print(f"ds_lite: {dist.get_world_size()} process(es), backend {dist.get_backend()}", flush=True)
    if trace_dir is not None:
        trace.open_trace(trace_dir, dist.get_rank(), dist.get_world_size(), limit_s=trace_limit)


def _backend_string(wanted: str | None) -> str:
    """NCCL only where each local rank has its own GPU; message headers stay on gloo.

    "staged" computes on GPUs that ranks share, and sends by gloo.
    """
    if wanted in (None, "auto"):
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        wanted = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks else "gloo"
    return "cpu:gloo,cuda:nccl" if wanted == "nccl" else str(wanted)


def _start(
    backend: str,
    timeout: timedelta,
    init_method: str | None,
    rank: int,
    world_size: int,
    store: dist.Store | None = None,
) -> None:
    global _shared_card
    _shared_card = None
    if backend == "staged":
        cards = torch.cuda.device_count()
        if not cards:
            raise ValueError("backend='staged' needs a GPU, and there is none here; choose gloo (§9.11)")
        _shared_card = torch.device("cuda", int(os.environ.get("LOCAL_RANK", max(rank, 0))) % cards)
        torch.cuda.set_device(_shared_card)
        backend = "cpu:gloo"
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if store is not None:
        dist.init_process_group(backend, store=store, timeout=timeout, world_size=world_size, rank=rank)
    elif init_method is not None and rank >= 0:
        dist.init_process_group(backend, init_method, timeout, world_size=world_size, rank=rank)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, init_method or "env://", timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    _wait_until_connected(None)


_shared_card: torch.device | None = None  # what a rank of a "staged" job computes on


def device_of_this_rank() -> torch.device:
    """The device this rank computes on: its GPU under NCCL, one that it shares if staged, else the CPU."""
    if _shared_card is not None and dist.is_initialized():
        return _shared_card
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def control_device() -> torch.device:
    """Where headers and flags travel: the CPU, unless a caller started a backend that cannot."""
    config = str(dist.get_backend_config())
    return torch.device("cpu") if "cpu:" in config else device_of_this_rank()


def new_group(ranks: list[int], axis: str, timeout: timedelta | None = None) -> ProcessGroup:
    """A group of global ranks for one mesh axis; every rank of the world calls this, in one order."""
    group = dist.new_group(ranks, timeout=timeout, group_desc=axis)
    if dist.get_rank() in ranks:
        _wait_until_connected(group)
    return group


def _wait_until_connected(group: ProcessGroup | None) -> None:
    """Each rank of a gloo group connects to all others, and a rank that left at once would break that for the
    slower ones: its own error would look like theirs."""
    if control_device().type == "cpu":
        dist.all_reduce(torch.zeros(1), group=group)  # not counted in the ledger


def new_group_of_one(axis: str = "self") -> ProcessGroup:
    """This rank alone: only this rank has to call it."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=axis)


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in `group` (the world by default)."""
    return dist.get_rank(group)


def ranks_of(group: ProcessGroup) -> list[int]:
    """The global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(group))


def get_world_size(group: ProcessGroup | None = None) -> int:
    """How many processes `group` has (the world by default)."""
    return dist.get_world_size(group)


# ------------------------------------------------------------------------------------ the collectives


# torch 2.13 renamed these two and warns on every call of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Done:
    """The handle of a collective that had nobody to talk to."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _All:
    """The handle of several messages that together are one collective."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_staged(tensor: Tensor) -> bool:
    """Whether a tensor has to go by way of the host."""
    return _shared_card is not None and tensor.device.type == _shared_card.type


def _sent(
    message: Callable[..., Any], tensors: Sequence[Tensor], writes: Sequence[int], async_op: bool = True
) -> Any:
    """`message(*tensors, async_op=...)`, by way of the host where ranks share a card.

    `writes` says which of the tensors it changes.
    """
    if _is_staged(tensors[0]):
        return staged(message, tensors, writes, async_op=async_op)
    return message(*tensors, async_op=async_op)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Sum (or `op`) `tensor` over the group, in place on every rank."""
    n = dist.get_world_size(group)
    if n == 1:
        return _Done() if async_op else None
    note("all_reduce", group, _bytes(tensor), 2 * (n - 1) * _bytes(tensor) // n)
    return _sent(partial(dist.all_reduce, op=op, group=group), [tensor], [0], async_op)


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Copy `tensor` from the global rank `src` to every rank of the group."""
    if dist.get_world_size(group) == 1:
        return _Done() if async_op else None
    note("broadcast", group, _bytes(tensor), _bytes(tensor) if dist.get_rank() == src else 0)
    return _sent(partial(dist.broadcast, src=src, group=group), [tensor], [0], async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Concatenate every rank's `tensor` along dim 0 into `output_tensor`, on every rank."""
    n = dist.get_world_size(group)
    if n == 1:
        output_tensor.copy_(tensor.view_as(output_tensor))
        return _Done() if async_op else None
    note("all_gather", group, _bytes(output_tensor), (n - 1) * _bytes(tensor))
    return _sent(partial(_all_gather, group=group), [output_tensor, tensor], [0], async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """DeepSpeed's list form; prefer `all_gather_into_tensor`."""
    n = dist.get_world_size(group)
    note("all_gather", group, n * _bytes(tensor), (n - 1) * _bytes(tensor))

    def message(x: Tensor, *outputs: Tensor, async_op: bool) -> Any:
        return dist.all_gather(list(outputs), x, group=group, async_op=async_op)

    return _sent(message, [tensor, *tensor_list], range(1, n + 1), async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum `tensor` over the group and keep this rank's 1/n of it, cut along dim 0, in `output_tensor`."""
    n = dist.get_world_size(group)
    if n == 1:
        output_tensor.copy_(tensor.view_as(output_tensor))
        return _Done() if async_op else None
    note("reduce_scatter", group, _bytes(tensor), (n - 1) * _bytes(tensor) // n)
    return _sent(partial(_reduce_scatter, op=op, group=group), [output_tensor, tensor], [0], async_op)


def reduce_scatter_in_place(tensor: Tensor, group: ProcessGroup | None = None) -> Any:
    """Start to sum `tensor` over the group; once waited, this rank's 1/n of it (along dim 0) is the sum.

    The other parts are lost. `tensor` is contiguous, its length a multiple of the group's size n.
    """
    n = dist.get_world_size(group)
    if n == 1 or not tensor.numel():
        return _Done()
    note("reduce_scatter", group, _bytes(tensor), (n - 1) * _bytes(tensor) // n)
    if tensor.device.type != "cpu" or _is_staged(tensor):
        own = tensor.view(n, -1)[dist.get_rank(group)]
        return _sent(partial(_reduce_scatter, group=group), [own, tensor.view(-1)], [0])
    # gloo's own reduce-scatter is this all-reduce too, of a copy.
    return dist.all_reduce(tensor, group=group, async_op=True)


def all_gather_in_place(tensor: Tensor, group: ProcessGroup | None = None) -> Any:
    """Start to bring every rank's own 1/n of `tensor` (along dim 0) to all; once waited, all hold all parts.

    `tensor` is contiguous, its length a multiple of the group's size n.
    """
    n = dist.get_world_size(group)
    if n == 1 or not tensor.numel():
        return _Done()
    note("all_gather", group, _bytes(tensor), (n - 1) * _bytes(tensor) // n)
    parts = tensor.view(n, -1)
    if tensor.device.type != "cpu" or _is_staged(tensor):
        own = parts[dist.get_rank(group)]
        return _sent(partial(_all_gather, group=group), [tensor.view(-1), own], [0])
    # gloo's all-gather goes through a buffer of its own.
    return _All(
        [dist.broadcast(part, group=group, group_src=i, async_op=True) for i, part in enumerate(parts)]
    )


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Rank i's j-th piece of `tensor` (cut along dim 0) becomes rank j's i-th piece of `output`."""
    n = dist.get_world_size(group)
    if n == 1:
        output.copy_(tensor.view_as(output))
        return _Done() if async_op else None
    rows = tensor.shape[0]
    home = input_split_sizes[dist.get_rank(group)] if input_split_sizes else rows // n
    row_bytes = _bytes(tensor) // rows if rows else 0
    note("all_to_all", group, _bytes(tensor), (rows - home) * row_bytes)
    message = partial(
        dist.all_to_all_single,
        output_split_sizes=output_split_sizes,
        input_split_sizes=input_split_sizes,
        group=group,
    )
    return _sent(message, [output, tensor], [0], async_op)


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Wait until every rank of the group is here."""
    note("barrier", group, 0, 0)
    return dist.barrier(group=group, async_op=async_op)


def isend(
    tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0, *, operation: str = "send"
) -> Work:
    """Start sending `tensor` to the global rank `dst`; keep it unchanged until the handle is waited."""
    note(operation, group, _bytes(tensor), _bytes(tensor))

    def message(x: Tensor, *, async_op: bool) -> Work | None:
        return dist.isend(x, dst, group=group, tag=tag)

    work: Work | None = _sent(message, [tensor], [])
    assert work is not None, f"rank {dist.get_rank()} is not in the group it sends on"
    return work


def irecv(
    tensor: Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0, *, operation: str = "recv"
) -> Work:
    """Post a receive from the global rank `src` into `tensor`, of exactly the size that was sent."""
    note(operation, group, _bytes(tensor), 0)

    def message(x: Tensor, *, async_op: bool) -> Work | None:
        return dist.irecv(x, src, group=group, tag=tag)

    work: Work | None = _sent(message, [tensor], [0])
    assert work is not None, f"rank {dist.get_rank()} is not in the group it receives on"
    return work


def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send and wait until `tensor` may be reused."""
    isend(tensor, dst, group, tag).wait()


def recv(tensor: Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Receive and wait until `tensor` is filled."""
    irecv(tensor, src, group, tag).wait()
