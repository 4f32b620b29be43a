"""A model that is whole outside its blocks: cut before the first one, whole again after the last (§9.14).

For models that make their own tokens, such as image patches and a class token, and for heads that look at
some tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ds_lite import comm
from ds_lite.sequence.context import Context
from ds_lite.sequence.data import Part, part_of
from ds_lite.sequence.whole import gather_tokens


class CutAtBlocks:
    """Hooks on the first and the last block of a model.

    Raises: ValueError for a model in which no single stack of blocks is found.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        self.context = context
        self._part: Part | None = None  # of the last forward
        blocks = stack_of(model)
        blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        for block in blocks[1:]:
            block.register_forward_pre_hook(self._go_on, with_kwargs=True)
        blocks[-1].register_forward_hook(self._leave)

    def _enter(self, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.context.is_open:
            return None
        hidden = args[0] if args else named["hidden_states"]
        group = self.context.group
        part = part_of(hidden.shape[1], comm.get_rank(group), comm.get_world_size(group))
        self.context.set_micro_batch(part)
        return _mapped((args, named), lambda x: _own(x, part))

    def _go_on(self, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A later block: its hidden states are this rank's, what else it is given for each token is whole."""
        part = self.context.part
        if part is None or not self.context.is_open:
            return None
        return _mapped((args, named), lambda x: _own(x, part))

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        part = self.context.part
        if not self.context.is_open or part is None:
            return None
        here = part.lengths[part.rank]

        def whole(x: Tensor) -> Tensor:
            is_part = x.dim() >= 2 and x.shape[1] == here
            return gather_tokens(x, part, self.context.group) if is_part else x

        if not self.context.is_backward:  # where blocks are recomputed, in backward, the last one comes first
            self._part, self.context.part = part, None
        return _mapped(output, whole)

    @property
    def part(self) -> Part | None:
        """The part of the last forward, on which its recomputed blocks work."""
        return self._part


def _own(x: Tensor, part: Part) -> Tensor:
    """This rank's tokens of (B, T, ...); masks (B, 1, T, T) stay, attention needs them whole."""
    return part.of(x) if x.dim() in (2, 3) and x.shape[1] == part.total else x


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, function) for item in value)
    return value


def stack_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: the one list of equal modules that is in no other.

    Raises: ValueError if there is none, or there are several.
    """
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        children = list(module.children())
        is_stack = (
            isinstance(module, nn.ModuleList) and children and len({type(one) for one in children}) == 1
        )
        if is_stack and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = children
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists)} stacks of blocks "
            f"({', '.join(lists) or 'no ModuleList'}), and its sequence is cut before the first block and "
            "whole after the last of one (§9.14)"
        )
    return next(iter(lists.values()))
