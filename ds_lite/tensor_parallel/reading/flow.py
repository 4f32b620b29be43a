"""What was read of a block: which layers open regions, close them, or stay whole (§9.13)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Closing:
    """A linear layer that closes a region: who opened it, and whether attention lies between.

    `picked` are those of its openers whose columns the code takes apart, `folded` those that it folds.
    """

    opened_by: set[str] = field(default_factory=set)
    is_attention: bool = False
    picked: set[str] = field(default_factory=set)
    folded: set[str] = field(default_factory=set)


@dataclass
class Flow:
    """What was read of one block; names are paths from it.

    `whole` says of layers why nobody may cut them. `inside` are modules with parameters that an open value
    passes, such as the norm of each head, with the layers that made it; `outside` those that whole values
    pass. `weights` are parameters that the code itself puts into a region, `arguments` those of the block,
    `experts` stacks of 3-D weights. `sizes` are attributes that the code uses as sizes of what is cut,
    `numbers` those that it computes with.
    """

    openers: set[str] = field(default_factory=set)
    closers: dict[str, Closing] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    inside: dict[str, set[str]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    weights: dict[str, set[str]] = field(default_factory=dict)
    arguments: set[str] = field(default_factory=set)
    sizes: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    left_by: frozenset[str] = frozenset()  # openers whose output the block returns
