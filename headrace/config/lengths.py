"""Fit lengths that a file leaves out to the model: no default is longer than the model's context."""

from collections.abc import Mapping
from typing import Any

from headrace.config.schema import Config, DistillConfig, RlConfig, stages_of

_PLAYED, _PROMPT = "max_episode_tokens", "max_prompt_tokens"


def unset_lengths(given: Mapping[str, Any], config: Config, context: int | None) -> dict[str, dict[str, int]]:
    """Return the lengths, by stage and key, that `given` leaves out and whose defaults do not fit.

    Sequences are at most the model's `context`, if it is known. Where prompts of the default length leave no room for a
    turn, they are at most half of an episode.

    >>> config = Config(rl=RlConfig(steps=1, tasks=SourceConfig(type="env", name="key_door")))
    >>> unset_lengths({"rl": {}}, config, 512), unset_lengths({"rl": {"max_prompt_tokens": 9}}, config, 512)
    ({'rl': {'max_episode_tokens': 512, 'max_prompt_tokens': 256}}, {'rl': {'max_episode_tokens': 512}})
    """
    changed: dict[str, dict[str, int]] = {}
    for name, stage in stages_of(config).items():
        key = _PLAYED if isinstance(stage, RlConfig | DistillConfig) else "max_tokens"
        longest: int = getattr(stage, key)
        if key not in given[name] and context is not None and context < longest:
            longest = context
            changed.setdefault(name, {})[key] = longest
        if not isinstance(stage, RlConfig | DistillConfig) or _PROMPT in given[name]:
            continue
        if longest // 2 < stage.max_prompt_tokens > longest - stage.sampling.max_tokens:
            changed.setdefault(name, {})[_PROMPT] = max(1, longest // 2)
    return changed
