"""The experts of one layer, each under its global number (§9.4)."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ds_lite.tags import leave_to_others


class Experts(nn.ModuleDict):
    """Copies of one module; keys are global numbers, so each expert has one name on whatever rank it lives.

    All copies are made at first, on every rank alike, and `keep` drops those that live elsewhere. An expert
    takes (tokens, width) and returns the same shape, or a tuple that begins with it. It is called once a
    forward, with no token if it got none, so that its gradient is then zero and not missing.

    Source: §9.4; DeepSpeed `moe/experts.py::Experts` @ 0.19.8.
    Differs: DeepSpeed names experts by their number on their rank.
    """

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__({str(number): copy.deepcopy(expert) for number in range(num_local_experts)})
        self.expert_group_name = expert_group_name

    @property
    def numbers(self) -> list[int]:
        """The global numbers of the experts that are here."""
        return [int(key) for key in self]

    def keep(self, numbers: Iterable[int]) -> None:
        """Drop all experts but these."""
        kept = {str(number) for number in numbers}
        for key in [key for key in self if key not in kept]:
            for parameter in self[key].parameters():
                leave_to_others(parameter)
            del self[key]

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows grouped by expert, `counts` of them for each expert that is here.

        Shapes: (sum of counts, H) -> the same.
        Raises: ValueError for an expert whose output has another shape than its input.
        """
        outputs = []
        for number, expert, piece in zip(self.numbers, self.values(), rows.split(counts), strict=True):
            output = expert(piece)
            output = output[0] if isinstance(output, tuple) else output
            if output.shape != piece.shape:
                raise ValueError(
                    f"expert {number} made {tuple(output.shape)} from {tuple(piece.shape)}; an expert "
                    f"returns (tokens, width) as it got it, change its last layer (§9.4)"
                )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
