"""What the modules of an attention are told once its heads have been dealt (§9.13)."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from ds_lite.tensor_parallel.dealing import Range
from ds_lite.tensor_parallel.fused_qkv import Heads
from ds_lite.tensor_parallel.heads import KV_HEADS, QUERY_HEADS

_GROUPS = ("num_key_value_groups",)
_QUERY_WIDTHS = ("embed_dim", "hidden_size", "split_size", "inner_dim", "all_head_size", "dim")
_KV_WIDTHS = ("kv_dim", "kv_size")


def keep_heads(modules: Sequence[nn.Module], heads: Heads, query: Range, kv: Range) -> None:
    """Tell the modules of an attention how many heads are theirs from now on.

    Only attributes that held the whole number change. The configuration keeps it, unless the code of a module
    asks the configuration: then it gets a copy.
    """
    mine, mine_kv = query[1] - query[0], kv[1] - kv[0]
    changes = [
        (QUERY_HEADS, heads.query, mine),
        (KV_HEADS, heads.kv, mine_kv),
        (_GROUPS, heads.query // heads.kv, mine // mine_kv),
        (_QUERY_WIDTHS, heads.query * heads.width, mine * heads.width),
        (_KV_WIDTHS, heads.kv * heads.width, mine_kv * heads.width),
    ]
    for module in modules:
        for names, before, after in changes:
            for name in names:
                if type(getattr(module, name, None)) is int and getattr(module, name) == before:
                    setattr(module, name, after)
        if _code_of(cast(Hashable, type(module))).asks_configuration:
            module.config = copy.copy(module.config)
            for names, before, after in changes[:2]:
                for name in names:
                    if getattr(module.config, name, None) == before:
                        setattr(module.config, name, after)


def check_no_scale(name: str, modules: Sequence[nn.Module], heads: Heads) -> None:
    """Numbers that change with the cut must be sizes in the code, and no factor.

    Raises: ValueError for code that takes a power or a root of one.
    """
    for module in modules:
        for attribute, expression in _code_of(cast(Hashable, type(module))).factors:
            if attribute in _QUERY_WIDTHS and getattr(module, attribute, 0) == heads.query * heads.width:
                raise ValueError(
                    f"the attention {name} computes {expression}, but self.{attribute} has to become the "
                    f"width of this rank's heads; use another attribute for the scale (§9.13)"
                )


@dataclass(frozen=True)
class _Code:
    """What the methods of a class, but the constructor, which has run, do with its numbers.

    `factors` are attributes in a power or a root, with the expression.
    """

    asks_configuration: bool = False
    factors: tuple[tuple[str, str], ...] = ()


@cache
def _code_of(kind: Hashable) -> _Code:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return _Code()  # no source, so nothing of its own: a layer of torch, or made by a program
    methods = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
    nodes = [node for method in methods for node in ast.walk(method)]
    asked = {f"self.config.{name}" for name in (*QUERY_HEADS, *KV_HEADS)}
    asks = any(ast.unparse(node) in asked for node in nodes if isinstance(node, ast.Attribute))
    factors = [
        (part.attr, ast.unparse(node))
        for node in nodes
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sqrt"))
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
    ]
    return _Code(asks, tuple(factors))


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

    if not hasattr(attention, "_ds_lite_keeps_heads"):  # two attentions may share the module around them
        attention.__dict__["_ds_lite_keeps_heads"] = attention.register_forward_pre_hook(
            keep_mine, with_kwargs=True
        )


def _my_heads(name: str, bias: Any, num_heads: int, mine: Range) -> Any:
    if name not in (*_BIASES, *_MASKS) or not isinstance(bias, Tensor):
        return bias
    start, stop = mine
    if bias.dim() == 4 and bias.shape[1] == num_heads:
        return bias[:, start:stop]
    if name in _BIASES and bias.dim() == 3 and bias.shape[0] % num_heads == 0:
        return bias.unflatten(0, (-1, num_heads))[:, start:stop].flatten(0, 1)
    return bias
