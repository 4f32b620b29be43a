"""The instruments. Guards against: a comparison that cannot fail, a meter or an oracle that miscounts."""

from pathlib import Path

import pytest
import torch
from meter import LiveStorages, live_micro_batches, vm_hwm_bytes
from oracles import Tied, one_process, split_micro_batches
from tolerance import BF16, EXACT, FP32, LAW, assert_close, differs
from torch import nn

F64 = {"dtype": torch.float64}


@pytest.mark.parametrize("tolerance", [EXACT, LAW, FP32, BF16])
def test_equal_is_close(tolerance):
    x = torch.tensor([[1.0, -2.0], [float("inf"), 0.0]], **F64)
    assert_close(x, x.clone(), tolerance)
    assert_close(x[:0], x[:0], tolerance)
    assert not differs(x, x.clone())


@pytest.mark.parametrize("tolerance", [LAW, FP32, BF16])
def test_the_bound_is_relative_above_one_and_absolute_below(tolerance):
    for largest, bound in [(0.001, 1.0), (50.0, 50.0)]:
        expected = torch.tensor([largest, 0.0], **F64)
        assert_close(expected + torch.tensor([0.0, 0.9 * bound * tolerance.value]), expected, tolerance)
        with pytest.raises(AssertionError, match=r"wq: differs by .* at \(1,\)"):
            assert_close(
                expected + torch.tensor([0.0, 1.1 * bound * tolerance.value]), expected, tolerance, "wq"
            )


@pytest.mark.parametrize(
    "actual,expected,match",
    [
        (torch.zeros(2, **F64), torch.zeros(1, 2, **F64), "shape"),
        (torch.zeros(2), torch.zeros(2, **F64), "dtype"),
        (torch.zeros(2), torch.zeros(2), "LAW is defined for torch.float64"),
        (torch.tensor(float("nan"), **F64), torch.tensor(float("nan"), **F64), "differs"),
        (torch.tensor(float("inf"), **F64), torch.tensor(-float("inf"), **F64), "differs"),
        (torch.tensor(1.0, **F64), torch.tensor(float("inf"), **F64), "differs"),
        (None, torch.zeros(2, **F64), "actual is None"),
    ],
)
def test_what_is_not_close(actual, expected, match):
    with pytest.raises(AssertionError, match=match):
        assert_close(actual, expected, LAW)


def test_exact_allows_nothing():
    with pytest.raises(AssertionError, match=r"at \(0, 1\)"):
        assert_close(torch.tensor([[1, 3]]), torch.tensor([[1, 2]]), EXACT)


def test_differs_wants_a_real_difference():
    x = torch.zeros(3, **F64)
    assert not differs(x + 1e-9, x)
    assert differs(x + 1e-5, x) and differs(x[:2], x) and differs(None, x) and differs(x * float("nan"), x)


def _tied_pair():
    shared = nn.Linear(2, 2, **F64)
    turned = Tied("w", shared, lambda module, x: x @ module.weight + module.bias)
    return [Tied("w", shared), nn.Linear(2, 2, **F64), torch.tanh, turned]


def test_one_process_by_hand():
    """One 1x1 layer, weight 1, loss w*x: the gradient is the mean input."""
    layer = nn.Linear(1, 1, bias=False, **F64)
    nn.init.ones_(layer.weight)
    batch = [(torch.tensor([[float(i)]], **F64), None) for i in range(4)]
    truth = one_process([layer], lambda y, _: y.sum(), batch, lr=0.1)
    assert truth.loss == 1.5 and truth.grads["0.weight"] == 1.5 and truth.norm == 1.5
    assert truth.before["0.weight"] == 1.0 and truth.weights["0.weight"] == 1.0 - 0.15
    assert [output.item() for output in truth.outputs] == [0.0, 1.0, 2.0, 3.0]
    clipped = one_process([layer], lambda y, _: y.sum(), batch, lr=0.1, clip=0.5, optimizer=torch.optim.SGD)
    assert clipped.grads["0.weight"] == 1.5
    assert_close(clipped.weights["0.weight"], torch.tensor([[0.95]], **F64), FP32)
    assert layer.weight.item() == 1.0 and layer.weight.grad is None


