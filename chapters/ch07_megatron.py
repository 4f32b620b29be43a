"""§9.7 How it relates to Megatron-LM.

Question: two libraries share a job; how does one learn which ranks the other put together?

Run time: about 20 s on two cores.   python chapters/ch07_megatron.py

You will see who does what, another library's layer trained over its own groups, with and without its marks,
our grid read by Megatron's names, and an mpu that is refused.

Chapter against source: with a PipelineModule DeepSpeed asserts that `mpu` is None and takes the module's own
grid, so an mpu never tells it about stages; here an mpu that agrees is welcome. For the tensor axis DeepSpeed
looks for tensor_model_parallel, slice_parallel and model_parallel in this order, and so does ds_lite.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite.launch import run
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.tensor_parallel import enter, leave

LAW = 1e-10  # what N processes may differ from one in float64
CONFIG = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
CONFIG |= {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": 1}}
# (steps, replicas, micro-batches, inputs and labels, samples, width)
DATA = torch.randn(3, 2, 2, 2, 3, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
CUT = {"1.up.weight": 0, "1.up.bias": 0, "1.down.weight": 1}  # dimensions; the rest is whole on every rank
WORDS = "data_parallel", "tensor_model_parallel", "pipeline_model_parallel", "model_parallel"
NAMES = [f"get_{word}_{what}" for word in WORDS for what in ("rank", "world_size")]
JOBS = """\
                                         DeepSpeed               Megatron
ZeRO, offload, fp16 and bf16, clipping   yes                     an optimizer of its own
pipeline                                 PipelineModule, 1F1B    its own, also interleaved
tensor-parallel layers and losses        AutoTP, lighter         yes
models, data, tokenizer, command line    no                      yes"""


def main() -> None:
    print(f"1 The division of labour.\n\n{JOBS}")
    ranks = run(one_rank, 4)
    a_foreign_mpu(ranks)
    our_grid_under_its_names(ranks)
    print("\nNext: chapters/ch09_pipeline_module.py   Lab: python -m ds_lite lab 2 --nproc 4")


def a_foreign_mpu(ranks: list[dict[str, Any]]) -> None:
    print("\n2 Another library made groups for data=2 x model=2, data fastest; our grid stands on them.\n")
    print("\n".join(f"rank {number}   {rank['marked'][2]}" for number, rank in enumerate(ranks)))
    print("\n3 Predict: its layer's parameters carry no marks. Is the gradient norm still right?\n")
    print("        one process  marked  no marks")
    norms = one_process()[0], ranks[0]["marked"][0], ranks[0]["no marks"][0]
    for step, three in enumerate(zip(*norms, strict=True)):
        print("step {}  {:>11.4f}  {:.4f}  {:>8.4f}".format(step, *three))
    for how in ("marked", "no marks"):
        print(f"{how}: weights within {LAW:g} of one process: {all(rank[how][1] <= LAW for rank in ranks)}")
    print("without marks a part passes for a copy: rank 0's is sent to all, half of the layer is gone")


def our_grid_under_its_names(ranks: list[dict[str, Any]]) -> None:
    print("\n4 The other way: a library that knows these names only reads our grid of pipe=2 x model=2.\n")
    for name in NAMES:
        print(f"{name:<40}" + "  ".join(f"rank {r}: {rank['names'][name]}" for r, rank in enumerate(ranks)))
    print("\n5 A PipelineModule of pipe=2 x data=2, and an mpu with these axes the other way round:")
    print(f"\n{ranks[0]['refused']}")


class MLP(nn.Module):
    """A layer of the other library: cut by hand over its group, and marked as Megatron marks."""

    def __init__(self, mpu: Any, is_marked: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.group = None if mpu is None else mpu.get_tensor_model_parallel_group()
        for name, parameter in self.named_parameters(prefix="1"):
            parameter.data = my_part(name, parameter.data, mpu)
            parameter.tensor_model_parallel = is_marked and name in CUT

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(enter(x, self.group)))
        return leave(F.linear(hidden, self.down.weight), self.group) + self.down.bias


def my_part(name: str, whole: Tensor, mpu: Any) -> Tensor:
    is_cut = mpu is not None and name in CUT
    return whole.chunk(2, CUT[name])[mpu.get_tensor_model_parallel_rank()].clone() if is_cut else whole


def make_mpu(**families: list[list[int]]) -> SimpleNamespace:
    """What the other library hands over: its names, on process groups of its own."""
    mpu = SimpleNamespace()
    for family, lists in families.items():
        made = [(ranks, dist.new_group(ranks)) for ranks in lists]
        group = next(group for ranks, group in made if dist.get_rank() in ranks)
        words = {"group": lambda group=group: group, "rank": group.rank, "world_size": group.size}
        vars(mpu).update({f"get_{family}_{word}": answer for word, answer in words.items()})
    return mpu


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    """Norms of the steps and weights after them, in plain torch."""
    model, norms = nn.Sequential(nn.LayerNorm(6), MLP(None, False)).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in DATA.flatten(1, 2):
        torch.stack([F.mse_loss(model(x), y) for x, y in step]).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.named_parameters())


def train(mpu: Any, is_marked: bool) -> tuple[list[float], float, str]:
    """Norms of the steps, how far the weights are from one process's, and this rank's place in the grid."""
    model, norms, truth = nn.Sequential(nn.LayerNorm(6), MLP(mpu, is_marked)).double(), [], one_process()[1]
    engine, *_ = ds_lite.initialize(model=model, mpu=mpu, config=CONFIG)
    for step in DATA[:, mpu.get_data_parallel_rank()]:
        for x, y in step:
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    gaps = [(my_part(n, truth[n], mpu) - p).abs().max().item() for n, p in model.named_parameters()]
    groups = f"data group {engine.grid.ranks('data')}   model group {engine.grid.ranks('model')}"
    return norms, max(gaps), f"{engine.grid.place}   {groups}"


def one_rank() -> dict[str, Any]:
    """One rank: two trainings on a foreign mpu, our grid's answers, and what a contradiction hears."""
    mpu = make_mpu(data_parallel=[[0, 1], [2, 3]], tensor_model_parallel=[[0, 2], [1, 3]])
    found: dict[str, Any] = {"marked": train(mpu, True), "no marks": train(mpu, False)}
    ours = ds_lite.PipelineParallelGrid(ds_lite.ProcessTopology(axes=["pipe", "model"], dims=[2, 2]))
    found["names"] = {name: getattr(ours, name)() for name in NAMES}
    model = PipelineModule([LayerSpec(nn.Linear, 6, 6)] * 2, num_stages=2, loss_fn=F.mse_loss)
    other = make_mpu(data_parallel=[[0, 2], [1, 3]], pipeline_model_parallel=[[0, 1], [2, 3]])
    try:
        ds_lite.initialize(model=model, mpu=other, config=CONFIG)
    except ValueError as error:
        found["refused"] = str(error)
    return found


if __name__ == "__main__":
    main()
