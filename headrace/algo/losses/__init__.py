"""The losses there are, by the name a configuration gives them."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.algo.lookup import lookup
from headrace.algo.loss import LossFn
from headrace.algo.losses.supervised import cross_entropy
from headrace.algo.losses.surrogate import importance_sampling, ppo

LOSSES: Mapping[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
}


def find_loss(fn: str | Callable[..., Any]) -> LossFn:
    """A loss by name or as a function; raises ConfigError that names the nearest one."""
    return lookup(LOSSES, fn, "loss") if isinstance(fn, str) else fn
