"""Build objects from the configuration: the only package that names implementations. Tier 2, so copy what you need.

The commands below are loaded when they are first used, so that a wrong file is answered before torch is imported.

A run, in the order of what happens:
- `checked_config` loads and checks the TOML file.
- `commands/train` makes the run folder and runs the stages; `resume` decides where each goes on; `signals` stops it.
- `changed_config` decides which keys a resumed run may change.
- `hub_commits` pins what is on the Hugging Face hub to commits, and fetches its models.
- `preflight` loads the data and functions of all stages once, as `inputs`; `input_files` tells if they changed.
- `picture_reader` reads pictures with the model's processor.
- `epochs` turns epochs into steps.
- `stage_context` opens what a stage needs; `runtime/` trains and samples its model.
- `stages` runs the loops; `build/` makes their parts from sections of the configuration.

The other commands are in `commands/`, one file each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.wiring.build.models import make_sampler
    from headrace.wiring.commands.demo import demo, demo_config
    from headrace.wiring.commands.eval import Demonstrated, demonstrate, evaluate
    from headrace.wiring.commands.train import RunResult, train
    from headrace.wiring.commands.verify import verify, verify_parts

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
    "Demonstrated": "headrace.wiring.commands.eval",
    "RunResult": "headrace.wiring.commands.train",
    "demo": "headrace.wiring.commands.demo",
    "demo_config": "headrace.wiring.commands.demo",
    "demonstrate": "headrace.wiring.commands.eval",
    "evaluate": "headrace.wiring.commands.eval",
    "make_sampler": "headrace.wiring.build.models",
    "train": "headrace.wiring.commands.train",
    "verify": "headrace.wiring.commands.verify",
    "verify_parts": "headrace.wiring.commands.verify",
}


def __getattr__(name: str) -> Any:
    """Import the module of one of the names above. A module of this package must not have the name of one of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'headrace.wiring' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
