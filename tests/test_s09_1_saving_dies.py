"""§9.1 A save that is killed, and what it finds in its place. Guards against: a save that dies and takes the
last checkpoint with it, a mixture of two checkpoints, files of others that are deleted."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from saving_models import ADAMW, copied, make_engine, scratch_folder, train
from small_models import HIDDEN, INPUTS, OUTPUTS, linear, mean_squared
from torch import Tensor, nn
from world import WorldError

from ds_lite.saving import writing

STEPS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


@contextlib.contextmanager
def dying_at(count: int) -> Iterator[None]:
    """SIGKILL in place of the `count`-th change of the file system."""
    seen = 0

    def counted(right: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return right(*args, **kwargs)

        return step

    with contextlib.ExitStack() as stack:
        for name in STEPS:
            stack.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        yield


def in_a_child(work: Any, after_s: float | None = None) -> bool:
    """Fork, run `work`, maybe kill it after a while; whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child raised"
    return not os.WIFSIGNALED(status)


class Versions:
    """An engine that saves, another that loads, and what the two versions of a checkpoint hold."""

    def __init__(self, folder: str) -> None:
        self.folder, self.known = folder, []
        self.writer, self.reader = make_engine(), make_engine()
        for tag in ("old", "new"):
            train(self.writer)
            self.writer.save_checkpoint(f"{folder}/base", tag, client_state={"version": tag})
            self.known.append(self.inside(self.writer, tag))
        for tag in ("new", "latest"):
            path = Path(folder, "base", tag)
            shutil.rmtree(path) if path.is_dir() else path.write_text("old")

    def inside(self, engine: Any, said: str) -> tuple[str, list[Tensor]]:
        states = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
        return said, [*copied(engine).values(), *states]

    def loaded(self, where: str, tag: str | None = None) -> str:
        """The version that `where` gives, whole: nothing of another one, and no leftover that disturbs."""
        path, client_state = self.reader.load_checkpoint(where, tag)
        said, values = self.inside(self.reader, client_state["version"])
        expected = dict(self.known)[said]
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)), f"a mixture: {path}"
        assert tag or os.path.basename(path) == Path(where, "latest").read_text()
        return said

    def save(self, where: str, tag: str, times: int = 1) -> None:
        for _ in range(times):
            self.writer.save_checkpoint(where, tag, client_state={"version": "new"})

    def check(self, where: str, tag: str) -> str:
        """After a save of `tag` died: all that was there before is there, and the next save succeeds."""
        said = self.loaded(where)
        if tag != "old":
            assert self.loaded(where, "old") == "old"
        self.save(where, tag)
        assert self.loaded(where) == "new"
        assert sorted(os.listdir(where)) == sorted({"old", tag, "latest"})
        return said


def dies_at_every_step(rank: int, folder: str, tag: str) -> None:
    versions = Versions(folder)
    said = []
    for count in range(1, 200):
        where = shutil.copytree(f"{folder}/base", f"{folder}/{count}")
        with dying_at(count):
            has_ended = in_a_child(partial(versions.save, where, tag))
        said.append(versions.check(where, tag))
        if has_ended:
            break
    assert has_ended and count > 15, f"{count} steps"
    assert said == sorted(said, reverse=True) and said[0] == "old" and said[-1] == "new", said


@pytest.mark.parametrize("tag", ["new", "old"])
def test_a_save_killed_at_any_step_leaves_the_last_checkpoint(world: Any, tag: str) -> None:
    """`old` is saved again under its own tag; `new` is another tag."""
    with scratch_folder() as folder:
        world(dies_at_every_step, 1, folder, tag)


def dies_at_any_moment(rank: int, folder: str) -> None:
    versions = Versions(folder)
    generator = random.Random(5)
    where = f"{folder}/base"
    started = time.perf_counter()
    in_a_child(lambda: versions.save(where, "new"))
    took = time.perf_counter() - started
    for attempt in range(30):
        tag = ("new", "old")[attempt % 2]
        after_s = generator.uniform(0, 1.5 * took)
        in_a_child(partial(versions.save, where, tag, times=9), after_s)
        versions.loaded(where)
        versions.loaded(where, "new")
    versions.save(where, "new")
    assert sorted(os.listdir(where)) == ["latest", "new", "old"]


def test_a_save_killed_at_random_leaves_a_checkpoint(world: Any) -> None:
    with scratch_folder() as folder:
        world(dies_at_any_moment, 1, folder)


def one_rank_dies(rank: int, folder: str) -> None:
    import ds_lite
    from ds_lite.pipe import PipelineModule

    layers = [linear(INPUTS, HIDDEN, 1), nn.Tanh(), linear(HIDDEN, OUTPUTS, 2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=mean_squared, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    engine = ds_lite.initialize(model=model, config=config)[0]
    if not os.path.exists(f"{folder}/good"):
        engine.save_checkpoint(folder, "good")
        if rank == 1:
            with mock.patch.object(writing, "write_states", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
                engine.save_checkpoint(folder, "bad")
        engine.save_checkpoint(folder, "bad")
    assert not os.path.exists(f"{folder}/bad")
    assert engine.load_checkpoint(folder)[0] == f"{folder}/good"
    engine.save_checkpoint(folder, "bad")
    assert engine.load_checkpoint(folder)[0] == f"{folder}/bad"
    assert sorted(os.listdir(folder)) == ["bad", "good", "latest"]


def test_a_rank_killed_while_it_writes_a_layer(world: Any) -> None:
    with scratch_folder() as folder:
        with pytest.raises(WorldError, match="rank 1 was killed by SIGKILL"):
            world(one_rank_dies, 2, folder)
        world(one_rank_dies, 2, folder)


def others_files(rank: int, folder: str) -> None:
    """What a script put into the folder of a checkpoint survives that it is saved again."""
    engine = make_engine()
    engine.save_checkpoint(folder, "best")
    Path(folder, "best", "tokenizer.json").write_text("{}")
    Path(folder, "empty").mkdir()
    engine.save_checkpoint(folder, "best")
    engine.save_checkpoint(folder, "empty")
    assert Path(folder, "best", "tokenizer.json").read_text() == "{}"
    assert engine.load_checkpoint(folder)[0] == f"{folder}/empty"
    Path(folder, "mine").mkdir()
    Path(folder, "mine", "notes").write_text("do not lose")
    with pytest.raises(ValueError, match="is not a checkpoint of ds_lite, so it is not replaced"):
        engine.save_checkpoint(folder, "mine")
    assert Path(folder, "mine", "notes").read_text() == "do not lose"


def test_what_others_put_there_is_not_lost(world: Any) -> None:
    with scratch_folder() as folder:
        world(others_files, 1, folder)
