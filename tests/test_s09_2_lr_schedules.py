"""§9.2 Learning rate schedules. Guards against: off by one at step 0, wrong end, lost stairs, bad resume."""

import copy
import io
import json
import warnings
from pathlib import Path

import pytest
import torch
from tolerance import EXACT, LAW, assert_close, differs

from ds_lite.lr_schedules import SCHEDULES, build_scheduler

GOLDEN = json.loads((Path(__file__).parent / "golden" / "lr_schedules.json").read_text())["cases"]
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}


def make(name, params, *, base_lrs=(0.1,), optimizer="AdamW", momentum=0.9):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in base_lrs]
    extra = {"momentum": momentum} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(groups, **extra)
    return made, build_scheduler(name, params, made)


def play(optimizer, scheduler, num_steps, key="lr"):
    """What each optimizer step uses: (num_steps, groups), or (num_steps, groups, 2) for betas."""
    used = []
    for _ in range(num_steps):
        used.append([copy.deepcopy(group[key]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return torch.tensor(used, dtype=torch.float64)


def remake(case):
    return make(case["scheduler"], case["params"], base_lrs=case["base_lrs"], optimizer=case["optimizer"])


def label(case):
    given = ",".join(f"{key}={value}" for key, value in case["params"].items())
    return f"{case['scheduler']}-{case['optimizer']}({given})"


@pytest.mark.parametrize("case", GOLDEN, ids=label)
def test_the_rates_equal_the_recorded_ones(case):
    recorded = torch.tensor(case["lr"], dtype=torch.float64)
    largest = recorded.max()  # so that the tolerance is relative to the rates, not to 1
    steps = torch.tensor(case["steps"])
    used = play(*remake(case), case["steps"][-1] + 2)
    assert differs(used[steps + 1] / largest, recorded / largest)  # control: one step late
    assert_close(used[steps] / largest, recorded / largest, LAW, msg=label(case))


@pytest.mark.parametrize("case", [case for case in GOLDEN if "betas" in case], ids=label)
def test_one_cycle_betas_equal_the_recorded_ones(case):
    recorded = torch.tensor(case["betas"], dtype=torch.float64)
    used = play(*remake(case), case["steps"][-1] + 1, key="betas")
    assert_close(used[torch.tensor(case["steps"])], recorded, LAW, msg=label(case))


def test_the_recording_covers_every_schedule_and_goes_past_its_end():
    assert len(GOLDEN) >= 12
    assert {case["scheduler"] for case in GOLDEN} == set(SCHEDULES)
    assert any(case["steps"][-1] > case["params"].get("total_num_steps", 1e9) for case in GOLDEN)
    assert any(len(case["base_lrs"]) > 1 for case in GOLDEN)


@pytest.mark.parametrize("case", [case for case in GOLDEN if len(case["steps"]) > 8], ids=label)
def test_a_resumed_run_continues_the_sequence(case):
    num_steps, stop = case["steps"][-1] + 1, case["steps"][-1] // 2
    whole = play(*remake(case), num_steps)
    optimizer, scheduler = remake(case)
    play(optimizer, scheduler, stop)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    optimizer, scheduler = remake(case)
    fresh = torch.tensor(scheduler.get_last_lr(), dtype=torch.float64)
    scheduler.load_state_dict(saved["scheduler"])  # the scheduler alone sets the rate ...
    set_at_once = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    assert_close(set_at_once, whole[stop], EXACT, msg="rate after load")
    assert scheduler.get_last_lr() == set_at_once.tolist()
    optimizer.load_state_dict(saved["optimizer"])  # ... and the order of the two does not matter
    assert_close(play(optimizer, scheduler, num_steps - stop), whole[stop:], EXACT, msg=label(case))
    if case["scheduler"] != "OneCycle":  # a finished cycle is back at the rate it began with
        assert (fresh != set_at_once).any()


def test_a_scheduler_built_after_the_optimizer_was_loaded_keeps_the_first_rates():
    params = {"total_num_steps": 12, "warmup_num_steps": 3}
    whole = play(*make("WarmupCosineLR", params, base_lrs=(0.1, 0.4)), 10)
    optimizer, scheduler = make("WarmupCosineLR", params, base_lrs=(0.1, 0.4))
    play(optimizer, scheduler, 6)
    late, _ = make("WarmupLR", {}, base_lrs=(0.7, 0.7))
    late.load_state_dict(optimizer.state_dict())
    resumed = build_scheduler("WarmupCosineLR", params, late)
    resumed.load_state_dict(scheduler.state_dict())
    assert_close(play(late, resumed, 4), whole[6:], EXACT)


def test_the_state_is_deepspeeds():
    whole = play(*make("WarmupLR", {"warmup_num_steps": 8}), 9)
    optimizer, scheduler = make("WarmupLR", {"warmup_num_steps": 8})
    assert scheduler.state_dict() == {"last_batch_iteration": -1}
    scheduler.load_state_dict({"last_batch_iteration": 3})
    assert_close(play(optimizer, scheduler, 5), whole[4:], EXACT)
    assert scheduler.state_dict() == {"last_batch_iteration": 8}


def test_one_cycle_moves_the_momentum_of_sgd_against_the_rate():
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9]
    used = play(*make("OneCycle", CYCLE, optimizer="SGD"), 10, key="momentum")
    assert_close(used.flatten(), torch.tensor(expected, dtype=torch.float64), LAW)
    zero_low = play(*make("OneCycle", CYCLE | {"cycle_min_mom": 0.0}, optimizer="SGD"), 9, key="momentum")
    assert zero_low.flatten()[[0, 4, 8]].tolist() == [
        0.0,
        0.0,
        0.9,
    ]  # a minimum of zero does not end the cycle


@pytest.mark.parametrize(
    "optimizer,momentum,params", [("SGD", 0.0, {}), ("SGD", 0.7, {"cycle_momentum": False})]
)
def test_one_cycle_leaves_other_momentum_alone(optimizer, momentum, params):
    made, scheduler = make("OneCycle", CYCLE | params, optimizer=optimizer, momentum=momentum)
    assert set(play(made, scheduler, 6, key="momentum").flatten().tolist()) == {momentum}


def test_stairs_hold_the_rate_between_jumps():
    steps = CYCLE | {"cycle_first_step_size": 6, "cycle_first_stair_count": 2, "cycle_second_stair_count": 0}
    used = play(*make("OneCycle", steps), 8).flatten()
    expected = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.5, 0.1 + 0.4 * 5 / 6], dtype=torch.float64)
    assert_close(used, expected, LAW)


