"""A mixture of experts as a layer: gate, experts, and their place in the grid (§9.4).

The layer is made whole on every rank, all experts alike or as the caller sets them, and is the whole layer
until it is bound: then it keeps the experts of this rank's expert coordinate and learns its groups.
`initialize` binds all layers of a model; without an engine `set_deepspeed_parallelism` does it.

    ep_size   model axis            tokens               experts' gradients on the model axis
    1         any                   stay                 full: every rank did all of it
    > 1       1                     exchanged            -
    > 1       > 1                   a share of them on   partial: each rank did its share
                                    each rank
    > 1       > 1, experts cut      exchanged by every   as the experts' layers say
                                    rank for its part

Letters: T tokens, H width, E experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.config_keys import DSConfig
from ds_lite.expert_groups import ExpertGroups
from ds_lite.grid import PipelineParallelGrid
from ds_lite.moe.clock import Clock
from ds_lite.moe.dispatch import through_experts
from ds_lite.moe.experts import Experts
from ds_lite.moe.gate import TopKGate, largest_over
from ds_lite.moe.gating import Agree
from ds_lite.moe.mappings import drop_tokens, gather_tokens, token_cut
from ds_lite.moe.noise import TokenNoise
from ds_lite.moe.routing import Routing
from ds_lite.moe.whole import WholeMicroBatch
from ds_lite.tags import tag, tags_of
from ds_lite.tensor_parallel.regions import is_alone
from ds_lite.tensor_parallel.sharded import ShardedLayer

_MIN_CAPACITY = 4


class MoE(nn.Module):
    """`num_experts` copies of `expert`, of which each token visits k; returns (output, l_aux, exp_counts).

    Add l_aux, times a small coefficient, to the loss. Each group of `ep_size` ranks holds the experts once.
    Where a sequence is spread over ranks, all of them route the whole micro-batch, each by the logits of all.
    `min_capacity` defaults to zero_optimization.moe_min_capacity of the config, and to 4 without one. With
    `use_residual` the output is mixed with that of `expert` itself, by weights that depend on the token. With
    `enable_expert_tensor_parallelism` the expert is made of tensor-parallel layers. `use_tutel` is accepted
    and changes nothing.

    Shapes: hidden_states (..., H), used_token (...) -> output (..., H), l_aux (), exp_counts (E,), which
    counts this rank's choices before dropping.
    Communication: none with ep_size=1. Else forward one all-reduce of two numbers, one all-to-all of E
    integers and two of the kept rows, and with tensor parallelism one all-gather of the output over the model
    axis; backward two all-to-alls and two all-gathers (of x and of the routing's weights).
    Gradient: the gate's and the coefficient's are complete on every rank of the model axis.
    Raises: ValueError for sizes, k, capacities, policy, and num_experts that ep_size does not divide; in
    forward for another width and for logits that are not numbers; and on all ranks of the expert group if one
    of them fails before the exchange. An expert that raises on one rank leaves its peers waiting.

    Source: §9.4; DeepSpeed `moe/layer.py::MoE` @ 0.19.8.
    Differs: names in the state dict are `gate`, `experts.{global number}`, `mlp` and `coefficient`.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int | None = None,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size, num_experts=num_experts, ep_size=ep_size, k=k)
        _check_division(num_experts, ep_size)
        if not isinstance(expert, nn.Module):
            raise TypeError(
                f"expert={expert!r} is no module; give one expert, (tokens, width) to the same shape, of "
                f"which the layer makes num_experts copies (§9.4)"
            )
        self.hidden_size, self.num_experts, self.ep_size = hidden_size, num_experts, ep_size
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.expert_group_name = f"ep_size_{ep_size}"
        self.has_own_min_capacity = min_capacity is not None
        self.gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            _MIN_CAPACITY if min_capacity is None else min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.experts = Experts(expert, num_experts, self.expert_group_name)
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)
        self.whole_size = sum(parameter.numel() for parameter in self.parameters())
        self.number = 0
        self.clock: Clock | None = None
        self._keeps_whole = False
        self._groups: ExpertGroups | None = None
        self._model_group: ProcessGroup | None = None
        self.tag_parameters()

    # --------------------------------------------------------------------------- its place in the grid

    def configure(self, config: DSConfig) -> None:
        """Take what the config says of MoE layers."""
        zero = config.zero_optimization
        if not self.has_own_min_capacity:
            self.gate.min_capacity = zero.moe_min_capacity
        self._keeps_whole = self.whole_size < zero.moe_layer_size_threshold
        self.tag_parameters()

    def bind(self, grid: PipelineParallelGrid) -> None:
        """Keep the experts of this rank's expert coordinate; the grid's expert groups have been made.

        Raises: ValueError for a layer that was bound to other ranks, and for experts made of tensor-parallel
        layers that nobody announced.
        """
        groups = grid.expert(self.ep_size)
        if self._groups is not None and self._groups.ranks != groups.ranks:
            raise ValueError(
                f"an MoE layer shares its experts among the ranks {list(self._groups.ranks)} already and "
                f"cannot share them among {list(groups.ranks)}; initialize binds the layers itself, so "
                f"do not call set_deepspeed_parallelism before it (§9.4)"
            )
        self._groups, self._model_group = groups, grid.group("model")
        if self._shares_tokens() and any(isinstance(part, ShardedLayer) for part in self.experts.modules()):
            raise ValueError(
                "the expert is made of tensor-parallel layers, but each tensor-parallel rank would get other "
                "tokens; pass enable_expert_tensor_parallelism=True (§9.4)"
            )
        per_rank = self.num_experts // self.ep_size
        first = groups.coordinate * per_rank
        self.experts.keep(range(first, first + per_rank))
        self.tag_parameters()

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Bind a layer that no engine will bind, with all ranks of the world as replicas.

        Communication: creates groups; every rank calls it for the same layers in the same order.
        """
        if self._groups is None:
            grid = PipelineParallelGrid()
            grid.make_expert_groups([self.ep_size], data_first=use_data_before_expert_parallel_)
            self.bind(grid)

    def tag_parameters(self) -> None:
        """Say whose gradients are whose; also by the marks that DeepSpeed's scripts look for."""
        for parameter in self.parameters():
            tag(parameter, keeps_whole=self._keeps_whole)
        for parameter in self.experts.parameters():
            parameter.allreduce, parameter.group_name = False, self.expert_group_name  # type: ignore[attr-defined]
            if self._groups is not None:
                tag(parameter, owner="expert", ep_size=self.ep_size)
            if self._shares_tokens() and tags_of(parameter).model == "full":
                tag(parameter, model="partial")

    def _shares_tokens(self) -> bool:
        """Whether each rank of the model axis sends another share of the tokens to whole experts."""
        splits = self.ep_size > 1 and not self.enable_expert_tensor_parallelism
        return splits and not is_alone(self._model_group)

    # ------------------------------------------------------------------------------------------ running

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        agree = largest_over(self._exchange_group())
        with nullcontext() if agree is None else agree.told():
            x, routing = self._route(hidden_states, used_token, agree)
        output = self._through_experts(x, routing).view_as(hidden_states)
        if self.use_residual:
            output = self._with_residual(output, hidden_states)
        return output, routing.l_aux, routing.exp_counts

    def _route(
        self, hidden_states: Tensor, used_token: Tensor | None, agree: Agree | None
    ) -> tuple[Tensor, Routing]:
        """The tokens, (T, H), and where they go."""
        if not hidden_states.dim() or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states of shape {tuple(hidden_states.shape)} at an MoE layer of hidden_size="
                f"{self.hidden_size}; the last dimension is the width, make them equal (§9.4)"
            )
        x = hidden_states.reshape(-1, self.hidden_size)
        micro_batch = WholeMicroBatch.around(hidden_states)
        used = None if used_token is None else torch.as_tensor(used_token, device=x.device).reshape(-1)
        noise = self._noise(micro_batch.total, x.device)
        logits = self.gate.scores(x, noise=None if noise is None else micro_batch.own_noise(noise))
        routing = self.gate.route(
            micro_batch.gathered(logits),
            None if used is None else micro_batch.gathered(used),
            noise=noise,
            agree=agree,
        )
        return x, micro_batch.own(routing)

    def _exchange_group(self) -> ProcessGroup | None:
        """Whom this rank exchanges tokens with; nobody while it holds all experts."""
        return self._groups.group if self._groups is not None and self.ep_size > 1 else None

    def _through_experts(self, x: Tensor, routing: Routing) -> Tensor:
        group = self._exchange_group()
        if not self._shares_tokens():
            return through_experts(x, routing, self.experts, group)
        over, total = self._model_group, len(x)
        assert over is not None
        ((start, stop),) = token_cut(total, 0, over).ranges[comm.get_rank(over)]
        weight = drop_tokens(routing.weight, group=over)  # whole gradients for the gate, too
        share = replace(routing.tokens(start, stop), weight=weight)
        y = through_experts(drop_tokens(x, group=over), share, self.experts, group)
        return gather_tokens(y, group=over, total=total)

    def _with_residual(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        dense = self.mlp(hidden_states)
        dense = dense[0] if isinstance(dense, tuple) else dense
        mix = self.coefficient(hidden_states).softmax(dim=-1)
        return output * mix[..., 0:1] + dense * mix[..., 1:]

    def _noise(self, num_tokens: int, device: torch.device) -> TokenNoise | None:
        """None without an engine: the gate draws from torch's generator then."""
        if self.clock is None or not self.training:
            return None
        return self.clock.noise(self.number, num_tokens, device)

    def extra_repr(self) -> str:
        held = f"experts {self.experts.numbers} of {self.num_experts}"
        return f"{held}, k={self.gate.k}, ep_size={self.ep_size}"


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} of an MoE layer; give a whole number of 1 or more (§9.4)")


def _check_division(num_experts: int, ep_size: int) -> None:
    if num_experts % ep_size:
        fitting = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"num_experts={num_experts} is not divisible by ep_size={ep_size}; every rank of an expert group "
            f"holds as many experts, choose ep_size from {fitting} (§9.4)"
        )


def moe_layers(model: nn.Module) -> Iterator[MoE]:
    """The MoE layers of a model, in its order."""
    return (module for module in model.modules() if isinstance(module, MoE))


def give_clock(model: nn.Module, clock: Clock) -> None:
    """Let the noise of all MoE layers follow a clock.

    A layer's number comes from its name: any layout of one module draws the same, a plain module and a
    pipeline of the same layers do not.
    """
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            module.number, module.clock = zlib.crc32(name.encode()), clock
