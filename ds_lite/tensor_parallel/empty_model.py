"""A model without weights from the name of its class or from its configuration, to plan for it (§9.13)."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn


def empty_model(name: str) -> nn.Module:
    """A model on the meta device, in which weights have shapes and no values.

    `name` is a class of transformers, which gets its default configuration; a config.json or the folder that
    holds one; or `package.module:Class`, called without arguments.

    Raises: ValueError for a name that leads to no model, and without transformers.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name} is no class that can be imported: {error} (§9.13)") from None
    else:
        make = _from_config(Path(name)) if Path(name).exists() else _of_transformers(name)
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} made a {type(model).__name__}, not a torch module (§9.13)")
    return model


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "transformers is not installed; pip install 'ds-lite[hf]', or name a class of your own as "
            "package.module:Class (§9.13)"
        ) from None
    return transformers


def _of_transformers(name: str) -> Any:
    made_of: Any = getattr(_transformers(), name, None)
    config = getattr(made_of, "config_class", None)
    if config is None:
        raise ValueError(
            f"{name} is neither a file nor a model class of transformers; try LlamaForCausalLM, or the path "
            f"of a config.json (§9.13)"
        )
    return lambda: made_of(config())


def _from_config(path: Path) -> Any:
    transformers = _transformers()
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(**given)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is no configuration of a model: {error} (§9.13)") from None
    names = given.get("architectures") or []
    usual = transformers.AutoModelForCausalLM.from_config
    return partial(getattr(transformers, names[0], usual) if names else usual, config)
