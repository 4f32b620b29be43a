"""§9.2 What a user gets wrong: the message, on every rank, before any collective; and the way out of it.

Guards against: a hang where a message should be, a rank that raises alone, an error that names no value, no
rule and no remedy, a silent fallback. B22 (data that ends) and the killed rank have files of their own."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ds_lite
from ds_lite import comm
from ds_lite.grid import PipelineParallelGrid
from ds_lite.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from ds_lite.topology import ProcessTopology

WIDTH = 3
SECTION = re.compile(r"\(§9(\.\d+)+\)$")  # where to read ends every message
ONE = {"train_micro_batch_size_per_gpu": 1}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def layers(count: int = 4) -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)]


def tie(attribute: str | list[str], kind: Any = nn.Linear, *sizes: int) -> TiedLayerSpec:
    return TiedLayerSpec("word", kind, *(sizes or (WIDTH, WIDTH)), tied_weight_attr=attribute)


def build(content: Any = None, num_stages: int | None = 1, **options: Any) -> PipelineModule:
    return PipelineModule(
        layers() if content is None else content, num_stages=num_stages, loss_fn=squares, **options
    )


def start(config: Any = None, num_stages: int = 1, content: Any = None, **options: Any) -> Any:
    settings = {**ONE, **SGD} if config is None else config
    return ds_lite.initialize(model=build(content, num_stages), config=settings, **options)[0]


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((1, WIDTH), float(i)), torch.ones(1, WIDTH)) for i in range(count)]


# ----------------------------------------------------------- refused from values equal on every rank


@dataclass(frozen=True)
class Refusal:
    """One mistake, the worlds it is made in, and what the message must say of value, rule and remedy."""

    call: Callable[[], Any]
    match: str
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    kind: type[Exception] = ValueError
    early: bool = True  # before any collective; where not, still on every rank


def batch_numbers(
    train: Any = None, micro: Any = None, steps: Any = None, num_stages: int = 1
) -> Callable[[], Any]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: value for name, value in zip(names, (train, micro, steps)) if value is not None}
    return lambda: start({**given, **SGD}, num_stages)


class Parsed:
    """What argparse makes of --deepspeed_config."""

    deepspeed_config = "ds_config.json"


REFUSALS = {
    # the cut into stages
    "2 stages on 3": Refusal(
        lambda: build(num_stages=2), r"world size 3 is not divisible by num_stages=2.*from \[1, 3\]", (3,)
    ),
    "3 stages on 4": Refusal(
        lambda: build(num_stages=3), r"world size 4 is not divisible by num_stages=3.*from \[1, 2, 4\]", (4,)
    ),
    "4 stages on fewer": Refusal(
        lambda: build(num_stages=4),
        r"world size \d is not divisible by num_stages=4.*or start a multiple of 4 processes",
        (1, 2, 3),
    ),
    "2 stages, 1 layer": Refusal(
        lambda: build(layers(1), 2), r"2 exceeds \w+=1.*choose at most 1 stage", (2, 4)
    ),
    "4 stages, 3 layers": Refusal(
        lambda: build(layers(3), 4), r"4 exceeds \w+=3.*choose at most 3 stages", (4,)
    ),
    "regex without match": Refusal(
        lambda: build(partition_method="type:attention"),
        r"'type:attention' matches no layer.*\['Linear'\]",
    ),
    "unknown method": Refusal(
        lambda: build(partition_method="paramters"), r"'paramters' is unknown.*did you mean 'parameters'"
    ),
    "neither stages nor topology": Refusal(
        lambda: build(num_stages=None), r"needs num_stages or a topology; neither was given"
    ),
    "no stages": Refusal(lambda: build(num_stages=0), r"num_stages=0 must be an integer >= 1"),
    "negative stages": Refusal(lambda: build(num_stages=-2), r"num_stages=-2 must be an integer >= 1"),
    "half a stage": Refusal(lambda: build(num_stages=1.5), r"num_stages=1.5 must be an integer"),
    "topology of another size": Refusal(
        lambda: build(num_stages=None, topology=ProcessTopology(["pipe", "data"], [3, 2])),
        r"topology has 6 ranks and the world \d; start 6 processes or change an axis",
    ),
    "topology against stages": Refusal(
        lambda: build(num_stages=2, topology=ProcessTopology(["pipe", "data"], [4, 1])),
        r"num_stages=2 contradicts the topology's pipe axis of 4; give one",
        (4,),
    ),
    "topology without pipe against stages": Refusal(
        lambda: build(num_stages=2, topology=ProcessTopology(["data"], [2])),
        r"num_stages=2 contradicts the topology's pipe axis of 1",
        (2,),
    ),
    "axis that is not built": Refusal(
        lambda: ds_lite.initialize(
            model=build(num_stages=None, topology=ProcessTopology(["pipe", "seq"], [1, 2])),
            config={**ONE, **SGD},
        ),
        r"sequences are spread over 2 ranks: .*use the axes pipe, data and model",
        (2,),
    ),
    # layers
    "no layers": Refusal(lambda: build([]), r"empty list of layers; give at least one"),
    "a number as layer": Refusal(
        lambda: build([*layers(2), 7]), r"layer 2 is a int; a layer is a LayerSpec", kind=TypeError
    ),
    "a class as layer": Refusal(
        lambda: build([*layers(2), nn.ReLU]),
        r"layer 2 is the class ReLU.*LayerSpec\(ReLU",
        kind=TypeError,
    ),
    "spec of a function": Refusal(
        lambda: LayerSpec(torch.tanh, 3), r"subclass of torch.nn.Module, got .*tanh", kind=TypeError
    ),
    "spec of a module": Refusal(
        lambda: LayerSpec(nn.Linear(2, 2)), r"subclass of torch.nn.Module, got Linear", kind=TypeError
    ),
    "a pipeline as layer": Refusal(
        lambda: build([build(layers(1))]),
        r"layer 0 is itself a PipelineModule; put its layers into one list",
        kind=NotImplementedError,
    ),
    "negative interval": Refusal(
        lambda: build(activation_checkpoint_interval=-1), r"activation_checkpoint_interval=-1 must be"
    ),
    # ties
    "missing tied attribute": Refusal(
        lambda: build([tie("wieght"), tie("weight")]),
        r"tied key 'word': Linear \(layer 0\) has no attribute 'wieght'; its parameters are \['weight', 'bi",
    ),
    "missing dotted attribute": Refusal(
        lambda: build([*layers(2), tie(["weight", "linear.bias"])]),
        r"tied key 'word': Linear \(layer 2\) has no attribute 'linear.bias'",
    ),
    "missing on the other stage": Refusal(
        lambda: build([*layers(3), tie(["bias", "none"])], 2), r"layer 3\) has no attribute 'none'", (2, 4)
    ),
    "tie of two shapes": Refusal(
        lambda: build([tie("weight"), tie("weight", nn.Linear, WIDTH, 4)]),
        r"tied key 'word': layer 1 has parameters .*\(4, 3\).* but layer 0 has .*\(3, 3\)",
    ),
    "key that is no name": Refusal(lambda: TiedLayerSpec("a.b", nn.Linear, 1, 1), r"tied key 'a.b' must be"),
    # batch numbers; on four ranks two stages leave two replicas
    "contradiction": Refusal(batch_numbers(10, 4, 1, 2), r"10 != 4 \* 1 \* 2: train_batch_size must", (4,)),
    "not divisible": Refusal(batch_numbers(10, 4, None, 2), r"10 != 4 \* 1 \* 2", (4,)),
    "world instead of replicas": Refusal(batch_numbers(16, 2, 2, 2), r"16 != 2 \* 2 \* 2", (4,)),
    "contradiction on one replica": Refusal(batch_numbers(7, 2, 3), r"7 != 2 \* 3 \* 1", (1,)),
    "zero": Refusal(batch_numbers(0, 1), r"train_batch_size=0 must be a whole number of at least 1"),
    "negative": Refusal(batch_numbers(None, -2), r"train_micro_batch_size_per_gpu=-2 must be"),
    "zero steps": Refusal(batch_numbers(None, 1, 0), r"gradient_accumulation_steps=0 must be"),
    "float": Refusal(batch_numbers(None, 1, 2.5), r"gradient_accumulation_steps=2.5 must be a whole number"),
    "text": Refusal(batch_numbers("8"), r"train_batch_size='8' must be a whole number"),
    "missing": Refusal(batch_numbers(), r"no batch key does not say how many samples.*give train_batch_size"),
    "steps alone": Refusal(batch_numbers(None, None, 4), r"gradient_accumulation_steps=4 alone does not say"),
    # the config
    "unknown key": Refusal(
        lambda: start({**ONE, **SGD, "grandient_accumulation_steps": 2}),
        r"unknown key 'grandient_accumulation_steps' \(did you mean 'gradient_accumulation_steps'\?\)",
    ),
    "no config": Refusal(
        lambda: ds_lite.initialize(model=build()), r"needs exactly one config, none was given; pass config="
    ),
    "two configs": Refusal(
        lambda: start({**ONE, **SGD}, args=Parsed()), r"needs exactly one config, 2 were given"
    ),
    "config that is a number": Refusal(lambda: start(3), r"config is a int; pass a dict", kind=TypeError),
    "no such file": Refusal(lambda: start("no/such.json"), r"no/such.json: cannot be read: No such file"),
    "no model": Refusal(
        lambda: ds_lite.initialize(config=ONE), r"initialize needs a model; pass a PipelineModule"
    ),
    "other number of replicas": Refusal(
        lambda: start({**ONE, **SGD, "data_parallel_size": 7}),
        r"data_parallel_size=7 in the config, but the ranks form \d replicas; remove the key",
    ),
    "ZeRO-3": Refusal(
        lambda: start({**ONE, **SGD, "zero_optimization": {"stage": 3}}),
        r"stage=3 is refused.*write 0, 1 or 2",
    ),
    "two precisions": Refusal(
        lambda: start({**ONE, **SGD, "fp16": {"enabled": True}, "bf16": {"enabled": True}}),
        r"fp16.enabled and bf16.enabled are both true; keep one",
    ),
    # optimizer and schedule
    "optimizer with a typo": Refusal(
        lambda: start({**ONE, "optimizer": {"type": "AdmW", "params": {"lr": 1e-3}}}),
        r"optimizer.type='AdmW' is not in torch.optim; did you mean AdamW\?",
    ),
    "optimizer option with a typo": Refusal(
        lambda: start({**ONE, "optimizer": {"type": "SGD", "params": {"lrr": 1e-3}}}),
        r"optimizer.params do not fit SGD: .*'lrr'.*correct the config",
    ),
    "negative rate": Refusal(
        lambda: start({**ONE, "optimizer": {"type": "SGD", "params": {"lr": -1.0}}}),
        r"optimizer.params do not fit SGD: Invalid learning rate: -1.0; correct the config",
    ),
    "optimizer that is text": Refusal(
        lambda: start({**ONE}, optimizer="SGD"), r"optimizer is a str; pass an Optimizer", kind=TypeError
    ),
    "unknown schedule": Refusal(
        lambda: start({**ONE, **SGD, "scheduler": {"type": "WarmupRL", "params": {}}}),
        r"'WarmupRL' is unknown; the nearest is 'WarmupLR'",
        early=False,
    ),
    "schedule without optimizer": Refusal(
        lambda: start({**ONE, "scheduler": {"type": "WarmupLR", "params": {}}}),
        r"schedule needs an optimizer; name one",
        early=False,
    ),
    # calls that a pipeline engine does not offer
    "forward": Refusal(
        lambda: start()(torch.ones(1, WIDTH)), r"no forward\(\); call train_batch\(\)", kind=RuntimeError,
        early=False,
    ),
    "backward": Refusal(
        lambda: start().backward(torch.ones(())), r"no backward\(\); train_batch\(\) does", kind=RuntimeError,
        early=False,
    ),
    "step": Refusal(
        lambda: start().step(), r"no step\(\); train_batch\(\) does", kind=RuntimeError, early=False
    ),
    # training that cannot be
    "without optimizer": Refusal(
        lambda: start(ONE).train_batch(iter(pairs(1))), r"train_batch\(\) needs an optimizer; name one",
        early=False,
    ),
    "other batch size": Refusal(
        lambda: start({**SGD, "train_micro_batch_size_per_gpu": 4}).set_train_batch_size(7),
        r"7 != 4 \* \d \* \d: train_batch_size must",
        early=False,
    ),
    "reduction that is not offered": Refusal(
        lambda: start().eval_batch(iter(pairs(1)), reduce_output="sum"),
        r"reduce_output='sum' is not offered; choose 'avg' or None",
        early=False,
    ),
    "no micro-batches": Refusal(
        lambda: start().eval_batch(iter(pairs(1)), num_micro_batches=0),
        r"micro_batches=0 is not a positive integer.*choose micro_batches >= 1",
        early=False,
    ),
}  # fmt: skip


def _refusals(rank: int, names: list[str]) -> dict[str, str]:
    """Make each mistake; nothing may have been sent before the message, so the next one can follow."""
    messages = {}
    for name in names:
        case = REFUSALS[name]
        with comm.record() as ledger:
            try:
                case.call()
            except case.kind as error:
                messages[name] = re.sub("0x[0-9a-f]+", "0x", str(error))  # addresses of functions
            else:
                raise AssertionError(f"{name}: not refused on rank {rank}")
        assert re.search(case.match, messages[name]), f"{name}: {messages[name]!r} lacks {case.match!r}"
        assert SECTION.search(messages[name]), f"{name}: {messages[name]!r} does not say where to read"
        assert not (case.early and ledger.rows), f"{name}: collectives before the refusal: {ledger.rows}"
    return messages


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_a_mistake_is_refused_alike_on_every_rank_before_any_collective(world: Any, nprocs: int) -> None:
    names = [name for name, case in REFUSALS.items() if nprocs in case.worlds]
    assert len(names) >= 40
    first, *others = world(_refusals, nprocs, names)
    for name, message in first.items():
        assert all(messages[name] == message for messages in others), name


def _make_mistake(rank: int, name: str) -> None:
    REFUSALS[name].call()


LINES_OF_THE_ISSUE = [
    "3 stages on 4", "4 stages, 3 layers", "regex without match", "neither stages nor topology",
    "contradiction", "zero", "negative", "missing", "unknown key", "missing tied attribute",
    "forward", "backward", "step",
]  # fmt: skip


@pytest.mark.parametrize("name", LINES_OF_THE_ISSUE)
def test_nothing_is_left_behind_and_the_processes_go_on(world: Any, name: str) -> None:
    world(_right_numbers, 4)
    pids = world.pids()
    case = REFUSALS[name]
    world.raises(case.kind, case.match, _make_mistake, 4, name)
    assert world.pids() == pids


def _right_numbers(rank: int) -> tuple[int, int, int]:
    engine = start({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, **SGD}, num_stages=2)
    return engine.train_batch_size(), engine.micro_batch_size, engine.gradient_accumulation_steps()


def test_two_stages_on_four_ranks_are_two_replicas_in_the_batch_triangle(world: Any) -> None:
    assert world(_right_numbers, 4) == [(16, 2, 4)] * 4  # the world's size would give 2 steps


# ---------------------------------------------------------------------------- mistakes of one rank only


def _contradicting_mpu(rank: int) -> None:
    """With swapped axes ranks 0 and 3 stand where the model's grid puts them, ranks 1 and 2 do not."""
    start(num_stages=2, mpu=PipelineParallelGrid(ProcessTopology(["data", "pipe"], [2, 2])))


