"""The user's plan against the model: which layers it speaks of, and what it may not say (§9.13)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_lite.tensor_parallel.kinds import is_linear, is_stack_of_experts
from ds_lite.tensor_parallel.partition_config import AutoTPConfig, PartitionType, TPLayerSpec


class UserPlan:
    """A `partition_config` for one model; without a config it says nothing and forbids nothing."""

    def __init__(self, config: AutoTPConfig | None, model: nn.Module) -> None:
        self.config, self.model = config, model
        self.modules = dict(model.named_modules())
        self.model_type = getattr(getattr(model, "config", None), "model_type", None)
        self.used: set[int] = set()

    def kept(self, name: str, block: nn.Module) -> dict[str, str]:
        """What the user's plan keeps out of all regions, by its name in the block."""
        if self.config is None:
            return {}
        kept = {}
        for inner, module in block.named_modules():
            if is_linear(module) or is_stack_of_experts(module):
                spec = self.spec_of(f"{name}.{inner}".strip("."))
                if spec is None:
                    kept[inner] = "no pattern of partition_config matches it"
                elif spec.partition_type is PartitionType.SKIP:
                    kept[inner] = "partition_config skips it"
                elif spec.gather_output:
                    kept[inner] = "partition_config gathers its output"
        return kept

    def spec_of(self, name: str) -> TPLayerSpec | None:
        """The spec that speaks of a module's weights."""
        if self.config is None:
            return None
        module = self.modules[name]
        weights = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False) if key != "bias"]
        for weight in weights:
            spec = self.config.find_matching_spec(weight, self.model_type)
            if spec is not None:
                self.used.add(id(spec))
                return spec
        return None

    def check_roles(self, roles: Mapping[str, str]) -> None:
        """The plan must not contradict the code, which makes a layer "column", "row", or whole for a reason.

        Raises: ValueError for a layer that it cuts otherwise.
        """
        for linear, role in roles.items():
            self._check_role(linear, role)

    def _check_role(self, linear: str, role: str) -> None:
        spec = self.spec_of(linear)
        if spec is None or spec.partition_type is PartitionType.SKIP or spec.gather_output:
            return
        wanted = PartitionType(spec.partition_type).value
        if role != wanted:
            is_cut = role in ("row", "column")
            what = f"is {role}-parallel in the code" if is_cut else f"stays whole: {role}"
            raise ValueError(
                f"partition_config says {wanted} for {linear}, but it {what}; name all layers of a "
                f"region, or use gather_output=True for one whose output is used whole (§9.13)"
            )

    def check_patterns(self) -> None:
        """Every pattern speaks of something, and in strict mode every layer is spoken of.

        Raises: ValueError otherwise.
        """
        config = self.config
        if config is None:
            return
        for spec in config.layer_specs:
            if id(spec) not in self.used and not spec.is_preset:
                for name, module in self.modules.items():
                    if any(True for _ in module.parameters(recurse=False)):
                        self.spec_of(name)
                if id(spec) in self.used:
                    continue
                raise ValueError(
                    f"the pattern {', '.join(spec.patterns)} of partition_config matches no weight of "
                    f"{type(self.model).__name__}; names look like {self._example()} (§9.13)"
                )
        if config.layer_specs and not self.used:
            raise ValueError(
                f"the preset matches no weight of {type(self.model).__name__}; names look like "
                f"{self._example()}, remove preset_model (§9.13)"
            )
        unmatched = [
            name
            for name, module in self.modules.items()
            if is_linear(module)
            and self.spec_of(name) is None
            and not any(pattern in name for pattern in config.lm_head_patterns)
        ]
        if config.strict_mode and unmatched:
            raise ValueError(
                "strict_mode: no pattern of partition_config matches the linear layers "
                f"{', '.join(unmatched[:6])}{' ...' if len(unmatched) > 6 else ''}; add them, with "
                f"partition_type skip if they stay whole (§9.13)"
            )

    def _example(self) -> str:
        return next(f"{name}.weight" for name, module in self.modules.items() if is_linear(module))
