"""Batches of sequences over the seq group: what is cut, what is made before, what the loss divides by
(§9.14).

Three things are right only before a sequence is cut: a token's label is the token after it, which may lie
on the next rank; a token's position counts from the first token of the whole sequence; and the number of
valid labels is that of all ranks. So a batch is made whole, on every rank, and each takes its tokens.

Nothing is padded: a length that sp does not divide is dealt unevenly, the first ranks one token more.

Legend: B micro-batch, T tokens, V vocabulary; sp ranks in the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Range, deal

IGNORE = -100  # the label of a token that has none
_PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class Part:
    """Which tokens of a sequence of `sum(lengths)` this rank has."""

    lengths: tuple[int, ...]
    rank: int

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def tokens(self) -> Range:
        start = sum(self.lengths[: self.rank])
        return start, start + self.lengths[self.rank]

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole tensor."""
        start, stop = self.tokens
        return x.narrow(dim, start, stop - start)


def part_of(num_tokens: int, sp_rank: int, sp_size: int, *, may_differ: bool = True) -> Part:
    """Deal a sequence over sp ranks.

    Raises: ValueError for fewer tokens than ranks; without `may_differ` for a length that sp does not divide.

    >>> part_of(9, 1, 2).tokens
    (5, 9)
    """
    if num_tokens < sp_size or (num_tokens % sp_size and not may_differ):
        rule = "each rank needs a token" if num_tokens < sp_size else "parts of one size are asked for"
        raise ValueError(
            f"a sequence of {num_tokens} tokens does not fit sequence_parallel_size={sp_size}: {rule}; pad "
            f"it to {-(-num_tokens // sp_size) * sp_size} tokens with a mask, or choose another degree "
            "(§9.14)"
        )
    return Part(tuple(deal(num_tokens, sp_size, what="tokens")), sp_rank)