def test_an_mpu_that_contradicts_on_some_ranks_is_refused_on_all(world: Any) -> None:
    match = r"get_data_parallel_(rank|group)\(\) is .* but the PipelineModule's grid says .*\(§9.7\)$"
    world.raises(ValueError, match, _contradicting_mpu, 4)


def _agreeing_mpu(rank: int) -> float:
    mpu = PipelineParallelGrid(ProcessTopology(["pipe", "data"], [2, 2]))
    return float(start(num_stages=2, mpu=mpu).train_batch(iter(pairs(1))))


def test_an_mpu_that_agrees_is_accepted(world: Any) -> None:
    assert len(set(world(_agreeing_mpu, 4))) == 1


def _wrong_data(rank: int, kind: str, on: list[int]) -> None:
    engine = start({**ONE, **SGD, "gradient_accumulation_steps": 2}, num_stages=2)
    good = pairs(2)
    if kind.startswith("batch_fn"):
        engine.set_batch_fn(lambda item: item)
    loader = DataLoader(TensorDataset(torch.ones(4, WIDTH), torch.ones(4, WIDTH)))
    source: Any = {
        "list": good,
        "DataLoader": loader,
        "batch_fn list": good,
        "batch_fn DataLoader": loader,
        "three": iter([(1, 2, 3)] * 2),
        "tensor": iter([torch.ones(2, WIDTH)] * 2),
        "dict": iter([{"x": 1, "y": 2}] * 2),
        "number": 5,
        "short": iter(good[:1]),
        "own error": _breaks(),
    }[kind]
    engine.train_batch(source if rank in on else iter(good))


