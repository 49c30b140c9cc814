"""The short names of `rl.algorithm`: each stands for a credit method, a loss and a weighting, PPO also for a critic,
DAPO also for clip bounds, a filter and a length penalty, segment-wise PPO for stale tokens and their weights.

A key that a file sets wins over the preset, as long as the result is still that algorithm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.config.introspect import default_of
from headrace.config.paths import split_sum
from headrace.config.schema import RlConfig, SamplingConfig
from headrace.names import CREDITS, CRITIC_CREDITS, FILTERS, LENGTH, LOSSES, WEIGHTINGS, near_name

OVERLONG_SHARE = 5  # the penalty begins a fifth before the longest answer
PPO_LOSSES = ("ppo", "conservative_ppo", "decoupled_ppo", "loglinear_ppo")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmPreset:
    """The settings that an algorithm stands for; the first of several is the default, the others are allowed."""

    credits: tuple[str, ...]
    losses: tuple[str, ...]  # one of them must be a term of the loss, which may have more terms
    terms: tuple[str, ...] = ()  # all of them must be terms of the loss, too
    weighting: str
    critic: bool = False
    loss_params: Mapping[str, float] = field(default_factory=dict)  # those that the file does not set
    filter: str | None = None  # of groups, unless the file has filters
    overlong_penalty: bool = False  # a reward "length", unless the file has one
    without_reference: bool = False  # no KL to a reference model
    any_credit: bool = False  # any credit method will do, a critic's or a user's too
    asynchronous: Mapping[str, Any] = field(default_factory=dict)  # keys of [rl.async] that the file does not set
    behaviour: tuple[str, ...] = ()  # one of them must be `rl.async.behaviour_weight`
    kl_limit: float | None = None  # with `rl.kl_action = "scale_back"`


ALGORITHMS: Mapping[str, AlgorithmPreset] = {
    "grpo": AlgorithmPreset(credits=("grpo",), losses=PPO_LOSSES, weighting="sequence_mean"),
    "dapo": AlgorithmPreset(
        credits=("grpo",),
        losses=PPO_LOSSES,
        weighting="token_mean",
        loss_params={"clip_low": 0.2, "clip_high": 0.28},
        filter="reward_spread",
        overlong_penalty=True,
        without_reference=True,
    ),
    "dr_grpo": AlgorithmPreset(credits=("dr_grpo",), losses=PPO_LOSSES, weighting="constant"),
    "rloo": AlgorithmPreset(credits=("rloo",), losses=("sequence_ppo", *PPO_LOSSES), weighting="sequence_mean"),
    "reinforce_pp": AlgorithmPreset(
        credits=("reinforce_pp", "reinforce_pp_baseline"), losses=PPO_LOSSES, weighting="token_mean"
    ),
    "gspo": AlgorithmPreset(credits=("grpo",), losses=("gspo", "gspo_token"), weighting="sequence_mean"),
    "cispo": AlgorithmPreset(credits=("grpo",), losses=("cispo",), weighting="token_mean"),
    "gigpo": AlgorithmPreset(credits=("gigpo",), losses=PPO_LOSSES, weighting="token_mean"),
    "ppo": AlgorithmPreset(credits=CRITIC_CREDITS, losses=PPO_LOSSES, weighting="token_mean", critic=True),
    "segment_wise_ppo": AlgorithmPreset(
        credits=("grpo",),
        any_credit=True,
        losses=("decoupled_ppo",),
        weighting="token_mean",
        asynchronous={"max_staleness": 2, "stale_action": "mask", "behaviour_weight": "one_step"},
        behaviour=("one_step", "loglinear"),
    ),
    "drgrpo": AlgorithmPreset(
        credits=("grpo",), losses=PPO_LOSSES, terms=("discriminative_term",), weighting="sequence_mean"
    ),
    "enhanced_ppo": AlgorithmPreset(
        credits=CRITIC_CREDITS,
        losses=PPO_LOSSES,
        terms=("reference_kl_k3", "entropy_bonus"),
        weighting="token_mean",
        critic=True,
    ),
    "conservative_ppo": AlgorithmPreset(
        credits=CRITIC_CREDITS, losses=("conservative_ppo",), weighting="token_mean", critic=True, kl_limit=0.02
    ),
}
# names that are spelt alike and mean different things -> what each is
ALIKE: Mapping[str, str] = {
    "drgrpo": "GRPO and a discriminative term in the loss",
    "dr_grpo": "Dr. GRPO, advantages without the standard deviation",
}
assert all(set(algorithm.credits) <= set(CREDITS) for algorithm in ALGORITHMS.values())
assert all({*algorithm.losses, *algorithm.terms} <= set(LOSSES) for algorithm in ALGORITHMS.values())
assert all(algorithm.filter in (None, *FILTERS) for algorithm in ALGORITHMS.values())
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
    filled: dict[str, Any] = {
        "credit": chosen.credits[0],
        "loss": " + ".join((chosen.losses[0], *chosen.terms)),
        "weighting": chosen.weighting,
        **({"critic": {}} if chosen.critic else {}),
        **({"filters": [{"fn": chosen.filter}]} if chosen.filter else {}),
        **({} if chosen.kl_limit is None else {"kl_limit": chosen.kl_limit, "kl_action": "scale_back"}),
        **rl,
    }
    if chosen.asynchronous and isinstance(given := rl.get("asynchronous", {}), dict):
        unsaid = dict(chosen.asynchronous)
        if "correction" in rl:  # says the same in more forms
            del unsaid["behaviour_weight"]
        filled["asynchronous"] = {**unsaid, **given}
    if chosen.loss_params and isinstance(given := rl.get("loss_params", {}), dict):
        filled["loss_params"] = {**chosen.loss_params, **given}
    rewards = rl.get("rewards", [{"fn": "env"}])
    has_own = not isinstance(rewards, list) or any(
        isinstance(term, dict) and term.get("fn") == LENGTH for term in rewards
    )
    longest = _longest_answer(rl) if chosen.overlong_penalty and not has_own else None
    if longest is not None:
        penalty = {"fn": LENGTH, "kwargs": {"max_tokens": longest, "margin": max(1, longest // OVERLONG_SHARE)}}
        filled["rewards"] = [*rewards, penalty]
    return filled


def _longest_answer(rl: Mapping[str, Any]) -> int | None:
    """Return the most tokens that an episode can sample; None for numbers that the loader refuses."""
    sampling, tasks = rl.get("sampling", {}), rl.get("tasks", {})
    sources = tasks if isinstance(tasks, list) else [tasks]
    if not isinstance(sampling, dict) or not all(isinstance(source, dict) for source in sources):
        return None
    by_env = any(source.get("type") in ("env", "task", "harbor") or "env" in source for source in sources)
    plays = by_env or "program" in rl or "generate_fn" in rl
    turn = sampling.get("max_tokens", default_of(SamplingConfig, "max_tokens"))
    turns = rl.get("max_turns", default_of(RlConfig, "max_turns")) if plays else 1
    episode = rl.get("max_episode_tokens", default_of(RlConfig, "max_episode_tokens"))
    numbers = (turn, turns, episode)
    if not all(type(number) is int and number > 0 for number in numbers):
        return None
    return int(min(turn * turns, episode))


def preset_problems(rl: RlConfig) -> Iterator[str]:
    """Yield what makes the configuration another algorithm than `rl.algorithm` names."""
    if rl.algorithm is None:
        return
    chosen = ALGORITHMS[rl.algorithm]
    what = f"'rl.algorithm' is \"{rl.algorithm}\""
    if rl.credit not in chosen.credits and not chosen.any_credit:
        yield f"{what}, but 'rl.credit' is \"{rl.credit}\": write {_either(chosen.credits)}, or leave one of them out"
    if not set(split_sum(rl.loss)) & set(chosen.losses):
        yield f"{what}, but 'rl.loss' is \"{rl.loss}\": have {_either(chosen.losses)} in it, or leave one of them out"
    if missing := [term for term in chosen.terms if term not in split_sum(rl.loss)]:
        yield f'{what}, but \'rl.loss\' is "{rl.loss}": add " + {missing[0]}" to it, or leave one of them out'
    behaviour = rl.asynchronous.behaviour_weight
    if chosen.behaviour and rl.correction is None and behaviour not in chosen.behaviour:
        yield (
            f"{what}, but 'rl.async.behaviour_weight' is \"{behaviour}\", which is decoupled PPO with one proximal "
            f"policy for all segments: write {_either(chosen.behaviour)}, or leave one of them out"
        )
    if chosen.kl_limit is not None and rl.kl_limit is None:
        yield f"{what}, whose KL has a hard limit, but there is none: add 'rl.kl_limit'"
    if chosen.without_reference and any(term.startswith("reference_kl") for term in split_sum(rl.loss)):
        yield f"{what}, which has no KL to a reference, but 'rl.loss' is \"{rl.loss}\": leave one of them out"
    if chosen.filter is not None and not any(item.fn in (chosen.filter, "success_rate") for item in rl.filters):
        yield f"{what}, but 'rl.filters' keep groups without contrast: add {{ fn = \"{chosen.filter}\" }} to them"
    if chosen.overlong_penalty and rl.reward_source == "env":
        yield f'{what}, whose length penalty \'rl.reward_source\' = "env" would only measure: write "sum"'
    if chosen.critic and rl.critic is None:
        yield f"{what}, but there is no critic: add a table [rl.critic]"
    if not chosen.critic and not chosen.any_credit and rl.critic is not None:
        yield f"{what}, which has no critic, but there is a table [rl.critic]: leave one of them out"


def preset_text(rl: RlConfig) -> str:
    """Say in words what the algorithm stands for in this configuration."""
    assert rl.algorithm is not None
    chosen = ALGORITHMS[rl.algorithm]
    parts = [f"credit {rl.credit}", f"loss {rl.loss}", f"weighting {rl.weighting}"]
    parts += ["a critic"] if rl.critic is not None else []
    parts += [f"{name} {rl.loss_params[name]:g}" for name in chosen.loss_params if name in rl.loss_params]
    if chosen.filter is not None:
        parts.append(f"groups replaced by {' and '.join(item.fn for item in rl.filters)}")
    for term in rl.rewards:
        if chosen.overlong_penalty and term.fn == LENGTH:
            most, margin = term.kwargs.get("max_tokens", 0), term.kwargs.get("margin", 0)
            parts.append(f"a penalty from {most - margin} to {most} sampled tokens")
    if chosen.without_reference:
        parts.append("no KL")
    if chosen.kl_limit is not None:
        parts.append(f"KL limit {rl.kl_limit:g} ({rl.kl_action})")
    parts += [f"{key} {getattr(rl.asynchronous, key)}" for key in chosen.asynchronous]
    return f"algorithm {rl.algorithm} = {', '.join(parts)}"


def algorithm_hint(name: object) -> str | None:
    """Say which algorithm an unknown name may mean; where two are spelt alike, what each of them is.

    >>> algorithm_hint("dr-grpo")
    'did you mean "drgrpo" (GRPO and a discriminative term in the loss) or "dr_grpo" (Dr. GRPO, advantages without \
the standard deviation)?'
    """
    if not isinstance(name, str):
        return None
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    if plain.replace("_", "").replace(".", "") in ALIKE:
        return "did you mean " + " or ".join(f'"{alike}" ({what})' for alike, what in ALIKE.items()) + "?"
    close = near_name(plain, ALGORITHMS)
    if close in ALIKE:
        return "did you mean " + " or ".join(f'"{alike}" ({what})' for alike, what in ALIKE.items()) + "?"
    return None if close is None else f'did you mean "{close}"?'


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)
