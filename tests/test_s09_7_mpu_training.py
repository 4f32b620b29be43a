"""§9.7 A model trained on the process groups of another library equals one process.

Guards against: groups made twice, cut parameters reduced as if they were copies, parts that are not summed.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_mpu import CUT_DIM, MegatronBlock, TensorParallelBlock, make_mpu, whole_layers
from oracles import one_process, split_micro_batches
from small_models import SAMPLES, linear, make_batch, mean_squared
from test_s09_7_mpu import GRID_SAYS, check_grid
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn

import ds_lite
from ds_lite.mpu import MpuGrid
from ds_lite.pipe.module import PipelineModule

# ------------------------------------------------------------------- the same through ds_lite.initialize


def _start(model: nn.Module, mpu: Any, zero: int = 0) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 0.3,
    }
    return ds_lite.initialize(model=model, config=config, mpu=mpu)[0]


def _train(mpu: Any, model: nn.Module, zero: int, mark_to_forget: str = "") -> bool:
    """Two steps of `model` against one process; with a mark forgotten, whether anything differs."""
    for parameter in model.parameters():
        vars(parameter).pop(mark_to_forget, None)
        if mpu.get_data_parallel_rank() > 0:  # replicas start from the first one's weights
            parameter.data += 1.0
    batch = make_batch(8)
    truth = one_process(whole_layers(), mean_squared, batch, lr=0.1, clip=0.3, steps=2)
    engine = _start(model, mpu, zero)
    assert engine.train_batch_size() == SAMPLES * 2 * 2
    mine = split_micro_batches(batch, replica=mpu.get_data_parallel_rank(), num_replicas=2, steps=2)
    pairs: list[tuple[Tensor, Tensor | None, str]] = []
    for count, (x, y) in enumerate(mine):
        engine.backward(mean_squared(engine(x), y))
        if count == 3:
            pairs += [
                (engine.gradients.full(f"layers.{n}"), g, f"gradient {n}") for n, g in truth.grads.items()
            ]
        engine.step()
        if count % 2:
            norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
            pairs.append((norm, truth.norms[count // 2], "norm"))
    weights = dict(model.layers.named_parameters())
    pairs += [(weights[name].detach(), weight, name) for name, weight in truth.weights.items()]
    rank, off = mpu.get_tensor_model_parallel_rank(), False
    for actual, expected, name in pairs:
        assert expected is not None
        if (place := CUT_DIM.get(name.split()[-1])) is not None and actual.shape != expected.shape:
            expected = expected.chunk(2, place)[rank]
        off |= differs(actual, expected)
        if not mark_to_forget:
            assert_close(actual, expected, LAW, name)
    return off


ORDERS = ["tp-cp-dp-pp", "dp-tp-cp-pp"]


def _trained(rank: int, order: str, zero: int, mark_to_forget: str) -> bool:
    mpu = make_mpu(order, names="sequence" if zero else "core", tp=2, dp=2)
    return _train(mpu, TensorParallelBlock(mpu), zero, mark_to_forget)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_a_foreign_tensor_parallel_model_trains_like_one_process(world: Any, order: str, zero: int) -> None:
    world(_trained, 4, order, zero, "")


@pytest.mark.parametrize("mark", ["sequence_parallel", "tensor_model_parallel"])
def test_control_without_its_marks_it_does_not(world: Any, mark: str) -> None:
    assert all(world(_trained, 4, ORDERS[0], 0, mark))


def _refused(rank: int, how: str) -> None:
    if how == "pipeline":
        _start(nn.Linear(5, 3).double(), make_mpu(pp=2, dp=2))
    model = PipelineModule([linear(5, 4, 1), linear(4, 3, 2)], num_stages=2, loss_fn=mean_squared)
    if how == "agrees":
        _start(model, make_mpu(pp=2, dp=2)).train_batch(iter(make_batch(2)))
    else:
        _start(model, make_mpu("tp-cp-pp-dp", pp=2, dp=2))


def test_an_mpu_that_agrees_with_a_pipeline_is_accepted(world: Any) -> None:
    world(_refused, 4, "agrees")


@pytest.mark.parametrize("how,match", [("pipeline", r"not a PipelineModule"), ("contradicts", GRID_SAYS)])
def test_initialize_refuses_what_it_cannot_drive(world: Any, how: str, match: str) -> None:
    world.raises(ValueError, match + r".*\(§9.7\)$", _refused, 4, how)


# ------------------------------------------------------------------------- the real thing, if it is here


def _megatron(rank: int) -> None:
    from megatron.core import parallel_state

    layouts = [(order, {"tp": 2, "dp": 2}) for order in ORDERS] + [(ORDERS[0], {"cp": 2, "dp": 2})]
    for order, sizes in layouts:
        degrees = {
            "tensor_model_parallel_size": sizes.get("tp", 1),
            "context_parallel_size": sizes.get("cp", 1),
        }
        parallel_state.initialize_model_parallel(**degrees, order=order.replace("cp", "cp-ep"))
        try:
            grid = MpuGrid(parallel_state)
            check_grid(grid, rank, order, sizes)
            stand_in = make_mpu(order, **sizes)
            for name in filter(re.compile("get_").match, vars(stand_in)):
                pair = [getattr(mpu, name)() for mpu in (stand_in, parallel_state)]
                mine, real = map(dist.get_process_group_ranks, pair) if name.endswith("group") else pair
                assert mine == real, f"the stand-in is not like the real one: {name}"
            both = parallel_state.get_data_parallel_group(with_context_parallel=True)
            assert "cp" not in sizes or grid.group("data", "seq") is both
            if "tp" in sizes:
                assert grid.group("model") is parallel_state.get_tensor_model_parallel_group()
                for zero in (0, 1):
                    _train(parallel_state, MegatronBlock(parallel_state), zero)
        finally:
            parallel_state.destroy_model_parallel()


def test_megatron_core_itself(world: Any) -> None:
    why = "not proved here: real Megatron-Core groups and layers; pip install megatron-core proves it"
    pytest.importorskip("megatron.core", reason=why)
    world(_megatron, 4)