def _breaks() -> Iterator[Any]:
    yield pairs(1)[0]
    raise LookupError("record 17 is broken")


WRONG_DATA = {
    "list": (TypeError, r"data_iter on stage \d .* is a list, which starts anew.*iter\(loader\)"),
    "DataLoader": (TypeError, r"data_iter on stage \d .* is a DataLoader, which starts anew"),
    "batch_fn list": (TypeError, r"is a list, which starts anew"),
    "batch_fn DataLoader": (TypeError, r"is a DataLoader, which starts anew"),
    "three": (TypeError, r"micro-batch 0 on stage \d .* is a tuple of length 3; .*\(inputs, labels\)"),
    "tensor": (TypeError, r"micro-batch 0 on stage \d .* is a Tensor; .*\(inputs, labels\)"),
    "dict": (TypeError, r"micro-batch 0 on stage \d .* is a dict; .*\(inputs, labels\)"),
    "number": (TypeError, r"data_iter on stage \d .* is a int"),
    "short": (ValueError, r"ended after 1 of 2 micro-batches on stage \d"),
    "own error": ((LookupError, RuntimeError), r"record 17 is broken"),
}


@pytest.mark.parametrize("kind", WRONG_DATA)
def test_wrong_data_on_any_rank_is_told_to_all(world: Any, kind: str) -> None:
    error, match = WRONG_DATA[kind]
    world.raises(error, match, _wrong_data, 2, kind, [0, 1])
    world.raises(error, match, _wrong_data, 4, kind, [3])  # the last stage of one replica only


