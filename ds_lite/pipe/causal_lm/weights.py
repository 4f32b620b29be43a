"""Which weights of a whole model a stage keeps, and where those come from that have no values yet (§9.9)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ds_lite.tensor_parallel.whole_model import aliases_of, weights_by_name


@torch.no_grad()
def keep_only(
    model: nn.Module, stage: nn.Module, names: Mapping[str, str], source: str | os.PathLike[str] | None
) -> None:
    """Let the model's parameters go that the stage does not hold; fill those that it holds.

    `names` are those of the stage's parameters, and the model's. Each tensor that is wanted is read once.

    Raises: ValueError for a parameter without values and without a source, or that the source lacks or has in
    another shape.
    """
    held = {id(parameter): names[name] for name, parameter in stage.named_parameters()}
    empty = [names[name] for name, parameter in stage.named_parameters() if parameter.is_meta]
    if source is None and empty:
        raise ValueError(
            f"{len(empty)} parameters of this stage have no values, e.g. {empty[0]}; give "
            "from_model(weights=...) a folder of safetensors files (§9.9)"
        )
    known = _Known(model, source) if source is not None else None
    instead: dict[int, nn.Parameter] = {}  # a tie stays one object
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in instead:
                instead[id(parameter)] = _kept(parameter, held.get(id(parameter)), known)
            module._parameters[key] = instead[id(parameter)]


def _kept(parameter: nn.Parameter, name: str | None, known: _Known | None) -> nn.Parameter:
    """What takes a parameter's place: nothing if it is nobody's here, else the source's values or its own."""
    if name is None:
        return parameter if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    if known is None:
        return parameter
    value = known.value(name, parameter)
    return nn.Parameter(value.to(parameter.dtype).clone(), parameter.requires_grad)


class _Known:
    """The weights of a source, by the names that the model has for them."""

    def __init__(self, model: nn.Module, source: str | os.PathLike[str]) -> None:
        self.source = source
        self._get, self._names = weights_by_name(source)
        self._aliases = aliases_of(model)

    def value(self, name: str, parameter: nn.Parameter) -> Tensor:
        found = next((one for one in (name, *self._aliases.get(name, ())) if one in self._names), None)
        if found is None:
            raise ValueError(f"{self.source} has no {name}; give the folder of this model (§9.9)")
        value = self._get(found)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{found} is {tuple(value.shape)} in {self.source}, in the model {tuple(parameter.shape)}; "
                "give the folder of this model (§9.9)"
            )
        return value
