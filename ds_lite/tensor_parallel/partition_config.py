"""The user's own plan: patterns that say which weights are cut, and presets of them (§9.13)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ds_lite.tensor_parallel.fused_qkv import FusedLayout


class PartitionType(Enum):
    """What happens to a weight: its output columns are dealt, its input columns, or nothing."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """Weights whose names match one of `patterns` (re.match on "model.layers.0.mlp.up_proj.weight").

    `shape` says how a fused weight is packed along `partition_dim`: (3, -1) three equal parts,
    ((q, k, v), -1) parts of these sizes; `per_head` that it holds q, k and v for one key and value head after
    the other. `gather_output` gives every rank all columns. With `grad_allreduce` a skipped
    weight is used inside a region, so that each rank has a part of its gradient.

    Raises: ValueError for an unknown partition type, and for a shape of another form.

    Source: §9.13; DeepSpeed `module_inject/autotp_config.py::TPLayerSpec` @ 0.19.8.
    Differs: DeepSpeed takes a fused weight without shape as packed head by head; here `per_head` says so.
    """

    patterns: Sequence[str]
    partition_type: PartitionType | str = PartitionType.COLUMN
    shape: Any = None
    partition_dim: int | None = None
    model_types: Sequence[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False
    per_head: bool = False
    is_preset: bool = False  # may match nothing

    def __post_init__(self) -> None:
        if not isinstance(self.partition_type, PartitionType):
            known = [kind.value for kind in PartitionType]
            if str(self.partition_type).lower() not in known:
                raise ValueError(
                    f"partition_type={self.partition_type!r} is unknown; choose one of {known} (§9.13)"
                )
            self.partition_type = PartitionType(str(self.partition_type).lower())
        if isinstance(self.patterns, str):
            self.patterns = [self.patterns]
        if not isinstance(self.patterns, Sequence) or not all(isinstance(one, str) for one in self.patterns):
            raise ValueError(
                f"patterns={self.patterns!r} of partition_config must be a list of regular expressions "
                "(§9.13)"
            )
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"the pattern {pattern!r} of partition_config is no regular expression: {error} (§9.13)"
                ) from None
        self.parts()

    def parts(self) -> tuple[int, ...] | int | None:
        """How the partitioned dimension is packed: sizes, or a number of equal parts; None if it is not."""
        if self.shape is None:
            return None
        usual = 1 if self.partition_type is PartitionType.ROW else 0
        dim = usual if self.partition_dim is None else self.partition_dim
        shape = list(self.shape) if isinstance(self.shape, (list, tuple)) else []
        wanted = shape[dim] if 0 <= dim < len(shape) else None
        if isinstance(wanted, int) and wanted > 0:
            return wanted
        if isinstance(wanted, (list, tuple)) and wanted:
            if all(isinstance(size, int) and size > 0 for size in wanted):
                return tuple(wanted)
        raise ValueError(
            f"shape={self.shape!r} of partition_config does not say how dim {dim} is packed; write a number "
            f"of equal parts there, as in (3, -1), or their sizes, as in ((q, k, v), -1) (§9.13)"
        )

    def matches(self, name: str, model_type: str | None = None) -> bool:
        """Whether the spec speaks of a weight."""
        if self.model_types and str(model_type).lower() not in [one.lower() for one in self.model_types]:
            return False
        return any(re.match(pattern, name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """A list of specs, of which the first that matches a weight counts; what none matches stays whole.

    With `strict_mode` a linear layer that none matches is an error.

    Source: §9.13; DeepSpeed `module_inject/autotp_config.py::AutoTPConfig` @ 0.19.8.
    Differs: a pattern that matches nothing is an error; `embedding_partition_dim` is accepted and unused.
    """

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: Sequence[str] = ("lm_head", "embed_out")
    use_default_specs: bool = True
    strict_mode: bool = False

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> AutoTPConfig:
        """From the JSON form.

        Raises: ValueError for keys that do not exist.
        """
        specs = [_checked(TPLayerSpec, spec, "layer_specs") for spec in given.get("layer_specs", [])]
        return _checked(cls, {**given, "layer_specs": specs}, "partition_config")

    def find_matching_spec(self, name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """The first spec that speaks of a weight."""
        return next((spec for spec in self.layer_specs if spec.matches(name, model_type)), None)


def _checked(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    known = [name for name in kind.__dataclass_fields__ if name != "is_preset"]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{where} has no key {', '.join(unknown)}; its keys are {', '.join(known)} (§9.13)")
    if kind is TPLayerSpec and "patterns" not in given:
        raise ValueError("an entry of layer_specs has no patterns, so it speaks of no weight (§9.13)")
    return kind(**given)


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """The override's specs before those of the base; the other settings are the override's."""
    return replace(override, layer_specs=[*override.layer_specs, *base.layer_specs])


# ------------------------------------------------------------------------------------------------- presets

# Model type -> names of layers inside a block that are (row, column, skipped), and shapes of fused ones.
_LLAMA = (("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ())
_PRESETS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "bloom": (("dense", "dense_4h_to_h"), ("query_key_value", "dense_h_to_4h"), ()),
    "mixtral": (
        ("o_proj", "w2", "down_proj"),
        ("q_proj", "k_proj", "v_proj", "w1", "w3", "gate_up_proj"),
        ("gate",),
    ),
    "phi3": (("o_proj", "down_proj"), ("qkv_proj", "gate_up_proj"), ()),
}


class AutoTPPresets:
    """Plans of known architectures."""

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig:
        """The plan of a model type.

        Raises: ValueError for one that has no preset.

        Source: §9.13; DeepSpeed `module_inject/autotp_config.py::AutoTPPresets` @ 0.19.8.
        """
        if model_type.lower() not in _PRESETS:
            raise ValueError(
                f"preset_model={model_type!r} is unknown; choose one of {sorted(_PRESETS)}, or leave it out "
                f"and the model's code decides (§9.13)"
            )
        row, column, skip = _PRESETS[model_type.lower()]
        kinds = ((PartitionType.ROW, row), (PartitionType.COLUMN, column), (PartitionType.SKIP, skip))
        specs = [
            TPLayerSpec([rf".*\.({'|'.join(names)})(\.weight)?$"], partition_type=kind, is_preset=True)
            for kind, names in kinds
            if names
        ]
        return AutoTPConfig(layer_specs=specs)


def config_of(partition_config: Mapping[str, Any] | None, preset_model: str | None) -> AutoTPConfig | None:
    """What the config's `tensor_parallel` block says of layers; None if the model's code decides.

    With both, the preset counts where `use_default_specs` is true and no pattern of the user's matches.
    """
    own = None if partition_config is None else AutoTPConfig.from_dict(partition_config)
    preset = None if preset_model is None else AutoTPPresets.get_preset(preset_model)
    if own is None or preset is None or not own.use_default_specs:
        return own or preset
    return merge_autotp_configs(preset, own)


def layout_from(spec: TPLayerSpec | None, sizes: tuple[int, ...]) -> FusedLayout | None:
    """The layout that a user's spec declares for a fused weight with parts of these sizes; None if it says
    none.

    Raises: ValueError for other parts.
    """
    if spec is None or (spec.shape is None and not spec.per_head):
        return None
    parts, rows = spec.parts(), sum(sizes)
    given = sizes if parts is None else (rows // parts,) * parts if isinstance(parts, int) else parts
    if given != sizes or (isinstance(parts, int) and rows % parts):
        raise ValueError(
            f"shape={spec.shape!r} of partition_config makes parts of {list(given)} rows, but by its heads "
            f"the weight has parts of {list(sizes)} (§9.13)"
        )
    return FusedLayout(None if spec.per_head else 1, ("q", "k", "v")[-len(sizes) :])
