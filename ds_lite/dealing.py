"""How one dimension is dealt over the ranks of a group: columns, heads, tokens (§9.3 §9.13 §9.14).

Nothing here knows torch: a deal is numbers. It cuts between units only, and a unit is what must stay whole: a
column, a head, or a group of query heads with the key and value head they share.
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]  # start and stop
Ranges = tuple[tuple[Range, ...], ...]  # per rank, the ranges it keeps side by side


def deal(total: int, ranks: int, *, unit: int = 1, what: str = "width") -> list[int]:
    """Widths per rank: whole units, as even as possible, the first ranks one unit more.

    Raises: ValueError if `total` is not a multiple of `unit` or there are fewer units than ranks.

    >>> deal(12, 4)
    [3, 3, 3, 3]
    >>> deal(15, 2, unit=5)  # three heads of width 5
    [10, 5]
    """
    if ranks < 1 or unit < 1:
        raise ValueError(f"ranks={ranks} and unit={unit} must be at least 1 (§9.3)")
    units, rest = divmod(total, unit)
    if rest:
        raise ValueError(
            f"{what}={total} is not a multiple of unit={unit}; a unit is never cut, so choose a unit that "
            f"divides {total} (§9.3)"
        )
    if units < ranks:
        raise ValueError(
            f"{ranks} ranks exceed the {units} units of {what}={total}, unit={unit}; each rank needs one, "
            f"choose at most {units} ranks (§9.3)"
        )
    return [(units // ranks + (rank < units % ranks)) * unit for rank in range(ranks)]


def side_by_side(widths: list[int]) -> Ranges:
    """One range per rank: rank 0 has the first `widths[0]` indices, rank 1 the next, and so on.

    >>> side_by_side([10, 5])
    (((0, 10),), ((10, 15),))
    """
    stops = [sum(widths[: rank + 1]) for rank in range(len(widths))]
    return tuple(((stop - width, stop),) for width, stop in zip(widths, stops, strict=True))


def deal_evenly(total: int, ranks: int) -> Ranges:
    """The ranges of a `deal` in single indices: how a layer is cut unless it is told otherwise."""
    return side_by_side(deal(total, ranks))


def deal_by_grain(total: int, ranks: int, grain: int = 1) -> Ranges:
    """The ranges of a `deal` in units of `grain` indices, the last rank also takes what is left over.

    Where that would leave a rank without any, the unit is one index.

    >>> deal_by_grain(30, 4, grain=8)
    (((0, 8),), ((8, 16),), ((16, 24),), ((24, 30),))

    Source: §9.13; DeepSpeed `module_inject/tp_shard.py::get_shard_size` @ 0.19.8.
    """
    grains, rest = divmod(total, grain)
    widths = [(grains // ranks + (rank < grains % ranks)) * grain for rank in range(ranks)]
    widths[-1] += rest
    return side_by_side(widths) if min(widths) > 0 else deal_evenly(total, ranks)


def repeated(ranges: Ranges, total: int, times: int) -> Ranges:
    """The same deal of `times` dimensions of `total` that lie side by side, as gate and up in one weight.

    >>> repeated((((0, 2),), ((2, 3),)), total=3, times=2)
    (((0, 2), (3, 5)), ((2, 3), (5, 6)))
    """
    return tuple(
        tuple((start + i * total, stop + i * total) for i in range(times) for start, stop in mine)
        for mine in ranges
    )


# ---------------------------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class HeadDeal:
    """Which heads each rank computes: `query[r]` and `kv[r]` are rank r's ranges of head numbers.

    With `kv_is_replicated` some ranks name the same key and value head; otherwise every head has one rank.
    """

    query: tuple[Range, ...]
    kv: tuple[Range, ...]
    kv_is_replicated: bool


def deal_heads(
    num_heads: int,
    num_kv_heads: int,
    ranks: int,
    *,
    what: str = "tensor-parallel degree",
    section: str = "§9.3",
) -> HeadDeal:
    """Deal attention heads so that each rank has the key and value heads that its query heads read.

    A kv group is one kv head and the `num_heads / num_kv_heads` query heads that share it. Up to one rank per
    kv head, whole groups are dealt, the first ranks one more. Beyond that, each kv head goes to
    `ranks / num_kv_heads` neighbours, which deal its query heads among them.

    Refusals say `what` the ranks are, and name a `section`.

    Raises: ValueError if the query heads are not whole kv groups, if there are more ranks than query heads,
    or if there are more ranks than kv heads and not the same number of ranks for each.

    >>> deal_heads(6, 3, 2).query  # groups of two query heads: two groups and one
    ((0, 4), (4, 6))
    >>> dealt = deal_heads(6, 2, 4)  # groups of three, two ranks for each
    >>> dealt.query, dealt.kv
    (((0, 2), (2, 3), (3, 5), (5, 6)), ((0, 1), (0, 1), (1, 2), (1, 2)))

    Source: §9.3; DeepSpeed `module_inject/tp_shard.py::get_shard_size` @ 0.19.8.
    Differs: DeepSpeed gives ranks beyond the kv heads no columns of k and v; here they hold a copy.
    """
    _check_heads(num_heads, num_kv_heads, ranks, what, section)
    group = num_heads // num_kv_heads  # query heads for each kv head
    if ranks <= num_kv_heads:
        kv = [ranges[0] for ranges in side_by_side(deal(num_kv_heads, ranks))]
        return HeadDeal(tuple((start * group, stop * group) for start, stop in kv), tuple(kv), False)
    sharers = ranks // num_kv_heads
    query = [ranges[0] for ranges in side_by_side(deal(group, sharers) * num_kv_heads)]
    kv = [(rank // sharers, rank // sharers + 1) for rank in range(ranks)]
    return HeadDeal(tuple(query), tuple(kv), True)


def _check_heads(num_heads: int, num_kv_heads: int, ranks: int, what: str, section: str) -> None:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; every kv head serves "
            f"equally many query heads, choose num_kv_heads from {divisors} ({section})"
        )
    working = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or n % num_kv_heads == 0]
    if ranks in working:
        return
    if not 1 <= ranks <= num_heads:
        problem = f"{what} {ranks} does not fit num_heads={num_heads}: each rank needs a query head"
    else:
        problem = (
            f"{what} {ranks} cannot share num_kv_heads={num_kv_heads} evenly: a rank's query heads would "
            f"need parts of two kv groups"
        )
    raise ValueError(f"{problem}; choose a degree from {working} ({section})")


def query_columns(num_heads: int, num_kv_heads: int, head_width: int, ranks: int) -> Ranges:
    """Each rank's columns of a query projection, which are its input columns of the output projection.

    >>> query_columns(3, 3, 5, 2)
    (((0, 10),), ((10, 15),))
    """
    heads = deal_heads(num_heads, num_kv_heads, ranks).query
    return tuple(((start * head_width, stop * head_width),) for start, stop in heads)
