"""The way back and the way in: a cut model's whole state dict, and shards from a whole one (§9.13)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.tags import cut_of, whole
from ds_lite.tensor_parallel.fused_layer import SharedQueryKeyValue

WEIGHTS = "model.safetensors"


def whole_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The entries of the state dict of the model before it was cut, one after the other, on every rank.

    Communication: one all-gather for each parameter that was cut, when its turn comes.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        path, _, key = name.rpartition(".")
        module = modules[path]
        if not isinstance(module, SharedQueryKeyValue):
            yield name, whole(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach()
        elif key == "weight":
            for part, value in module.whole_parameters().items():
                yield f"{path}.{part}", value


def gather_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model before it was cut, on every rank, bit for bit.

    Communication: one all-gather for each parameter that was cut.
    """
    return dict(whole_state(model))


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write what transformers' `from_pretrained` reads: one safetensors file of whole weights, and the
    config.

    Weights that are one in the model are written once. The first rank of the world writes; it needs room for
    the whole model.

    Communication: one all-gather for each parameter that was cut, then a barrier; every rank calls it.
    """
    from safetensors.torch import save_file

    is_writer = comm.get_rank() == 0
    kept: dict[str, Tensor] = {}
    again = {name for others in aliases_of(model).values() for name in others}
    for name, tensor in whole_state(model):
        if is_writer and name not in again:
            kept[name] = tensor.cpu().contiguous()
    if is_writer:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(kept, Path(folder) / WEIGHTS, metadata={"format": "pt"})
        if hasattr(config := getattr(model, "config", None), "save_pretrained"):
            config.save_pretrained(folder)  # type: ignore[union-attr]
    comm.barrier()


# ---------------------------------------------------------------------------------- without a whole model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have parameters without storage; buffers have their values.

    A model built so is planned and cut like any other, and then filled by `load_shards`.
    """
    usual = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tie is registered once more, as it is
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        usual(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = usual  # type: ignore[method-assign]


@torch.no_grad()
def load_shards(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Fill a model that was cut with its parts of whole weights, one weight after the other.

    `source` is a folder with safetensors files, a file, or a mapping. A rank never holds more than its part
    of the model and one whole weight. Parameters on the meta device get storage on `device`.

    Raises: ValueError for a weight that the source lacks, or that has another shape.
    """
    get, known = weights_by_name(source)
    aliases = aliases_of(model)
    made: dict[int, nn.Parameter] = {}
    for name, module, key in _places(model):
        found = next((alias for alias in [name, *aliases.get(name, ())] if alias in known), None)
        if found is None:
            raise ValueError(
                f"the source has no weight {name}; it has {len(known)}, such as "
                f"{', '.join(sorted(known)[:3])} (§9.13)"
            )
        tensor = get(found)
        for part_key, part in _parts(module, key, tensor).items():
            old = module._parameters[part_key]
            assert old is not None
            if tuple(part.shape) != tuple(old.shape):
                raise ValueError(
                    f"{found} has shape {tuple(tensor.shape)}, of which this rank would keep "
                    f"{tuple(part.shape)}, but {name} holds {tuple(old.shape)}; load the weights of the same "
                    f"model (§9.13)"
                )
            if old.is_meta:
                made[id(old)] = nn.Parameter(part.to(device, dtype or old.dtype), old.requires_grad)
                made[id(old)].__dict__.update(old.__dict__)
            else:
                old.copy_(part)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]
    buffers = dict(model.named_buffers())
    for name in buffers.keys() & known & model.state_dict(keep_vars=True).keys():
        buffers[name].copy_(get(name))


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each parameter of the whole model once: its name, and where it is held."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            is_split_off = isinstance(module, SharedQueryKeyValue) and key.startswith("kv_")
            if parameter is not None and id(parameter) not in seen and not is_split_off:
                seen.add(id(parameter))
                yield f"{path}.{key}".lstrip("."), module, key


def aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """Other names of tied weights: a file holds one of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: group[1:] for group in names.values() if len(group) > 1}


def _parts(module: nn.Module, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """What this rank keeps of a whole parameter, by the names of the parameters that hold it."""
    if isinstance(module, SharedQueryKeyValue):
        return module.parts_of(key, tensor)
    parameter = module._parameters[key]
    assert parameter is not None
    how = cut_of(parameter)
    return {key: tensor if how is None else how.take(tensor, comm.get_rank(how.group))}


def weights_by_name(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
) -> tuple[Callable[[str], Tensor], set[str]]:
    """How to get one weight by name, and the names there are."""
    if isinstance(source, Mapping):
        return source.__getitem__, set(source)
    from safetensors import safe_open

    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path} holds no safetensors file; give the folder of a saved model (§9.13)")
    where: dict[str, Any] = {}
    for file in files:
        opened = safe_open(file, framework="pt")  # memory-mapped; a weight is read when it is asked for
        where |= dict.fromkeys(opened.keys(), opened)
    return lambda name: where[name].get_tensor(name), set(where)
