"""The options of parameter groups (rate, decay, ...) by the names of their parameters (§9.1).

Each stage has its own groups, and a ZeRO shard may hold no parameter of one. What is saved is one list for
the whole model: number, options and names of every group; groups of one number are one entry if their options
are equal. On loading, a group takes the options that its parameters were saved with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_lite.saving.files import plain

# How a step is carried out, not what it computes: the new run decides.
_OF_THIS_RUN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class Group:
    """The options of a parameter group, and the names of its parameters."""

    index: int
    options: dict[str, Any]
    names: list[str] = field(default_factory=list)


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[Group]:
    """This rank's groups; `names` are those of what the optimizer steps, by id.

    Raises: ValueError, with the key, for an option that cannot be loaded again.
    """
    return [
        Group(
            index,
            {
                key: plain(value, f"optimizer.param_groups[{index}][{key!r}]")
                for key, value in group.items()
                if key not in _OF_THIS_RUN
            },
            [names[id(target)] for target in group["params"] if id(target) in names],
        )
        for index, group in enumerate(optimizer.param_groups)
    ]


def groups_of_a_stage(ranks: Iterable[Sequence[Group]]) -> list[Group]:
    """Over the ranks of a stage, which have the same groups and each some of the parameters."""
    union: list[Group] = []
    for groups in ranks:
        for group in groups:
            if group.index == len(union):
                union.append(Group(group.index, group.options))
            known = union[group.index].names
            known += [name for name in group.names if name not in known]
    return union


def groups_of_the_model(stages: Iterable[Sequence[Group]]) -> list[Group]:
    """Over the stages: groups with one number and equal options are one."""
    joined: list[Group] = []
    for group in (group for groups in stages for group in groups):
        equal = (g for g in joined if g.index == group.index and same(g.options, group.options))
        if (known := next(equal, None)) is None:
            joined.append(Group(group.index, group.options, list(group.names)))
        else:
            known.names += [name for name in group.names if name not in known.names]
    return joined


def chosen_options(groups: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    """For each group of this stage the options that its parameters were saved with.

    A group without parameters takes those of the saved group with its number; where there is none, nothing
    changes.

    Raises: ValueError for a group whose parameters were saved with different options.
    """
    by_name = {name: group.options for group in saved for name in group.names}
    chosen: list[dict[str, Any]] = []
    for group in groups:
        known = [(name, by_name[name]) for name in group.names if name in by_name]
        if not known:
            known = [("", other.options) for other in saved if other.index == group.index][:1]
        for name, options in known[1:]:
            if not same(options, known[0][1]):
                raise ValueError(
                    f"parameter group {group.index} holds {known[0][0]} and {name}, which were saved in "
                    f"groups with the options {known[0][1]} and {options}; form the groups as in the saved "
                    f"run, or pass load_optimizer_states=False (§9.1)"
                )
        chosen.append(known[0][1] if known else {})
    return chosen


def set_options(optimizer: torch.optim.Optimizer, chosen: Sequence[dict[str, Any]]) -> None:
    """Change the options of the groups in place."""
    for group, options in zip(optimizer.param_groups, chosen, strict=False):  # a peer may have more groups
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):  # a rate that somebody holds on to
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value.clone() if isinstance(value, Tensor) else value


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal, tensors element by element."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
