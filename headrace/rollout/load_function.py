"""A user's own function by name: "file.py:name" or "package.module:name". Runs the file once; judges nothing else."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError, boundary


def load_function(spec: str, *, base: Path | None = None) -> Callable[..., Any]:
    """The function that `spec` names; a relative file is looked up in `base` (None: the working directory).

    Raises ConfigError if the file, module or name is not there, or importing it fails.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise ConfigError(f'"{spec}" does not name a function: write "file.py:function" or "package.module:function"')
    module = _load_file(place, base) if place.endswith(".py") else _load_module(place, spec)
    found = getattr(module, name, None)
    if found is None or not callable(found):
        what = "is not a function there" if found is not None else "is not there"
        raise ConfigError(f'"{spec}": {name} {what}; {place} has {_listed(_functions(module))}')
    function: Callable[..., Any] = found
    return function


def load_module(place: str, *, base: Path | None = None) -> ModuleType:
    """A user's module: "file.py", looked up in `base`, or "package.module". Raises ConfigError if there is none."""
    return _load_file(place, base) if place.endswith(".py") else _load_module(place, place)


def _load_file(place: str, base: Path | None) -> ModuleType:
    path = ((base or Path()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: correct the path before the colon")
    digest = hashlib.blake2b(str(path).encode() + path.read_bytes(), digest_size=8).hexdigest()
    name = f"headrace_user_{path.stem}_{digest}"  # one module per file and content: two functions share its globals
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.util.spec_from_file_location(name, path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        with boundary(ConfigError, f"{path} cannot be imported"):
            loader.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    return module


def _load_module(place: str, spec: str) -> ModuleType:
    with boundary(ConfigError, f'"{spec}": the module {place} cannot be imported'):
        return importlib.import_module(place)


def _functions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "no functions"
