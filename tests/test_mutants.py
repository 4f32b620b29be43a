"""Every mutant dies, of the test it names and for the reason it names; without it that test passes.

A mutant that survives means that a rule of the engine is not tested. `make mutants` counts them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutants import (
    Mutant,
    auto_tp,
    domino,
    failures,
    fpdt,
    layouts,
    moe,
    pipeline,
    precision,
    reductions,
    saving,
    sequence,
    tensor_parallel,
    tiled,
)
from world import World

MUTANTS = [
    *pipeline.MUTANTS,
    *reductions.MUTANTS,
    *failures.MUTANTS,
    *tensor_parallel.MUTANTS,
    *precision.MUTANTS,
    *saving.MUTANTS,
    *moe.MUTANTS,
    *auto_tp.MUTANTS,
    *sequence.MUTANTS,
    *tiled.MUTANTS,
    *fpdt.MUTANTS,
    *domino.MUTANTS,
    *layouts.MUTANTS,
]

HERE = Path(__file__).parent
OPTIONS = {"tied", "clip", "interval", "zero", "kind", "optimizer"}


class CountedWorld:
    """A world that knows how often it was asked to run something."""

    def __init__(self, world: World) -> None:
        self.world, self.calls = world, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.world(*args, **self._changed(kwargs))

    def raises(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.world.raises(*args, **self._changed(kwargs))

    def _changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs


class MutatedWorld(CountedWorld):
    """A world in which each call runs with the mutant."""

    def __init__(self, world: World, mutant: Mutant) -> None:
        super().__init__(world)
        self.mutant = mutant

    def _changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        limit = {} if self.mutant.deadline is None else {"deadline": self.mutant.deadline}
        return {**kwargs, **limit, "mutant": self.mutant.patch}


def find(killer: str) -> tuple[Callable[..., None], dict[str, Any]]:
    """The test function of an id and what its parametrisation passes for it.

    Raises: AssertionError if there is no such test, or no such set of parameters.
    """
    file, _, rest = killer.partition("::")
    name, _, wanted = rest.rstrip("]").partition("[")
    assert Path(file).parent.name == "tests" and (HERE / Path(file).name).exists(), f"no file {file}"
    test = getattr(importlib.import_module(Path(file).stem), name, None)
    assert callable(test), f"no test {name} in {file}"
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    assert len(marks) == bool(wanted), f"{name} has {len(marks)} parametrisations, its id says {wanted!r}"
    if not marks:
        return test, {}
    names, sets = [word.strip() for word in marks[0].args[0].split(",")], list(marks[0].args[1])
    ids = marks[0].kwargs.get("ids") or (lambda one: getattr(one, "id", None) or _id(one))
    ids = [ids(one) for one in sets] if callable(ids) else ids
    assert wanted in ids, f"{name} has no parameters {wanted!r}, but {ids}"
    chosen = sets[ids.index(wanted)]
    values = chosen if len(names) > 1 else (chosen,)
    return test, dict(zip(names, getattr(chosen, "values", values), strict=True))


def _id(values: Any) -> str:
    """What pytest calls a set of plain values."""
    if hasattr(values, "marks"):
        values = values.values if len(values.values) > 1 else values.values[0]
    return "-".join(map(str, values)) if isinstance(values, tuple) else str(values)


def narrowed(arguments: dict[str, Any], mutant: Mutant) -> dict[str, Any]:
    """Of a list of cases the cheapest one in which the fault can show; other arguments as they are."""
    if "cases" not in arguments:
        return arguments
    fitting = [
        case
        for case in arguments["cases"]
        if case.num_micro_batches > 1
        and all(getattr(case, key) == value for key, value in mutant.needs.items())
    ]
    assert fitting, f"{mutant.killer} has no case with {mutant.needs}"

    def cost(case: Any) -> tuple[int, int]:
        return case.num_micro_batches, sum(1 for option in OPTIONS if getattr(case, option, None))

    return {**arguments, "cases": [min(fitting, key=cost)]}


def kill(mutant: Mutant, world: Any, impl: Any) -> None:
    test, arguments = find(mutant.killer)
    fixtures = {"world": world, "impl": impl}
    needed = {name: value for name, value in fixtures.items() if name in test.__annotations__}
    test(**needed, **narrowed(arguments, mutant))


@pytest.fixture(autouse=True)
def only_ds_lite(impl: Any) -> None:
    if impl.name != "ds_lite":
        pytest.skip("not proved: the mutants change ds_lite's own modules")


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_dies(mutant: Mutant, world: World, impl: Any) -> None:
    try:
        kill(mutant, MutatedWorld(world, mutant), impl)
    except Exception as death:
        assert re.search(mutant.keyword, str(death)), (
            f"{mutant.name} died, but not of {mutant.keyword!r}:\n{death}"
        )
    else:
        pytest.fail(f"{mutant.name} lives: {mutant.breaks} {mutant.killer} does not see it")


CONTROLS = {str((mutant.killer, sorted(mutant.needs.items()))): mutant for mutant in reversed(MUTANTS)}


def controls() -> list[Any]:
    return [pytest.param(mutant, id=f"without_{mutant.name}") for mutant in CONTROLS.values()]


@pytest.mark.full
@pytest.mark.parametrize("mutant", controls())
def test_the_killer_passes_without_the_mutant(mutant: Mutant, world: World, impl: Any) -> None:
    healthy = CountedWorld(world)
    kill(mutant, healthy, impl)
    assert healthy.calls, f"{mutant.killer} runs nothing in a world, so no mutant can reach it"


def test_every_mutant_says_what_it_breaks() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    for mutant in MUTANTS:
        assert mutant.breaks.endswith(".") and re.fullmatch(r"9(\.\d+)+", mutant.section), mutant.name
        find(mutant.killer)
