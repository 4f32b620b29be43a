"""Pipeline parallelism: layers as specs, stages, schedules and their engine (§9.2 §9.9 §9.10).

The three names are loaded when they are asked for: the schedules and the simulator need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_lite.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ds_lite.pipe.module"), name)
