"""§9.3 A checkpoint of any layout continues in any other. Guards against: optimizer state that only its own
layout can read, masters that are left behind, a tie stored twice, options of groups that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saving_layouts import (
    AFTER,
    BEFORE,
    LAYOUTS,
    MICRO_BATCHES,
    SAMPLES,
    Layout,
    Odd,
    continue_and_compare,
    data_of,
    make_engine,
    mean_squared,
    truth,
)
from saving_models import scratch_folder
from tolerance import EXACT, LAW, assert_close, differs
from torch import nn

# ------------------------------------------------------------------------------------ any pair of layouts

KINDS = ("AdamW", "SGD")


def test_a_parameter_gets_its_first_gradient_after_the_checkpoint() -> None:
    for kind in KINDS:
        late = [truth(kind, steps).weights["4.late"] for steps in (BEFORE, BEFORE + 1)]
        assert not differs(late[0], Odd().late.detach()) and differs(late[1], late[0])


def save_one(rank: int, layout: Layout, folder: str) -> None:
    """Two steps, save; the same engine then goes on as if nothing had happened."""
    for kind in KINDS:
        engine = make_engine(layout, kind)
        data = data_of(engine, 0, BEFORE)
        for _ in range(BEFORE):
            engine.train_batch(data)
        assert engine.save_checkpoint(folder, tag=f"{kind}-{layout}", client_state={"said": kind})
        if kind == "AdamW":
            continue_and_compare(engine, truth(kind), f"{layout} after saving")


def load_some(rank: int, layout: Layout, folder: str, kind: str, sources: list[Layout]) -> None:
    """One checkpoint after the other; the first one meets an engine that has never stepped."""
    expected = truth(kind)
    engine = make_engine(layout, kind)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(9.0)
    for source in sources:
        path, client_state = engine.load_checkpoint(folder, tag=f"{kind}-{source}")
        assert path == f"{folder}/{kind}-{source}" and client_state == {"said": kind}
        assert (engine.global_steps, engine.global_samples) == (BEFORE, BEFORE * MICRO_BATCHES * SAMPLES)
        assert engine.micro_steps == BEFORE * MICRO_BATCHES // source.dp
        continue_and_compare(engine, expected, f"{kind} from {source} to {layout}")
    engine = make_engine(layout, kind)
    engine.load_checkpoint(folder, tag=f"{kind}-{sources[-1]}", load_optimizer_states=False)
    data = data_of(engine, BEFORE, AFTER)
    losses = [engine.train_batch(data) for _ in range(AFTER)]
    assert_close(losses[0], expected.losses[BEFORE], LAW, "control: the weights were loaded")
    assert differs(losses[-1], expected.losses[-1]), f"control: the states of {kind} make no difference"


def all_pairs(world: Any, folder: str, kind: str, sources_each: int = len(LAYOUTS)) -> None:
    for layout in LAYOUTS:
        start = LAYOUTS.index(layout) + 1  # so that each target begins with another source
        sources = [*LAYOUTS[start:], *LAYOUTS[:start]][:sources_each]
        world(load_some, layout.world_size, layout, folder, kind, sources, deadline=120.0)


def test_every_layout_continues_the_checkpoints_of_others(world: Any) -> None:
    with scratch_folder() as folder:
        for layout in LAYOUTS:
            world(save_one, layout.world_size, layout, folder)
        look_into_files(folder)
        all_pairs(world, folder, "AdamW", 2)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_every_pair_of_layouts(world: Any, kind: str) -> None:
    with scratch_folder() as folder:
        for layout in LAYOUTS:
            world(save_one, layout.world_size, layout, folder)
        all_pairs(world, folder, kind)


def look_into_files(folder: str) -> None:
    """B40: a tied module is stored once, and a checkpoint does not show which layout wrote it."""
    for layout in LAYOUTS:
        for ending in ("model", "optim"):
            files = Path(folder, f"AdamW-{layout}").glob(f"*-{ending}_states.pt")
            contents = {path.name: torch.load(path, weights_only=True) for path in files}
            holders = [file for file, content in contents.items() if "tied_modules.word.weight" in content]
            assert holders == [f"layer_00-{ending}_states.pt"], layout
            wanted = ["layer_00", "layer_02", "layer_04", "layer_05"]
            assert sorted(contents) == [f"{layer}-{ending}_states.pt" for layer in wanted], layout
        kept = torch.load(Path(folder, f"AdamW-{layout}", "layer_04-optim_states.pt"), weights_only=True)
        gain = kept["4.gain"]
        assert gain["numbers"]["step"] == BEFORE and gain["elements"]["exp_avg"].shape == (), layout
        for name in ("4.late", "4.idle"):
            assert kept[name]["elements"] == {} and kept[name]["numbers"] == {}, layout
        assert "4.frozen" not in kept


PAIR = (Layout(pp=2, dp=2, zero=1), Layout(tp=2, zero=2))


def test_pp2_dp2_zero1_goes_on_as_tp2_zero2(world: Any) -> None:
    saved, loaded = PAIR
    with scratch_folder() as folder:
        world(save_one, saved.world_size, saved, folder)
        world(load_some, loaded.world_size, loaded, folder, "AdamW", [saved])
        world(load_some, loaded.world_size, loaded, folder, "SGD", [saved])


# ------------------------------------------------------------------------------------------------ B40


def numbered(rank: int, stages: int, folder: str, saves: bool) -> None:
    """102 layers, layer i filled with i."""
    import ds_lite
    from ds_lite.pipe import LayerSpec, PipelineModule

    model = PipelineModule([LayerSpec(nn.Linear, 1, 1)] * 102, num_stages=stages, loss_fn=mean_squared)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = ds_lite.initialize(model=model, config=config)[0]
    if saves:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(float(name.split(".")[0]))
        engine.save_checkpoint(folder, tag="numbered")
    else:
        engine.load_checkpoint(folder)
    for name, parameter in model.named_parameters():
        assert_close(parameter.detach(), torch.full_like(parameter, float(name.split(".")[0])), EXACT, name)


def test_b40_layer_10_is_not_layer_100(world: Any) -> None:
    with scratch_folder() as folder:
        world(numbered, 2, 2, folder, True)
        files = sorted(path.name for path in Path(folder, "numbered").glob("*-model_states.pt"))
        assert files == [f"layer_{index:03d}-model_states.pt" for index in range(102)]
        world(numbered, 1, 1, folder, False)
        world(numbered, 4, 2, folder, False)


def gaps(rank: int, stages: int, folder: str, saves: bool) -> None:
    """[Linear, ReLU, lambda, Linear]: layers without state have no file."""
    import ds_lite
    from ds_lite.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(nn.Linear, 2, 2), nn.ReLU(), lambda x: x * 2, LayerSpec(nn.Linear, 2, 2)]
    torch.manual_seed(1 if saves else 2)
    model = PipelineModule(layers, num_stages=stages, loss_fn=mean_squared, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = ds_lite.initialize(model=model, config=config)[0]
    batch = (torch.ones(2, 2), torch.full((2, 2), 3.0))
    if saves:
        engine.train_batch(iter([batch]))
        engine.save_checkpoint(folder)
    else:
        path, _ = engine.load_checkpoint(folder)
        assert path == f"{folder}/global_step1" and engine.global_steps == 1
    torch.save(
        [float(engine.train_batch(iter([batch]))) for _ in range(2)], f"{folder}/losses-{stages}-{rank}"
    )


def test_b40_layers_without_state_have_no_file(world: Any) -> None:
    with scratch_folder() as folder:
        world(gaps, 2, 2, folder, True)
        files = sorted(path.name for path in Path(folder, "global_step1").iterdir())
        layers = [f"layer_0{index}-{kind}_states.pt" for index in (0, 3) for kind in ("model", "optim")]
        assert files == ["engine_states.pt", *layers, "manifest.json"]
        for stages in (1, 4):
            world(gaps, stages, stages, folder, False)
        losses = [torch.load(path, weights_only=True) for path in Path(folder).glob("losses-*")]
        assert len(losses) == 7 and losses[0][0] != losses[0][1]
        assert all(one == pytest.approx(losses[0], rel=1e-6) for one in losses)
