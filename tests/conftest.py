"""Options and fixtures of the conformance suite.

pytest                        the everyday tests, against ds_lite
pytest --full                 every combination
pytest --impl student         against tests/adapters/student.py; also a FILE.py, or a dotted module name
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for _entry in (str(HERE.parent), str(HERE)):  # the package, and world, oracles, tolerance, meter, adapters
    if _entry not in sys.path:
        sys.path.insert(0, _entry)

from adapters.loading import Implementation, load_impl  # noqa: E402
from world import World  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl", default="ds_lite", help="the implementation under test: a name, a file, a module"
    )
    parser.addoption(
        "--layouts", type=int, default=0, help="how many layouts to draw in test_every_layout.py"
    )
    parser.addoption("--layout-seed", type=int, default=0, help="where to begin drawing")
    parser.addoption("--full", action="store_true", help="also the tests marked full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full the rest does not exist: it is deselected, not skipped."""
    if config.getoption("--full"):
        return
    rest = [item for item in items if item.get_closest_marker("full")]
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> Implementation:
    """The implementation under test; may be passed to a world, which loads it again by its name."""
    return load_impl(request.config.getoption("--impl"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Processes that run a body together: `world(body, nprocs, *args)`. One pool for each pytest process."""
    pool = World(tmp_path_factory.mktemp("world"))
    yield pool
    pool.close()
