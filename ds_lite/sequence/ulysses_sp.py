"""What scripts of DeepSpeed's Ulysses for transformers call, and what stands behind each name here (§9.14).

Such a script registers an attention, wraps its loader and gives `initialize` the groups. Here
`"sequence_parallel_size"` in the config does the first, and makes the groups; the calls remain.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_lite.sequence.data import UlyssesSPDataLoaderAdapter
from ds_lite.sequence.groups import SequenceGrid, initialize_sequence_parallel
from ds_lite.sequence.routes import ATTENTIONS
from ds_lite.sequence.tiled import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

__all__ = [
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]


class UlyssesSPAttentionHF:
    """The name under which DeepSpeed's scripts ask for sequence parallelism of a transformers model."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceGrid | None:
        """The groups to give to `initialize` as `mpu`, which then spreads the model's sequences.

        None for sequence_parallel_size=1. Lengths may always vary; `micro_batch_size`, `seq_length`,
        `seq_length_is_variable` and `max_length` are accepted and not needed.

        Communication: creates the process groups.
        Raises: ValueError for an attention that cannot be exchanged, for one that the model does not use,
        and for a degree that does not divide the number of processes; disable_in_eval is not built.

        Source: §9.14; DeepSpeed `ulysses_sp.py::UlyssesSPAttentionHF` @ 0.19.8.
        Differs: eager attention works, with its masks; nothing is registered before `initialize`.
        """
        if core_attn_implementation not in ATTENTIONS:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r} cannot be exchanged; choose from "
                f"{', '.join(ATTENTIONS)} (§9.14)"
            )
        if disable_in_eval:
            raise ValueError(
                "disable_in_eval=True is not yet built into ds_lite; evaluate whole batches, which are "
                "spread like any other (§9.14)"
            )
        if isinstance(model_name_or_path, nn.Module):
            used = getattr(model_name_or_path.config, "_attn_implementation", core_attn_implementation)
            if used != core_attn_implementation:
                raise ValueError(
                    f"core_attn_implementation={core_attn_implementation!r}, but the model uses {used!r}; "
                    "make them equal (§9.14)"
                )
        return None if sequence_parallel_size == 1 else initialize_sequence_parallel(sequence_parallel_size)
