"""One batch of whole sequences, or one that the loader has cut already, as this rank's model gets it (§9.14).

Legend: B micro-batch, T tokens; sp ranks in the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.sequence.data import IGNORE, Part, part_of, shard_batch, tokens_of
from ds_lite.sequence.models import Kind
from ds_lite.sequence.whole import gather_tokens

_POSITIONS = ("position_ids", "positions")


@dataclass(frozen=True)
class Cut:
    """What the model of this rank is called with.

    `labels` are this rank's, shifted if need be, and `num_valid` counts those of all ranks; None: the
    engine computes no loss. `padding` and `positions` (B, T) are whole, for masks. `part` is None for a
    model that is cut at its blocks. `sizes` must be equal on all ranks.
    """

    inputs: dict[str, Any]
    part: Part | None
    sizes: dict[str, int]
    labels: Tensor | None = None
    num_valid: Tensor | None = None
    padding: Tensor | None = None
    positions: Tensor | None = None
    is_from_loader: bool = False
    moves_positions: bool = False  # a mask with padding, and no positions

    def _refuse_a_whole_batch(self, group: ProcessGroup) -> None:
        """If all ranks bring the same tokens at the same places, nobody has cut them."""
        mine = torch.tensor(_fingerprint(self.inputs), dtype=torch.float64, device=comm.control_device())
        ranks = comm.get_world_size(group)
        everyone = mine.new_empty(len(mine) * ranks)
        comm.all_gather_into_tensor(everyone, mine, group=group)
        if all(torch.equal(row, mine) for row in everyone.view(ranks, -1)):
            raise ValueError(
                f"all {ranks} ranks of a sequence brought the same tokens with shift_labels, which say that "
                "the batch is cut; give whole batches with labels instead (§9.14)"
            )

    def completed(self, group: ProcessGroup) -> Cut:
        """A batch from the loader, whose ranks have to tell each other how many tokens they have.

        Communication: one all-gather of a number, one of a fingerprint; one of each of positions and
        padding.
        """
        here = torch.tensor([tokens_of(self.inputs)], device=comm.control_device())
        everyone = here.new_empty(comm.get_world_size(group))
        comm.all_gather_into_tensor(everyone, here, group=group)
        part = Part(tuple(everyone.tolist()), comm.get_rank(group))
        self._refuse_a_whole_batch(group)
        positions, padding = (
            None if x is None else gather_tokens(x, part, group) for x in (self.positions, self.padding)
        )
        return replace(self, part=part, positions=positions, padding=padding)


def _fingerprint(inputs: Mapping[str, Any]) -> list[float]:
    """Numbers that differ between two batches, nearly always."""
    found = []
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        x = inputs.get(name)
        if isinstance(x, Tensor):
            found.append(float(_weighed(x.double())))
    return found


def _weighed(x: Tensor) -> Tensor:
    """The sum of x, each element as often as its place says."""
    return (x * torch.arange(1, x.numel() + 1, device=x.device).view(x.shape)).sum()


def cut_batch(given: Mapping[str, Any], kind: Kind, sp_rank: int, sp_size: int) -> Cut:
    """This rank's part of a batch; see `Cut`.

    Raises: ValueError for a batch that cannot be cut: no tokens, too few, other lengths, labels that mean
    nothing to the engine.
    """
    _refuse_arguments(given, kind)
    if kind.cut == "blocks":
        ids = given.get("input_ids")
        return Cut(dict(given), None, _sizes(int(ids.shape[1]) if isinstance(ids, Tensor) else 0, given))
    if not kind.is_transformers:
        return _of_any_model(given, kind, sp_rank, sp_size)
    if "shift_labels" in given:
        return _from_loader(given, kind)
    total = tokens_of(given)
    part = part_of(total, sp_rank, sp_size)
    labels = given.get("labels")
    _check_numbers(given, total, kind)
    if labels is not None and kind.loss is None:
        raise ValueError(
            "labels for a model without a loss for each token; compute the loss of its output (§9.14)"
        )
    mine = shard_batch(given, sp_rank=sp_rank, sp_size=sp_size, shift=kind.loss == "causal")
    own, padding = mine.pop("shift_labels", None), given.get("attention_mask")
    valid = None if labels is None else _num_valid(labels, is_shifted=kind.loss == "causal")
    return Cut(
        _accepted(mine, given, kind),
        part,
        _sizes(total, given),
        labels=own,
        num_valid=valid,
        padding=padding if padding is not None and padding.dim() == 2 else None,
        positions=given.get("position_ids"),
        moves_positions=_is_padded(given) and given.get("position_ids") is None,
    )


def _is_padded(given: Mapping[str, Any]) -> bool:
    mask = given.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.bool().all())


def _refuse_arguments(given: Mapping[str, Any], kind: Kind) -> None:
    """Arguments whose answer is made of all tokens, or of all heads."""
    if not kind.is_transformers:
        return
    refused = ["num_items_in_batch", "logits_to_keep", "output_attentions", "output_router_logits"]
    refused += ["output_hidden_states"] if kind.cut == "blocks" else []
    for name in refused:
        if name == "logits_to_keep" and isinstance(given.get(name), int) and given[name] == 0:
            continue
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name} cannot be honoured on a part of the sequence; leave it out (§9.14)")
    if given.get("return_dict") is False:
        raise ValueError("return_dict=False hides which output is which; leave it out (§9.14)")


def _check_numbers(given: Mapping[str, Any], total: int, kind: Kind) -> None:
    """What a rank would find out of range in its own tokens, all ranks find in the whole batch."""
    ids, labels, positions = (given.get(name) for name in ("input_ids", "labels", "position_ids"))
    for name, x in (("input_ids", ids), ("labels", labels)):
        if kind.num_ids is None or not isinstance(x, Tensor) or not x.numel():
            continue
        counted = x[x != IGNORE] if name == "labels" and kind.loss is not None else x
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < kind.num_ids:
            raise ValueError(
                f"{name} from {int(counted.min())} to {int(counted.max())} lie outside the vocabulary of "
                f"{kind.num_ids} (§9.14)"
            )
    last = int(positions.max()) if isinstance(positions, Tensor) else total - 1
    if kind.num_positions is not None and last >= kind.num_positions:
        raise ValueError(
            f"position {last} lies outside the model's table of {kind.num_positions} positions; shorten the "
            "sequence (§9.14)"
        )


def _from_loader(given: Mapping[str, Any], kind: Kind) -> Cut:
    if kind.loss != "causal":
        raise ValueError(
            "shift_labels for a model whose labels are not the next tokens; give the engine whole batches "
            "with labels (§9.14)"
        )
    if given.get("labels") is not None or not isinstance(given.get("position_ids"), Tensor):
        raise ValueError(
            "a batch with shift_labels is taken as cut already, which needs position_ids and no labels; "
            "give whole batches with labels, or use UlyssesSPDataLoaderAdapter (§9.14)"
        )
    inputs = dict(given)
    labels, padding = inputs.pop("shift_labels"), inputs.get("attention_mask")
    return Cut(
        _accepted(inputs, given, kind),
        None,
        _sizes(0, given),
        labels=labels,
        padding=padding,
        positions=inputs.get("position_ids"),
        is_from_loader=True,
    )


def _accepted(inputs: dict[str, Any], given: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Without positions where the model takes none; without a cache, which would hold some heads' tokens."""
    if "position_ids" not in kind.accepts and "position_ids" not in given:
        inputs.pop("position_ids", None)
    if "use_cache" in kind.accepts:
        inputs["use_cache"] = False
    return inputs


