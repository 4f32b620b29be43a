"""§9.6 The one law, whole: any legal layout of any family computes what one process computes.

`make test` runs a fixed set in which every pair of axes and options meets; `make layouts N=200` draws as many
as asked and ends with the smallest one that fails. `layout_corpus.json` holds those that failed once.

Guards against: two parallelisms that are right alone and wrong together.
"""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings

pytest.importorskip("transformers", reason="not proved here: layouts of transformers' models")
pytest.importorskip("greenlet", reason="not proved here: layouts with Domino")

from layouts import Layout, compare, layouts

SHARES = 2  # which pytest-xdist can run side by side
PATIENCE_S = 180.0  # eight ranks that import transformers on two cores take a while
CORPUS = Path(__file__).parent / "layout_corpus.json"

# Every pair of axes, two ranks of each, and each option somewhere.
QUICK = [
    Layout("llama", pp=2, dp=2, zero=1, tokens=9, clipping=0.05),
    Layout("gpt2", pp=2, sp=2, heads=6, kv_heads=6, zero=2, recompute=1, samples=3),
    Layout("qwen2", pp=2, tp=2, domino=True, overlap=True, micro_batches=3),
    Layout("llama tied", dp=2, sp=2, zero=2, padded=False, tokens=11),
    Layout("gemma2", dp=2, tp=2, domino=True, zero=1, samples=3),
    Layout("mistral", sp=2, tp=2, overlap=True, heads=8, kv_heads=4),
    Layout("mixtral", pp=2, dp=2, ep=2, tokens=9, zero=2),
    Layout("mixtral", pp=1, sp=2, tp=2, ep=2, micro_batches=1, samples=3),
    Layout("qwen2_moe", dp=2, tp=2, ep=2, zero=1, clipping=0.05, overlap=True),
    Layout("gpt_neox", pp=2, tp=2, heads=6, kv_heads=6, bf16=True, zero=1),
]
AXES = ("pp", "dp", "sp", "tp", "ep")


def test_the_quick_set_has_every_pair_of_axes() -> None:
    def is_on(layout: Layout, axis: str) -> bool:
        return getattr(layout, axis) > 1

    for one, other in combinations(AXES, 2):
        assert any(is_on(layout, one) and is_on(layout, other) for layout in QUICK), f"{one} with {other}"
    for axis, option in product(AXES[:4], ("zero", "padded")):
        assert any(is_on(layout, axis) and getattr(layout, option) for layout in QUICK), (
            f"{axis} with {option}"
        )
    assert all(layout.refusal() is None for layout in QUICK)


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_every_pair_of_axes_equals_one_process(world: Any, layout: Layout) -> None:
    compare(world, [layout], PATIENCE_S)


def test_layouts_that_failed_once_equal_one_process(world: Any) -> None:
    corpus = [Layout(**row) for row in json.loads(CORPUS.read_text(encoding="utf-8"))]
    compare(world, corpus, PATIENCE_S)


@pytest.mark.parametrize(
    "share", [pytest.param(n, marks=pytest.mark.xdist_group(f"share{n}")) for n in range(SHARES)]
)
def test_any_layout_equals_one_process(world: Any, request: pytest.FixtureRequest, share: int) -> None:
    """A share of as many as `--layouts N` says; none by default."""
    count, first = request.config.getoption("--layouts"), request.config.getoption("--layout-seed")
    if not count:
        pytest.skip("not proved here: drawn layouts; run `make layouts N=200`")
    done: list[str] = []

    @seed(first * SHARES + share)
    @settings(
        max_examples=-(-count // SHARES),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(layouts())
    def any_layout(layout: Layout) -> None:
        assume(layout.refusal() is None)
        compare(world, [layout], PATIENCE_S)
        done.append(str(layout))

    any_layout()
    assert len(done) >= count // SHARES
    print(f"{len(done)} layouts equal one process, {len(set(done))} of them different (seed {first})")
