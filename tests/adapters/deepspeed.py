"""The adapter of the installed DeepSpeed, on CPU with gloo. The contract is `adapters/__init__.py`.

Needs the extra `peer`, and `DS_ACCELERATOR=cpu DS_BUILD_OPS=0` in the environment. What it leaves out says
so by NotImplementedError; where DeepSpeed answers differently stands in `adapters/differences.py`.

float64. DeepSpeed trains in float32 and below, the law is proved in float64. For float64 models three
places are opened that would refuse or round it: the types it reduces, the type it reduces in, and the float32
copy of the loss that leaves the last stage. Clipping computes in float32 by design and stays as it is; ZeRO-1
steps float32 masters, finds no gradient of a float64 tie, and is judged in float32 and below only.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mixture import Mixture
from oracles import Layer, MicroBatch, Tied
from torch import Tensor, nn

from adapters import OptimizerOf
from adapters.ds_lite import given, merge_equal, written

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

ZERO_STAGES = (0,)  # of a float64 model; 1 takes none, 2 takes no pipeline


def train_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    return written(TrainSchedule(num_micro_batches, num_stages, stage_id))


def inference_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    from deepspeed.runtime.pipe.schedule import InferenceSchedule

    return written(InferenceSchedule(num_micro_batches, num_stages, stage_id))


def data_parallel_steps(num_micro_batches: int) -> list[list[str]]:
    from deepspeed.runtime.pipe.schedule import DataParallelSchedule

    return written(DataParallelSchedule(num_micro_batches, 1, 0))


def num_pipe_buffers(kind: str, num_micro_batches: int, num_stages: int, stage_id: int) -> int:
    from deepspeed.runtime.pipe import schedule

    return getattr(schedule, kind)(num_micro_batches, num_stages, stage_id).num_pipe_buffers()


def comm_lists(axes: Sequence[str], dims: Sequence[int], axis: str) -> list[list[int]]:
    from deepspeed.runtime.pipe.topology import ProcessTopology

    return ProcessTopology(list(axes), list(dims)).get_axis_comm_lists(axis)


def coordinate(axes: Sequence[str], dims: Sequence[int], rank: int) -> dict[str, int]:
    from deepspeed.runtime.pipe.topology import ProcessTopology

    return ProcessTopology(list(axes), list(dims)).get_coord(rank)._asdict()


def partition(method: str, layers: Sequence[float] | Sequence[str], num_parts: int) -> list[int]:
    """PipelineModule's own cut, of a module whose layers are never built."""
    from deepspeed.pipe import PipelineModule

    module = PipelineModule.__new__(PipelineModule)
    nn.Module.__init__(module)
    first_stage = SimpleNamespace(pipe=0)
    module.num_stages, module.global_rank = num_parts, 1  # rank 0 would print
    module._topo = SimpleNamespace(get_coord=lambda rank: first_stage)
    module._layer_specs = [type(layer, (), {}) if isinstance(layer, str) else layer for layer in layers]
    module._count_layer_params = lambda: list(layers)
    module._partition_layers(method)
    return list(module.parts)


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
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": 0.0,  # when silent, DeepSpeed clips at 1.0
        "zero_allow_untested_optimizer": True,
        "pipeline": {"use_reentrant": False},
        "steps_per_print": 10**9,
        **(config or {}),
    }
    own = copy.deepcopy(list(layers))
    dtypes = {p.dtype for layer in own for p in _module_of(layer).parameters()}
    is_double = torch.float64 in dtypes
    _refuse(own, settings, tensor_parallel, expert_parallel, is_double)
    _adopt()
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import ProcessTopology

    options = {"dynamic_shape": True, **(module or {})}
    if "topology" in options:
        options["topology"] = ProcessTopology(list(options["topology"].axes), list(options["topology"].dims))
    model = PipelineModule(
        layers=[given(layer, TiedLayerSpec) for layer in own],
        num_stages=num_stages,
        loss_fn=loss_fn,
        **options,
    )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if isinstance(optimizer, str):
        group = {"params": [p for _, p in trained]}  # may be empty on a stage, where a list may not
        made = getattr(torch.optim, optimizer)([group], lr=lr)
    else:
        made = optimizer(trained)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=settings)
    return Pipeline(engine, is_double=is_double)


