"""§9.9.3 Which layers go to which stage.

An answer is a list of bounds with one entry more than there are parts: part p holds items bounds[p] to
bounds[p+1]-1. No part is empty. Three ways to choose the bounds:

    uniform       equally many layers in each part
    parameters    equally many trainable parameters, as nearly as whole layers allow
    type:REGEX    equally many layers whose class name the regex finds
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import accumulate

METHODS = ("uniform", "parameters", "type:REGEX")


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of parts with equally many items; the first `num_items % num_parts` parts get one more.

    Raises: ValueError if there are fewer items than parts.

    >>> partition_uniform(7, 3)
    [0, 3, 5, 7]

    Source: §9.9.3; DeepSpeed `runtime/utils.py::partition_uniform` @ edaa7221.
    Differs: DeepSpeed leaves trailing parts empty when items run out.
    """
    _check_parts(num_items, num_parts)
    chunk, remainder = divmod(num_items, num_parts)
    return [part * chunk + min(part, remainder) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of parts whose weight sums lie close together.

    Grows from the front: for the first i items in p parts it keeps the one split with the smallest
    difference between the heaviest and the lightest part, and of equal ones the split with the latest
    last cut. As the difference of a longer split does not follow from that of a shorter one alone, this
    is a good split, not always the best.

    Raises: ValueError if there are fewer items than parts, or a negative weight.

    >>> partition_balanced([5, 1, 1, 1], 2)
    [0, 1, 4]
    >>> partition_balanced([1, 1, 1, 1, 1], 4)
    [0, 2, 3, 4, 5]

    Source: §9.9.3; DeepSpeed `runtime/utils.py::partition_balanced` @ edaa7221.
    Differs: plain integers; DeepSpeed returns numpy integers, and empty parts when items run out.
    """
    num_items = len(weights)
    _check_parts(num_items, num_parts)
    _check_weights(weights)
    if num_items == num_parts:
        return list(range(num_parts + 1))
    sums = [0, *accumulate(weights)]
    # for the first i items: heaviest and lightest part of the split kept so far, and its last cut
    kept: list[tuple[float, float, int] | None] = [(total, total, 0) for total in sums]
    kept[0] = None  # a part holds at least one item
    cuts = []
    for _ in range(1, num_parts):
        kept = [_best_last_part(kept, sums, end) for end in range(num_items + 1)]
        cuts.append(kept)
    bounds = [num_items]
    for splits in reversed(cuts):
        split = splits[bounds[0]]
        assert split is not None, f"no split of {bounds[0]} items into {len(cuts)} parts"
        bounds.insert(0, split[2])
    return [0, *bounds]


def partition_layers(
    method: str,
    class_names: Sequence[str],
    parameter_counts: Sequence[int] | Callable[[], Sequence[int]],
    num_parts: int,
) -> list[int]:
    """Bounds of the stages of a pipeline, by the method a user names.

    The method's name ignores case. Everything after the first colon of `type:REGEX` is the regex, which
    is searched in each class name without regard to case. `parameter_counts` may be a function; only
    `parameters` calls it, as counting means building every layer.

    Raises: ValueError for more parts than layers, an unknown method, an invalid or fruitless regex.

    >>> names = ["Embed", "Block", "Block", "Norm", "Block", "Block", "Head"]
    >>> partition_layers("type:block", names, lambda: [], 2)
    [0, 4, 7]
    >>> partition_layers("parameters", names, [50, 10, 10, 1, 10, 10, 50], 2)
    [0, 4, 7]

    Source: §9.9.3; DeepSpeed `runtime/pipe/module.py::PipelineModule._partition_layers` @ edaa7221.
    Differs: DeepSpeed lower-cases the regex, which turns `\\D` into `\\d`, and drops it
    from a second colon on.
    """
    _check_parts(len(class_names), num_parts)
    if not isinstance(method, str):
        raise ValueError(
            f"partition_method={method!r} is not a string; choose one of {list(METHODS)} (§9.9.3)"
        )
    name, colon, pattern = method.partition(":")
    name = name.strip().lower()
    if name == "type" and colon:
        return partition_balanced(_weights_by_type(pattern, class_names), num_parts)
    if name == "uniform" and not colon:
        return partition_uniform(len(class_names), num_parts)
    if name == "parameters" and not colon:
        counts = parameter_counts() if callable(parameter_counts) else parameter_counts
        assert len(counts) == len(class_names), f"{len(counts)} counts for {len(class_names)} layers"
        return partition_balanced([int(count) for count in counts], num_parts)
    raise ValueError(_unknown_method(method, name, colon))


def _check_parts(num_items: int, num_parts: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts} is below 1; choose at least one part (§9.9.3)")
    if num_items < num_parts:
        raise ValueError(
            f"num_parts={num_parts} exceeds num_items={num_items}; a stage without a layer has nothing "
            f"to compute, choose at most {max(num_items, 1)} stages (§9.9.3)"
        )


def _check_weights(weights: Sequence[float]) -> None:
    for place, weight in enumerate(weights):
        if not weight >= 0:
            raise ValueError(
                f"weights[{place}]={weight} is negative or no number; "
                f"a weight counts work, choose weights >= 0 (§9.9.3)"
            )


def _best_last_part(
    kept: Sequence[tuple[float, float, int] | None], sums: Sequence[float], end: int
) -> tuple[float, float, int] | None:
    """Append the part cut..end to the splits kept for each cut, and keep the most even result."""
    best = None
    best_difference = float("inf")
    for cut in range(end):
        split = kept[cut]
        if split is None:
            continue
        part = sums[end] - sums[cut]
        heaviest = part if part > split[0] else split[0]
        lightest = part if part < split[1] else split[1]
        if heaviest - lightest <= best_difference:  # <= keeps the latest cut
            best_difference = heaviest - lightest
            best = (heaviest, lightest, cut)
    return best


def _weights_by_type(pattern: str, class_names: Sequence[str]) -> list[int]:
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"partition_method='type:{pattern}' holds an invalid regex: {error}; "
            f"it must compile with Python's re, correct it or escape special characters (§9.9.3)"
        ) from None
    weights = [1 if regex.search(name) else 0 for name in class_names]
    if not pattern or not any(weights):
        raise ValueError(
            f"partition_method='type:{pattern}' matches no layer; the regex is searched in the class names, "
            f"which here are {sorted(set(class_names))} (§9.9.3)"
        )
    return weights


def _unknown_method(method: str, name: str, colon: str) -> str:
    if name == "profile":
        return (
            f"partition_method={method!r} is not available; splitting by measured time is not implemented, "
            f"choose one of {list(METHODS)} (§9.9.3)"
        )
    if name == "type":
        return (
            f"partition_method={method!r} lacks a regex; write 'type:REGEX', searched in class names (§9.9.3)"
        )
    close = get_close_matches(name, ["uniform", "parameters", "type"], n=1, cutoff=0.5)
    hint = (
        f"; did you mean {'type:' + method.partition(':')[2] if close[0] == 'type' else close[0]!r}?"
        if close
        else ""
    )
    return f"partition_method={method!r} is unknown; choose one of {list(METHODS)}{hint} (§9.9.3)"
