"""A stand-in for Megatron's parallel_state: its names, its arguments, groups of its own; no line of ds_lite.

`make_mpu("tp-cp-dp-pp", tp=2, dp=2)` lays the ranks out with the first axis of the order fastest, as Megatron
does, and returns a module with functions. `names` chooses whose names it has:

    core      Megatron-Core 0.16: tensor_model_parallel, pipeline_model_parallel, context_parallel
    sequence  Megatron-DeepSpeed: the same with sequence_parallel, and initialize_sequence_parallel
    slice     DeepSpeed's older grids: slice_parallel, pipe_parallel, model_parallel over both
    minimum   what DeepSpeed documents: model_parallel and data_parallel

The layers at the end are a Megatron block in small: cut by hand, marked with Megatron's attributes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

_FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "core": {
        "data_parallel": ("dp",),
        "context_parallel": ("cp",),
        "tensor_model_parallel": ("tp",),
        "pipeline_model_parallel": ("pp",),
    },
    "sequence": {
        "data_parallel": ("dp",),
        "sequence_parallel": ("cp",),
        "sequence_data_parallel": ("dp", "cp"),
        "model_parallel": ("tp",),
        "tensor_model_parallel": ("tp",),
        "pipeline_model_parallel": ("pp",),
    },
    "slice": {
        "model_parallel": ("tp", "pp"),
        "data_parallel": ("dp",),
        "pipe_parallel": ("pp",),
        "slice_parallel": ("tp",),
    },
    "minimum": {"model_parallel": ("tp",), "data_parallel": ("dp",)},
}


def members(order: str, sizes: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of every group over `axes`, the first axis of `order` fastest.

    >>> members("tp-dp", {"tp": 2, "dp": 2}, ("dp",))
    [[0, 2], [1, 3]]
    """
    names = order.split("-")[::-1]  # a numpy table has its fastest axis last
    table = np.arange(np.prod([sizes[name] for name in names])).reshape([sizes[name] for name in names])
    mine = [names.index(axis) for axis in names if axis in axes]
    rest = [place for place in range(len(names)) if place not in mine]
    rows = table.transpose([*rest, *mine]).reshape(-1, int(np.prod([sizes[axis] for axis in axes])))
    return [sorted(row) for row in rows.tolist()]


def make_mpu(
    order: str = "tp-cp-dp-pp", *, names: str = "core", backwards: bool = False, **given: int
) -> ModuleType:
    """Make all groups and return the module; `backwards` numbers each group's ranks from the highest down.

    Groups are made family by family, from the last list to the first: in an order unlike that of our grid.
    """
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, **given}
    made: dict[tuple[str, ...], Any] = {}

    def group_over(*axes: str) -> Any:
        if axes not in made:
            for ranks in reversed(members(order, sizes, axes)):
                group = dist.new_group(ranks[::-1], sort_ranks=False) if backwards else dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    made[axes] = group
        return made[axes]

    mpu = ModuleType("parallel_state")
    for family, axes in _FAMILIES[names].items():
        _add(mpu, family, group_over(*axes))
    if names == "core":
        _add_arguments_of_core(mpu, group_over("dp", "cp"), group_over("tp", "pp"))
    if names == "sequence":
        mpu.initialize_sequence_parallel = lambda *sizes: None  # type: ignore[attr-defined]
    return mpu


def _add(mpu: ModuleType, family: str, group: Any) -> None:
    setattr(mpu, f"get_{family}_group", lambda: group)
    setattr(mpu, f"get_{family}_world_size", lambda: dist.get_world_size(group))
    setattr(mpu, f"get_{family}_rank", lambda: dist.get_rank(group))


def _add_arguments_of_core(mpu: Any, with_cp: Any, tensor_and_pipe: Any) -> None:
    """Data groups with or without the context axis; of model_parallel Core has the group alone."""
    without = mpu.get_data_parallel_group()

    def get_data_parallel_group(
        with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> Any:
        assert not partial_data_parallel, "Partial DP for Optimizer needs to include CP"
        return with_cp if with_context_parallel else without

    def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
        return get_data_parallel_group(with_context_parallel).size()

    def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
        return get_data_parallel_group(with_context_parallel).rank()

    def get_model_parallel_group(check_initialized: bool = True) -> Any:
        return tensor_and_pipe

    for function in (
        get_data_parallel_group,
        get_data_parallel_world_size,
        get_data_parallel_rank,
        get_model_parallel_group,
    ):
        setattr(mpu, function.__name__, function)


# ------------------------------------------------------------------------------------ a model of that library


class _Enter(torch.autograd.Function):
    """Megatron's f: nothing forward, an all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Megatron's g: an all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


CUT_DIM = {"1.weight": 0, "1.bias": 0, "3.weight": 1}  # of `whole_layers`, by name; the rest is replicated


class Scale(nn.Module):
    """One number for all columns: used inside the cut region, so each rank has a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.3], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


def whole_layers() -> list[nn.Module]:
    """Norm, linear, scaled tanh, linear: what one process trains. All widths differ, no bias is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.LayerNorm(5), nn.Linear(5, 6), Scale(), nn.Linear(6, 3)]
        for layer in layers:
            for parameter in layer.double().parameters():
                parameter.data += 0.3 * torch.randn_like(parameter)
    return list(layers)


class TensorParallelBlock(nn.Module):
    """`whole_layers`, the first linear cut by columns and the second by rows over the mpu's tensor group."""

    def __init__(self, mpu: Any) -> None:
        super().__init__()
        self.group = mpu.get_tensor_model_parallel_group()
        rank, ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        self.layers = nn.ModuleList(whole_layers())
        for name, parameter in self.layers.named_parameters():
            if name in CUT_DIM:
                parameter.data = parameter.data.chunk(ranks, CUT_DIM[name])[rank].clone()
            parameter.tensor_model_parallel = name in CUT_DIM  # type: ignore[attr-defined]
            parameter.allreduce = True  # type: ignore[attr-defined]
        self.layers[2].weight.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        norm, column, scale, row = self.layers
        partial = nn.functional.linear(scale(column(_Enter.apply(norm(x), self.group))), row.weight)
        return _Leave.apply(partial, self.group) + row.bias


class MegatronBlock(nn.Module):
    """`whole_layers` out of Megatron-Core's own layers, which mark their parameters themselves."""

    def __init__(self, mpu: Any) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        options = {"use_cpu_initialization": True, "params_dtype": torch.float64}
        options |= {
            "tensor_model_parallel_size": 2,
            "num_layers": 1,
            "hidden_size": 4,
            "num_attention_heads": 2,
        }
        both = {"config": TransformerConfig(**options), "init_method": nn.init.normal_, "bias": True}
        whole = whole_layers()
        column = ColumnParallelLinear(5, 6, gather_output=False, **both)
        row = RowParallelLinear(6, 3, input_is_parallel=True, skip_bias_add=False, **both)
        self.layers = nn.ModuleList([whole[0], column, whole[2], row])
        for name, values in nn.ModuleList(whole).state_dict().items():
            mine = (
                values.chunk(2, CUT_DIM[name])[mpu.get_tensor_model_parallel_rank()]
                if name in CUT_DIM
                else values
            )
            self.layers.get_parameter(name).data.copy_(mine)
        self.layers[2].weight.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        norm, column, scale, row = self.layers
        return row(scale(column(norm(x))[0]))[0]
