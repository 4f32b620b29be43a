"""All replicas of a stage start as its first one, once it is clear that they hold the same tensors (§9.2)."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.grid import PipelineParallelGrid
from ds_lite.tags import tags_of


@torch.no_grad()
def make_replicas_equal(tensors: Sequence[Tensor], grid: PipelineParallelGrid) -> None:
    """All ranks of a stage start from the values of its first rank.

    What somebody cut already is equal over the data axis only, and so are buffers beside it; experts that a
    layer has dealt out are equal over their expert-data group.

    Communication: one broadcast per tensor, two for experts that were dealt out, after two small all-reduces.
    Raises: ValueError, on every rank, for replicas whose tensors have other shapes or dtypes.
    """
    raise_together(_other_shapes(tensors, grid))
    is_cut = {id(t) for t in tensors if isinstance(t, nn.Parameter) and tags_of(t).model == "sharded"}
    for tensor in tensors:
        is_part = id(tensor) in is_cut or (bool(is_cut) and not isinstance(tensor, nn.Parameter))
        size = tags_of(tensor).ep_size if isinstance(tensor, nn.Parameter) else 0
        if size > 1:
            experts = grid.expert(size)
            _broadcast(tensor, experts.data_ranks[0], experts.data_group)
            if not is_part:
                _broadcast(tensor, grid.ranks("model")[0], grid.group("model"))
            continue
        axes = ("data", "seq") if is_part else ("data", "seq", "model")
        _broadcast(tensor, grid.ranks(*axes)[0], grid.group(*axes))


def _other_shapes(tensors: Sequence[Tensor], grid: PipelineParallelGrid) -> ValueError | None:
    """What this replica has otherwise than the first one of its stage: a broadcast would fill it anyhow."""
    group, ranks = grid.group("data", "seq"), grid.ranks("data", "seq")
    if len(ranks) == 1:
        return None
    mine = [f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}" for tensor in tensors]
    digest = zlib.crc32(" ".join(mine).encode())
    extremes = torch.tensor([digest, -digest], device=comm.control_device())
    comm.all_reduce(extremes, op=comm.ReduceOp.MAX, group=group)
    if extremes[0] == -extremes[1]:
        return None
    theirs = [mine]
    comm.broadcast_object_list(theirs, src=ranks[0], group=group)
    for number, (own, first) in enumerate(itertools.zip_longest(mine, theirs[0], fillvalue="nothing")):
        if own != first:
            return ValueError(
                f"tensor {number} of stage {grid.get_stage_id()} is {own} on rank {grid.global_rank} and "
                f"{first} on rank {ranks[0]}; all replicas of a stage run the same code (§9.2)"
            )
    return None


def _broadcast(tensor: Tensor, src: int, group: ProcessGroup) -> None:
    values = tensor.detach().contiguous()
    comm.broadcast(values, src=src, group=group)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