def _num_valid(labels: Tensor, *, is_shifted: bool) -> Tensor:
    return ((labels[:, 1:] if is_shifted else labels) != IGNORE).sum()


def _of_any_model(given: Mapping[str, Any], kind: Kind, sp_rank: int, sp_size: int) -> Cut:
    """A model of nobody in particular: its first tensor (B, T, ...) says how many tokens there are."""
    if given.get("labels") is not None:
        raise ValueError(
            "labels for a model whose loss nobody knows here would be cut with its tokens; call the engine "
            "without them and compute the loss of its output, which comes back whole (§9.14)"
        )
    tensors = [x for x in given.values() if isinstance(x, Tensor) and x.dim() >= 2]
    if not tensors or tensors[0].dim() > 3:
        raise ValueError(
            f"a batch with {sorted(given)} has no tokens (B, T) and no embeddings (B, T, H) to cut (§9.14)"
        )
    samples, total = tensors[0].shape[:2]
    part = part_of(total, sp_rank, sp_size)
    inputs = {name: _own(name, x, samples, part) for name, x in given.items()}
    for name in _POSITIONS:
        if name in kind.accepts and given.get(name) is None:
            whole = torch.arange(total, device=tensors[0].device).unsqueeze(0)
            inputs[name] = part.of(whole)
    return Cut(inputs, part, _sizes(total, given), positions=given.get("position_ids"))


def _own(name: str, x: Any, samples: int, part: Part) -> Any:
    is_mask = isinstance(x, Tensor) and (
        x.dim() > 3 or (x.shape[-2:] == (part.total,) * 2 and "mask" in name)
    )
    if not isinstance(x, Tensor) or is_mask or x.dim() < 2 or x.shape[1] != part.total:
        return x
    return part.of(x) if x.shape[0] in (1, samples) else x


def _sizes(total: int, given: Mapping[str, Any]) -> dict[str, int]:
    """What has to be equal on all ranks of the group; `total` is 0 where nothing says it."""
    first = next((x for x in given.values() if isinstance(x, Tensor) and x.dim()), None)
    samples = 0 if first is None else int(first.shape[0])
    ids = given.get("input_ids")
    is_whole = "shift_labels" not in given
    return {
        "tokens": total,
        "samples": samples,
        "labels": int(given.get("labels") is not None),
        "checksum of input_ids": int(_weighed(ids)) if is_whole and isinstance(ids, Tensor) else 0,
    }
