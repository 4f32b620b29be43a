"""§9.1 What a save or a load refuses, on every rank. Guards against: a failure on one rank that hangs the
others, a checkpoint that nobody can load, the wrong checkpoint loaded in silence."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from saving_models import ADAMW, Net, copied, is_same, make_engine, scratch_folder, train
from small_models import HIDDEN, INPUTS, OUTPUTS, linear, mean_squared
from torch import nn

from ds_lite import comm
from ds_lite.agreement import RemoteError
from ds_lite.saving import loading, writing


def refused_names(rank: int, folder: str) -> None:
    engine = make_engine()
    engine.save_checkpoint(folder, "good")
    for tag in (
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "/a",
        "a\\b",
        "latest",
        " a",
        "a ",
        "a\n",
        "a\0b",
        "x" * 201,
    ):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(ValueError, match="is not a plain name in a folder"):
                call(folder, tag)
            with pytest.raises(ValueError, match="is not a plain name in a folder"):
                call(folder, tag if rank == 1 else "good")  # wrong on one rank only
        with pytest.raises(ValueError, match=r"save_filename=.* is not a plain name"):
            engine.save_16bit_model(folder, tag)
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match=r"tag differs between ranks: 'of0' on rank 0, 'of1' on rank 1"):
            call(folder, f"of{rank}")
    with pytest.raises(ValueError, match=r"optimizer_states differs between ranks"):
        engine.load_checkpoint(folder, load_optimizer_states=rank == 0)
    assert sorted(os.listdir(folder)) == ["good", "latest"]
    with pytest.raises(ValueError, match=r"no checkpoint 'gone' in .*: the folder has \['good'\]"):
        engine.load_checkpoint(folder, "gone")
    with pytest.raises(ValueError, match=r"no checkpoint 'good' in .*/nowhere: the folder does not exist"):
        engine.load_checkpoint(f"{folder}/nowhere", "good")
    for path in (f"{folder}/latest", f"{folder}/latest/below"):
        with pytest.raises(ValueError, match="is a file or lies below one"):
            engine.save_checkpoint(path, "a")
        with pytest.raises(ValueError, match=r"does not exist|cannot read a tag"):
            engine.load_checkpoint(path, "a")


def refused_latest(rank: int, folder: str) -> None:
    engine = make_engine()
    expected = copied(engine)
    engine.save_checkpoint(folder, "good", save_latest=False)
    assert engine.load_checkpoint(folder) == (None, {})
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, {})
    assert is_same(engine, expected)
    latest = Path(folder, "latest")
    texts = {
        b"gone": r"no checkpoint 'gone' in .*: the folder has \['good'\]; correct .* what `latest` says",
        b"": "cannot read a tag from .*latest",
        b"../good": r"cannot read a tag from .*latest.*pass tag= one of \['good'\]",
        b"\xff\xfe": "cannot read a tag from .*latest",
        None: "cannot read a tag from .*latest: .*directory",
    }
    for text, message in texts.items():
        if rank == 0:
            latest.mkdir() if text is None else latest.write_bytes(text)
        comm.barrier()
        with pytest.raises(ValueError, match=message):
            engine.load_checkpoint(folder)
        comm.barrier()
        if rank == 0:
            latest.rmdir() if text is None else latest.unlink()
    if rank == 0:
        latest.write_text("good\n")
    comm.barrier()
    assert engine.load_checkpoint(folder)[0] == f"{folder}/good"


@pytest.mark.parametrize("body", [refused_names, refused_latest], ids=lambda body: body.__name__)
def test_names_that_are_refused_on_every_rank(world: Any, body: Any) -> None:
    with scratch_folder() as folder:
        world(body, 2, folder)


def test_nothing_loaded_is_said_aloud(world: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with scratch_folder() as folder:
        world(refused_latest, 2, folder)
    said = [line for line in capfd.readouterr().out.splitlines() if "NOTHING WAS LOADED" in line]
    assert len(said) == 2 and all(line.startswith("[rank 0]") for line in said)
    assert "its checkpoints are ['good']" in said[0] and "it does not exist" in said[1]


class Thing:
    """What no checkpoint can hold."""


class Schedule:
    def __init__(self, state: Any) -> None:
        self.state = state

    def step(self) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def refused_content(rank: int, folder: str) -> None:
    """What could not be loaded again is refused while it can still be helped; also on one rank alone."""
    engine = make_engine()
    train(engine)
    bad = {
        "client_state['deep'][1]": {"deep": [1, Thing()]},
        "client_state['array']": {"array": np.zeros(2)},
        "client_state['function']": {"function": print},
        "a key of client_state": {Thing(): 1},
        "client_state['kind']": {"kind": collections.namedtuple("Pair", "a b")(1, 2)},
    }
    for name, client_state in bad.items():
        for ranks in ((0, 1), (1,)):
            with pytest.raises(ValueError, match=re.escape(f"{name} is a ") + ".*cannot be loaded again"):
                engine.save_checkpoint(folder, "a", client_state=client_state if rank in ranks else {})
    engine.lr_scheduler = Schedule({"rule": Thing()})
    with pytest.raises(ValueError, match=re.escape("lr_scheduler.state_dict()['rule'] is a ")):
        engine.save_checkpoint(folder, "a")
    engine.lr_scheduler = Thing()
    with pytest.raises(ValueError, match=re.escape("lr_scheduler Thing has no state_dict()")):
        engine.save_checkpoint(folder, "a")
    engine.lr_scheduler = None
    engine.optimizer.param_groups[0]["note"] = Thing()
    with pytest.raises(ValueError, match=re.escape("optimizer.param_groups[0]['note'] is a ")):
        engine.save_checkpoint(folder, "a")
    del engine.optimizer.param_groups[0]["note"]
    engine.optimizer.state["clock"] = {"time": 3}
    with pytest.raises(
        ValueError, match="AdamW keeps state for 'clock', which is no parameter of the module"
    ):
        engine.save_checkpoint(folder, "a")
    del engine.optimizer.state["clock"]
    engine.module.register_state_dict_post_hook(
        lambda m, state, prefix, meta: state.update(sum=torch.zeros(1))
    )
    with pytest.raises(ValueError, match="'sum' in the state dict is neither a parameter nor a buffer"):
        engine.save_checkpoint(folder, "a")
    assert os.listdir(folder) == []


def test_what_cannot_be_loaded_again_is_not_saved(world: Any) -> None:
    with scratch_folder() as folder:
        world(refused_content, 2, folder)


def another_run(rank: int, folder: str) -> None:
    """The checkpoint is of another model, optimizer or schedule."""
    engine = make_engine(
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    )
    engine.save_checkpoint(folder, "net")
    make_engine(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)).save_checkpoint(folder, "sgd")
    bare = make_engine(optimizer=lambda groups: None)
    bare.save_checkpoint(folder, "bare")

    def refuse(match: str, other: Any, tag: str, **options: Any) -> None:
        before = copied(other)
        with pytest.raises(ValueError, match=match):
            other.load_checkpoint(folder, tag, **options)
        assert is_same(other, before), "changed by a refused load"

    shape = re.escape(
        f"head.weight is {(OUTPUTS, HIDDEN)} of floats in the checkpoint and {(7, HIDDEN)} of floats here"
    )
    for strict in (True, False):
        refuse(shape, make_engine(Net(7)), "net", load_module_strict=strict)
    whole = Net()
    whole.norm.running_mean = torch.zeros(HIDDEN, dtype=torch.int64)
    refuse(
        "norm.running_mean is .* of floats in the checkpoint and .* of integers here",
        make_engine(whole),
        "net",
    )
    stranger = make_engine(nn.Sequential(*[linear(2, 2, 1) for _ in range(9)]))
    refuse(
        r"missing in the checkpoint \['0.weight', .* and 10 more, not in this model \['scale'",
        stranger,
        "net",
    )
    refuse(
        "was saved with the optimizer SGD and this engine has AdamW.*load_optimizer_states=False",
        engine,
        "sgd",
    )
    refuse("was saved with no optimizer and this engine has AdamW", engine, "bare")
    refuse(
        "with no lr_scheduler and this .* ExponentialLR.*=False", engine, "sgd", load_optimizer_states=False
    )
    options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    assert engine.load_checkpoint(folder, "sgd", **options)[0]
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 3)
    refuse("with the lr_scheduler ExponentialLR and this engine has StepLR", engine, "net")
    assert bare.load_checkpoint(folder, "net")[0] == f"{folder}/net"


def test_a_checkpoint_of_another_run_is_refused(world: Any) -> None:
    with scratch_folder() as folder:
        world(another_run, 2, folder)


class RowSGD(torch.optim.Optimizer):
    """Keeps one number for each row of a matrix: it cannot be cut, and is not made whole from parts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            rows = parameter.grad.square().reshape(parameter.shape[0], -1).sum(1)
            kept = self.state[parameter].setdefault("rows", torch.zeros_like(rows)).add_(rows)
            if parameter.dim() > 1:
                parameter.sub_(0.1 * parameter.grad / kept.sqrt().unsqueeze(1))


