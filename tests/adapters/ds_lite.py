"""The adapter of ds_lite: glue only. The contract is `adapters/__init__.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mixture import Mixture
from oracles import Layer, MicroBatch, Tied
from torch import Tensor, nn

from adapters import OptimizerOf

# The engine's modules are imported inside the functions, so that a fault in one leaves the others testable.


def train_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    from ds_lite.pipe.schedule import TrainSchedule

    return written(TrainSchedule(num_micro_batches, num_stages, stage_id))


def inference_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    from ds_lite.pipe.schedule import InferenceSchedule

    return written(InferenceSchedule(num_micro_batches, num_stages, stage_id))


def data_parallel_steps(num_micro_batches: int) -> list[list[str]]:
    from ds_lite.pipe.schedule import DataParallelSchedule

    return written(DataParallelSchedule(num_micro_batches, 1, 0))


def num_pipe_buffers(kind: str, num_micro_batches: int, num_stages: int, stage_id: int) -> int:
    from ds_lite.pipe import schedule

    return getattr(schedule, kind)(num_micro_batches, num_stages, stage_id).num_pipe_buffers()


def comm_lists(axes: Sequence[str], dims: Sequence[int], axis: str) -> list[list[int]]:
    from ds_lite.topology import ProcessTopology

    return ProcessTopology(list(axes), list(dims)).get_axis_comm_lists(axis)


def coordinate(axes: Sequence[str], dims: Sequence[int], rank: int) -> dict[str, int]:
    from ds_lite.topology import ProcessTopology

    return ProcessTopology(list(axes), list(dims)).get_coord(rank)._asdict()


def partition(method: str, layers: Sequence[float] | Sequence[str], num_parts: int) -> list[int]:
    from ds_lite.pipe.partition import partition_layers

    names = [str(layer) for layer in layers]
    counts = [int(layer) if not isinstance(layer, str) else 0 for layer in layers]
    return partition_layers(method, names, counts, num_parts)


def make_pipeline(
    layers: Sequence[Layer],
    *,
    num_stages: int,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    num_micro_batches: int,
    micro_batch_size: int = 1,
    lr: float = 0.1,
    optimizer: str | OptimizerOf = "SGD",
    config: Mapping[str, Any] | None = None,
    module: Mapping[str, Any] | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: bool = False,
) -> Pipeline:
    import ds_lite
    from ds_lite.pipe.module import PipelineModule, TiedLayerSpec

    own = copy.deepcopy(list(layers))
    if tensor_parallel > 1:
        own = _parallel(own)
    own = [_with_experts(layer, expert_parallel, expert_tensor_parallel) for layer in own]
    model = PipelineModule(
        layers=[given(layer, TiedLayerSpec) for layer in own],
        num_stages=num_stages,
        loss_fn=loss_fn,
        **(module or {}),
    )
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        **({"optimizer": {"type": optimizer, "params": {"lr": lr}}} if isinstance(optimizer, str) else {}),
        "tensor_parallel": {"tp_size": tensor_parallel},
        **(config or {}),
    }
    client = None if isinstance(optimizer, str) else optimizer(list(model.named_parameters()))
    engine, *_ = ds_lite.initialize(model=model, optimizer=client, config=settings)
    return Pipeline(engine)


class Pipeline:
    """The contract's handle around one PipelineEngine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.stage_id: int = engine.stage_id
        self.replica: int = engine.grid.get_data_parallel_id()
        self.num_replicas: int = engine.grid.get_data_parallel_world_size()

    def train_batch(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        return self.engine.train_batch(data_iter)

    def eval_batch(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        return self.engine.eval_batch(data_iter)

    def compute_gradients(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        return self.engine.compute_gradients(data_iter)

    def clear_gradients(self) -> None:
        self.engine.zero_grad()

    def gradients(self) -> dict[str, Tensor | None]:
        mine = self.engine.gradients  # of this rank's stage
        return merge_equal({name: mine.full(name) for name in mine.names()})

    def weights(self) -> dict[str, Tensor]:
        from ds_lite.tags import whole

        return merge_equal({name: whole(p) for name, p in self.engine.module.named_parameters()})

    def loss_scale(self) -> float:
        return self.engine.scaler.scale

    def norm(self) -> Tensor:
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float64)


def _parallel(layers: list[Layer]) -> list[Layer]:
    """The tensor-parallel forms of toy layers, with the same weights; ties stay ties."""
    from ds_lite import toy_layers
    from ds_lite.toy_parallel import ParallelAttention, ParallelEmbedding, ParallelMLP, gathering_head

    tables: dict[str, nn.Module] = {}

    def cuttable(layer: Any) -> Any:
        if isinstance(layer, Tied) and isinstance(layer.module, toy_layers.Embedding):
            table = tables.setdefault(layer.key, cuttable(layer.module))
            return Tied(layer.key, table, gathering_head if layer.forward is toy_layers.head else None)
        if isinstance(layer, toy_layers.Block):
            made = toy_layers.Block(layer.shape, ParallelAttention, ParallelMLP)
        elif isinstance(layer, toy_layers.Embedding):
            vocabulary, width = layer.weight.shape
            made = ParallelEmbedding(toy_layers.Shape(width=width, num_heads=1, vocabulary=vocabulary))
        else:
            return layer
        made.to(next(layer.parameters()).dtype).load_state_dict(layer.state_dict())
        return made

    return [cuttable(layer) for layer in layers]


def _with_experts(layer: Any, ep_size: int, is_cut: bool) -> Any:
    """The layer with an MoE in the place of every Mixture, with the same weights."""
    from ds_lite import toy_layers
    from ds_lite.moe.layer import MoE
    from ds_lite.toy_parallel import ParallelMLP

    if isinstance(layer, Mixture):
        expert = copy.deepcopy(layer.experts["0"])
        if is_cut:
            assert isinstance(expert, toy_layers.MLP)
            up = expert.up.weight.shape
            expert = ParallelMLP(toy_layers.Shape(width=up[1], num_heads=1)).to(expert.up.weight.dtype)
        made = MoE(
            layer.hidden_size,
            expert,
            layer.num_experts,
            ep_size,
            use_rts=False,
            top2_2nd_expert_sampling=False,
            enable_expert_tensor_parallelism=is_cut,
            **layer.options,
        )
        made.to(next(layer.parameters()).dtype).load_state_dict(layer.state_dict())
        return made
    if isinstance(layer, nn.Module):
        for name, child in layer.named_children():
            setattr(layer, name, _with_experts(child, ep_size, is_cut))
    return layer


def merge_equal(mine: Mapping[str, Any]) -> dict[str, Any]:
    """All ranks' tensors (or None) by name; ranks that share a name must hold the same values, bit by bit."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(mine))
    merged: dict[str, Any] = {}
    for rank, tensors in enumerate(everyone):
        for name, tensor in tensors.items():
            first = merged.setdefault(name, tensor)
            same = first is tensor if first is None or tensor is None else torch.equal(first, tensor)
            assert same, f"{name} on rank {rank} differs from a lower rank's"
    return merged


def written(schedule: Any) -> list[list[str]]:
    return [[_word(instruction) for instruction in step] for step in schedule.steps()]


def _word(instruction: Any) -> str:
    buffer_id = getattr(instruction, "buffer_id", None)
    return instruction.name if buffer_id is None else f"{instruction.name}({buffer_id})"


def given(layer: Layer, tied_layer_spec: Any) -> Any:
    """A Tied layer as TiedLayerSpec whose `build` hands out the module that is there already."""
    if not isinstance(layer, Tied):
        return layer
    built = layer.module
    typename = type(type(built).__name__, (nn.Module,), {"__new__": lambda cls: built})
    names = [name for name, _ in built.named_parameters()]
    return tied_layer_spec(layer.key, typename, forward_fn=layer.forward, tied_weight_attr=names)
