"""Recipes for layers, and what can be told of a layer without building it for good (§9.9.1 §9.9.2)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


class LayerSpec:
    """A layer that is built later: its class and the arguments for it.

    Raises: TypeError if `typename` is not a subclass of `torch.nn.Module`.

    >>> LayerSpec(nn.Linear, 2, 3, bias=False).build()
    Linear(in_features=2, out_features=3, bias=False)

    Source: §9.9.1; DeepSpeed `runtime/pipe/module.py::LayerSpec` @ 0.19.8.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise TypeError(
                f"LayerSpec needs a subclass of torch.nn.Module, got {typename!r}; put a plain function into "
                f"the list of layers as it is (§9.9.1)"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer; `log` prints which."""
        if log:
            print(f"ds_lite: building {self!r}", flush=True)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.module_args]
        arguments += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights with every other layer of the same `key`, on whatever stage.

    `forward_fn(module, x)` replaces the module's own forward at this position, e.g. an embedding used as the
    output head. `tied_weight_attr` names attributes that must exist; dots reach into submodules.

    Source: §9.9.2; DeepSpeed `runtime/pipe/module.py::TiedLayerSpec` @ 0.19.8.
    Differs: the whole module is tied, so every parameter with a gradient anywhere stays equal everywhere.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key:
            raise ValueError(f"tied key {key!r} must be a non-empty string without dots (§9.9.2)")
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


Layer = LayerSpec | nn.Module | Callable[..., Any]


def layer_name(layer: Layer) -> str:
    """The class name of a layer, or a function's own name; this is what `type:REGEX` looks at."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def parameter_count(layer: Layer) -> int:
    """Trainable parameters of a layer; a recipe is built without memory where the layer allows it."""
    if isinstance(layer, LayerSpec):
        layer = build_for_inspection(layer)
    if isinstance(layer, nn.Module):
        return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
    return 0


def build_for_inspection(spec: LayerSpec) -> nn.Module:
    """A throw-away copy of the layer on the meta device; a real one if its constructor needs values."""
    with rng_restored():
        try:
            with torch.device("meta"):
                return spec.build()
        except Exception:  # whatever a constructor raises because meta tensors have no values
            return spec.build()


def check_layers(layers: Sequence[Layer], pipeline_class: type[nn.Module]) -> list[Layer]:
    """The layers as a list. TypeError for one that cannot be called, ValueError for an empty list."""
    specs = list(layers)
    if not specs:
        raise ValueError("PipelineModule got an empty list of layers; give at least one per stage (§9.9)")
    for index, layer in enumerate(specs):
        if isinstance(layer, pipeline_class) or (
            isinstance(layer, LayerSpec) and issubclass(layer.typename, pipeline_class)
        ):
            raise NotImplementedError(
                f"layer {index} is itself a PipelineModule; put its layers into one list (§9.9)"
            )
        if isinstance(layer, type):
            name = layer.__name__
            raise TypeError(
                f"layer {index} is the class {name}; a class is no layer, write LayerSpec({name}, ...) or "
                f"{name}(...) (§9.9)"
            )
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise TypeError(
                f"layer {index} is a {type(layer).__name__}; a layer is a LayerSpec, a module or a "
                f"function (§9.9)"
            )
    return specs


def check_shared(specs: Sequence[Layer], stage_of: Callable[[int], int]) -> None:
    """ValueError for modules that share a parameter across stages: each stage would train its own copy."""
    first_use: dict[int, int] = {}
    for index, layer in enumerate(specs):
        for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
            other = first_use.setdefault(id(parameter), index)
            if stage_of(other) != stage_of(index):
                raise ValueError(
                    f"layers {other} and {index} share a parameter but are on stages {stage_of(other)} and "
                    f"{stage_of(index)}; use one TiedLayerSpec key for both (§9.9.2)"
                )


def check_ties(specs: Sequence[Layer]) -> dict[str, list[int]]:
    """Where each tied key is used, in order of the layers.

    Raises: ValueError if a named attribute is missing or the uses of a key do not have the same parameters.
    Checked on every rank, also on those that do not hold the layer.
    """
    uses: dict[str, list[int]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for index, spec in enumerate(specs):
        if not isinstance(spec, TiedLayerSpec):
            continue
        module = build_for_inspection(spec)
        for attribute in spec.tied_weight_attr:
            _check_attribute(module, attribute, spec, index)
        mine = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        first = shapes.setdefault(spec.key, mine)
        if mine != first:
            raise ValueError(
                f"tied key {spec.key!r}: layer {index} has parameters {mine} but layer {uses[spec.key][0]} "
                f"has {first}; all uses of a key must be the same module (§9.9.2)"
            )
        uses.setdefault(spec.key, []).append(index)
    return uses


def _check_attribute(module: nn.Module, attribute: str, spec: TiedLayerSpec, index: int) -> None:
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if value is None:
        names = [name for name, _ in module.named_parameters()]
        raise ValueError(
            f"tied key {spec.key!r}: {spec.typename.__name__} (layer {index}) has no attribute "
            f"{attribute!r}; its parameters are {names}; set tied_weight_attr (§9.9.2)"
        )


# ------------------------------------------------------------------------------------------- randomness


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def rng_restored() -> Iterator[None]:
    """Put all global generators back as they were, whatever the block draws or seeds."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
