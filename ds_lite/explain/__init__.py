"""`ds-lite explain`: what a config would form, told without a process group (§9.6 §9.7).

legal.py     is it legal, in the words of `initialize`; the job
places.py    the groups of a rank, and the reduction table with their numbers
pieces.py    the parameters of a rank, cut and dealt
stored.py    buckets, shards and masters in bytes
sums.py      the model's code run once without values: which sums it would make
traffic.py   messages and bytes of a step
text.py      all of it as lines
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_lite.explain.legal import Config, Job, form
from ds_lite.explain.pieces import pieces_of
from ds_lite.explain.places import Place, Reduction, coordinates, groups_of, reductions_of
from ds_lite.explain.stored import Stored, stored_on
from ds_lite.explain.traffic import Batches, Row, traffic_of
from ds_lite.tags import tags_of

__all__ = ["Batches", "Explanation", "Job", "Place", "Reduction", "Row", "Stored", "explain", "form"]


@dataclass(frozen=True)
class Explanation:
    """What one rank of a job has, and each stage.

    `coordinates` are those of every rank. `traffic` and `stored`, by (stage, tensor-parallel rank), are empty
    where nobody knows the model's layers.
    """

    job: Job
    rank: int
    batches: Batches
    coordinates: tuple[dict[str, int], ...]
    groups: dict[str, tuple[int, ...]]
    reductions: tuple[Reduction, ...]
    traffic: tuple[Row, ...] = ()
    stored: dict[tuple[int, int], Stored] | None = None


def explain(
    config: Config,
    world_size: int,
    model: nn.Module | Sequence[Any] | None = None,
    *,
    num_stages: int | None = None,
    partition_method: str = "parameters",
    rank: int = 0,
    tokens: int = 1024,
    has_mask: bool = False,
) -> Explanation:
    """What `initialize` would form on `world_size` ranks, seen from one of them.

    Arguments as `form` has them. Sequences have `tokens`, and an attention mask if `has_mask`. What is stored
    is told for the data and seq coordinates of `rank`: the last shard of ZeRO may be shorter than others.

    Raises: as `form`; ValueError for a rank outside the world, and a sequence shorter than its ranks.
    """
    job = form(config, world_size, model, num_stages=num_stages, partition_method=partition_method)
    everyone = tuple(coordinates(job.topology, other) for other in range(world_size))
    place, batches = Place(job, rank), Batches(tokens, has_mask)
    if not job.is_known:
        rows = tuple(reductions_of(place, None))
        return Explanation(job, rank, batches, everyone, groups_of(place), rows)
    kinds = [tags_of(piece) for piece in pieces_of(place)]
    mine = place.coordinates
    neighbours = {
        (at["pipe"], at["model"]): Place(job, other)
        for other, at in enumerate(everyone)
        if (at["data"], at["seq"]) == (mine["data"], mine["seq"])
    }
    return Explanation(
        job,
        rank,
        batches,
        everyone,
        groups_of(place),
        tuple(reductions_of(place, kinds)),
        tuple(traffic_of(place, batches)),
        {key: stored_on(one) for key, one in neighbours.items()},
    )
