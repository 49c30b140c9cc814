"""Load a user's code by name: "file.py:function" or "package.module:function". Standard library only.

A file is run once per content. Callers decide what its functions are for.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError, boundary

USER_MODULES = "headrace_user_"  # of the module names of loaded files


def load_function(spec: str, *, base: Path | None = None) -> Callable[..., Any]:
    """Load the function that `spec` names; a relative file is looked up in `base`, by default the working directory.

    Raises ConfigError if the file, module or name does not exist, or importing it fails.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise ConfigError(f'"{spec}" does not name a function: write "file.py:function" or "package.module:function"')
    return find_function(load_module(place, base=base), name, spec=spec)


def load_module(place: str, *, base: Path | None = None) -> ModuleType:
    """Load "file.py", looked up in `base`, or "package.module". Raises ConfigError if that fails."""
    if not place.endswith(".py"):
        with boundary(ConfigError, f"the module {place} cannot be imported"):
            return importlib.import_module(place)
    path = ((base or Path()) / Path(place).expanduser()).resolve()
    with boundary(ConfigError, f"{path} cannot be imported"):
        return import_file(path)


def import_file(path: Path, *, own_process: bool = False) -> ModuleType:
    """Run a file as a module, once, so that its functions share its globals.

    `own_process` says that this process runs nothing else, so the file may import its neighbours. Raises ConfigError if
    there is no such file, and any exception that the file raises.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: correct the path")
    digest = hashlib.blake2b(str(path).encode() + path.read_bytes(), digest_size=8).hexdigest()
    name = f"{USER_MODULES}{path.stem}_{digest}"  # one module per file and content
    if name in sys.modules:
        return sys.modules[name]
    if own_process:
        sys.path.insert(0, str(path.parent))
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # where dataclasses and pickle look a module up
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half loaded: the next import tries again
        raise
    return module


def find_function(module: ModuleType, name: str, *, spec: str) -> Callable[..., Any]:
    """Return a module's function by name. Raises ConfigError that lists the module's functions if there is none."""
    value = getattr(module, name, None)
    if value is None or not callable(value):
        what = f"there is no function {name}" if value is None else f"{name} is not a function"
        is_file = module.__name__.startswith(USER_MODULES)
        place = Path(str(module.__file__)).name if is_file else module.__name__
        raise ConfigError(f'"{spec}": {what}; {place} has {", ".join(_function_names(module)) or "no functions"}')
    function: Callable[..., Any] = value
    return function


def check_arguments(fn: Callable[..., Any], num_arguments: int, what: str, called_as: str) -> None:
    """Raise ConfigError if a function cannot be called with so many positional arguments; `what` names it."""
    try:
        signature(fn).bind(*(None,) * num_arguments)
    except TypeError as exc:
        raise ConfigError(f"{what} cannot be called as function({called_as}): {exc}") from exc
    except ValueError:  # a function in C that does not say
        return


def _function_names(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
