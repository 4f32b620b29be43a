"""§9.2 The ds_config: JSON file, path or dict in, one typed `DSConfig` out; and the batch triangle.

Nothing here needs torch or a process group, so every rank checks the same values before the first collective.
The keys are the fields of `config_keys.py`; `config_check.py` compares a file with them.

Source: §9.2-9.5; DeepSpeed 0.19.8 `deepspeed/runtime/config.py::DeepSpeedConfig`.
Differs: a misspelt key is an error; "auto" is an error; gradients are not clipped unless the config says so.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ds_lite.config_check import BATCH_KEYS, checked, whole_number
from ds_lite.config_keys import DSConfig


@dataclass(frozen=True)
class Batch:
    """The three batch numbers, all known: train = micro * accumulation steps * data-parallel size."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def resolve_batch(
    train_batch_size: int | None,
    micro_batch: int | None,
    gradient_accumulation_steps: int | None,
    data_parallel_size: int,
) -> Batch:
    """Complete the three batch numbers from the ones that are given.

    Units: samples, except the accumulation steps, which count micro-batches. Only data-parallel ranks
    multiply: the stages of a pipeline, and ranks that share a sequence or a layer, work on the same samples.
    Raises: ValueError for a value below 1 or not whole, for a product that does not hold, and when neither
    batch size is given.

    >>> resolve_batch(16, 2, None, data_parallel_size=2)
    Batch(train_batch_size=16, micro_batch_size=2, gradient_accumulation_steps=4)
    >>> resolve_batch(8, None, None, data_parallel_size=2)
    Batch(train_batch_size=8, micro_batch_size=4, gradient_accumulation_steps=1)
    """
    train, micro, steps = (
        whole_number(key, value)
        for key, value in zip(BATCH_KEYS, (train_batch_size, micro_batch, gradient_accumulation_steps))
    )
    ranks = whole_number("data_parallel_size", data_parallel_size)
    if ranks is None:
        raise ValueError("data_parallel_size is missing; give the number of data-parallel ranks (§9.2)")
    if train is None and micro is None:
        given = f"gradient_accumulation_steps={steps} alone" if steps else "no batch key"
        raise ValueError(
            f"{given} does not say how many samples a step takes; "
            "give train_batch_size or train_micro_batch_size_per_gpu (§9.2)"
        )
    if train is None:
        assert micro is not None
        steps = steps or 1
        return Batch(micro * steps * ranks, micro, steps)
    if micro is None:
        steps = steps or 1
        micro = train // (steps * ranks)
    elif steps is None:
        steps = train // (micro * ranks)
    if train != micro * steps * ranks:
        raise ValueError(
            f"{train} != {micro} * {steps} * {ranks}: train_batch_size must equal "
            "train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size; "
            "change one of them, or leave one key out and let it follow from the others (§9.2)"
        )
    return Batch(train, micro, steps)


def load_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> DSConfig:
    """Read and check a whole ds_config, without changing what was passed in.

    Raises: ValueError that names the file and every offending key: missing file, invalid JSON, duplicate key,
    unknown key, "auto", a value of the wrong type or out of range. TypeError for another kind of argument.

    >>> load_config({"train_batch_size": 8, "zero_optimization": {"overlap_comm": True}}).unused
    ['zero_optimization.overlap_comm']
    """
    if isinstance(config, Mapping):
        return checked(config, "the config dict")
    if isinstance(config, (str, os.PathLike)):
        return checked(_read(Path(config)), str(Path(config)))
    raise TypeError(f"config is a {type(config).__name__}; pass a dict or the path of a JSON file (§9.2)")


def refuse_what_is_not_built(config: DSConfig) -> None:
    """Raise for every switch that this version understands but cannot honour yet; nothing passes silently.

    Raises: ValueError with one line per switch.
    """
    refusals = list(_not_built(config))
    if refusals:
        raise ValueError("\n".join(refusals))


def _not_built(config: DSConfig) -> list[str]:
    def not_yet(what: str, remedy: str, section: str) -> str:
        return f"{what} is not yet built into ds_lite; {remedy} ({section})"

    tensor, degree = config.tensor_parallel, config.expert_parallel.expert_tensor_parallel_size
    switches = [
        (
            config.zero_optimization.stage == 3,
            "zero_optimization.stage=3 is refused: it would gather every parameter for each micro-batch, "
            "where a pipeline already gives a rank only the layers of its own stage, and expert parallelism "
            "only its own experts; write 0, 1 or 2 (§9.3)",
        ),
        (
            bool(tensor.injection_policy_tuple),
            "tensor_parallel.injection_policy_tuple is not read: the model's code says which outputs are "
            "summed; where it does not, write tensor_parallel.partition_config (§9.13)",
        ),
        (
            tensor.tp.mpu is not None or tensor.tp.tp_group is not None,
            "tensor_parallel.tp.mpu and tp.tp_group are not read; pass initialize(mpu=...) (§9.7)",
        ),
        (
            degree not in (1, tensor.degree),
            f"expert_parallel.expert_tensor_parallel_size={degree} is neither 1 nor the degree of "
            f"tensor_parallel, {tensor.degree}: AutoTP cuts experts like every other layer; leave the key "
            "out (§9.4)",
        ),
        (
            bool(config.compile.passes),
            not_yet(f"compile.passes={config.compile.passes}", "leave the key out", "§9.13"),
        ),
    ]
    return [message for applies, message in switches if applies]


def _read(path: Path) -> Any:
    def object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"duplicate key {', '.join(map(repr, twice))}; keep one of them")
        return dict(pairs)

    def not_a_number(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a JSON number; write a finite one")

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=object_without_duplicates, parse_constant=not_a_number)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; pass the path of a JSON file (§9.2)"
        ) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"{path}: not valid JSON at {place}: {error.msg}; correct the file (§9.2)") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8; pass a JSON file (§9.2)") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error} (§9.2)") from None
