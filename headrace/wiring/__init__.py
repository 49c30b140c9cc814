"""Build objects from the configuration: the only package that names implementations. Tier 2, so copy what you need.

The commands below are loaded when they are first used, so that a wrong file is answered before torch is imported.
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
