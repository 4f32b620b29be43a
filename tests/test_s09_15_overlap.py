"""§9.15 `"tp_overlap_comm": true`: in backward a region's sum runs beside the weights' gradients.

Guards against: a wait before the weights' gradients, a gradient that is lost or comes twice, frozen weights,
graphs that are used again, layers that share an entry.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from domino_models import OVERLAP, switched
from families import KeepWide
from sequence_models import MODELS
from tolerance import BF16, LAW, assert_close
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite.tags import cut_of
from ds_lite.tensor_parallel.pending import watched_by

pytest.importorskip("transformers", reason="not proved here: overlap on transformers' models")
pytestmark = pytest.mark.xdist_group("sequence")


class Order:
    """What backward does, in order: sums that start and are waited for, gradients that are there."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: self.events.append(name))

    def started(self, key: Any, work: Any) -> None:
        self.events.append("start")

    def waits(self, key: Any) -> None:
        self.events.append("wait")

    def waited(self, key: Any) -> None:
        pass


def in_order(rank: int, name: str) -> dict[str, list[str]]:
    with KeepWide():
        model = MODELS[name].make(4, 2 if name == "llama" else 4)
        engine = ds_lite.initialize(model=model, config=switched(OVERLAP, samples=2))[0]
        order = Order(model)
        with watched_by(order):
            batch = MODELS[name].batch(0, 5)
            batch.pop("labels")
            engine.backward(engine(**batch, use_cache=False).logits.square().sum())
    kept = [event for event in order.events if event in ("start", "wait") or "weight" in event]
    starts = [place for place, event in enumerate(kept) if event == "start"]
    blocks = [kept[start : kept.index("wait", start) + 1] for start in starts]
    assert len(blocks) == 4, "two blocks of an attention and an MLP"
    return [[event.split(".")[-2] if "." in event else event for event in block] for block in blocks[-2:]]


LAYERS = {
    "llama": ({"gate_proj", "up_proj"}, {"q_proj", "k_proj", "v_proj"}),
    "gpt2": ({"c_fc"}, {"c_attn"}),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_weights_get_their_gradients_while_the_input_s_is_summed(world: Any, name: str) -> None:
    for found in world(in_order, 2, name):
        for (first, *between, last), names in zip(found, LAYERS[name], strict=True):
            assert (first, last) == ("start", "wait") and set(between) == names, f"{name}: {found}"


class TwoRegions(nn.Module):
    """Two column layers that take one tensor, one of them without a bias, and another one that takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.down(F.gelu(self.a(x)) * self.b(x))


PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\b(a|b)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\bdown\.weight$"], "partition_type": "row"},
    ],
}


def hard_cases(rank: int) -> None:
    with KeepWide():
        torch.manual_seed(1)
        truth, model = TwoRegions().double(), TwoRegions().double()
        model.load_state_dict(truth.state_dict())
        config = switched(OVERLAP, samples=2)
        config["tensor_parallel"]["partition_config"] = PARTITION
        for one in (truth, model):
            one.a.weight.requires_grad_(False)  # its bias learns
        engine = ds_lite.initialize(model=model, config=config)[0]
        x, y = torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
        calls = []
        for module in (truth, engine.module):
            x.grad = None
            module.zero_grad()
            entered = x.requires_grad_()
            with torch.no_grad():
                module(entered)
            loss = F.mse_loss(module(entered), y)
            loss.backward(retain_graph=True)
            loss.backward()
            calls.append(x.grad.clone())
        assert_close(calls[1], calls[0], LAW, "dL/dx of two backwards")
        for name, weight in truth.named_parameters():
            if weight.requires_grad:
                assert_close(whole_gradient(dict(model.named_parameters())[name]), weight.grad, LAW, name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [module.float()(x.detach().float()) for module in (truth, engine.module)]
        assert_close(outputs[1], outputs[0], BF16, "under autocast")


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    how = cut_of(parameter)
    assert parameter.grad is not None
    return parameter.grad if how is None else how.gather(parameter.grad)


def test_regions_of_two_layers_frozen_weights_and_retained_graphs(world: Any) -> None:
    world(hard_cases, 2)