def _unequal_calls(rank: int, what: str) -> None:
    engine = start({**ONE, **SGD, "gradient_accumulation_steps": 2}, num_stages=2)
    if what == "micro_batches" and rank == 1:
        engine.set_train_batch_size(3 * engine.grid.get_data_parallel_world_size())
    if what == "training" and rank == 1:
        engine.eval_batch(iter(pairs(3)))
    else:
        engine.train_batch(iter(pairs(3)))


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("what", ["micro_batches", "training"])
def test_ranks_that_make_different_calls_are_told_so(world: Any, nprocs: int, what: str) -> None:
    match = rf"{what} differs between ranks: \d here, from \d to \d over all.*same settings \(§9.2\)$"
    world.raises(ValueError, match, _unequal_calls, nprocs, what)


def _without_gradients(rank: int, context: str) -> None:
    engine = start(num_stages=2)
    with torch.no_grad() if context == "no_grad" else torch.inference_mode():
        engine.train_batch(iter(pairs(1)))


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_training_without_gradients_is_refused(world: Any, context: str) -> None:
    match = r"train_batch\(\) inside torch.no_grad\(\); use eval_batch\(\) or enable gradients \(§9.2\)$"
    world.raises(RuntimeError, match, _without_gradients, 2, context)


# -------------------------------------------------------------------- what goes wrong inside a schedule

OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dict": (lambda x: {"hidden": x}, "the output of {layer} is a dict"),
    "None": (lambda x: None, "the output of {layer} is a NoneType"),
    "float": (lambda x: 2.5, "the output of {layer} is a float"),
    "int": (lambda x: 7, "the output of {layer} is a int"),
    "text": (lambda x: "hidden", "the output of {layer} is a str"),
    "None inside": (lambda x: (x, None), "element 1 of the output of {layer} is a NoneType"),
    "number inside": (lambda x: (1, x), "element 0 of the output of {layer} is a int"),
    "nested": (lambda x: (x, (x, x)), "element 1 of the output of {layer} is a tuple"),
    "sparse": (lambda x: x.to_sparse(), r"the output of {layer} is torch.float32, torch.sparse_coo"),
}


class Gives(nn.Module):
    """A stage's last layer with an output that cannot travel."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(WIDTH, WIDTH), what

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.what][0](self.linear(x))


def _bad_output(rank: int, num_stages: int, bad_stage: int, what: str, evaluate: bool) -> None:
    content = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(num_stages)]
    content[bad_stage] = LayerSpec(Gives, what)
    engine = ds_lite.initialize(
        model=build(content, num_stages, partition_method="uniform"),
        config={**ONE, **SGD, "gradient_accumulation_steps": 3},
    )[0]
    with comm.record() as ledger:
        try:
            (engine.eval_batch if evaluate else engine.train_batch)(iter(pairs(3)))
        finally:
            if engine.stage_id == bad_stage:
                assert ledger.total(operation="send").calls == 0, "sent before it was checked"


@pytest.mark.parametrize("what", OUTPUTS)
def test_an_output_that_cannot_travel_names_layer_and_type_on_every_rank(world: Any, what: str) -> None:
    for nprocs, bad_stage, evaluate in ((2, 0, False), (4, 2, False), (3, 1, True)):
        match = OUTPUTS[what][1].replace("{layer}", rf"layer {bad_stage} \(Gives\)") + r".*\(§9.10\)$"
        world.raises(TypeError, match, _bad_output, nprocs, nprocs, bad_stage, what, evaluate)


class Broken(RuntimeError):
    """An error of the user's own."""


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken("valve 3 is stuck")


