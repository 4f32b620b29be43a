"""Linear layers and embeddings that are cut over the model axis (§9.3).

A layer is made whole, so that its initial weights do not depend on the cut, and takes its part when it joins
a group: in the constructor, or by `bind(grid)` inside `initialize`. Until then it is the whole layer.
Parameters stay the same objects, so optimizers and ties made earlier stay right; each gets the tag that says
how its gradient is reduced. Any other module, such as a norm of each head, may stand inside a region if its
parameters are tagged with `tag(parameter, model="partial")`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Ranges, deal_evenly, deal_heads, side_by_side
from ds_lite.tags import Cut, mark_cut, tag
from ds_lite.tensor_parallel.regions import enter, gather, leave
from ds_lite.tensor_parallel.sharded import Dealing, ShardedLayer, cut_once


class LinearLayer(ShardedLayer):
    """Column-parallel: each rank computes some output columns of a whole input.

    `dealing` says which columns, e.g. by heads; by default they are dealt evenly. `skip_partition` says that
    `module` holds this rank's columns already. `gather_output` gives every rank all columns. With
    `input_is_entered` the caller has called `enter`, so that several layers share one all-reduce in backward.

    Shapes: x (..., in) -> (..., out/tp), or (..., out) with `gather_output`.
    Communication: backward one all-reduce of x's size (none with `input_is_entered`); with `gather_output`
    forward one all-gather. With `skip_partition` one all-gather of a number on joining.
    Raises: as ShardedLayer.

    Source: §9.3; DeepSpeed `module_inject/layers.py::LinearLayer` @ 0.19.8.
    """

    def __init__(
        self,
        module: nn.Module,
        mp_group: ProcessGroup | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        *,
        dealing: Dealing | None = None,
        input_is_entered: bool = False,
    ) -> None:
        super().__init__(module)
        self.skip_partition, self.gather_output = skip_partition, gather_output
        self.input_is_entered = input_is_entered
        self.dealing = dealing or partial(deal_evenly, self.whole_shape[self.out_dim])
        self.tag_parameters()
        if mp_group is not None:
            self.join(mp_group)

    def tag_parameters(self) -> None:
        """Say at once that a part is a part: until it is bound nobody may take it for a copy."""
        for parameter in self.parameters() if self.skip_partition else ():
            tag(parameter, model="sharded")

    def _take_part(self, group: ProcessGroup) -> Ranges:
        if self.skip_partition:
            ranges, take = side_by_side(_widths_of_all(self.weight, self.out_dim, group)), mark_cut
        else:
            ranges, take = self.dealing(comm.get_world_size(group)), cut_once
        take(self.weight, Cut(self.out_dim, ranges, group))
        if self.bias is not None:
            take(self.bias, Cut(0, ranges, group))
        return ranges

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_is_entered else enter(x, self.group, overlaps=self.overlaps)
        y = self.product(x, self.bias)
        return gather(y, self.ranges, self.group) if self.gather_output else y


def _widths_of_all(weight: Tensor, dim: int, group: ProcessGroup) -> list[int]:
    """How wide the weight is along `dim` on each rank of the group."""
    mine = torch.tensor([weight.shape[dim]], device=weight.device)
    widths = mine.new_empty(comm.get_world_size(group))
    comm.all_gather_into_tensor(widths, mine, group=group)
    return [int(width) for width in widths]


class LinearAllreduce(ShardedLayer):
    """Row-parallel: each rank holds some input columns; the products are summed and the bias is added once.

    Shapes: x (..., in/tp) -> (..., out).
    Communication: forward one all-reduce of the output; backward none.
    Gradient: every rank has the whole gradient of the bias.
    Raises: as ShardedLayer; ValueError for an input that is not this rank's part.

    Source: §9.3; DeepSpeed `module_inject/layers.py::LinearAllreduce` @ 0.19.8.
    """

    def __init__(
        self, module: nn.Module, mp_group: ProcessGroup | None = None, *, dealing: Dealing | None = None
    ) -> None:
        super().__init__(module)
        self.dealing = dealing or partial(deal_evenly, self.whole_shape[self.in_dim])
        if mp_group is not None:
            self.join(mp_group)

    def _take_part(self, group: ProcessGroup) -> Ranges:
        ranges = self.dealing(comm.get_world_size(group))
        cut_once(self.weight, Cut(self.in_dim, ranges, group))
        return ranges

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[self.in_dim]:
            raise ValueError(
                f"LinearAllreduce ({self.extra_repr()}) got {x.shape[-1]} input columns; it takes the "
                f"{self.weight.shape[self.in_dim]} of this rank, the output of a LinearLayer without a "
                "gather (§9.3)"
            )
        y = leave(self.product(x), self.group)
        # A bias before the sum would count once per rank; divided by the ranks it would learn too slowly.
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(ShardedLayer):
    """A linear layer that stays whole inside a sharded region; each rank uses its result for its own part.

    Shapes: x (..., in), inside the region -> (..., out).
    Gradient: partial on each rank, for x and for the parameters, which are tagged so.
    Raises: as ShardedLayer.
    """

    def __init__(self, module: nn.Module, mp_group: ProcessGroup | None = None) -> None:
        super().__init__(module)
        if mp_group is not None:
            self.join(mp_group)

    def _take_part(self, group: ProcessGroup) -> Ranges:
        for parameter in self.parameters():
            tag(parameter, model="partial")
        return ()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class KeyValueLinear(ShardedLayer):
    """The key or the value projection: each rank makes the kv heads that its query heads read.

    Up to one rank per kv head it is cut by heads. With more ranks it stays whole on each of them, a rank uses
    the rows of its one kv head, and the gradients are partial. With `input_is_entered` the caller has called
    `enter`, for the query's input too.

    Shapes: x (..., in) -> (..., kv heads of this rank * head width).
    Communication: backward one all-reduce of x's size (none with `input_is_entered`).
    Raises: as ShardedLayer and `deal_heads`; ValueError for an output that is not made of whole heads.
    """

    def __init__(
        self,
        module: nn.Module,
        num_heads: int,
        num_kv_heads: int,
        mp_group: ProcessGroup | None = None,
        *,
        input_is_entered: bool = True,
    ) -> None:
        super().__init__(module)
        self.input_is_entered = input_is_entered
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_width, rest = divmod(self.whole_shape[0], num_kv_heads)
        if rest:
            raise ValueError(
                f"out_features={self.whole_shape[0]} is not divisible by num_kv_heads={num_kv_heads}; a head "
                f"is never cut, check both (§9.3)"
            )
        self.rows: tuple[int, int] | None = None  # None: all that this rank holds
        if mp_group is not None:
            self.join(mp_group)

    def _take_part(self, group: ProcessGroup) -> Ranges:
        dealt = deal_heads(self.num_heads, self.num_kv_heads, comm.get_world_size(group))
        columns = tuple(((start * self.head_width, stop * self.head_width),) for start, stop in dealt.kv)
        for parameter in self.parameters():
            if dealt.kv_is_replicated:
                tag(parameter, model="partial")
            else:
                cut_once(parameter, Cut(0, columns, group))
        if dealt.kv_is_replicated:
            (self.rows,) = columns[comm.get_rank(group)]
        return columns

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_is_entered else enter(x, self.group, overlaps=self.overlaps)
        if self.rows is None:
            return self.linear(x, self.weight, self.bias)
        rows = slice(*self.rows)
        return self.linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])


class VocabParallelEmbedding(ShardedLayer):
    """An embedding whose rows are dealt over the ranks; used the other way round it is a vocab-parallel head.

    `module` is a torch.nn.Embedding or has a weight of shape (vocabulary, width).

    Shapes: ids (...) -> (..., width).
    Communication: forward one all-reduce of the output; backward none.
    Raises: as ShardedLayer; ValueError for ids outside the vocabulary and for options of torch.nn.Embedding
    that need whole rows or counts on one rank.

    Source: §9.3; Megatron-LM `core/tensor_parallel/layers.py::VocabParallelEmbedding`.
    """

    module_type = nn.Module

    def __init__(
        self, module: nn.Module, mp_group: ProcessGroup | None = None, *, dealing: Dealing | None = None
    ) -> None:
        super().__init__(module)
        if used := [
            name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name, None)
        ]:
            raise ValueError(
                f"VocabParallelEmbedding does not support {used}; leave them at their defaults (§9.3)"
            )
        self.num_embeddings = self.whole_shape[0]
        self.dealing = dealing or partial(deal_evenly, self.num_embeddings)
        self.padding_idx: int | None = getattr(module, "padding_idx", None)
        self.start, self.stop = 0, self.num_embeddings
        if mp_group is not None:
            self.join(mp_group)

    def _take_part(self, group: ProcessGroup) -> Ranges:
        ranges = self.dealing(comm.get_world_size(group))
        cut_once(self.weight, Cut(0, ranges, group))
        ((self.start, self.stop),) = ranges[comm.get_rank(group)]
        return ranges

    def forward(self, ids: Tensor) -> Tensor:
        if bool(((ids < 0) | (ids >= self.num_embeddings)).any()):  # else such an id would be a row of zeros
            raise ValueError(
                f"ids from {ids.min().item()} to {ids.max().item()} do not fit a vocabulary of "
                f"{self.num_embeddings}; ids are 0..{self.num_embeddings - 1} (§9.3)"
            )
        is_elsewhere = (ids < self.start) | (ids >= self.stop)
        local = (ids - self.start).masked_fill(is_elsewhere, 0)
        rows = F.embedding(local, self.weight, self._local_padding_idx())
        return leave(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.group)

    def _local_padding_idx(self) -> int | None:
        if self.padding_idx is None or not self.start <= self.padding_idx < self.stop:
            return None
        return self.padding_idx - self.start

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the scores, for a vocabulary-parallel loss.

        Shapes: hidden (..., width) -> (..., V/tp).
        Communication: backward one all-reduce of hidden's size.
        """
        return self.linear(enter(hidden, self.group, overlaps=self.overlaps), self.weight, None)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """The scores of the whole vocabulary on every rank.

        Shapes: hidden (..., width) -> (..., V).
        Communication: forward one all-gather; backward one all-reduce of hidden's size.
        """
        return gather(self.logits(hidden), self.ranges, self.group)
