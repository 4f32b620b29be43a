"""Masks for the whole sequence, where a transformers model asks for one of this rank's tokens (§9.14).

A model describes its mask as a function of two token numbers, and asks a registered function to make the
tensor. Ours makes it for all T tokens, from the padding mask and the positions of the whole batch. What the
function compares must not depend on this rank's part: causal, bidirectional, sliding windows and documents
by positions are known, anything else is refused.

Source: transformers 5.24 `masking_utils.py`, whose names of functions are read here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_lite.sequence.context import Context, current

MaskFunction = Callable[..., Any]

# Functions of token numbers alone, by qualified name.
_GLOBAL = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}
_DOCUMENTS = "packed_sequence_mask_function.<locals>.inner_mask"
_BY_POSITION = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_BOTH = "and_masks.<locals>.and_mask"


def mask_maker(base: str) -> Callable[..., Any]:
    """The function that a model with the attention `base` asks for its masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def make_mask(*args: Any, **named: Any) -> Any:
        plain, context = ALL_MASK_ATTENTION_FUNCTIONS[base], current()
        if context is None or context.part is None:
            return plain(*args, **named)
        if args:
            raise ValueError(
                f"a mask asked for with {len(args)} unnamed arguments cannot be made whole (§9.14)"
            )
        return plain(**{**named, **_of_the_whole(context, named)})

    return make_mask


def _of_the_whole(context: Context, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that change for all tokens of the sequence."""
    from transformers.masking_utils import (
        and_masks,
        find_packed_sequence_indices,
        packed_sequence_mask_function,
    )

    assert context.part is not None
    function, is_causal = _without_documents(named["mask_function"])
    padding, positions = context.padding, context.positions
    documents = None
    if is_causal and padding is None and positions is not None:
        documents = find_packed_sequence_indices(positions.expand(named["batch_size"], -1))
    if documents is not None:
        function = and_masks(function, packed_sequence_mask_function(documents))
    total = context.part.total
    changed = {
        "q_length": total,
        "kv_length": total,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": None if padding is None else padding.bool(),
    }
    return {**changed, "allow_is_causal_skip": False} if documents is not None else changed


def _without_documents(function: MaskFunction) -> tuple[MaskFunction, bool]:
    """The mask without what it says of documents on this rank, and whether it is causal.

    Raises: ValueError for a function that is not known to be the same on all ranks.
    """
    from transformers.masking_utils import and_masks

    name = getattr(function, "__qualname__", str(function))
    inner = [cell.cell_contents for cell in function.__closure__ or ()]
    if name in _GLOBAL:
        return function, name == "causal_mask_function"
    if name == _BY_POSITION:
        return _without_documents(next(one for one in inner if callable(one)))
    if name == _BOTH:
        parts = [one for one in inner[0] if getattr(one, "__qualname__", "") != _DOCUMENTS]
        known = [_without_documents(one) for one in parts]
        return and_masks(*(one for one, _ in known)), any(is_causal for _, is_causal in known)
    raise ValueError(
        f"the model's attention mask is made by {name}, which may depend on the tokens of one rank, so it "
        "cannot be made for the whole sequence; causal, bidirectional and sliding-window masks can (§9.14)"
    )