class Fails(nn.Module):
    """Fails at its n-th forward, or in the backward of it; harmless before."""

    def __init__(self, where: str, at: int) -> None:
        super().__init__()
        self.linear, self.where, self.left = nn.Linear(WIDTH, WIDTH), where, at

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and self.where == "forward":
            raise Broken("valve 3 is stuck")
        x = self.linear(x)
        return FailsBackward.apply(x) if self.left == 0 and self.where == "backward" else x


@dataclass(frozen=True)
class Failure:
    """Stage `stage` of `num_stages` fails in its `at`-th micro-batch of `m`; maybe in one replica only."""

    num_stages: int
    stage: int
    where: str
    at: int
    m: int
    replica: int | None = None
    tied: bool = False
    evaluate: bool = False


def _failure(rank: int, case: Failure) -> None:
    content: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(case.num_stages * 2)]
    if case.tied:
        content[0] = content[-2] = tie("weight")
    topology = ProcessTopology(["pipe", "data"], [case.num_stages, comm.get_world_size() // case.num_stages])
    if case.replica is None or topology.get_coord(rank).data == case.replica:
        content[case.stage * 2 + 1] = Fails(case.where, case.at)
    else:
        content[case.stage * 2 + 1] = Fails("nowhere", 0)
    engine = ds_lite.initialize(
        model=build(content, case.num_stages, partition_method="uniform"),
        config={**ONE, **SGD, "gradient_accumulation_steps": case.m},
    )[0]
    begin = time.monotonic()
    try:
        (engine.eval_batch if case.evaluate else engine.train_batch)(iter(pairs(case.m)))
    finally:
        assert time.monotonic() - begin < 10


FAILURES = [
    *(Failure(3, stage, "forward", at, 4) for stage in range(3) for at in (1, 4)),
    *(Failure(3, stage, "backward", 1, 4) for stage in range(3)),
    *(Failure(2, stage, "backward", 2, 2) for stage in range(2)),  # of the last micro-batch: others reduce
    Failure(2, 0, "backward", 2, 3),
    *(Failure(4, 0, "backward", at, at + 3) for at in (1, 2)),  # the next stage only sends from there on
    Failure(4, 1, "backward", 2, 6),
    Failure(2, 0, "backward", 1, 1, tied=True),
    Failure(3, 1, "forward", 2, 2, evaluate=True),
    Failure(2, 1, "forward", 1, 2, replica=0),
    Failure(2, 0, "backward", 2, 2, replica=1),
    Failure(2, 1, "forward", 2, 2, replica=1, evaluate=True),
]


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_a_layer_that_fails_on_one_stage_is_told_to_every_rank(world: Any, case: Failure) -> None:
    replicas = 1 if case.replica is None else 2
    world.raises(RuntimeError, "valve 3 is stuck", _failure, case.num_stages * replicas, case)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], type[Exception], str]] = {
    "vector": (lambda y, t: (y - t)[0], TypeError, r"one element, got shape \(3,\); reduce it in loss_fn"),
    "number": (lambda y, t: float((y - t).sum()), TypeError, r"one element, got float; reduce it in loss_fn"),
    "None": (lambda y, t: None, TypeError, r"one element, got NoneType"),
    "empty tuple": (lambda y, t: (), (TypeError, ValueError), r"loss_fn.*\(§9.2\)$"),
    "own error": (lambda y, t: {}["scale"], (KeyError, RuntimeError), r"scale"),
}  # fmt: skip


