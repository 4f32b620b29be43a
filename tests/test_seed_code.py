"""§9.2 §9.9 §9.11 The chapter's own code runs after one word is changed, `deepspeed` to `ds_lite`.

Guards against: an import path that scripts use and compat.py lacks, a signature that drifts, a config block
of the chapter that is passed over in silence. Later issues add the blocks of 9.4 and 9.12 to 9.15 and turn
the "not yet" of the JSON blocks into runs.
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import torch
from torch import nn

from ds_lite import toy

# The blocks as they are printed. In 9.2 two dots of ellipsis stand for the reader's own code: the arguments
# of a layer, which stay as they are (a layer may take `...`), and the loss, which is put in.
BLOCK_9_2 = """
from deepspeed.pipe import PipelineModule, LayerSpec

# 把每层写成一个 LayerSpec（延迟实例化，节省显存）
specs = [
    LayerSpec(EmbeddingLayer, vocab_size, hidden_size),
    *[LayerSpec(TransformerLayer, ...) for _ in range(num_layers)],
    LayerSpec(LMHeadLayer, hidden_size, vocab_size),
]

model = PipelineModule(
    layers=specs,
    num_stages=8,                         # 分成 8 段
    partition_method="uniform",           # 均匀分；其他：parameters / type:Transformer
    loss_fn=lambda outputs, labels: ...,
    activation_checkpoint_interval=1,
)

engine, _, _, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters()
)

# 训练循环用 train_batch() 而不是手写 forward/backward
loss = engine.train_batch(data_iter)
"""
BLOCK_9_9_1 = """
# pipe/module.py:30–75
class LayerSpec:
    def __init__(self, typename, *module_args, **module_kwargs):
        self.typename     = typename
        self.module_args  = module_args
        self.module_kwargs= module_kwargs
    def build(self):
        return self.typename(*self.module_args, **self.module_kwargs)
"""
BLOCK_9_9_2 = """
from deepspeed.pipe import LayerSpec
# pipe/module.py:77–84
class TiedLayerSpec(LayerSpec):
    def __init__(self, key, typename, *args, tied_weight_attr=['weight'], forward_fn=None, **kwargs):
        ...
"""
BLOCK_9_11 = """
from deepspeed.runtime.pipe.topology import ProcessTopology
# 形如：3D 训练 24 张卡，PP=4 / DP=3 / TP=2
topo = ProcessTopology(
    axes=['pipe', 'data', 'model'],
    dims=[4, 3, 2]
)
# 拿到 (pipe=2, data=1, model=0) 对应的全局 rank
g_rank = topo.get_rank(pipe=2, data=1, model=0)
# 沿 data 轴的所有 rank（用来建 DP 通信组）
dp_ranks = topo.get_axis_comm_lists('data')
"""
BLOCK_9_4 = """
from deepspeed.moe.layer import MoE

class MoEBlock(nn.Module):
    def __init__(self, dim, num_experts, ep_size):
        super().__init__()
        self.moe = MoE(
            hidden_size=dim,
            expert=Expert(dim),
            num_experts=num_experts,
            ep_size=ep_size,          # expert 并行度
            k=2,                       # top-2 路由
            min_capacity=4,
            use_residual=False,
        )
    def forward(self, x):
        out, l_aux, exp_counts = self.moe(x)
        return out, l_aux
"""
LOSS_9_4 = "loss = main_loss + 0.01 * l_aux"
BLOCK_9_12_4 = """
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, input): ...   # dist.all_to_all_single
    @staticmethod
    def backward(ctx, grad_output): ...   # 反方向再 all_to_all 一次
