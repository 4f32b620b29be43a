"""What a run of the suite was asked for, checked before anything is started.

The map from sections to test files is `ds_lite/sections.py`; the tests themselves exist in a checkout only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ds_lite.conformance import in_a_job
from ds_lite.sections import SECTIONS, Section, find

BACKENDS = ("auto", "gloo", "nccl", "staged")


@dataclass(frozen=True)
class Asked:
    """One run. `nproc` None: no limit. `jobs` 0: all tests in one process of pytest."""

    root: Path
    sections: tuple[Section, ...]
    nproc: int | None
    backend: str
    impl: str
    full: bool
    jobs: int | None  # None: as many as pytest-xdist finds right

    def files(self) -> list[str]:
        """Test files of the sections, each once, by their path from the root."""
        found = (path for section in self.sections for glob in section.tests for path in self._matching(glob))
        return list(dict.fromkeys(found))

    def _matching(self, glob: str) -> Iterator[str]:
        return (path.relative_to(self.root).as_posix() for path in sorted(self.root.glob(glob)))


def sections_of(file: str) -> list[str]:
    """Numbers of the sections that a test file proves.

    >>> sections_of("tests/test_s09_14_equality.py")
    ['9.5', '9.14']
    """
    return [one.number for one in SECTIONS if any(fnmatch(file, glob) for glob in one.tests)]


def checked(
    *,
    sections: str | None,
    nproc: int | None,
    backend: str,
    impl: str,
    full: bool,
    jobs: str,
    root: Path | None = None,
) -> Asked:
    """The run that these words describe.

    Raises: ValueError for a section without tests, an implementation that is not there, a backend this
    machine cannot serve, or where tests or pytest are missing.
    """
    place = _suite() if root is None else root
    if importlib.util.find_spec("pytest") is None:
        raise ValueError("pytest is not installed; pip install 'ds-lite[test]' (§9.1)")
    chosen = _sections(sections)
    if backend not in BACKENDS:
        raise ValueError(f"--backend {backend!r} is unknown; choose from {', '.join(BACKENDS)} (§9.11)")
    wanted = _nproc(nproc, backend)
    asked = Asked(place, chosen, wanted, backend, impl, full, _jobs(jobs, backend))
    _check_impl(impl, place)
    _check_peer(impl)
    if not asked.files():
        raise ValueError(f"no test file of the sections {_numbers(chosen)} is in {place / 'tests'} (§9.1)")
    return asked


def _suite() -> Path:
    """The checkout that holds the package, or else the current folder."""
    for place in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (place / "tests" / "world.py").is_file():
            return place
    raise ValueError(
        "the tests are not beside the package: they come with the repository, not with an installed package; "
        "`git clone` it, `pip install -e '.[test]'` there, and run the command again (§9.1)"
    )


def _sections(words: str | None) -> tuple[Section, ...]:
    if words is None:
        return tuple(section for section in SECTIONS if section.tests)
    chosen = [find(word) for word in words.split(",")]
    for section in chosen:
        if not section.tests:
            with_tests = _numbers(one for one in SECTIONS if one.tests)
            raise ValueError(f"section {section.number} has no tests; choose from {with_tests}")
    return tuple(section for section in SECTIONS if section in chosen)


def _numbers(sections: Iterator[Section] | tuple[Section, ...]) -> str:
    return ", ".join(section.number for section in sections)


def _nproc(nproc: int | None, backend: str) -> int | None:
    """No more ranks than asked for; NCCL wants a GPU for each, staging wants one."""
    if backend not in ("nccl", "staged"):
        return nproc
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "staged" and not gpus:
        raise ValueError("--backend staged needs a GPU, and there is none; choose --backend gloo (§9.11)")
    if backend == "nccl" and gpus < max(1, 1 if in_a_job.ranks() > 1 else nproc or 1):
        raise ValueError(
            f"--backend nccl needs a GPU for each rank: {nproc or 1} wanted, {gpus} found; "
            f"choose --backend gloo{f' or --nproc {gpus}' if gpus else ''} (§9.11)"
        )
    return nproc


def _jobs(word: str, backend: str) -> int | None:
    """Tests on GPUs run one after another, because ranks of two worlds would share one; so do those of a job,
    whose processes are the ranks."""
    has_xdist = importlib.util.find_spec("xdist") is not None
    if in_a_job.ranks() > 1:
        if word not in ("auto", "0", "1"):
            raise ValueError(f"--jobs {word} in a job of torchrun: its processes are the ranks; leave it out")
        return 0
    if word == "auto":
        return None if has_xdist and not _on_gpus(backend) else 0
    if not word.isdecimal():
        raise ValueError(f"--jobs {word!r} is not a number of processes; write auto, 0, 1, 2, ... (§9.1)")
    if int(word) > 1 and not has_xdist:
        raise ValueError(f"--jobs {word} needs pytest-xdist; pip install 'ds-lite[test]' (§9.1)")
    return int(word) if int(word) > 1 else 0


def _on_gpus(backend: str) -> bool:
    if backend == "gloo":
        return False
    import torch

    return torch.cuda.is_available()


def _check_impl(impl: str, root: Path) -> None:
    """The words of `pytest --impl`: an adapter's name, a Python file, or a module."""
    adapters = root / "tests" / "adapters"
    if impl.endswith(".py"):
        there = Path(impl).is_file()
    else:
        there = (adapters / f"{impl}.py").is_file() or _is_module(impl)
    if not there:
        files = sorted(adapters.glob("[a-z]*.py"))
        known = ", ".join(file.stem for file in files if "def make_pipeline" in file.read_text("utf-8"))
        raise ValueError(f"--impl {impl!r} is not there; choose from {known}, or give a .py file (§9.1)")


def _check_peer(impl: str) -> None:
    if impl == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ValueError("--impl deepspeed: DeepSpeed is not installed; pip install 'ds-lite[peer]' (§9.1)")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
