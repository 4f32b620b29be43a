"""§9.11 Field report B31: ranks of a group and ranks of the world, with its whole kind.

Guards against: code that is right only where the two agree, in the group that holds rank 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from field_pipelines import F64, VOCABULARY, WIDTH, Gate, check_equal, seeded, token_ids
from oracles import Tied
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.grid import PipelineParallelGrid
from ds_lite.topology import ProcessTopology

# ------------------------------------------------------------------------------------------------- B31


def _swapped_axes(rank: int, impl: Any, axes: list[str], dims: list[int]) -> list[int]:
    topology = ProcessTopology(axes, dims)
    stages = topology.get_dim("pipe")
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    layers = seeded([Tied("word", embedding), Gate(), Gate(), Tied("word", embedding, logits)])
    ids = token_ids(8)
    batch = [(ids[i][0], ids[(i + 1) % 8][0]) for i in range(8)]
    for zero in impl.zero_stages:
        pipeline = check_equal(
            impl,
            layers,
            batch,
            f"{axes} {dims} zero={zero}",
            num_stages=stages,
            steps=2,
            loss_fn=cross_entropy,
            config={"zero_optimization": {"stage": zero}},
            module={"topology": topology},
            clip=0.05,
        )
        coord = topology.get_coord(rank)
        assert (pipeline.stage_id, pipeline.replica) == (coord.pipe, coord.data)
    grid = pipeline.engine.grid
    return [grid.stage_to_global(stage) for stage in range(stages)]


def logits(embedding: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ embedding.weight.t()


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "axes,dims,columns",
    [
        (["pipe", "data"], [2, 2], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (["data", "pipe"], [2, 2], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (["data", "pipe"], [1, 4], [[0, 1, 2, 3]] * 4),
        (["data", "pipe"], [4, 1], [[0], [1], [2], [3]]),
    ],
)
def test_b31_any_order_of_the_axes_trains_like_one_process(
    world: Any, impl: Any, axes: list[str], dims: list[int], columns: list[list[int]]
) -> None:
    assert world(_swapped_axes, 4, impl, axes, dims) == columns


def _without_rank_zero(rank: int) -> dict[str, Any]:
    """Broadcast, scatter and gather, each from the first of my group; two groups have no rank 0."""
    grid = PipelineParallelGrid(ProcessTopology(["data", "model"], [2, 2]))
    group, ranks = grid.get_slice_parallel_group(), grid.ranks("model")
    loss = torch.tensor([float(rank)], dtype=F64)
    comm.broadcast(loss, src=ranks[-1], group=group)
    piece = torch.empty(1, dtype=F64)
    mine = [torch.tensor([10.0 * rank + i], dtype=F64) for i in range(2)] if rank == ranks[0] else None
    comm.scatter(piece, mine, src=ranks[0], group=group)
    back = [torch.empty(1, dtype=F64) for _ in ranks] if rank == ranks[0] else None
    comm.gather(piece + 0.5, back, dst=ranks[0], group=group)
    return {"loss": loss.item(), "piece": piece.item(), "back": back and [t.item() for t in back]}


def test_b31_collectives_on_groups_without_rank_zero_take_global_ranks(world: Any) -> None:
    results = world(_without_rank_zero, 4)
    assert [result["loss"] for result in results] == [1.0, 1.0, 3.0, 3.0]
    assert [result["piece"] for result in results] == [0.0, 1.0, 20.0, 21.0]
    assert [result["back"] for result in results] == [[0.5, 1.5], None, [20.5, 21.5], None]
