"""§9.1 Checkpoints of a plain engine, and what a load may leave out. Guards against: states that are lost
without a word, a frozen or missing parameter that stops a load, another replica's buffers."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saving_models import ADAMW, Net, copied, make_engine, scratch_folder, train
from small_models import HIDDEN, INPUTS, OUTPUTS, linear, make_batch, mean_squared
from tolerance import EXACT, assert_close, differs
from torch import Tensor, nn

from ds_lite.saving.parts import labelled

# ------------------------------------------------------------------------------------------ plain engine


def plain_engine(rank: int, folder: str, zero: int) -> tuple[Tensor, Tensor]:
    """This replica's running mean when it saved, and after loading."""
    engine = make_engine(zero=zero)
    train(engine, 2)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, f"zero{zero}", save_latest=False)
    weights = copied(engine)
    path, client_state = (other := make_engine(zero=zero)).load_checkpoint(folder)
    assert (path, client_state) == (f"{folder}/global_step2", {}) and other.global_steps == 2
    for name, value in other.module.named_parameters():
        assert_close(value.detach(), weights[name], EXACT, name)
    means = weights["norm.running_mean"], other.module.norm.running_mean.clone()
    other.module.load_state_dict(weights)  # the buffers of this replica again
    assert train(other, 3, seed=2) == train(engine, 3, seed=2), f"zero={zero}"
    return means


def one_process_loads(rank: int, folder: str) -> None:
    """What two replicas wrote, with and without ZeRO, is the same in one process."""
    found = []
    for zero in (0, 1, 2):
        engine = make_engine()
        engine.load_checkpoint(folder, tag=f"zero{zero}")
        found.append((copied(engine), train(engine, 2, seed=3)))
    for weights, losses in found[1:]:
        assert losses == pytest.approx(found[0][1], rel=1e-12)
        assert all(not differs(value, found[0][0][name]) for name, value in weights.items())


def test_a_plain_engine_saved_by_two_replicas_is_loaded_by_one(world: Any) -> None:
    with scratch_folder() as folder:
        for zero in (0, 1, 2):
            (mine, loaded), (others, copy) = world(plain_engine, 2, folder, zero)
            assert differs(mine, others), "control: the replicas have the same buffers"
            assert_close(loaded, mine, EXACT, "data rank 0's buffers")
            assert_close(copy, mine, EXACT, "data rank 0's buffers on rank 1")
        world(one_process_loads, 1, folder)
        files = sorted(path.name for path in Path(folder, "zero1").iterdir())
        parts = [f"part_0{part}-model_states.pt" for part in range(5)]
        assert [name for name in files if "model" in name] == parts
        manifest = json.loads(Path(folder, "zero1", "manifest.json").read_text())
        assert manifest["tensors"]["blocks.1.weight"] == {
            "file": "part_02-model_states.pt",
            "shape": [HIDDEN, INPUTS],
            "dtype": "float64",
        }
        assert "scale" not in manifest["optimizer"] and len(manifest["optimizer"]) == 8


def test_parts_of_an_ordinary_model_follow_its_numbers() -> None:
    names = [
        "scale",
        "model.word.weight",
        "model.blocks.0.mlp.0.weight",
        "model.blocks.1.bias",
        "model.end.bias",
    ]
    parts = labelled(nn.Module(), names)
    assert parts == {
        "part_00": ["scale"],
        "part_01": ["model.word.weight", "model.end.bias"],
        "part_02": ["model.blocks.0.mlp.0.weight"],
        "part_03": ["model.blocks.1.bias"],
    }
    many = labelled(nn.Module(), [f"blocks.{index}.weight" for index in range(101)])
    assert list(many)[::50] == ["part_000", "part_050", "part_100"]


# ------------------------------------------------------------------- counters, schedule, generators, client


