"""Your own pipeline, judged by the same suite: `pytest --impl student`.

Fill in what you want to have checked, in any order; `adapters/__init__.py` says what each function takes
and returns. A copy of this file anywhere works too: `pytest --impl path/to/mine.py`.
"""

from __future__ import annotations

from typing import Any


def train_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    raise NotImplementedError(
        "§9.10.1: the forward of micro-batch i runs on stage s at tick s + 2i, its backward at tick "
        "2S - 1 - s + 2i; transfers stand in the tick after the one that made the tensor"
    )


def inference_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    raise NotImplementedError(
        "§9.10.1: a wave, the forward of micro-batch i on stage s at tick s + i; two buffers"
    )


def data_parallel_steps(num_micro_batches: int) -> list[list[str]]:
    raise NotImplementedError(
        "§9.10.1: load, forward, backward on buffer 0; the last step reduces and updates"
    )


def num_pipe_buffers(kind: str, num_micro_batches: int, num_stages: int, stage_id: int) -> int:
    raise NotImplementedError("§9.10.1: how many forwards of this stage wait for a backward at one time?")


def comm_lists(axes: list[str], dims: list[int], axis: str) -> list[list[int]]:
    raise NotImplementedError("§9.11: neighbours along an axis lie product(dims after it) ranks apart")


def coordinate(axes: list[str], dims: list[int], rank: int) -> dict[str, int]:
    raise NotImplementedError("§9.11: divide with remainder, the last axis first")


def partition(method: str, layers: list[Any], num_parts: int) -> list[int]:
    raise NotImplementedError("§9.9.3: start with uniform: n // p each, the first n % p parts get one more")


def make_pipeline(layers: list[Any], **options: Any) -> Any:
    raise NotImplementedError(
        "§9.9 §9.10: an object with the methods of `adapters.Pipeline`; begin with 2 stages"
    )
