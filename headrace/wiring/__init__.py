"""Configuration to objects: the only package that names implementations. Tier 2, so copy what you need."""

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
