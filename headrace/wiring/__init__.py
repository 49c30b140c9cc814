"""Build objects from the configuration: the only package that names implementations. Tier 2, so copy what you need.

The commands below are loaded when they are first used, so that a wrong file is answered before torch is imported.

A run, in the order of what happens:
- `checked_config` loads and checks the TOML file; `sizes` says how large its model is and what memory it asks for.
- `run` makes the run folder and runs the stages; `resume` decides where each goes on; `process` handles signals.
- `preflight` loads the data and functions of all stages once, as `inputs`; `sources` and `objective` build them.
- `desk` opens the context of a stage; `runtime` is the protocol of what trains and samples, `here` and `remote` are it.
- `stages` runs the loops; `models`, `rewards`, `rollouts`, `play`, `programs`, `beside`, `metrics`, `record` build its
  parts.

Commands: `playing` (eval, demonstrate), `showcase` (demo), `explaining`, `doctor`, `proofs` (verify), `recredit`,
`serve` with `references`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.wiring.models import make_sampler
    from headrace.wiring.playing import Demonstrated, demonstrate, evaluate
    from headrace.wiring.proofs import verify, verify_parts
    from headrace.wiring.run import RunResult, train
    from headrace.wiring.showcase import demo, demo_config

__all__ = [
    "Demonstrated",
    "RunResult",
    "demo",
    "demo_config",
    "demonstrate",
    "evaluate",
    "make_sampler",
    "train",
    "verify",
    "verify_parts",
]

_MODULES = {
    "Demonstrated": "headrace.wiring.playing",
    "RunResult": "headrace.wiring.run",
    "demo": "headrace.wiring.showcase",
    "demo_config": "headrace.wiring.showcase",
    "demonstrate": "headrace.wiring.playing",
    "evaluate": "headrace.wiring.playing",
    "make_sampler": "headrace.wiring.models",
    "train": "headrace.wiring.run",
    "verify": "headrace.wiring.proofs",
    "verify_parts": "headrace.wiring.proofs",
}


def __getattr__(name: str) -> Any:
    """Import the module of one of the names above. A module here must not have the name of one of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'headrace.wiring' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