def shift_labels(labels: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Each token's label becomes the one of the token after it; the last has none.

    Shapes: labels (B, T) -> the same.

    >>> shift_labels(torch.tensor([[1, 2, 3, 4]])).tolist()
    [[2, 3, 4, -100]]
    """
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def positions_of(batch: Mapping[str, Any]) -> Tensor:
    """The position of every token in its whole sequence: the batch's own, else counted from 0.

    Shapes: (B, T), or (1, T) where they are counted.
    """
    given = batch.get("position_ids")
    if isinstance(given, Tensor):
        return given
    tokens = batch["input_ids"] if isinstance(batch.get("input_ids"), Tensor) else batch["inputs_embeds"]
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def shard_batch(
    batch: Mapping[str, Any],
    *,
    sp_rank: int,
    sp_size: int,
    shift: bool = True,
    may_differ: bool = True,
    ignore_index: int = IGNORE,
) -> dict[str, Any]:
    """This rank's tokens of a batch of whole sequences, with positions and labels made before the cut.

    `labels` become `shift_labels`: with `shift` the label of the next token, for causal language models; else
    as they are. A 2-D `attention_mask` is cut too; what has no tokens stays whole.

    Shapes: `input_ids` (B, T) -> (B, T/sp), and so on; lengths as `part_of` deals them.
    Raises: ValueError for a batch without tokens, tensors of other lengths, and as `part_of`.
    """
    part = part_of(tokens_of(batch), sp_rank, sp_size, may_differ=may_differ)
    whole = {**batch, "position_ids": positions_of(batch)}
    labels = whole.pop("labels", None)
    if isinstance(labels, Tensor):
        whole["shift_labels"] = shift_labels(labels, ignore_index) if shift else labels
    names = [*_PER_TOKEN, "shift_labels", "attention_mask", "loss_mask"]
    sharded = dict(whole)
    for name in names:
        value = whole.get(name)
        if not isinstance(value, Tensor) or (name == "attention_mask" and value.dim() != 2):
            continue
        if value.dim() < 2 or value.shape[1] != part.total:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but the sequence has {part.total} tokens; "
                "dimension 1 is that of the tokens (§9.14)"
            )
        sharded[name] = part.of(value)
    return sharded


def tokens_of(batch: Mapping[str, Any]) -> int:
    """The length of the sequences of a batch."""
    for name in ("input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return int(value.shape[1])
    raise ValueError(
        f"a batch with {sorted(batch)} has no input_ids (B, T) and no inputs_embeds (B, T, H), so nothing "
        "says how long its sequences are (§9.14)"
    )


# ------------------------------------------------------------------------------------------------ the loss


def sequence_loss(
    logits: Tensor,
    shifted_labels: Tensor,
    group: ProcessGroup | None,
    *,
    ignore_index: int = IGNORE,
    num_valid: Tensor | None = None,
) -> Tensor:
    """Mean cross entropy over the valid tokens of all ranks: each in the dtype of the logits, their sum in
    float32 or wider.

    Shapes: logits (B, T/sp, V), labels (B, T/sp) -> 0-dim, equal on all ranks of the group.
    Communication: as `token_weighted`.
    Gradient: as `token_weighted`; a rank without a valid token contributes zeros.
    """
    losses = F.cross_entropy(
        logits.flatten(0, -2), shifted_labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    valid = (shifted_labels != ignore_index).sum() if num_valid is None else num_valid
    return token_weighted(total, valid, group, is_counted=num_valid is not None)


def token_weighted(
    total: Tensor, num_valid: Tensor, group: ProcessGroup | None, *, is_counted: bool = False
) -> Tensor:
    """The sum of the ranks' losses over the number of their valid tokens.

    `total` is the sum of this rank's token losses. `num_valid` counts its valid tokens, or with `is_counted`
    those of the whole group. If there is none at all the loss is nan, as a mean over nothing in one process.

    Shapes: 0-dim -> 0-dim, equal on all ranks of the group.
    Communication: one all-reduce of one number, one more for the count.
    Gradient: sp / (valid tokens of the group) times the upstream one, for the engine divides by dp * sp.
    """
    if group is None or comm.get_world_size(group) == 1:
        return total / num_valid
    if not is_counted:
        num_valid = num_valid.detach().clone()
        comm.all_reduce(num_valid, group=group)
    result: Tensor = _Mean.apply(total * comm.get_world_size(group) / num_valid, group)
    return result


def sum_over_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sums over the tokens of each rank become those over all tokens, for a loss that every rank computes.

    Communication: one all-reduce.
    Gradient: sp times the upstream one, which is the same on all ranks; the engine divides by dp * sp.
    """
    if group is None or comm.get_world_size(group) == 1:
        return x
    total: Tensor = _Sum.apply(x, group)
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.ranks = comm.get_world_size(group)
        total = x.detach().clone()
        comm.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks, None


class _Mean(torch.autograd.Function):
    """The mean over the ranks; each takes the whole upstream gradient: the engine takes their mean again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        mean = x.detach().clone()
        comm.all_reduce(mean, group=group)
        return mean / comm.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


# --------------------------------------------------------------------------------------------- the loader


class UlyssesSPDataLoaderAdapter:
    """A loader's batches, each cut over the seq group: every rank gets its tokens of the same samples.

    If the ranks' loaders draw different samples (a `DistributedSampler` over all ranks), each batch of each
    rank is given to the whole group, one after another; if they draw the same ones, each batch once. So every
    sample comes once an epoch and group. Batches are dicts with `input_ids` and `labels`; `position_ids` are
    made where they are missing.

    Communication: when it is made, one all-gather; in each step one of the ranks' batches, which are small.
    Raises: ValueError, on every rank, for a batch without `labels` or tokens, for ranks that see the same
    dataset in different orders of their own.

    Source: §9.14; DeepSpeed `runtime/sequence_parallel/ulysses_sp.py::UlyssesSPDataLoaderAdapter` @ 0.19.8.
    Differs: DeepSpeed gives a batch that all ranks drew sp times, needs `position_ids`, and lengths that sp
    divides.
    """

    def __init__(
        self,
        dl: Iterable[Any],
        sp_rank: int,
        sp_group: ProcessGroup | None,
        sp_world_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dl, self.rank, self.group, self.size, self.device = dl, sp_rank, sp_group, sp_world_size, device
        sampler = getattr(dl, "sampler", None)
        replicas, replica = (getattr(sampler, name, 0) for name in ("num_replicas", "rank"))
        self._draws = self._gathered((replicas, replica, _length(dl)))
        self._differ = len({draw[:2] for draw in self._draws}) > 1

    def __len__(self) -> int:
        """Micro-batches of one epoch."""
        lengths = [draw[2] for draw in self._draws]
        if None in lengths:
            raise TypeError("the wrapped loader has no len() on some rank (§9.14)")
        return sum(lengths) if self._differ else max(lengths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        iterator = iter(self.dl)
        while True:
            batches = self._gathered(self._drawn(iterator))
            for failure in (batch for batch in batches if isinstance(batch, Exception)):
                raise failure
            present = [batch for batch in batches if batch is not None]
            if not present:
                return
            for batch in present if self._differ else self._the_same(present):
                yield self._cut(batch)

    def _drawn(self, iterator: Iterator[Any]) -> Any:
        """This rank's next batch, None at the end, or what its loader raised: all ranks shall hear of it."""
        try:
            drawn = next(iterator, None)
            return None if drawn is None else dict(drawn)
        except Exception as failure:
            return ValueError(f"the loader failed: {type(failure).__name__}: {failure} (§9.14)")

    def _the_same(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(batches) != self.size or any(not _equal(batch, batches[0]) for batch in batches):
            raise ValueError(
                "the ranks of a seq group draw different batches, but their samplers do not say that they "
                "share the samples out; use a DistributedSampler, over the data ranks or over all ranks, "
                "or shuffle with the same seed (§9.14)"
            )
        return batches[:1]

    def _cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(batch.get("labels"), Tensor):
            raise ValueError(
                f"a batch with {sorted(batch)} has no labels, which must be shifted before the cut (§9.14)"
            )
        mine = shard_batch(batch, sp_rank=self.rank, sp_size=self.size)
        return {key: x.to(self.device) if isinstance(x, Tensor) else x for key, x in mine.items()}

    def _gathered(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        if self.size == 1:
            return [mine]
        comm.all_gather_object(everyone, mine, group=self.group)
        return everyone


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
