"""Refuse by name what other frameworks have and this one does not, and say what to write instead."""

import re
from collections.abc import Mapping
from typing import Any

_SHARDING = "write 'cluster.ranks' = the number of GPUs, which shards the model by PyTorch's FSDP2 (docs/scale.md)"
# words of a key or a value -> what they ask for, and what to write instead
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(^|_)(megatron|mbridge|mcore)(_|$)"), f"Megatron (mbridge), which is not used here: {_SHARDING}"),
    (
        re.compile(r"(^|_)(jax|flax|maxtext|tpu)(_|$)"),
        'JAX, which is not used here: models are PyTorch modules on \'model.device\' = "cuda", "mps" or "cpu"; '
        f"for several GPUs {_SHARDING}",
    ),
    (
        re.compile(
            r"^((tensor|pipeline|context|expert|sequence)(_model)?_parallel(_size|ism)?|(tp|pp|cp|ep|sp)(_size)?)$"
        ),
        "tensor, pipeline, context or expert parallelism, which training does not have: "
        f"{_SHARDING}, and give inference servers their own option in 'engine.launch.args'",
    ),
)


def refusal(dotted: str, name: str, value: Any) -> str | None:
    """Return the sentence that refuses the key `dotted`, whose last part is `name`, or None if it asks for nothing that
    is refused by name.

    >>> refusal("cluster.megatron", "megatron", {})[:52]
    "'cluster.megatron' asks for Megatron (mbridge), whic"
    >>> refusal("model.path", "path", "a/model") is None
    True
    """
    for pattern, asked_for in _REFUSED:
        if pattern.search(_word(name)) or _mentions(value, pattern):
            return f"'{dotted}' asks for {asked_for}"
    return None


def _mentions(value: Any, pattern: re.Pattern[str]) -> bool:
    """Tell whether a value is such a word, or a table that has one among its keys or values."""
    match value:
        case str():
            return pattern.search(_word(value)) is not None
        case Mapping():
            return any(pattern.search(_word(str(key))) or _mentions(item, pattern) for key, item in value.items())
    return False


def _word(text: str) -> str:
    return text.strip().lower().replace("-", "_")