def the_rest(rank: int, folder: str) -> None:
    """Schedule, options, counters, generators and client_state, of a run with accumulation."""
    options = {"m": 2, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    engine = make_engine(**options)
    train(engine, 3)
    engine.optimizer.param_groups[0]["weight_decay"] = 0.25
    torch.rand(3), random.random(), random.gauss(0, 1), np.random.rand()
    client = {
        "step": 7,
        "best": np.float64(0.5),
        "names": ("a", [None, True]),
        "table": torch.arange(3),
        4: b"x",
    }
    engine.save_checkpoint(folder, "one", client_state=client if rank == 0 else {})
    drawn = (torch.rand(2), random.random(), random.gauss(0, 1), float(np.random.rand()))
    continued = train(engine, 2, seed=4), engine.get_lr()
    other = make_engine(**options)
    _, loaded = other.load_checkpoint(folder)
    table = loaded.pop("table")
    assert_close(table, torch.arange(3), EXACT)
    assert loaded == {"step": 7, "best": 0.5, "names": ("a", [None, True]), 4: b"x"}
    assert type(loaded["best"]) is float
    again = (torch.rand(2), random.random(), random.gauss(0, 1), float(np.random.rand()))
    assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]
    assert (other.global_steps, other.micro_steps, other.global_samples) == (3, 6, 12)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.25
    assert (train(other, 2, seed=4), other.get_lr()) == continued
    fresh = make_engine(**options)
    fresh.load_checkpoint(folder, load_lr_scheduler_states=False, load_optimizer_states=False)
    assert fresh.get_lr() == [0.0] != continued[1], "control: the schedule makes no difference"
    assert fresh.global_steps == 3 and not fresh.optimizer.state


def test_everything_else_comes_back(world: Any) -> None:
    with scratch_folder() as folder:
        world(the_rest, 1, folder)


def in_the_middle(rank: int, folder: str) -> None:
    """Saved after one of two micro-batches: the checkpoint is that of the last step."""
    engine = make_engine(m=2)
    train(engine, 1)
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    x, y = make_batch(1)[0]
    engine.backward(mean_squared(engine(x), y))
    engine.step()
    assert engine.micro_steps == 3
    engine.save_checkpoint(folder)
    other = make_engine(m=2)
    other.backward(mean_squared(other(x), y))
    other.step()
    other.load_checkpoint(folder)
    assert (other.micro_steps, other.global_steps) == (2, 1) and not other.is_gradient_accumulation_boundary()
    assert all(parameter.grad is None for parameter in other.module.parameters())
    for name, parameter in other.module.named_parameters():
        assert_close(parameter.detach(), weights[name], EXACT, name)


def test_a_save_between_micro_batches_is_that_of_the_last_step(world: Any) -> None:
    with scratch_folder() as folder:
        world(in_the_middle, 1, folder)


# -------------------------------------------------------------------------------- what a load may leave out


