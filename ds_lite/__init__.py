"""ds_lite: the engine of chapter 9 on DeepSpeed, in code short enough to read whole.

`initialize` makes an engine; `pipe` holds layers, schedules and stages. N processes equal one process: the
loss, every gradient, the norm and the weights after the step.

Public names are loaded when they are asked for: the command line and the schedules start without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ds_lite import compat

if TYPE_CHECKING:
    from ds_lite import checkpointing, comm
    from ds_lite.comm import init_distributed
    from ds_lite.engine import Engine
    from ds_lite.forming import tp_model_init
    from ds_lite.grid import PipelineParallelGrid
    from ds_lite.initialize import add_config_arguments, initialize
    from ds_lite.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from ds_lite.pipe.engine import PipelineEngine
    from ds_lite.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__version__ = "0.1.0"

_HOME = {
    "Engine": "engine",
    "LayerSpec": "pipe.module",
    "PipeDataParallelTopology": "topology",
    "PipeModelDataParallelTopology": "topology",
    "PipelineEngine": "pipe.engine",
    "PipelineModule": "pipe.module",
    "PipelineParallelGrid": "grid",
    "ProcessTopology": "topology",
    "TiedLayerSpec": "pipe.module",
    "add_config_arguments": "initialize",
    "checkpointing": "",
    "comm": "",
    "init_distributed": "comm",
    "initialize": "initialize",
    "tp_model_init": "forming",
}
__all__ = [
    "Engine",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "tp_model_init",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"ds_lite.{_HOME[name] or name}")
    return getattr(module, name) if _HOME[name] else module


class _Package(ModuleType):
    """`ds_lite.initialize` is the function, also after Python has imported the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_the_module = name == "initialize" and isinstance(value, ModuleType)
        super().__setattr__(name, value.initialize if is_the_module else value)


sys.modules[__name__].__class__ = _Package
compat.install()
