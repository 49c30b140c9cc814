"""The short names of `rl.algorithm`: each stands for a credit method, a loss, a weighting and, for PPO, a critic.

A key that a file sets wins over the preset, as long as the result is still that algorithm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.paths import split_sum
from headrace.config.schema import RlConfig
from headrace.names import CREDITS, CRITIC_CREDITS, LOSSES, WEIGHTINGS

PPO_LOSSES = ("ppo", "conservative_ppo", "decoupled_ppo", "loglinear_ppo")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmPreset:
    """The settings that an algorithm stands for; the first of several is the default, the others are allowed."""

    credits: tuple[str, ...]
    losses: tuple[str, ...]  # one of them must be a term of the loss, which may have more terms
    weighting: str
    critic: bool = False


ALGORITHMS: Mapping[str, AlgorithmPreset] = {
    "grpo": AlgorithmPreset(credits=("grpo",), losses=PPO_LOSSES, weighting="sequence_mean"),
    "dr_grpo": AlgorithmPreset(credits=("dr_grpo",), losses=PPO_LOSSES, weighting="constant"),
    "rloo": AlgorithmPreset(credits=("rloo",), losses=("sequence_ppo", *PPO_LOSSES), weighting="sequence_mean"),
    "reinforce_pp": AlgorithmPreset(
        credits=("reinforce_pp", "reinforce_pp_baseline"), losses=PPO_LOSSES, weighting="token_mean"
    ),
    "gspo": AlgorithmPreset(credits=("grpo",), losses=("gspo", "gspo_token"), weighting="sequence_mean"),
    "cispo": AlgorithmPreset(credits=("grpo",), losses=("cispo",), weighting="token_mean"),
    "gigpo": AlgorithmPreset(credits=("gigpo",), losses=PPO_LOSSES, weighting="token_mean"),
    "ppo": AlgorithmPreset(credits=CRITIC_CREDITS, losses=PPO_LOSSES, weighting="token_mean", critic=True),
}
assert all(set(algorithm.credits) <= set(CREDITS) for algorithm in ALGORITHMS.values())
assert all(set(algorithm.losses) <= set(LOSSES) for algorithm in ALGORITHMS.values())
assert all(algorithm.weighting in WEIGHTINGS for algorithm in ALGORITHMS.values())


def apply_preset(rl: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the keys that the table [rl] leaves out with those of its algorithm.

    >>> apply_preset({"algorithm": "ppo", "credit": "turn_gae"})["credit"], apply_preset({"algorithm": "ppo"})["critic"]
    ('turn_gae', {})
    """
    name = rl.get("algorithm")
    chosen = ALGORITHMS.get(name) if isinstance(name, str) else None
    if chosen is None:
        return dict(rl)
    critic: dict[str, Any] = {"critic": {}} if chosen.critic else {}
    return {"credit": chosen.credits[0], "loss": chosen.losses[0], "weighting": chosen.weighting, **critic, **rl}


def preset_problems(rl: RlConfig) -> Iterator[str]:
    """Yield what makes the configuration another algorithm than `rl.algorithm` names."""
    if rl.algorithm is None:
        return
    chosen = ALGORITHMS[rl.algorithm]
    what = f"'rl.algorithm' is \"{rl.algorithm}\""
    if rl.credit not in chosen.credits:
        yield f"{what}, but 'rl.credit' is \"{rl.credit}\": write {_either(chosen.credits)}, or leave one of them out"
    if not set(split_sum(rl.loss)) & set(chosen.losses):
        yield f"{what}, but 'rl.loss' is \"{rl.loss}\": have {_either(chosen.losses)} in it, or leave one of them out"
    if chosen.critic and rl.critic is None:
        yield f"{what}, but there is no critic: add a table [rl.critic]"
    if not chosen.critic and rl.critic is not None:
        yield f"{what}, which has no critic, but there is a table [rl.critic]: leave one of them out"


def preset_text(rl: RlConfig) -> str:
    """Say in words what the algorithm stands for in this configuration."""
    critic = ", a critic" if rl.critic is not None else ""
    return f"algorithm {rl.algorithm} = credit {rl.credit}, loss {rl.loss}, weighting {rl.weighting}{critic}"


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)
