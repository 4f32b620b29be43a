"""Options and fixtures of the conformance suite.

pytest                        the everyday tests, against ds_lite
pytest --full                 every combination
pytest --impl student         against tests/adapters/student.py; also a FILE.py, or a dotted module name
pytest --impl deepspeed       against the installed DeepSpeed; adapters/differences.py lists where it differs
pytest --nproc 2              tests that need more ranks are skipped and say so
pytest --backend auto         worlds on NCCL where each rank has a GPU of its own, staged where they share
pytest --backend nccl         only what NCCL can do here; gloo (the default) and staged: everything by them
torchrun ... -m pytest tests  worlds of the job's processes, on all its nodes; rank 0 reports

`ds-lite conformance` runs the same for people, with a table and a report.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
for _entry in (str(HERE.parent), str(HERE)):  # the package, and world, oracles, tolerance, meter, adapters
    if _entry not in sys.path:
        sys.path.insert(0, _entry)

import measured  # noqa: E402
from adapters import judging  # noqa: E402
from adapters.loading import Implementation, load_impl  # noqa: E402
from world import World, preload, skip_if_larger  # noqa: E402
from world_job import Job, JobWorld, host, leave_the_job  # noqa: E402

from ds_lite import launch  # noqa: E402
from ds_lite.conformance import bandwidth  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl", default="ds_lite", help="the implementation under test: a name, a file, a module"
    )
    parser.addoption(
        "--layouts", type=int, default=0, help="how many layouts to draw in test_every_layout.py"
    )
    parser.addoption("--layout-seed", type=int, default=0, help="where to begin drawing")
    parser.addoption("--full", action="store_true", help="also the tests marked full")
    parser.addoption("--nproc", type=int, help="no test uses more ranks than this")
    parser.addoption("--backend", choices=("gloo", "auto", "nccl", "staged"), default="gloo")
    parser.addoption("--bandwidth-to", help="in a job: measure it at the end, write it into this folder")


_job: Job | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """In a job only rank 0 runs tests; the others are its ranks."""
    global _job
    _job = leave_the_job()
    if _job is None:
        return None
    if _job.rank > 0:
        return host(_job)
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("in a job the tests run one after another; leave out --numprocesses")
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What does not belong to the run does not exist: it is deselected, not skipped."""
    is_full, is_own = config.getoption("--full"), config.getoption("--impl") == "ds_lite"
    kept = [item for item in items if is_full or not item.get_closest_marker("full")]
    if not is_own:
        kept = [item for item in kept if judging.judges_others(item)]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("--impl") != "ds_lite":
        judging.one_case_a_test(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("--impl") == "deepspeed":
        judging.judge(item, report)
    return report


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> Implementation:
    """The implementation under test; may be passed to a world, which loads it again by its name."""
    found = load_impl(request.config.getoption("--impl"))
    if found.name == "deepspeed":
        preload("deepspeed.pipe")  # seconds for each process
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test carries what it measured as a property; reports show it."""
    with measured.record() as seen:
        try:
            return (yield)
        finally:
            if seen != measured.Measured():
                item.user_properties.append(("measured", seen.as_json()))


@pytest.fixture(scope="session")
def at_most(request: pytest.FixtureRequest) -> dict[str, int]:
    """How large a job may be here, by what limits it."""
    wanted, backend = request.config.getoption("--nproc"), request.config.getoption("--backend")
    limits = {} if wanted is None else {"ranks": wanted}
    cards = torch.cuda.device_count()
    if _job is not None:
        limits["ranks"] = min(limits.get("ranks", _job.world_size), _job.world_size)
        cards = _job.world_size if cards >= _job.local_world_size else 0
    return {**limits, "GPUs": cards} if backend == "nccl" else limits


@pytest.fixture(scope="session")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, at_most: dict[str, int]
) -> Iterator[World]:
    """Processes that run a body together: `world(body, nprocs, *args)`. One pool for each pytest process."""
    if "transformers" in sys.modules:  # some test here wants it, so many processes will
        preload("transformers.models.llama.modeling_llama")
    folder, backend = tmp_path_factory.mktemp("world"), request.config.getoption("--backend")
    pool = World(folder, backend, at_most) if _job is None else JobWorld(_job, folder, backend, at_most)
    yield pool
    if to := request.config.getoption("--bandwidth-to"):
        ranks = at_most.get("ranks", 2)
        rates = bandwidth.measure(ranks, on_cpu=backend == "gloo", run=_on(pool))
        bandwidth.write(Path(to), rates)
    pool.close()


def _on(pool: World) -> Any:
    return lambda function, nproc, *args: pool(bandwidth.body, nproc, function, *args)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The job's other processes wait for a world; if no test wanted one, they hear now that all is over."""
    if _job is not None and not JobWorld.were_made:
        JobWorld(_job).close()


@pytest.fixture(scope="session", autouse=True)
def _launched_jobs_are_limited_too(request: pytest.FixtureRequest) -> Iterator[None]:
    wanted = request.config.getoption("--nproc")
    with pytest.MonkeyPatch.context() as patch:
        if wanted is not None:
            ranks = {"ranks": wanted}
            run, run_script = launch.run, launch.run_script

            def limited_run(function: Any, nproc: int, *args: Any, **options: Any) -> list[Any]:
                skip_if_larger(nproc, ranks)
                return run(function, nproc, *args, **options)

            def limited_run_script(*args: Any, nproc: int, **options: Any) -> int:
                skip_if_larger(nproc, ranks)
                return run_script(*args, nproc=nproc, **options)

            patch.setattr(launch, "run", limited_run)
            patch.setattr(launch, "run_script", limited_run_script)
        yield
