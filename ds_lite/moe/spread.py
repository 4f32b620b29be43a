"""Expert parallelism for a model that knows nothing of it: its experts are spread over ranks (§9.4).

`"expert_parallel": {"enabled": true, "autoep_size": 2}` does this to every stack of experts of a transformers
model. Gate, choice and weights stay the model's own; each chosen row travels to the rank that holds the
expert, and nothing is dropped. Under tensor parallelism every rank of the model axis holds its columns of the
experts and exchanges all rows for them.

Letters: T tokens, H width, I inner columns, K choices per token, E experts.

Source: §9.4; DeepSpeed `module_inject/auto_ep.py` @ 0.19.8.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ds_lite.comm import ProcessGroup
from ds_lite.expert_groups import ExpertGroups
from ds_lite.grid import PipelineParallelGrid
from ds_lite.moe.dispatch import through_experts
from ds_lite.moe.experts import Experts
from ds_lite.moe.routing import Routing
from ds_lite.tags import cut_of, mark_cut, tag
from ds_lite.tensor_parallel.kinds import is_stack_of_experts
from ds_lite.tensor_parallel.regions import enter, leave


def spread_experts(model: nn.Module, grid: PipelineParallelGrid, ep_size: int) -> int:
    """Replace every stack of experts; this rank keeps those of its expert coordinate. Returns how many.

    The grid's expert groups have been made, `layout.py` has checked the numbers, and AutoTP has cut what it
    cuts.
    """
    stacks = list(stacks_of(model))
    for name, stack in stacks:
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, SpreadExperts(stack, grid.expert(ep_size), ep_size))
    return len(stacks)


def stacks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The stacks of experts of a model, by name."""
    return ((name, module) for name, module in model.named_modules() if is_stack_of_experts(module))


class SpreadExperts(nn.Module):
    """The experts of one layer that are here, called as the model calls all of them.

    Shapes: hidden_states (T, H), top_k_index and top_k_weights (T, K) -> (T, H).
    Communication: forward one all-to-all of E integers and two of rows, backward two of rows; with experts
    that AutoTP has cut one all-reduce more in each direction, and one for the weights in backward.
    """

    def __init__(self, stack: nn.Module, groups: ExpertGroups, ep_size: int) -> None:
        super().__init__()
        self.num_experts, self.ep_size = len(stack.gate_up_proj), ep_size  # type: ignore[arg-type]
        self.group: ProcessGroup | None = groups.group if ep_size > 1 else None
        how = cut_of(stack.down_proj)  # type: ignore[arg-type]
        self.model_group: ProcessGroup | None = None if how is None else how.group
        self.experts = _StackedExperts(stack)
        per_rank = self.num_experts // ep_size
        first = groups.coordinate * per_rank if ep_size > 1 else 0
        self.experts.keep(range(first, first + per_rank))
        self.tag_parameters()

    def tag_parameters(self) -> None:
        """Say whose gradients are whose."""
        for parameter in self.experts.parameters():
            tag(parameter, owner="expert", ep_size=self.ep_size)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = enter(hidden_states, self.model_group)
        weights = enter(top_k_weights, self.model_group)
        y = through_experts(x, self._routing(top_k_index, weights), self.experts, self.group)
        return leave(y.to(hidden_states.dtype), self.model_group)

    def _routing(self, chosen: Tensor, weights: Tensor) -> Routing:
        """The model's choice, all of it kept."""
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        return Routing(
            expert=chosen,
            slot=torch.zeros_like(chosen),
            weight=weights,
            dropped=torch.zeros_like(chosen, dtype=torch.bool),
            l_aux=weights.new_zeros(()),
            exp_counts=counts,
            capacity=0,
        )

    def extra_repr(self) -> str:
        return f"experts {self.experts.numbers} of {self.num_experts}, ep_size={self.ep_size}"


class _StackedExperts(Experts):
    """The experts of a stack, each under its number with weights of its own."""

    def __init__(self, stack: nn.Module) -> None:
        nn.ModuleDict.__init__(self)
        self.expert_group_name = None
        one = copy.copy(stack)  # the model's own code, for one expert
        one._parameters, one._forward_hooks, one._forward_pre_hooks = {}, OrderedDict(), OrderedDict()
        one.num_experts = 1  # type: ignore[assignment]
        for number in range(len(stack.gate_up_proj)):  # type: ignore[arg-type]
            self[str(number)] = _OneExpert(one, stack, number)


class _OneExpert(nn.Module):
    """gate_up_proj (2*I, H) and down_proj (H, I) of one expert, run by the model's own code."""

    def __init__(self, code: nn.Module, stack: nn.Module, number: int) -> None:
        super().__init__()
        self.__dict__["code"] = code  # nobody's child
        for name, whole in stack.named_parameters(recurse=False):
            mine = nn.Parameter(whole.detach()[number].clone(), whole.requires_grad)
            if (how := cut_of(whole)) is not None:
                mark_cut(mine, replace(how, dim=how.dim - 1))
            self.register_parameter(name, mine)

    def forward(self, rows: Tensor) -> Tensor:
        if not len(rows):  # no token, and yet a gradient of zeros
            return rows + sum(parameter.flatten()[:0].sum() for parameter in self.parameters())
        stacked = {name: parameter.unsqueeze(0) for name, parameter in self.named_parameters()}
        first = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        output: Tensor = functional_call(
            self.__dict__["code"], stacked, (rows, first, torch.ones_like(rows[:, :1]))
        )
        return output