def states_of_rows(rank: int, folder: str) -> None:
    engine = make_engine(linear(4, 3, 1), optimizer=RowSGD)
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.save_checkpoint(folder, "rows")
    other = make_engine(linear(4, 3, 2), optimizer=RowSGD)
    other.load_checkpoint(folder, "rows")
    assert torch.equal(
        other.optimizer.state[other.module.weight]["rows"],
        engine.optimizer.state[engine.module.weight]["rows"],
    )
    sharded = make_engine(linear(4, 3, 2), optimizer=RowSGD, zero=1)
    with pytest.raises(
        ValueError, match=r"'rows' of weight has shape \(3,\), not the parameter's.* to load it"
    ):
        sharded.load_checkpoint(folder, "rows")
    for parameter in (p for group in sharded.optimizer.param_groups for p in group["params"]):
        sharded.optimizer.state[parameter]["rows"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'rows' of (weight|bias) has shape \(3,\), .* to save it"):
        sharded.save_checkpoint(folder, "parts")


def test_states_that_cannot_be_cut_are_refused(world: Any) -> None:
    with scratch_folder() as folder:
        world(states_of_rows, 2, folder)


def one_rank_fails(rank: int, folder: str) -> None:
    """A stage that cannot write or read raises on all ranks, and nothing is half there."""
    import ds_lite
    from ds_lite.pipe import PipelineModule

    layers = [linear(INPUTS, HIDDEN, 1), nn.Tanh(), linear(HIDDEN, OUTPUTS, 2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=mean_squared, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    engine = ds_lite.initialize(model=model, config=config)[0]
    engine.save_checkpoint(folder, "good")
    full = OSError(errno.ENOSPC, "cannot write layer_02: No space left on device")
    unreadable = ValueError("cannot load layer_02-model_states.pt: Input/output error")
    for broken in (0, 1):
        here = rank == broken
        failing = mock.Mock(side_effect=full)
        patch = mock.patch.object(writing, "write_states", failing) if here else contextlib.nullcontext()
        with patch, pytest.raises(OSError if here else RemoteError, match="No space left on device"):
            engine.save_checkpoint(folder, "bad")
        comm.barrier()
        assert sorted(os.listdir(folder)) == ["good", "latest"]
        failing = mock.Mock(side_effect=unreadable)
        patch = mock.patch.object(loading, "load_states", failing) if here else contextlib.nullcontext()
        with patch, pytest.raises(ValueError, match="cannot load layer_02"):
            engine.load_checkpoint(folder)

        load = mock.Mock(side_effect=KeyError("mine") if here else None)
        with pytest.raises(KeyError if here else RemoteError, match="mine"):
            engine.load_checkpoint(folder, custom_load_fn=load)
        with pytest.raises(ValueError, match="is not the folder that rank 0 sees"):
            engine.save_checkpoint(folder if rank == 0 else f"{folder}/elsewhere", "bad")
        with pytest.raises(
            ValueError, match=r"good is not visible on rank 1, but on rank 0; all ranks name one folder"
        ):
            engine.load_checkpoint(folder if rank == 0 else f"{folder}/elsewhere", "good")
    assert engine.load_checkpoint(folder)[0] == f"{folder}/good"


def test_a_failure_on_one_rank_is_raised_on_all(world: Any) -> None:
    with scratch_folder() as folder:
        world(one_rank_fails, 2, folder)
