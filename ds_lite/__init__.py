"""ds_lite: the engine of chapter 9 on DeepSpeed, in code short enough to read whole.

`initialize` makes an engine; `pipe` holds layers, schedules and stages. N processes equal one process: the
loss, every gradient, the norm and the weights after the step.
"""

from ds_lite import comm, compat
from ds_lite.comm import init_distributed
from ds_lite.engine import Engine
from ds_lite.grid import PipelineParallelGrid
from ds_lite.initialize import add_config_arguments, initialize
from ds_lite.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_lite.pipe.engine import PipelineEngine
from ds_lite.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__version__ = "0.1.0"

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
    "comm",
    "init_distributed",
    "initialize",
]

compat.install()
