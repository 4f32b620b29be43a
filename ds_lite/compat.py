"""DeepSpeed's import paths, under `ds_lite` (§9.2).

A script of the chapter runs after one word is changed, so `ds_lite.runtime.pipe.schedule` must import
although the code stands in `ds_lite/pipe/schedule.py`.
`PATHS` is the whole table; `install` makes Python honour it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# DeepSpeed's path without its first word -> where each name stands. "*" takes every public name of a module.
PATHS: dict[str, dict[str, str]] = {
    "runtime": {},
    "runtime.pipe": {"PipelineModule": "pipe", "LayerSpec": "pipe", "TiedLayerSpec": "pipe"},
    "runtime.pipe.engine": {"*": "pipe.engine"},
    "runtime.pipe.module": {"*": "pipe.module"},
    "runtime.pipe.p2p": {"*": "pipe.p2p"},
    "runtime.pipe.schedule": {"*": "pipe.schedule", "**": "pipe.instructions"},
    "runtime.pipe.topology": {"*": "topology", "PipelineParallelGrid": "grid"},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {"*": "checkpointing"},
    "runtime.dataloader": {"RepeatingLoader": "data"},
    "runtime.domino": {"*": "domino"},
    "runtime.domino.async_linear": {"*": "domino.async_linear"},
    "runtime.domino.transformer": {"*": "domino.transformer"},
    "runtime.engine": {"DeepSpeedEngine": "engine:Engine"},
    "runtime.lr_schedules": {"*": "lr_schedules"},
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.parallel_state_sp": {"*": "sequence.groups"},
    "runtime.sequence_parallel.ulysses_sp": {"*": "sequence.ulysses_sp"},
    "runtime.utils": {
        "partition_uniform": "pipe.partition",
        "partition_balanced": "pipe.partition",
        "set_random_seed": "pipe.building",
    },
    "moe.sharded_moe": {
        "*": "moe.gate",
        "**": "moe.noise",
        "_AllToAll": "moe.dispatch",
        "_capacity": "moe.gate",
    },
    "module_inject": {
        "AutoTPConfig": "tensor_parallel.partition_config",
        "AutoTPPresets": "tensor_parallel.partition_config",
        "PartitionType": "tensor_parallel.partition_config",
        "TPLayerSpec": "tensor_parallel.partition_config",
        "merge_autotp_configs": "tensor_parallel.partition_config",
        "replace_policies": "tensor_parallel.fused_qkv",
    },
    "module_inject.autotp_config": {"*": "tensor_parallel.partition_config"},
    "module_inject.auto_tp": {"AutoTP": "tensor_parallel.auto_tp"},
    "module_inject.fusedqkv_utils": {
        "prepare_tp_fused_qkvw": "tensor_parallel.replace_module",
        "require_tp_fused_qkvw": "tensor_parallel.replace_module",
    },
    "module_inject.layers": {
        "LinearLayer": "tensor_parallel.layers",
        "LinearAllreduce": "tensor_parallel.layers",
    },
    "module_inject.replace_module": {"ReplaceWithTensorSlicing": "tensor_parallel.replace_module"},
    "module_inject.replace_policy": {"replace_policies": "tensor_parallel.fused_qkv"},
    "module_inject.tp_shard": {"*": "tensor_parallel.tp_shard"},
    "utils": {"RepeatingLoader": "data"},
}


def install() -> None:
    """Make the paths of the table importable; doing it twice changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _contents(path: str) -> dict[str, object]:
    names: dict[str, object] = {}
    for name, target in PATHS[path].items():
        module_path, _, original = target.partition(":")
        module = importlib.import_module(f"ds_lite.{module_path}")
        if name.startswith("*"):
            names.update({key: value for key, value in vars(module).items() if not key.startswith("_")})
        else:
            names[name] = getattr(module, original or name)
    return names


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "ds_lite" or rest not in PATHS:
            return None
        is_package = any(other.startswith(f"{rest}.") for other in PATHS)
        return ModuleSpec(fullname, _TableLoader(), origin="ds_lite/compat.py", is_package=is_package)


class _TableLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_contents(module.__name__.partition(".")[2]))