"""
JSON_9_3 = '{"tensor_parallel": {"tp_size": 4, "tp_grain_size": 8}, "zero_optimization": {"stage": 2}}'
JSON_9_4 = '{"zero_optimization": {"stage": 2, "moe_layer_size_threshold": 0, "moe_min_capacity": 4}}'
JSON_9_5 = '{"sequence_parallel_size": 4}'


def after_the_change(block: str) -> str:
    return block.replace("deepspeed", "ds_lite")


class EmbeddingLayer(nn.Embedding):
    pass


class TransformerLayer(nn.Module):
    def __init__(self, the_readers_arguments: Any) -> None:
        super().__init__()
        assert the_readers_arguments is ...
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class LMHeadLayer(nn.Linear):
    pass


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def run_block_9_2(rank: int, config_path: str) -> tuple[float, int, int]:
    import ds_lite

    torch.manual_seed(5)
    ids = torch.randint(11, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {
        "ds_lite": ds_lite,
        "EmbeddingLayer": EmbeddingLayer,
        "TransformerLayer": TransformerLayer,
        "LMHeadLayer": LMHeadLayer,
        "vocab_size": 11,
        "hidden_size": 6,
        "num_layers": 6,
        "args": argparse.Namespace(ds_lite_config=config_path),
        "data_iter": iter([(part, part) for part in ids]),
        "cross_entropy": cross_entropy,
    }
    block = BLOCK_9_2.replace("labels: ...", "labels: cross_entropy(outputs, labels)")
    exec(after_the_change(block), names)
    model = names["model"]
    return float(names["loss"]), model.stage_id, len(model.forward_funcs)


def test_the_training_script_of_9_2_runs_on_eight_stages(world: Any, tmp_path: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    results = world(run_block_9_2, 8, str(path))
    losses, stages, layers = zip(*results)
    assert len(set(losses)) == 1 and 0 < losses[0] < 10
    assert list(stages) == list(range(8))
    assert set(layers) == {1}, "eight layers on eight stages"


def test_the_sketch_of_layer_spec_builds_what_ours_builds() -> None:
    from ds_lite.pipe import LayerSpec

    names: dict[str, Any] = {}
    exec(after_the_change(BLOCK_9_9_1), names)
    arguments, options = (nn.Linear, 3, 5), {"bias": False}
    theirs, ours = names["LayerSpec"](*arguments, **options).build(), LayerSpec(*arguments, **options).build()
    assert repr(theirs) == repr(ours)
    assert theirs.weight.shape == ours.weight.shape == (5, 3)


def test_the_signature_of_tied_layer_spec_is_ours() -> None:
    from ds_lite.pipe import TiedLayerSpec

    names: dict[str, Any] = {}
    exec(after_the_change(BLOCK_9_9_2), names)
    theirs = inspect.signature(names["TiedLayerSpec"].__init__).parameters
    ours = inspect.signature(TiedLayerSpec.__init__).parameters
    keyword_only = {name for name, p in theirs.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keyword_only == {"tied_weight_attr", "forward_fn"}
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in keyword_only)
    assert list(theirs)[:3] == list(ours)[:3] == ["self", "key", "typename"]
    assert list(ours["tied_weight_attr"].default) == theirs["tied_weight_attr"].default


def test_the_topology_of_9_11_gives_the_numbers_of_the_chapter() -> None:
    names: dict[str, Any] = {}
    exec(after_the_change(BLOCK_9_11), names)
    assert names["g_rank"] == 14
    lists = names["dp_ranks"]
    assert len(lists) == 8 and lists[:3] == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]


def run_json_9_5(rank: int) -> list[float]:
    """The chapter's one key, and a model that knows nothing of it: four ranks share each sequence."""
    import ds_lite

    model = toy.GPT(toy.Shape(width=24, num_heads=4, num_blocks=2, context=8, vocabulary=19))
    settings = {"train_batch_size": 2, **json.loads(JSON_9_5)}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = ds_lite.initialize(model=model, config=settings)
    assert engine.grid.get_sequence_parallel_world_size() == 4
    ids = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(3):
        loss = toy.loss_fn(engine(ids[:, :-1]), ids[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_the_json_of_9_5_trains(world: Any) -> None:
    results = world(run_json_9_5, 4)
    assert all(losses == results[0] for losses in results) and results[0][-1] < results[0][0]


SMALL_GPT = toy.Shape(width=24, num_heads=4, num_blocks=2, context=8, vocabulary=19)


def run_json_9_3(rank: int) -> tuple[float, int]:
    """The chapter's three keys, on a GPT whose layers can be cut: 2 stages x 4 tensor-parallel ranks."""
    import ds_lite
    from ds_lite.pipe import PipelineModule

    specs = toy.parallel_layer_specs(SMALL_GPT)
    model = PipelineModule(specs, num_stages=2, loss_fn=toy.loss_fn, seed_layers=True)
    settings = {"train_batch_size": 4, "gradient_accumulation_steps": 2, **json.loads(JSON_9_3)}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = ds_lite.initialize(model=model, config=settings)
    generator = torch.Generator().manual_seed(5)
    batches = [
        (ids[:, :-1], ids[:, 1:]) for ids in torch.randint(19, (2, 2, 9), generator=generator).unbind()
    ]
    losses = [float(engine.train_batch(iter(batches))) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    return losses[-1], engine.grid.get_tensor_model_parallel_world_size()


def test_the_json_of_9_3_trains(world: Any) -> None:
    results = world(run_json_9_3, 8)
    assert len({loss for loss, _ in results}) == 1 and {size for _, size in results} == {4}


class Expert(nn.Linear):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)


def run_block_9_4(rank: int) -> tuple[float, list[int]]:
    """The block, the loss and the JSON of 9.4: four experts, two a rank, with ZeRO-2."""
    import ds_lite

    torch.manual_seed(0)
    names: dict[str, Any] = {"nn": nn, "Expert": Expert}
    exec(after_the_change(BLOCK_9_4), names)
    block = names["MoEBlock"](6, 4, 2)
    settings = {
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **json.loads(JSON_9_4),
    }
    engine, *_ = ds_lite.initialize(model=block, config=settings)
    x = torch.randn(16, 6)[8 * rank : 8 * rank + 8]
    losses = []
    for _ in range(5):
        out, names["l_aux"] = engine(x)
        names["main_loss"] = (out - x).square().mean()
        exec(LOSS_9_4, names)
        engine.backward(names["loss"])
        engine.step()
        losses.append(names["loss"].item())
    return losses[-1] / losses[0], block.moe.experts.numbers


def test_the_block_the_loss_and_the_json_of_9_4_train(world: Any) -> None:
    (first, its_experts), (second, other_experts) = world(run_block_9_4, 2)
    assert first < 0.98 and second < 0.98
    assert (its_experts, other_experts) == ([0, 1], [2, 3])


def test_the_all_to_all_of_9_12_4_takes_what_ours_takes() -> None:
    from ds_lite.moe.sharded_moe import _AllToAll

    names: dict[str, Any] = {"torch": torch}
    exec(after_the_change(BLOCK_9_12_4), names)
    theirs = inspect.signature(names["_AllToAll"].forward).parameters
    ours = inspect.signature(_AllToAll.forward).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default is None for name in list(ours)[len(theirs) :])