class Pipeline:
    """The contract's handle around one PipelineEngine of DeepSpeed."""

    def __init__(self, engine: Any, *, is_double: bool) -> None:
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        self.engine, self.is_double = engine, is_double
        self.stage_id: int = engine.stage_id
        self.replica: int = engine.grid.get_data_parallel_id()
        self.num_replicas: int = engine.grid.get_data_parallel_world_size()
        self._squares: dict[str, float] = {}
        self._step, step = OptimizerStep, engine._INSTRUCTION_MAP[OptimizerStep]
        self._left_over = False

        def note_and_step(engine: Any, **keywords: Any) -> None:
            self._note_squares()
            step(engine, **keywords)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, OptimizerStep: note_and_step}
        if is_double:
            engine.communication_data_type = torch.float64

    def train_batch(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        if self._left_over:  # the step that did not follow them would have cleared them
            self.clear_gradients()
        return self._of_the_last_stage(self.engine.train_batch(data_iter))

    def eval_batch(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        return self.engine.eval_batch(data_iter)

    def compute_gradients(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        with mock.patch.dict(self.engine._INSTRUCTION_MAP, {self._step: lambda engine: None}):
            loss = self.train_batch(data_iter)
        self._left_over = True
        return loss

    def clear_gradients(self) -> None:
        optimizer = self.engine.optimizer
        (self.engine if optimizer is self.engine.basic_optimizer else optimizer).zero_grad()
        self._left_over = False

    def gradients(self) -> dict[str, Tensor | None]:
        return merge_equal({name: self._gradient(p) for name, p in self._trained()})

    def weights(self) -> dict[str, Tensor]:
        return merge_equal({name: p.detach() for name, p in self.engine.module.named_parameters()})

    def loss_scale(self) -> float:
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0))

    def norm(self) -> Tensor:
        """DeepSpeed's own; where it says none, that of the gradients which its schedule left to the step."""
        own = self.engine.get_global_grad_norm()
        if own is not None:
            return torch.as_tensor(own, dtype=torch.float64)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._squares)
        squares = {name: square for of_rank in everyone for name, square in of_rank.items()}
        return torch.tensor(sum(squares.values()), dtype=torch.float64).sqrt()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.engine.module.named_parameters() if p.requires_grad]

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        if self.engine.optimizer is self.engine.basic_optimizer:
            return parameter.grad
        return safe_get_full_grad(parameter)

    def _note_squares(self) -> None:
        present = {name: p.grad for name, p in self._trained() if p.grad is not None}
        self._squares = {name: float(grad.double().square().sum()) for name, grad in present.items()}

    def _of_the_last_stage(self, loss: Tensor) -> Tensor:
        if self.is_double:
            loss = loss.double()
            group = self.engine.grid.get_pipe_parallel_group()
            dist.broadcast(loss, src=self.engine._loss_stage_global_rank(), group=group)
        return loss


def _refuse(
    layers: Sequence[Layer],
    settings: Mapping[str, Any],
    tensor_parallel: int,
    expert_parallel: int,
    is_double: bool,
) -> None:
    modules = [part for layer in layers for part in _module_of(layer).modules()]
    if expert_parallel > 1 or any(isinstance(part, Mixture) for part in modules):
        raise NotImplementedError(
            f"expert_parallel={expert_parallel}: DeepSpeed's gate computes in float32, and its experts in a "
            "pipeline are not set up here (§9.4)"
        )
    if tensor_parallel > 1:
        raise NotImplementedError(
            f"tensor_parallel={tensor_parallel}: DeepSpeed cuts no layer of a PipelineModule; the caller "
            "brings layers that are cut, and their groups (§9.3)"
        )
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage > 1:
        raise NotImplementedError(f"ZeRO-{stage} with a pipeline: DeepSpeed's PipelineEngine takes 0 and 1")
    if stage == 1 and is_double:
        raise NotImplementedError("ZeRO-1 of a float64 model: DeepSpeed's shards are float32")


def _module_of(layer: Layer) -> nn.Module:
    inner = layer.module if isinstance(layer, Tied) else layer
    return inner if isinstance(inner, nn.Module) else nn.Module()


def _adopt() -> None:
    """DeepSpeed uses the process group that is there; what it kept of an earlier one it forgets."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import comm
    from deepspeed.runtime.pipe import p2p
    from deepspeed.utils import groups, logger

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if getattr(comm.cdb, "adopted", None) is dist.group.WORLD:
        return
    logger.setLevel("WARNING")
    groups._release_process_group_references()
    p2p._grid = p2p._groups = None
    accelerator = get_accelerator()
    reduced = [*type(accelerator).supported_dtypes(accelerator), torch.float64]
    accelerator.supported_dtypes = lambda: reduced
    comm.cdb = None
    backend = importlib.import_module("deepspeed.comm.torch")
    with mock.patch.object(backend, "build_shm_op", lambda: None):  # gloo alone, nothing to compile
        comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    comm.cdb.adopted = dist.group.WORLD
