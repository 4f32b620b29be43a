"""What an attention is made of: heads, and which of its linear layers hold which of them (§9.13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads, attention_layout
from ds_lite.tensor_parallel.kinds import features
from ds_lite.tensor_parallel.partition_config import TPLayerSpec, layout_from

# Names under which models keep these numbers, on the attention or in their configuration.
QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads", "n_head_kv")
HEAD_WIDTH = ("head_dim", "head_width", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv")


def heads_of(
    name: str,
    near: Sequence[nn.Module],
    openers: Mapping[str, nn.Module],
    closer: nn.Module,
    specs: Mapping[str, TPLayerSpec],
) -> tuple[Heads, dict[str, FusedLayout]]:
    """The heads of one attention, and for each of its opening layers the layout of its rows.

    `near` are the modules that may know the number of query heads, the nearest first. The rest follows from
    the shapes: the closing layer takes all query heads, an opening layer as wide holds them, another one key
    and value heads, and one alone holds all three. A user's spec says how a fused weight is packed.

    Raises: ValueError for a number of heads that nobody knows, for widths that are not whole heads, and for a
    fused weight whose layout is unknown.
    """
    query, width = _query_heads(name, near, features(closer)[0])
    widths = {key: features(module)[1] for key, module in openers.items()}
    if len(widths) == 1:
        return _one_weight(widths, near, specs, query, width)
    if len(widths) == 2:
        return _query_and_fused(name, widths, near, specs, query, width)
    narrow = {columns for columns in widths.values() if columns != query * width}
    kv = _kv_heads(name, near, narrow.pop() // width, width) if len(narrow) == 1 else query
    if narrow or len(widths) != 3 or query % kv or any(columns % width for columns in widths.values()):
        raise ValueError(
            f"the attention {name} has {query} heads of width {width} and projections of {widths} columns; "
            f"three are expected, for {query} query heads and for equally many key and value heads. Leave "
            f"its layers whole by partition_config (§9.13)"
        )
    return Heads(query, kv, width), {
        key: FusedLayout(parts=("q",) if columns == query * width else ("k",))
        for key, columns in widths.items()
    }


def _query_heads(name: str, near: Sequence[nn.Module], columns: int) -> tuple[int, int]:
    """Query heads, and how wide each is."""
    query, width = number_of(near, QUERY_HEADS), number_of(near, HEAD_WIDTH)
    if query is None and width:
        query = columns // width
    if not query or columns % query:
        known = "no number of heads was found" if query is None else f"{query} heads do not divide it"
        raise ValueError(
            f"the attention {name} is {columns} columns wide and {known} (looked for "
            f"{', '.join(QUERY_HEADS)}); set num_heads on the module to the number of its query heads (§9.13)"
        )
    return query, columns // query


def _kv_heads(name: str, near: Sequence[nn.Module], kv: int, width: int) -> int:
    """Key and value heads, by the width of their projections and by what the model says: two narrow
    projections may also be queries and keys of narrow heads."""
    said, width_said = number_of(near, KV_HEADS), number_of(near, HEAD_WIDTH)
    if said != kv and (said is not None or width_said != width):
        raise ValueError(
            f"the attention {name} has two projections as wide as {kv} heads of {width}, and the model says "
            f"{said} key and value heads (looked for {', '.join(KV_HEADS)}); set num_key_value_heads on the "
            f"module (§9.13)"
        )
    return kv


def _one_weight(
    widths: Mapping[str, int],
    near: Sequence[nn.Module],
    specs: Mapping[str, TPLayerSpec],
    query: int,
    width: int,
) -> tuple[Heads, dict[str, FusedLayout]]:
    """Query, key and value in one."""
    ((key, columns),) = widths.items()
    kv, rest = divmod(columns - query * width, 2 * width)
    if rest or kv < 1 or query % kv:
        raise ValueError(
            f"the fused weight {key} has {columns} rows, which are not {query} query heads of width {width} "
            f"and whole key and value heads; leave its layers whole by partition_config (§9.13)"
        )
    heads = Heads(query, kv, width)
    layout = layout_from(specs.get(key), (query * width, kv * width, kv * width)) or attention_layout(near)
    return heads, {key: _known(layout, key, columns)}


def _query_and_fused(
    name: str,
    widths: Mapping[str, int],
    near: Sequence[nn.Module],
    specs: Mapping[str, TPLayerSpec],
    query: int,
    width: int,
) -> tuple[Heads, dict[str, FusedLayout]]:
    """Queries in one weight, key and value in another."""
    fused = [key for key in widths if specs.get(key) is not None and specs[key].parts() is not None]
    fused = fused or [key for key, columns in widths.items() if columns != query * width]
    others = [key for key in widths if key not in fused]
    if len(fused) != 1 or widths[others[0]] != query * width or widths[fused[0]] % (2 * width):
        raise ValueError(
            f"the attention {name} has {query} heads of width {width} and two projections of {dict(widths)} "
            f"columns, of which nobody knows which one holds key and value; declare that one in "
            f"tensor_parallel.partition_config with shape=((k, v), -1) (§9.13)"
        )
    key, columns = fused[0], widths[fused[0]]
    kv = columns // (2 * width)
    layout = layout_from(specs.get(key), (kv * width, kv * width)) or attention_layout(near)
    without_query = tuple(part for part in _known(layout, key, columns).parts if part != "q")
    packed = replace(_known(layout, key, columns), parts=without_query)
    return Heads(query, kv, width), {others[0]: FusedLayout(parts=("q",)), key: packed}


def _known(layout: FusedLayout | None, key: str, rows: int) -> FusedLayout:
    if layout is None:
        raise ValueError(
            f"the layout of the fused weight {key} is unknown: its {rows} rows may be part after part or "
            "head by head, and a wrong guess would mix them; declare it in tensor_parallel.partition_config "
            f"with shape=((q, k, v), -1), the rows of each part, or per_head=true (§9.13)"
        )
    return layout


def number_of(near: Sequence[Any], names: Sequence[str]) -> int | None:
    """The first of some attributes that one of the objects, or its configuration, has."""
    for one in near:
        for owner in (one, getattr(one, "config", None)):
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
    return None


def head_width(near: Sequence[nn.Module], columns: int) -> int | None:
    """The width of a head in a projection of `columns` columns; None if nobody says it."""
    width, query = number_of(near, HEAD_WIDTH), number_of(near, QUERY_HEADS)
    if width:
        return width
    hidden = number_of(near, ("hidden_size", "embed_dim", "d_model", "n_embd", "dim"))
    if query and hidden and hidden % query == 0:
        return hidden // query
    return columns // query if query and columns % query == 0 else None


def changing_numbers(near: Sequence[nn.Module], columns: int) -> frozenset[int]:
    """Numbers of heads, and of columns of all heads, that a cut changes."""
    query, width = number_of(near, QUERY_HEADS), head_width(near, columns)
    kv = number_of(near, KV_HEADS) or query
    if not query or not width or not kv:
        return frozenset()
    return frozenset({query, kv, query * width, kv * width}) - {1}


def is_per_head(module: nn.Module, columns: int, near: Sequence[nn.Module]) -> bool:
    """Whether a module with parameters treats the heads of a projection of `columns` columns one by one.

    A norm of one head's width does, and so does one with a row of its own for each head. A norm over all
    columns does not.
    """
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    query, kv = number_of(near, QUERY_HEADS), number_of(near, KV_HEADS)
    counts = {count for count in (query, kv) if count}
    width = number_of(near, HEAD_WIDTH)
    widths = {width} if width else {columns // count for count in counts if count > 1}
    return all(
        (weight.dim() == 1 and weight.numel() in widths)
        or (weight.dim() == 2 and weight.shape[0] in counts and weight.numel() == columns)
        for weight in module.parameters()
    )