def test_one_process_counts_a_tied_layer_once():
    torch.manual_seed(1)
    layers = _tied_pair()
    batch = [(torch.randn(3, 2, **F64), torch.randn(3, 2, **F64)) for _ in range(4)]
    truth = one_process(layers, nn.functional.mse_loss, batch, lr=0.1, steps=2)
    assert set(truth.grads) == {"tied_modules.w.weight", "tied_modules.w.bias", "1.weight", "1.bias"}
    assert len(truth.losses) == 2 and len(truth.outputs) == 2

    shared, middle = layers[0].module, layers[1]
    for start in (0, 2):  # the same by hand
        inputs, labels = (torch.cat(parts) for parts in zip(*batch[start : start + 2], strict=True))
        y = torch.tanh(middle(shared(inputs))) @ shared.weight + shared.bias
        shared.zero_grad()
        middle.zero_grad()
        nn.functional.mse_loss(y, labels).backward()
        with torch.no_grad():
            for parameter in [*shared.parameters(), *middle.parameters()]:
                parameter -= 0.1 * parameter.grad
    assert_close(truth.grads["tied_modules.w.weight"], shared.weight.grad, LAW)
    assert_close(truth.weights["tied_modules.w.weight"], shared.weight.detach(), LAW)
    assert_close(truth.weights["1.bias"], middle.bias.detach(), LAW)
    assert differs(truth.weights["1.bias"], truth.before["1.bias"])


class _Idle(nn.Linear):
    def forward(self, x):
        return x


def test_a_parameter_outside_the_graph_has_no_gradient():
    layers = [_Idle(1, 1), nn.Linear(1, 1)]
    truth = one_process(layers, lambda y, _: y.sum(), [(torch.ones(1, 1), None)], lr=0.1)
    assert truth.grads["0.weight"] is None and truth.grads["1.weight"] is not None
    assert set(truth.weights) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_an_undeclared_tie_is_refused():
    layer = nn.Linear(1, 1)
    with pytest.raises(AssertionError, match="two names"):
        one_process([layer, layer], None, [(torch.ones(1, 1), None)], lr=0.1)


def test_replicas_get_runs_in_order():
    batch = [(i, -i) for i in range(12)]
    parts = [split_micro_batches(batch, replica=r, num_replicas=3, steps=2) for r in range(3)]
    assert [[i for i, _ in part] for part in parts] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_live_storages_follow_views_autograd_and_death():
    with LiveStorages(min_bytes=1000) as meter:
        x = torch.ones(1000, requires_grad=True)  # 4000 bytes
        view = x.detach()[10:]
        small = torch.ones(2)
        assert meter.current == 4000
        y = (x * 2).exp()  # exp keeps its result; the product dies
        assert (meter.current, meter.peak) == (8000, 12000)
        z = y.sum()
        del y
        assert meter.current == 8000  # autograd still holds it, no Python variable does
        meter.reset_peak()
        z.backward()
        assert meter.peak > 8000
        x.grad = None
        del z
        assert meter.current == 4000
    del x
    assert meter.current == 4000 and len(view) == 990 and len(small) == 2
    del view
    assert meter.current == 0


def test_live_storages_watch_what_was_there_before():
    x = torch.ones(100)
    meter = LiveStorages()
    meter.watch({"weights": [x, x[1:], "not a tensor"]})
    assert meter.current == 400


def test_live_micro_batches_counts_forwards_without_backward():
    assert live_micro_batches([]) == 0
    assert live_micro_batches([("F", i) for i in range(3)] + [("B", i) for i in range(3)]) == 3
    assert live_micro_batches([(kind, i) for i in range(3) for kind in "FB"]) == 1
    with pytest.raises(AssertionError, match="without its forward"):
        live_micro_batches([("B", 0)])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not proved: VmHWM needs /proc")
def test_vm_hwm_rises_with_memory_in_use():
    before = vm_hwm_bytes()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert before > 1 << 20 and vm_hwm_bytes() >= before and len(block)
