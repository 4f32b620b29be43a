"""What an attention is made of: heads, and which of its linear layers hold which of them (§9.13)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_lite.tensor_parallel.dealing import Range
from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads, attention_layout
from ds_lite.tensor_parallel.kinds import features
from ds_lite.tensor_parallel.partition_config import TPLayerSpec, layout_from

# Names under which models keep these numbers, on the attention or in their configuration.
_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads", "n_head_kv")
_HEAD_WIDTH = ("head_dim", "head_width", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv")
_GROUPS = ("num_key_value_groups",)
_QUERY_WIDTHS = ("embed_dim", "hidden_size", "split_size", "inner_dim", "all_head_size", "dim")
_KV_WIDTHS = ("kv_dim", "kv_size")


def heads_of(
    name: str,
    around: Sequence[nn.Module],
    openers: Mapping[str, nn.Module],
    closer: nn.Module,
    spec: TPLayerSpec | None = None,
) -> tuple[Heads, dict[str, FusedLayout]]:
    """The heads of one attention, and for each of its opening layers the layout of its rows.

    `around` are the modules that may know the number of query heads, the nearest first. The rest follows from
    the shapes: the closing layer takes all query heads, an opening layer as wide holds them, another one key
    and value heads. A user's `spec` says how a fused weight is packed.

    Raises: ValueError for a number of heads that nobody knows, for widths that are not whole heads, and for a
    fused weight whose layout is unknown.
    """
    width_of_all, _ = features(closer)
    query, width = number_of(around, _QUERY_HEADS), number_of(around, _HEAD_WIDTH)
    if query is None and width:
        query = width_of_all // width
    if query is None or width_of_all % query:
        known = "no number of heads was found" if query is None else f"{query} heads do not divide it"
        raise ValueError(
            f"the attention {name} is {width_of_all} columns wide and {known} (looked for "
            f"{', '.join(_QUERY_HEADS)}); set num_heads on the module to the number of its query heads "
            "(§9.13)"
        )
    width = width_of_all // query
    widths = {key: features(module)[1] for key, module in openers.items()}
    fused = [key for key, columns in widths.items() if _is_fused(columns, widths, query * width)]
    if fused:
        return _fused_heads(name, around, widths, fused, query, width, spec)
    narrow = sorted({columns for columns in widths.values() if columns != query * width})
    kv, rest = divmod(narrow[0] if narrow else query * width, width)
    if len(narrow) > 1 or rest or query % kv or len(widths) != 3:
        raise ValueError(
            f"the attention {name} has {query} heads of width {width} and projections of {widths} columns; "
            f"three are expected, for {query} query heads and for equally many key and value heads. Leave "
            f"its layers whole by partition_config (§9.13)"
        )
    layouts = {
        key: FusedLayout(parts=("q",) if columns == query * width else ("k",))
        for key, columns in widths.items()
    }
    return Heads(query, kv, width), layouts


def _is_fused(columns: int, widths: Mapping[str, int], all_query: int) -> bool:
    return len(widths) < 3 and columns != all_query


def _fused_heads(
    name: str,
    around: Sequence[nn.Module],
    widths: Mapping[str, int],
    fused: Sequence[str],
    query: int,
    width: int,
    spec: TPLayerSpec | None,
) -> tuple[Heads, dict[str, FusedLayout]]:
    """One weight for all three, or one for query and one for key and value."""
    layout = attention_layout(around)
    if spec is not None and (layout is None or spec.shape is not None):
        layout = layout_from(spec, widths[fused[0]], width)
    if layout is None:
        raise ValueError(
            f"the layout of the fused weight {fused[0]} is unknown: its {widths[fused[0]]} rows may "
            f"be [q|k|v] or head by head, and a wrong guess would mix them; declare it in "
            f"tensor_parallel.partition_config with shape=((q, k, v), -1), its rows of each (§9.13)"
        )
    has_query = len(widths) == 1
    kv, rest = divmod(widths[fused[0]] // width - (query if has_query else 0), 2)
    if rest or kv < 1 or query % kv or len(fused) > 1 or len(widths) > 2 or widths[fused[0]] % width:
        raise ValueError(
            f"the fused weights {dict(widths)} of {name} do not hold {query} query heads of width {width} "
            f"and whole key and value heads; leave its layers whole by partition_config (§9.13)"
        )
    layouts = {
        key: layout
        if has_query
        else replace(layout, parts=tuple(p for p in layout.parts if p != "q"))
        if key in fused
        else FusedLayout(parts=("q",))
        for key in widths
    }
    return Heads(query, kv, width), layouts


def number_of(around: Sequence[Any], names: Sequence[str]) -> int | None:
    """The first of some attributes that one of the objects, or its configuration, has."""
    for one in around:
        for owner in (one, getattr(one, "config", None)):
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
    return None


def is_per_head(module: nn.Module, columns: int, around: Sequence[nn.Module]) -> bool:
    """Whether a module with parameters treats the heads of a projection of `columns` columns one by one.

    A norm of one head's width does, and so does one with a row of its own for each head; a single number, as
    of a PReLU, too. A norm over all columns does not.
    """
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    query, kv = number_of(around, _QUERY_HEADS), number_of(around, _KV_HEADS)
    counts = {count for count in (query, kv) if count}
    width = number_of(around, _HEAD_WIDTH)
    widths = {width} if width else {columns // count for count in counts if count > 1}
    return all(
        weight.numel() == 1
        or (weight.dim() == 1 and weight.numel() in widths)
        or (weight.dim() == 2 and weight.shape[0] in counts and weight.numel() == columns)
        for weight in module.parameters()
    )


# ------------------------------------------------------------------------------------- after the cut


def keep_heads(modules: Sequence[nn.Module], heads: Heads, query: Range, kv: Range) -> None:
    """Tell the modules of an attention how many heads are theirs from now on.

    Only attributes that held the whole number change. The configuration keeps it, unless the code of a module
    asks the configuration: then it gets a copy.
    """
    mine, mine_kv = query[1] - query[0], kv[1] - kv[0]
    changes = [
        (_QUERY_HEADS, heads.query, mine),
        (_KV_HEADS, heads.kv, mine_kv),
        (_GROUPS, heads.query // heads.kv, mine // mine_kv),
        (_QUERY_WIDTHS, heads.query * heads.width, mine * heads.width),
        (_KV_WIDTHS, heads.kv * heads.width, mine_kv * heads.width),
    ]
    for module in modules:
        for names, before, after in changes:
            for name in names:
                if type(getattr(module, name, None)) is int and getattr(module, name) == before:
                    setattr(module, name, after)
        if _asks_its_configuration(module):
            module.config = copy.copy(module.config)
            for names, before, after in changes[:2]:
                for name in names:
                    if getattr(module.config, name, None) == before:
                        setattr(module.config, name, after)


def _asks_its_configuration(module: nn.Module) -> bool:
    """Whether `forward` reads a number of heads from `self.config`."""
    code = inspect.getsource(inspect.unwrap(type(module).forward))
    return any(f"self.config.{name}" in code for name in (*_QUERY_HEADS, *_KV_HEADS))


_BIASES = ("alibi", "position_bias")
_MASKS = ("attention_mask", "mask")


def cut_biases(attention: nn.Module, num_heads: int, mine: Range) -> None:
    """Give the attention its heads of what is added to the scores: ALiBi, a bias of positions.

    They come from outside for all heads, as (B * N, ...), (N, ...) or (B, N, ...); others pass as they are.
    """
    order = list(inspect.signature(attention.forward).parameters)

    def keep_mine(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = [_my_heads(*pair, num_heads, mine) for pair in zip(order, args, strict=False)]
        named = {name: _my_heads(name, value, num_heads, mine) for name, value in named.items()}
        return (*given, *args[len(given) :]), named

    attention.register_forward_pre_hook(keep_mine, with_kwargs=True)


def _my_heads(name: str, bias: Any, num_heads: int, mine: Range) -> Any:
    if name not in (*_BIASES, *_MASKS) or not isinstance(bias, Tensor):
        return bias
    start, stop = mine
    if bias.dim() == 4 and bias.shape[1] == num_heads:
        return bias[:, start:stop]
    if name in _BIASES and bias.dim() == 3 and bias.shape[0] % num_heads == 0:
        return bias.unflatten(0, (-1, num_heads))[:, start:stop].flatten(0, 1)
    return bias