class Wider(Net):
    """Net without its head, and with another layer."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.tail = linear(HIDDEN, OUTPUTS, 9)

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.tail
        try:
            return super().forward(x)
        finally:
            del self.head


def left_out(rank: int, folder: str) -> None:
    engine = make_engine(zero=1)
    train(engine, 2)
    engine.save_checkpoint(folder, "all")
    engine.save_checkpoint(folder, "thawed", save_latest=False, exclude_frozen_parameters=True)
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}

    other = make_engine(Wider(), zero=1)
    with pytest.raises(
        ValueError,
        match=r"missing in the checkpoint \['tail.weight', 'tail.bias'\], not in this mod"
        r"el \['head.weight', 'head.bias'\].*load_module_strict=False",
    ):
        other.load_checkpoint(folder)
    assert differs(other.module.blocks[0].weight.detach(), weights["blocks.0.weight"]), (
        "changed by a refused load"
    )
    other.load_checkpoint(folder, load_module_strict=False)
    for name, value in other.module.named_parameters():
        expected = weights.get(name, Wider().state_dict().get(name))
        assert_close(value.detach(), expected, EXACT, name)
    train(other, 1)

    other = make_engine()
    other.module.scale.data.fill_(9.0)
    other.load_checkpoint(folder, "thawed")
    assert float(other.module.scale) == 9.0
    assert_close(other.module.head.weight.detach(), weights["head.weight"], EXACT)
    assert Path(folder, "latest").read_text() == "all"

    other = make_engine()
    path, client_state = other.load_checkpoint(folder, load_module_only=True)
    assert path == f"{folder}/all" and client_state == {} and other.global_steps == 0
    assert not other.optimizer.state
    assert_close(other.module.head.weight.detach(), weights["head.weight"], EXACT)

    thawed = Net()
    thawed.scale.requires_grad_(True)
    other = make_engine(thawed)
    with pytest.raises(ValueError, match=r"no optimizer states for \['scale'\]"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, load_module_strict=False)
    assert len(other.optimizer.state) == 8
    train(other, 1)


def test_what_a_load_may_leave_out(world: Any) -> None:
    with scratch_folder() as folder:
        world(left_out, 2, folder)


def by_hand(rank: int, folder: str, zero: int) -> None:
    """`custom_load_fn` puts the tensors where it likes; masters and shards follow."""
    bf16 = {"bf16": {"enabled": True}, "zero": zero}
    engine = make_engine(nn.Sequential(linear(4, 4, 1), linear(4, 4, 2)), **bf16)
    x = torch.ones(2, 4).bfloat16()
    engine.backward(engine(x).float().square().mean())
    engine.step()
    engine.save_checkpoint(folder, f"saved{zero}")
    weights = copied(engine)
    held = [piece.target.detach().clone() for bucket in engine.gradients.buckets for piece in bucket.pieces]

    def same(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict(src)

    def crossed(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst[0].weight.data = src["1.weight"].clone()  # another storage: a ZeRO buffer must take it in
        dst[1].load_state_dict({"weight": src["0.weight"], "bias": src["1.bias"]})

    def exchanged(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst[0].weight = nn.Parameter(src["0.weight"].clone())

    for load in (same, crossed):
        other = make_engine(nn.Sequential(linear(4, 4, 5), linear(4, 4, 6)), **bf16)
        other.load_checkpoint(folder, f"saved{zero}", custom_load_fn=load)
        pieces = [piece for bucket in other.gradients.buckets for piece in bucket.pieces]
        masters = [piece.target.detach().clone() for piece in pieces]
        assert all(other.optimizer.state[piece.target]["step"] == 1 for piece in pieces)
        now = copied(other)
        if load is same:
            assert all(torch.equal(a, b) for a, b in zip(masters, held)), "masters lost their precision"
        else:
            assert torch.equal(now["0.weight"], weights["1.weight"])
            assert torch.equal(now["1.weight"], weights["0.weight"])
        other.gradients.publish()
        assert all(torch.equal(value, now[name]) for name, value in other.module.state_dict().items()), load
        if zero:
            for bucket in other.gradients.buckets:
                base = bucket.values.untyped_storage().data_ptr()
                assert all(p.untyped_storage().data_ptr() == base for p in bucket.parameters)
    with pytest.raises(ValueError, match="change values in place, not the Parameter object"):
        other.load_checkpoint(folder, f"saved{zero}", custom_load_fn=exchanged)


def test_a_custom_load_fn_is_honoured(world: Any) -> None:
    with scratch_folder() as folder:
        for zero in (0, 1):
            world(by_hand, 2, folder, zero)


# ----------------------------------------------------------------------------------------- the whole model


def whole_model(rank: int, folder: str, stages: int, degree: int) -> None:
    import ds_lite
    from ds_lite.pipe import PipelineModule
    from ds_lite.tensor_parallel import LinearAllreduce, LinearLayer

    layers = [linear(INPUTS, HIDDEN, 1), nn.Tanh(), LinearLayer(linear(HIDDEN, 6, 2)), nn.Tanh()]
    layers += [LinearAllreduce(linear(6, OUTPUTS, 3)), nn.BatchNorm1d(OUTPUTS).double()]
    layers[0].bias.requires_grad_(False)
    model = PipelineModule(layers, num_stages=stages, loss_fn=mean_squared)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAMW,
        "bf16": {"enabled": True},
        "tensor_parallel": {"tp_size": degree},
        "zero_optimization": {"stage": 1},
    }
    engine = ds_lite.initialize(model=model, config=config)[0]
    assert engine.save_16bit_model(f"{folder}/new/er", "all.bin")
    assert engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    assert engine.save_16bit_model(folder, exclude_frozen_parameters=True), "again"


def test_the_whole_model_in_one_file_for_a_plain_program(world: Any) -> None:
    for stages, degree in ((1, 1), (2, 1), (2, 2)):
        with scratch_folder() as folder:
            world(whole_model, 4, folder, stages, degree)
            plain = nn.Sequential(
                nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, OUTPUTS)
            )
            plain.append(nn.BatchNorm1d(OUTPUTS)).bfloat16()
            state = torch.load(f"{folder}/new/er/all.bin", weights_only=True)
            assert list(state) == list(plain.state_dict())
            plain.load_state_dict(state)
            for index, layer in (
                (0, linear(INPUTS, HIDDEN, 1)),
                (2, linear(HIDDEN, 6, 2)),
                (4, linear(6, OUTPUTS, 3)),
            ):
                assert_close(
                    plain[index].weight.detach(), layer.weight.detach().bfloat16(), EXACT, f"layer {index}"
                )
            without = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
            assert set(state) - set(without) == {"0.bias"}
            assert sorted(os.listdir(folder)) == ["new", "pytorch_model.bin"]