def test_a_tensor_rate_is_written_in_place():
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, optimizer)
    assert play(optimizer, scheduler, 4).flatten().tolist() == [0.0, 0.0, 0.125, 0.25]
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize(
    "name,params",
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 9}),
        ("CosineAnnealingLR", {"T_max": 5}),
        ("LambdaLR", {"lr_lambda": lambda epoch: 1 / (1 + epoch)}),
    ],
)
def test_a_scheduler_of_torch_is_built_by_its_name(name, params):
    optimizer, scheduler = make(name, params)
    assert type(scheduler) is getattr(torch.optim.lr_scheduler, name)
    parameter = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.AdamW([parameter], lr=0.1)
    expected = play(plain, type(scheduler)(plain, **params), 8)
    used = play(optimizer, scheduler, 8)
    assert differs(used, used[:1].expand(8, 1))
    assert_close(used, expected, EXACT, msg=name)


def test_the_engines_order_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer, scheduler = make("WarmupLR", {"warmup_num_steps": 3, "last_batch_iteration": -1})
        play(optimizer, scheduler, 3)
        optimizer, resumed = make("WarmupLR", {"warmup_num_steps": 3})
        resumed.load_state_dict(scheduler.state_dict())
        play(optimizer, resumed, 2)


WRONG = {
    "near name": ("WarmupLr", {}, "scheduler type 'WarmupLr' is unknown; the nearest is 'WarmupLR'"),
    "far name": ("onecycle", {}, "nearest is 'OneCycle'.*WarmupDecayLR"),
    "base class": ("LRScheduler", {}, "is unknown"),
    "typo": ("WarmupLR", {"warmup_steps": 3}, "parameter 'warmup_steps' is unknown.*'warmup_num_steps'"),
    "other's": ("WarmupCosineLR", {"total_num_steps": 9, "warmup_min_lr": 0.0}, "'warmup_min_ratio'"),
    "torch typo": ("StepLR", {"step_sise": 3}, "StepLR parameter 'step_sise' is unknown.*'step_size'"),
    "optimizer": ("StepLR", {"optimizer": None, "step_size": 1}, "parameter 'optimizer' is unknown"),
    "missing": ("WarmupDecayLR", {}, "WarmupDecayLR lacks total_num_steps"),
    "missing two": ("OneCycle", {"decay_lr_rate": 0.1}, "lacks cycle_min_lr, cycle_max_lr"),
    "torch missing": ("StepLR", {}, "StepLR lacks step_size"),
    "list length": ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, r"warmup_min_lr=\[0.1, 0.2\] needs 1 values"),
    "list elsewhere": ("WarmupLR", {"warmup_num_steps": [3]}, r"(?s)warmup_num_steps.*\[3\]"),
    "no steps": ("WarmupLR", {"warmup_num_steps": 0}, "(?s)warmup_num_steps.*greater than 0"),
    "half steps": ("WarmupLR", {"warmup_num_steps": 2.5}, "(?s)warmup_num_steps.*2.5"),
    "word for number": ("WarmupLR", {"warmup_num_steps": "6"}, "(?s)warmup_num_steps.*'6'"),
    "auto": ("WarmupLR", {"warmup_max_lr": "auto"}, "(?s)warmup_max_lr.*'auto'"),
    "type": ("WarmupLR", {"warmup_type": "Linear"}, "(?s)warmup_type.*'log' or 'linear'"),
    "resume": ("WarmupLR", {"last_batch_iteration": 7}, "(?s)last_batch_iteration.*-1.*7"),
    "first half": ("OneCycle", CYCLE | {"cycle_first_step_size": 0}, "(?s)cycle_first_step_size.*greater"),
    "second half": ("OneCycle", CYCLE | {"cycle_second_step_size": -1}, "(?s)cycle_second_step_size.*-1"),
    "range size": ("LRRangeTest", {"lr_range_test_step_size": 0}, "(?s)lr_range_test_step_size.*greater"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_config_is_refused_by_name_and_leaves_the_optimizer_alone(wrong):
    name, params, message = WRONG[wrong]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    with pytest.raises(ValueError, match=message):
        build_scheduler(name, params, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
