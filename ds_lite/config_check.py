"""§9.2 Checking a ds_config that was read: which keys exist, what their values may be, and how errors read.

The walk over the keys collects every unknown key and every "auto" first, so that one run shows them all; the
types and ranges are those of the fields in `config_keys.py`.
"""

import difflib
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ds_lite.config_ignored import AUTO_IS_A_VALUE, OTHER_SPELLINGS, UNUSED_KEYS
from ds_lite.config_keys import Block, DSConfig

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

SECTION_OF = {  # every other key belongs to §9.2
    "zero_optimization": "§9.3",
    "fp16": "§9.3",
    "bf16": "§9.3",
    "tensor_parallel": "§9.3",
    "expert_parallel": "§9.4",
    "sequence_parallel_size": "§9.5",
    "pipeline": "§9.9",
    "compile": "§9.13",
}


@dataclass
class _Findings:
    """What a walk over all keys met, as dotted names."""

    unknown: list[str] = field(default_factory=list)
    auto: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def checked(config: Any, source: str) -> DSConfig:
    """The typed config; `source` (a file name) opens every message."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: holds a {type(config).__name__}; a ds_config is one JSON object (§9.2)")
    found = _Findings()
    used = _used_part(config, DSConfig, "", found)
    if found.unknown:
        raise ValueError(f"{source}: unknown key {', '.join(found.unknown)}; correct or remove it (§9.2)")
    if found.auto:
        raise ValueError(
            f'{source}: "auto" given for {", ".join(found.auto)}; some trainers fill this in for DeepSpeed, '
            "ds_lite has none: write the value, or leave the key out (§9.2)"
        )
    if found.misplaced:
        raise ValueError(f"{source}: {'; '.join(found.misplaced)} (§9.2)")
    try:
        for key in BATCH_KEYS:
            whole_number(key, used.get(key))
        result = DSConfig.model_validate(used)
        _one_spelling(used.get("tensor_parallel", {}))
    except ValidationError as error:
        raise ValueError(f"{source}: {_readable(error)}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    result._unused = tuple(found.unused)
    return result


def _used_part(given: Mapping[str, Any], block: type[Block], path: str, found: _Findings) -> dict[str, Any]:
    """Copy of `given` with the keys that `block` has; everything else goes to `found`."""
    used: dict[str, Any] = {}
    for written, value in given.items():
        name = written if path else OTHER_SPELLINGS.get(written, written)
        dotted = f"{path}{name}"
        field_info = block.model_fields.get(name)
        if dotted not in AUTO_IS_A_VALUE:
            found.auto += _autos(value, dotted, field_info)
        if field_info is None:
            known = dotted in UNUSED_KEYS
            (found.unused if known else found.unknown).append(
                dotted if known else _with_suggestion(dotted, block)
            )
            continue
        if name in used:
            found.misplaced.append(f"{dotted} is given under two spellings; keep one of them")
            continue
        if (field_info.json_schema_extra or {}) == {"unused": True}:
            found.unused.append(dotted)
        inner = _block_of(field_info)
        if inner is None:
            used[name] = _copied(value)
        elif isinstance(value, Mapping):
            used[name] = _used_part(value, inner, f"{dotted}.", found)
        elif value is not None:  # null stands for an absent block
            found.misplaced.append(f"{dotted}={value!r} must be a JSON object with keys of its own")
    return used


def _block_of(info: FieldInfo) -> type[Block] | None:
    candidates = (info.annotation, *get_args(info.annotation))
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Block)), None)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _autos(value: Any, dotted: str, info: FieldInfo | None) -> list[str]:
    """Every place in a value, nested objects of free form included, that says "auto"."""
    if isinstance(value, Mapping) and (info is None or _block_of(info) is None):
        return [place for name, item in value.items() for place in _autos(item, f"{dotted}.{name}", None)]
    if isinstance(value, list):
        return [place for i, item in enumerate(value) for place in _autos(item, f"{dotted}[{i}]", None)]
    if not isinstance(value, str) or value != "auto" or dotted in AUTO_IS_A_VALUE:
        return []
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
    types = (info.annotation, *get_args(info.annotation)) if info else ()
    kind = next((text for one in types for known, text in kinds.items() if one is known), "the value itself")
    return [f"'{dotted}' (write {kind})"]


def _with_suggestion(dotted: str, block: type[Block]) -> str:
    path, dot, name = dotted.rpartition(".")
    ignored = [key.rpartition(".") for key in UNUSED_KEYS]
    siblings = [*block.model_fields, *(key for parent, _, key in ignored if parent == path)]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    likely = [path + dot + key for key in close] or [
        known for known in _all_names(DSConfig, "") if known.endswith(f".{name}") or known == name
    ]
    return f"'{dotted}' (did you mean '{likely[0]}'?)" if likely else f"'{dotted}'"


def _all_names(block: type[Block], path: str) -> list[str]:
    names = []
    for name, info in block.model_fields.items():
        inner = _block_of(info)
        names += [f"{path}{name}"] + (_all_names(inner, f"{path}{name}.") if inner else [])
    return names


def whole_number(key: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"{key}={value!r} must be a whole number of at least 1; correct it or leave it out (§9.2)"
        )
    return int(value)


def _one_spelling(given: Mapping[str, Any]) -> None:
    given = {key: value for key, value in given.items() if value is not None}
    degrees = {f"tensor_parallel.{key}": given[key] for key in ("tp_size", "autotp_size") if key in given}
    if "tp_size" in given.get("tp", {}):
        degrees["tensor_parallel.tp.tp_size"] = given["tp"]["tp_size"]
    grains = {"tensor_parallel.tp_grain_size": given["tp_grain_size"]} if "tp_grain_size" in given else {}
    if "tp_grain_size" in given.get("tp", {}):
        grains["tensor_parallel.tp.tp_grain_size"] = given["tp"]["tp_grain_size"]
    for what, spellings in (("degree", degrees), ("grain", grains)):
        if len(set(spellings.values())) > 1:
            listed = ", ".join(f"{key}={value}" for key, value in spellings.items())
            raise ValueError(f"{listed} contradict each other; keep one spelling of the {what} (§9.3)")


def _readable(error: ValidationError) -> str:
    """pydantic's findings in our form, one part per key."""
    parts: dict[str, str] = {}
    for one in error.errors():
        names: list[str] = []
        block: type[Block] | None = DSConfig
        for name in one["loc"]:  # the tail of a location may name a branch of a union
            if block is None or name not in block.model_fields:
                break
            names.append(str(name))
            block = _block_of(block.model_fields[str(name)])
        dotted, section = ".".join(names), SECTION_OF.get(names[0], "§9.2")
        rule = one["msg"].replace("Input should be", "must be")
        found = f"{dotted} is missing" if one["type"] == "missing" else f"{dotted}={one['input']!r} {rule}"
        parts.setdefault(dotted, f"{found}; correct it or leave it out ({section})")
    return "; ".join(parts.values())
