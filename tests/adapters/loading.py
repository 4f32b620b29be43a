"""Find an adapter by name, in the test process and again in each process of a world."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from adapters import FUNCTIONS

_CONTRACT = {function.__name__: function for function in FUNCTIONS}


class Implementation:
    """The adapter's functions as attributes. Pickled by name, so bodies take it as an argument."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name, self.module = name, module
        self.zero_stages: tuple[int, ...] = getattr(module, "ZERO_STAGES", (0, 1, 2))

    def __getattr__(self, attribute: str) -> Callable[..., Any]:
        if attribute not in _CONTRACT:
            raise AttributeError(f"{attribute!r} is not in the contract: {', '.join(_CONTRACT)}")
        function = getattr(self.module, attribute, None)
        if function is None:
            raise NotImplementedError(f"{self.name} has no {attribute}(...): {_CONTRACT[attribute].__doc__}")
        return function

    def __reduce__(self) -> tuple[Callable[..., Implementation], tuple[str]]:
        return load_impl, (self.name,)

    def __repr__(self) -> str:
        return f"<implementation {self.name}>"


def load_impl(name: str) -> Implementation:
    """`name` is a file ending in .py, a module of tests/adapters, or any importable module's dotted name."""
    if name.endswith(".py"):
        path = Path(name).resolve()
        return Implementation(str(path), _module_of(path))
    if (Path(__file__).parent / f"{name}.py").exists():
        return Implementation(name, importlib.import_module(f"adapters.{name}"))
    return Implementation(name, importlib.import_module(name))


def _module_of(path: Path) -> ModuleType:
    """Load a file once a process, under a name of its own, so that classes in it can be pickled."""
    name = "impl_" + "_".join(part for part in path.with_suffix("").parts if part.isidentifier())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ValueError(f"--impl {path}: no such Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
