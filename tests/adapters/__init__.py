"""The contract: what the suite asks of an implementation, function by function.

An adapter is a module with these functions, as thin as possible over the library it speaks for. It may
leave out what its library lacks; a test that needs it then fails with the docstring found here. Lists,
strings and plain integers in and out, tensors only in the distributed part.

The distributed part is called on every rank of a started process group (`ds_lite.comm` has done it),
in the same order. An adapter that pipelines with fewer ZeRO stages than 0, 1 and 2 says so by
`ZERO_STAGES = (0, 1)`; tests that go through all stages go through these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from oracles import Layer, MicroBatch
from torch import Tensor, nn

OptimizerOf = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

# ------------------------------------------------------------------- pure part: no process group, no tensors


def train_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    """§9.10.1 The 1F1B stream of one stage: a list of atomic steps, each a list of instructions.

    An instruction is written as its name, with the buffer if it has one:
    `[["LoadMicroBatch(0)", "ForwardPass(0)"], ["SendActivation(0)"], ..., ["OptimizerStep"]]`.
    An idle step is an empty list. Length 2 (m + S - 1).
    """
    raise NotImplementedError


def inference_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    """§9.10.1 The forward-only stream of one stage, written like `train_steps`. Length m + S - 1."""
    raise NotImplementedError


def data_parallel_steps(num_micro_batches: int) -> list[list[str]]:
    """§9.10.1 The stream without a pipeline: one step a micro-batch."""
    raise NotImplementedError


def num_pipe_buffers(kind: str, num_micro_batches: int, num_stages: int, stage_id: int) -> int:
    """§9.10.1 How many buffers a stage needs; `kind` is the schedule's class name, e.g. "TrainSchedule"."""
    raise NotImplementedError


def comm_lists(axes: Sequence[str], dims: Sequence[int], axis: str) -> list[list[int]]:
    """§9.11 The ranks that talk along `axis`: one list for each place on the other axes, in order."""
    raise NotImplementedError


def coordinate(axes: Sequence[str], dims: Sequence[int], rank: int) -> dict[str, int]:
    """§9.11 Where `rank` stands: one coordinate for each axis. Raises ValueError outside the mesh."""
    raise NotImplementedError


def partition(method: str, layers: Sequence[float] | Sequence[str], num_parts: int) -> list[int]:
    """§9.9.3 The num_parts + 1 bounds of the stages.

    method "uniform" looks at the number of `layers` only, "parameters" takes them as parameter counts,
    "type:REGEX" as class names. Raises ValueError where a stage would be empty.
    """
    raise NotImplementedError


# ------------------------------------------------------------------------------------- distributed part


class Pipeline(Protocol):
    """One rank's handle on a pipelined model. Every method is called on every rank.

    Names are `{layer index}.{name}` and `tied_modules.{key}.{name}`, as `oracles.one_process` makes them.
    """

    stage_id: int
    replica: int  # which data-parallel replica this rank belongs to
    num_replicas: int

    def train_batch(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        """One whole step on m micro-batches; the mean loss, 0-dim, the same on every rank."""
        ...

    def eval_batch(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        """The mean loss on m micro-batches; nothing of the training state changes."""
        ...

    def compute_gradients(self, data_iter: Iterator[MicroBatch]) -> Tensor:
        """The whole schedule without OptimizerStep: gradients are reduced, not clipped, weights untouched.

        Returns the mean loss, as `train_batch` does.
        """
        ...

    def clear_gradients(self) -> None:
        """Forget what `compute_gradients` left; the step that it left out would have done so."""
        ...

    def gradients(self) -> dict[str, Tensor | None]:
        """After `compute_gradients`: the whole gradient of every trained parameter, on every rank.

        Shapes: those of the parameter in one process. None where no rank had a gradient.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """Every parameter of the model, whole, on every rank.

        Raises: AssertionError if two ranks hold different values for one name.
        """
        ...

    def loss_scale(self) -> float:
        """What the loss of an fp16 model is multiplied by now; 1 in other precisions."""
        ...

    def norm(self) -> Tensor:
        """The norm over all gradients of the last `train_batch`, before clipping; float64, 0-dim."""
        ...


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
    """§9.3 §9.9 §9.10 Train `layers` on num_stages x tensor_parallel ranks, over and over in replicas.

    `layers` are modules, functions of one argument, and `oracles.Tied(key, module, forward)`; initial
    weights are those the modules have, and the caller's modules stay as they are. `optimizer` is a class
    name of torch.optim, built with `lr` alone, or makes an optimizer of (name, parameter) pairs. `config`
    is laid over the configuration that says batch sizes and optimizer (gradient_clipping,
    zero_optimization, ...), `module` are further arguments of PipelineModule (partition_method,
    activation_checkpoint_interval, ...). Messages may change in shape, dtype and number from one to the
    next. Gradients are not clipped unless `config` says so. With `tensor_parallel` > 1 the layers of
    `ds_lite.toy_layers` (Block, and the Embedding with its `head`) are cut over that many ranks; what else
    there is stays whole on each.

    Every `mixture.Mixture` in a layer becomes an MoE layer whose experts are spread over `expert_parallel`
    replicas (§9.4). With `expert_tensor_parallel` its experts, `ds_lite.toy_layers.MLP`, are cut over the
    tensor-parallel ranks too.
    """
    raise NotImplementedError


FUNCTIONS = (
    train_steps,
    inference_steps,
    data_parallel_steps,
    num_pipe_buffers,
    comm_lists,
    coordinate,
    partition,
    make_pipeline,
)
