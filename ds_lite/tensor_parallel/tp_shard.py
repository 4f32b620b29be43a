"""DeepSpeed's functions that say how wide each rank's part is, with its results (§9.13).

AutoTP itself deals heads and columns (`dealing.py`), which never leaves a rank without any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_lite import comm
from ds_lite.comm import ProcessGroup

_LAST = ("lm_head", "embed_out")
_MLP = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class AutoTPMeta:
    """What the widths of a model depend on."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        """The numbers of a model's configuration, under the names it may have for them."""
        config = getattr(model_config, "text_config", None) or model_config

        def first(*names: str) -> int | None:
            return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

        query = first("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
        kv = first("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads")
        return cls(query if kv is None else kv, query, first("n_embd", "hidden_size"), tp_grain_size)


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta = AutoTPMeta(), name: str | None = None
) -> list[int]:
    """The width of each rank's part of a dimension.

    Key and value heads, if known and if they divide it, are dealt whole, except in MLPs and the output layer;
    the other dimensions are dealt in grains, and the last rank takes what is left over.

    >>> get_shard_size_list(24, 4, AutoTPMeta(num_kv_heads=6))
    [8, 8, 4, 4]
    >>> get_shard_size_list(1000, 8, AutoTPMeta(tp_grain_size=64))
    [128, 128, 128, 128, 128, 128, 128, 104]

    Source: §9.13; DeepSpeed `module_inject/tp_shard.py::get_shard_size_list` @ 0.19.8.
    """
    kv, grain = meta.num_kv_heads, meta.tp_grain_size
    is_plain = str(name) not in _LAST and not any(part in str(name) for part in _MLP)
    if kv is not None and total_size % kv == 0 and is_plain:
        return [heads * (total_size // kv) for heads in _near_even(kv, mp_size)]
    if total_size < grain:
        return _near_even(total_size, mp_size)
    sizes = [grains * grain for grains in _near_even(total_size // grain, mp_size)]
    sizes[-1] += total_size % grain
    return sizes


def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta = AutoTPMeta(),
    name: str | None = None,
    rank: int | None = None,
    mp_group: ProcessGroup | None = None,
) -> int:
    """The width of one rank's part; `rank` counts in the tensor-parallel group, by default this process's.

    Raises: ValueError without rank and group in a world of another size than `mp_size`.

    Source: §9.13; DeepSpeed `module_inject/tp_shard.py::get_shard_size` @ 0.19.8.
    """
    if rank is None and mp_group is None and comm.get_world_size() != mp_size:
        raise ValueError(
            f"get_shard_size needs rank or mp_group: mp_size={mp_size} is not the world size "
            f"{comm.get_world_size()} (§9.13)"
        )
    mine = comm.get_rank(mp_group) if rank is None else rank
    return get_shard_size_list(total_size, mp_size, meta, name)[mine]


def _near_even(total: int, ranks: int) -> list[int]:
    """Whole numbers that add up to `total`, the first ones one more; zeros where there are too few."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]