def _bad_loss(rank: int, what: str) -> None:
    model = PipelineModule(layers(), num_stages=2, loss_fn=LOSSES[what][0])
    engine = ds_lite.initialize(model=model, config={**ONE, **SGD, "gradient_accumulation_steps": 2})[0]
    engine.train_batch(iter(pairs(2)))


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_told_to_every_rank(world: Any, what: str) -> None:
    _, error, match = LOSSES[what]
    world.raises(error, match, _bad_loss, 2, what)


def _goes_on(rank: int) -> list[float]:
    """Every mistake that is found before anything moves leaves an engine as it was."""
    torch.manual_seed(1)
    config = {**ONE, **SGD, "gradient_accumulation_steps": 2}
    engines = [start(config, num_stages=2, content=layers()) for _ in range(2)]
    engines[1].module.load_state_dict(engines[0].module.state_dict())
    for mistake in (pairs(2), iter(pairs(1)), iter([]), iter([1, 2])):
        with contextlib.suppress(ValueError, TypeError):
            engines[0].train_batch(mistake)
        with contextlib.suppress(RuntimeError), torch.no_grad():
            engines[0].train_batch(iter(pairs(2)))
        with contextlib.suppress(RuntimeError):
            engines[0].step()
    losses = [[float(engine.train_batch(iter(pairs(2)))) for _ in range(3)] for engine in engines]
    assert losses[0] == losses[1] and losses[0][0] != losses[0][2]
    assert engines[0].global_steps == 3
    return losses[0]


def test_training_goes_on_after_a_mistake_as_if_there_had_been_none(world: Any) -> None:
    assert len({tuple(losses) for losses in world(_goes_on, 4)}) == 1
