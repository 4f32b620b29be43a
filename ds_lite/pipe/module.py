"""A model as a list of layers, of which each stage builds only its own (§9.9).

A `LayerSpec` is a recipe: class and arguments, built where it is needed. `PipelineModule` cuts the list into
stages, builds the layers of this rank's stage one at a time from seeds that do not depend on the cut, and
runs them. Layers that share weights across stages are `TiedLayerSpec`s with one key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_lite import checkpointing, comm
from ds_lite.agreement import raise_together
from ds_lite.gradients import Tie
from ds_lite.grid import PipelineParallelGrid
from ds_lite.layout import check_stages, stages_of
from ds_lite.pipe.building import (
    LayerSpec,
    TiedLayerSpec,
    check_layers,
    check_shared,
    check_ties,
    layer_name,
    parameter_count,
    rng_restored,
    set_random_seed,
)
from ds_lite.pipe.causal_lm.hull import Hull
from ds_lite.pipe.causal_lm.layers import Piece, layers_of, names_in_pipeline
from ds_lite.pipe.causal_lm.loss import CausalLoss
from ds_lite.pipe.causal_lm.weights import keep_only
from ds_lite.pipe.partition import partition_layers
from ds_lite.tags import tag
from ds_lite.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(nn.Module):
    """The layers of this rank's stage, out of a model given as a list.

    `layers` holds LayerSpecs, modules and plain callables; each is called with the previous output as its
    only argument. A tuple stays one tuple; between stages a list or a named tuple arrives as a plain one.
    Give `num_stages` or a `topology` with a pipe axis. State-dict keys are `{global layer index}.…` and
    `tied_modules.{key}.…`, the same for every number of stages.

    Units: `activation_checkpoint_interval` in layers, 0 is off. `base_seed` with `seed_layers`: layer i is
    built from seed base_seed + i, and runs its k-th forward from seed base_seed * k + i.
    Raises: ValueError for neither or contradicting num_stages and topology, a world that stages do not
    divide, more stages than layers, a partition method that fits nothing, a tie that lacks its attribute;
    TypeError for a layer that cannot be called. All from values equal on every rank, before any collective.

    Source: §9.9; DeepSpeed `runtime/pipe/module.py::PipelineModule` @ 0.19.8.
    Differs: without `seed_layers` too, initial weights do not depend on the split: one number drawn from the
    global generator seeds all layers. `activation_checkpoint_func` defaults to non-reentrant checkpointing.
    Shapes may always change between micro-batches, so `dynamic_shape` changes nothing.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[..., Any]],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if not comm.is_initialized():
            comm.init_distributed(verbose=False)
        self.loss_fn, self.seed_layers, self.seed_fn, self.base_seed = (
            loss_fn,
            seed_layers,
            seed_fn,
            base_seed,
        )
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.dynamic_shape = dynamic_shape
        self.micro_offset = 0
        self._specs = check_layers(layers, type(self))
        self._topology = _agreed_topology(num_stages, topology)
        self.has_given_topology = topology is not None
        self.num_stages = max(1, self._topology.get_dim("pipe"))
        self.global_rank = comm.get_rank()
        coord = self._topology.get_coord(self.global_rank)
        self.stage_id: int = getattr(coord, "pipe", 0)
        self.parts = self._partition(partition_method)
        check_shared(self._specs, self.stage_owner)
        self._tied_specs = check_ties(self._specs)
        self._grid: PipelineParallelGrid | None = None
        self._ties: list[Tie] = []
        self.hull: Hull | None = None
        self._build()

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> PipelineModule:
        """A causal language model of transformers as a pipeline; nothing of it is written anew.

        The model is taken over: this stage keeps its layers, the rest loses its storage. A model whose
        parameters are on the meta device (`parameters_on_meta`) is filled from a safetensors folder, of which
        this stage reads its own tensors. Batches are (inputs, labels), where inputs are input_ids or a tuple
        of input_ids, attention_mask, position_ids; or dicts with these names and labels. `loss_fn` gets the
        logits and the labels; by default it is the model's own loss. `options` are those of the class.

        Shapes: ids, masks, positions, labels (B, T); logits (B, T, V).
        Raises: ValueError for a model whose layers are not found, weights that are nowhere, and what the
        class refuses.
        """
        hull = Hull(model)
        module = cls(layers_of(hull), num_stages, topology, loss_fn or CausalLoss(hull), **options)
        module.hull = hull
        module.fill(weights)
        return module

    def fill(self, weights: str | os.PathLike[str] | None) -> None:
        """Keep this stage's weights of the model around, and read those that have no values yet."""
        assert self.hull is not None
        keep_only(self.hull.model, self, self.original_names(), weights)

    def original_names(self) -> dict[str, str]:
        """This stage's parameters and what the model that they come from calls them."""
        return {name: self.original_name(name) for name, _ in self.named_parameters()}

    def original_name(self, name: str) -> str:
        """What the model that this pipeline was made from calls a parameter of any stage; else the name."""
        starts = {} if self.hull is None else names_in_pipeline(self.hull)
        found = (there + name[len(here) :] for here, there in starts.items() if name.startswith(here))
        return next(found, name)

    def adopt(self) -> None:
        """Take this stage's modules as the model around has them now, after AutoTP has cut it."""
        for _, piece in self._pieces():
            piece.adopt()

    def _pieces(self) -> list[tuple[str, Piece]]:
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Piece)]

    # -------------------------------------------------------------------------------------- building

    def _partition(self, method: str) -> list[int]:
        names = [layer_name(spec) for spec in self._specs]
        check_stages(self.num_stages, len(names))
        return partition_layers(
            method, names, lambda: [parameter_count(spec) for spec in self._specs], self.num_stages
        )

    def _build(self) -> None:
        """Build this stage's layers, one at a time, each from its own seed; the generators are put back."""
        start, stop = self.parts[self.stage_id], self.parts[self.stage_id + 1]
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        base = self.base_seed if self.seed_layers else int(torch.randint(2**31, ()))
        for index in range(start, stop):
            spec = self._specs[index]
            with rng_restored():
                first_use = self._tied_specs[spec.key][0] if isinstance(spec, TiedLayerSpec) else index
                (self.seed_fn if self.seed_layers and self.seed_fn else set_random_seed)(base + first_use)
                self.forward_funcs.append(self._build_layer(index, spec))

    def _build_layer(
        self, index: int, spec: LayerSpec | nn.Module | Callable[..., Any]
    ) -> Callable[..., Any]:
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                module = spec.build()
                self.tied_modules[spec.key] = module
                self.tag_parameters()
            tied = self.tied_modules[spec.key]
            return tied if spec.forward_fn is None else partial(spec.forward_fn, tied)
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        return layer

    def tag_parameters(self) -> None:
        """Say which parameters are tied, and by which key."""
        for key, module in self.tied_modules.items():
            for parameter in module.parameters():
                tag(parameter, tied=key)

    def parameters_elsewhere(self) -> list[nn.Parameter]:
        """Those of layers that were given as modules and belong to other stages only."""
        here = {id(parameter) for parameter in self.parameters()}
        layers = [spec for spec in self._specs if isinstance(spec, nn.Module)]
        return [p for layer in layers for p in layer.parameters() if id(p) not in here]

    def bind(self, grid: PipelineParallelGrid) -> None:
        """Take the groups of `grid`: make the groups of the ties and start tied copies equal.

        Communication: creates one group per tie that crosses stages, broadcasts its parameters from the
        lowest stage. Called once by `initialize`, on every rank.
        """
        self._grid = grid
        self._ties = []
        for key in sorted(self._tied_specs):
            stages = sorted({self.stage_owner(index) for index in self._tied_specs[key]})
            if len(stages) == 1:
                continue
            ranks, group = grid.stage_group(stages)
            if group is None:
                continue
            self._ties.append(Tie(key, tuple(ranks), group))
            trainable = [p.requires_grad for p in self.tied_modules[key].parameters()]
            raise_together(None, group, trainable_parameters_of_a_tie=sum(trainable))
            for tensor in [*self.tied_modules[key].parameters(), *self.tied_modules[key].buffers()]:
                comm.broadcast(tensor.detach(), src=ranks[0], group=group)

    # --------------------------------------------------------------------------------------- running

    def forward(self, forward_input: Any) -> Any:
        """Run this stage's layers; slices of the checkpoint interval are recomputed in backward."""
        self.micro_offset += 1
        interval, x = self.activation_checkpoint_interval, forward_input
        count = len(self.forward_funcs)
        if interval == 0 or not torch.is_grad_enabled():
            return self._run(0, count, self.micro_offset, x)
        for start in range(0, count, interval):
            stop = min(start + interval, count)
            run = partial(self._run, start, stop, self.micro_offset)
            x = self.activation_checkpoint_func(run, x) if self._is_checkpointable(start, stop) else run(x)
        return x

    def _run(self, start: int, stop: int, micro_offset: int, x: Any) -> Any:
        for local_index in range(start, stop):
            layer = self.forward_funcs[local_index]
            if not self.seed_layers:
                x = layer(x)
                continue
            with rng_restored():
                index = self.parts[self.stage_id] + local_index
                (self.seed_fn or set_random_seed)(self.base_seed * micro_offset + index)
                x = layer(x)
        return x

    def _is_checkpointable(self, start: int, stop: int) -> bool:
        """With a list of class names, all of the slice must be on it; without, one parameter is enough."""
        layers = self.forward_funcs[start:stop]
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(_has_parameters(layer) for layer in layers)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute in slices of `interval` layers from the next forward on; 0 is off."""
        if not isinstance(interval, int) or interval < 0:
            raise ValueError(
                f"activation_checkpoint_interval={interval!r} must be a number of layers >= 0; 0 is "
                f"off (§9.2)"
            )
        self.activation_checkpoint_interval = interval

    # --------------------------------------------------------------------------------------- answers

    def topology(self) -> ProcessTopology:
        """The topology that fixes this module's stage."""
        return self._topology

    def take_topology(self, topology: ProcessTopology) -> None:
        """Refine a topology that `num_stages` alone left open; the stages stay the same ranks.

        Raises: ValueError if this rank would be on another stage.
        """
        stage_id = getattr(topology.get_coord(self.global_rank), "pipe", 0)
        if topology.get_dim("pipe") != self.num_stages or stage_id != self.stage_id:
            raise ValueError(
                f"this rank built stage {self.stage_id} of {self.num_stages} and the new topology says stage "
                f"{stage_id} of {topology.get_dim('pipe')}; keep pipe the outermost axis (§9.11)"
            )
        self._topology = topology

    def mpu(self) -> PipelineParallelGrid:
        """The grid, which speaks the mpu protocol; there is one after `initialize`."""
        if self._grid is None:
            raise ValueError(
                "the PipelineModule has no grid yet; call ds_lite.initialize(model=...) first (§9.7)"
            )
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def partitions(self) -> list[int]:
        """num_stages + 1 bounds; stage s holds the layers bounds[s] .. bounds[s+1]-1."""
        return list(self.parts)

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a global layer index."""
        for stage in range(self.num_stages):
            if self.parts[stage] <= layer_idx < self.parts[stage + 1]:
                return stage
        raise ValueError(f"layer_idx={layer_idx} is not one of the {len(self._specs)} layers (§9.9)")

    def last_layer_name(self) -> str:
        """The last local layer in words, for messages about this stage's output."""
        index = self.parts[self.stage_id + 1] - 1
        return f"layer {index} ({layer_name(self._specs[index])})"

    def ties(self) -> list[Tie]:
        """The ties of this rank that cross stages."""
        return list(self._ties)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, comm.ProcessGroup]]:
        """Every parameter that is summed over stages, with its group."""
        return [(p, tie.group) for tie in self._ties for p in self.tied_modules[tie.key].parameters()]

    def shown(self, outputs: Any) -> Any:
        """What a caller sees of the last layer's outputs: logits, without what a router's loss needs."""
        has_sums = self.hull is not None and self.hull.router is not None
        return outputs[0] if has_sums else outputs

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Losses to report beside the main one; a subclass may return some."""
        return None

    def extra_repr(self) -> str:
        start, stop = self.parts[self.stage_id], self.parts[self.stage_id + 1]
        return f"stage {self.stage_id} of {self.num_stages}: layers {start}..{stop - 1} of {len(self._specs)}"


def _has_parameters(layer: Callable[..., Any]) -> bool:
    inner = layer.args[0] if isinstance(layer, partial) and layer.args else layer  # a tie with forward_fn
    return isinstance(inner, nn.Module) and any(True for _ in inner.parameters())


def _agreed_topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    """The topology given, or pipe x data over the world; ValueError for what contradicts."""
    world_size = comm.get_world_size()
    if topology is None:
        if num_stages is None:
            raise ValueError("PipelineModule needs num_stages or a topology; neither was given (§9.2)")
        return stages_of(num_stages, world_size)
    if topology.world_size() != world_size:
        raise ValueError(
            f"the topology has {topology.world_size()} ranks and the world {world_size}; start "
            f"{topology.world_size()} processes or change an axis (§9.11)"
        )
    stages = max(1, topology.get_dim("pipe"))
    if num_stages is not None and num_stages != stages:
        raise ValueError(
            f"num_stages={num_stages} contradicts the topology's pipe axis of {stages}; give one of "
            f"them (§9.9)"
        )
    return topology
