"""What the modules of an attention are told once its heads have been dealt (§9.13)."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Range
from ds_lite.tensor_parallel.fused_qkv import Heads
from ds_lite.tensor_parallel.heads import KV_HEADS, QUERY_HEADS
from ds_lite.tensor_parallel.regions import enter

_GROUPS = ("num_key_value_groups",)
_QUERY_WIDTHS = ("embed_dim", "hidden_size", "split_size", "inner_dim", "all_head_size", "dim")
_KV_WIDTHS = ("kv_dim", "kv_size")


def keep_heads(modules: Sequence[nn.Module], heads: Heads, query: Range, kv: Range) -> None:
    """Tell the modules of an attention how many heads are theirs from now on.

    Only attributes that held the whole number change. The configuration keeps it, unless the code of a module
    asks the configuration: then it gets a copy.

    Raises: ValueError for an attribute that cannot be set.
    """
    mine, mine_kv = query[1] - query[0], kv[1] - kv[0]
    numbers = {
        QUERY_HEADS: mine,
        KV_HEADS: mine_kv,
        _GROUPS: mine // mine_kv,
        _QUERY_WIDTHS: mine * heads.width,
        _KV_WIDTHS: mine_kv * heads.width,
    }
    for module in modules:
        for names, name in _changing(module, heads):
            try:
                setattr(module, name, numbers[names])
            except AttributeError:
                raise ValueError(
                    f"{type(module).__name__}.{name} cannot be set to the number of this rank's heads; make "
                    f"it a plain attribute (§9.13)"
                ) from None
        if _asks_configuration(module):
            config = copy.copy(module.config)
            for names, name in _changing(config, heads):
                if names in (QUERY_HEADS, KV_HEADS):
                    setattr(config, name, numbers[names])
            module.config = config


def changed_attributes(modules: Mapping[str, nn.Module], heads: Heads) -> set[str]:
    """The paths of all attributes that `keep_heads` changes; `modules` by their paths."""
    found = set()
    for path, module in modules.items():
        found |= {f"{path}.{name}" for _, name in _changing(module, heads)}
        if _asks_configuration(module):
            of_config = [
                name for names, name in _changing(module.config, heads) if names in (QUERY_HEADS, KV_HEADS)
            ]
            found |= {f"{path}.config.{name}" for name in of_config}
    return {path.lstrip(".") for path in found}


def _changing(owner: Any, heads: Heads) -> list[tuple[tuple[str, ...], str]]:
    """The attributes of a module or configuration that hold a number of the whole attention."""
    wholes = {
        QUERY_HEADS: heads.query,
        KV_HEADS: heads.kv,
        _GROUPS: heads.query // heads.kv,
        _QUERY_WIDTHS: heads.query * heads.width,
        _KV_WIDTHS: heads.kv * heads.width,
    }
    return [
        (names, name)
        for names, whole in wholes.items()
        for name in names
        if type(getattr(owner, name, None)) is int and getattr(owner, name) == whole
    ]


def _asks_configuration(module: nn.Module) -> bool:
    """Whether a method, but the constructor, which has run, reads a number of heads from `self.config`."""
    return _code_asks_configuration(cast(Hashable, type(module)))


@cache
def _code_asks_configuration(kind: Hashable) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return False  # no source, so nothing of its own: a layer of torch, or made by a program
    methods = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
    asked = {f"self.config.{name}" for name in (*QUERY_HEADS, *KV_HEADS)}
    nodes = (node for method in methods for node in ast.walk(method))
    return any(ast.unparse(node) in asked for node in nodes if isinstance(node, ast.Attribute))


BIASES = ("alibi", "position_bias")
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
    if name not in (*BIASES, *_MASKS) or not isinstance(bias, Tensor):
        return bias
    start, stop = mine
    if bias.dim() == 4 and bias.shape[1] == num_heads:
        return bias[:, start:stop]
    is_of_all = bias.shape[0] == num_heads or (name == "alibi" and bias.shape[0] % num_heads == 0)
    if name in BIASES and bias.dim() == 3 and is_of_all:
        return bias.unflatten(0, (-1, num_heads))[:, start:stop].flatten(0, 1)
    return bias


def enter_arguments(block: nn.Module, names: Sequence[str], group: ProcessGroup) -> None:
    """Sum the gradients of what a block takes from outside and puts into its regions, as a learned bias."""
    order = list(inspect.signature(block.forward).parameters)

    def entered(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(entered(name, one) for one in value)
        if name not in names or not isinstance(value, Tensor) or not value.requires_grad:
            return value
        return enter(value, group)

    def enter_all(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = [entered(name, value) for name, value in zip(order, args, strict=False)]
        return (*given, *args[len(given) :]), {name: entered(name, value) for name, value in named.items()}

    block.register_forward_pre_hook(enter_all, with_kwargs=True)
