"""§9.14 §9.4 Experts beside sequences that are spread: one routing of the whole micro-batch.

Guards against: capacity or dropping decided on a rank's tokens, noise of other tokens, a load-balancing loss
of a part, gradients of the gate that count once per rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerance import LAW, assert_close, differs
from torch import Tensor

import ds_lite
from ds_lite.toy import Shape
from ds_lite.toy_moe import Mixture, MoEGPT, MoELoss

SHAPE = Shape(width=12, num_heads=4, num_blocks=2, context=10)
SAMPLES, TOKENS, MICRO_BATCHES = 3, 9, 4

MIXTURES = {
    "top1": Mixture(k=1, capacity_factor=0.7, min_capacity=1),
    "top2": Mixture(k=2, capacity_factor=0.8, min_capacity=1),
    "top3": Mixture(k=3, capacity_factor=0.6, min_capacity=1),
    "dropless": Mixture(k=2, drop_tokens=False),
}


def trained(rank: int, name: str, sp: int, ep: int, tp: int = 1) -> dict[str, Tensor]:
    """Loss, gradients and norm of the micro-batches of one step, on however many ranks there are."""
    mixture = Mixture(**{**vars(MIXTURES[name]), "ep_size": ep})
    dp = ds_lite.comm.get_world_size() // sp
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES // dp,
        "sequence_parallel_size": sp,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "seed": 5,
    }
    model = MoEGPT(SHAPE, mixture).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            number = next((int(part) for part in key.split(".") if ".experts." in key and part.isdigit()), 0)
            parameter.mul_(1 + 0.1 * number)  # experts start as copies, which would hide a wrong one
    engine = ds_lite.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(256, (MICRO_BATCHES, SAMPLES, TOKENS + 1), generator=generator)
    mine = ids.chunk(dp)[engine.grid.get_data_parallel_rank()]
    found: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for batch in mine:
        loss = MoELoss(0.3)(engine(batch[:, :-1]), batch[:, 1:])
        engine.backward(loss)
        total += loss.detach() / len(mine)
        if len(mine) > 1 and batch is not mine[-1]:
            engine.step()
    ds_lite.comm.all_reduce(total, group=engine.grid.group("data"))
    found["loss"] = total / dp
    for key, parameter in engine.module.named_parameters():
        gradient = engine.gradients.full(key)
        found[key] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    found["norm"] = torch.tensor(float(engine.gradients.norm()), dtype=torch.float64)
    return found


CASES = [
    (2, "top1", 2, 1),
    (2, "top2", 2, 2),
    (4, "top1", 2, 2),
    (4, "top2", 2, 4),
    (4, "top3", 4, 1),
    (4, "dropless", 2, 2),
    (2, "dropless", 2, 1),
]


@pytest.mark.parametrize("world_size, name, sp, ep", CASES)
def test_experts_route_the_whole_micro_batch(
    world: Any, world_size: int, name: str, sp: int, ep: int
) -> None:
    (truth,) = world(trained, 1, name, 1, 1)
    seen = set()
    for rank, found in enumerate(world(trained, world_size, name, sp, ep)):
        for key, value in found.items():
            assert_close(value, truth[key], LAW, f"{key} on rank {rank}")
        seen |= set(found)
    assert seen == set(truth), "every weight is somewhere"
    assert differs(truth["blocks.1.moe.gate.wg.weight"], torch.zeros(())), "control: the gate learns"
