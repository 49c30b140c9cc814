"""Compute one advantage per step from groups of scored episodes, by the name of the method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from headrace import names
from headrace.algo.advantages.anchor_keys import Keys, KeysFn, default_keys
from headrace.algo.advantages.anchors import peers
from headrace.algo.advantages.chunked import in_chunks
from headrace.algo.advantages.episode_level import (
    AdvantageParts,
    Advantages,
    advantage_health,
    dr_grpo,
    grpo,
    lite_ppo,
    measured,
    opo,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from headrace.algo.advantages.gagpo import gagpo
from headrace.algo.advantages.gigpo import gigpo
from headrace.algo.advantages.graphgpo import graphgpo
from headrace.algo.advantages.group_stats import Floats
from headrace.algo.advantages.hgpo import hgpo
from headrace.algo.advantages.step_table import StepTable, anchors_of, discount, step_table
from headrace.algo.name_lookup import check_numbers, lookup
from headrace.errors import ConfigError, boundary
from headrace.metrics import Metric
from headrace.types import CreditedEpisode, Group, StepCredit

EPISODE_METHODS: Mapping[str, Callable[..., Advantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "lite_ppo": lite_ppo,
    "opo": opo,
    "reinforce": reinforce,
}
STEP_METHODS: Mapping[str, Callable[..., Advantages]] = {
    "gigpo": gigpo,
    "hgpo": hgpo,
    "graphgpo": graphgpo,
    "gagpo": gagpo,
}
assert tuple(EPISODE_METHODS) == names.EPISODE_CREDITS
assert tuple(STEP_METHODS) == names.STEP_CREDITS
METHODS: Mapping[str, Callable[..., Advantages]] = {**EPISODE_METHODS, **STEP_METHODS}
NO_PARAMS: Mapping[str, float | str] = {}
SHARES = ("gamma", "lam", "decay")  # parameters from 0 to 1; every other is 0 or more
SIGNED = ("baseline",)  # parameters of either sign
WHOLE = ("depth",)  # parameters that are integers


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditFunction:
    """A credit method of a user."""

    name: str  # "file.py:function"
    fn: Callable[..., Any]
    columns: tuple[str, ...]  # what it is called with: one of COLUMNS

    @property
    def by_step(self) -> bool:
        """Return whether it gives one number per step, and not per episode."""
        return self.columns == ("table",)


COLUMNS = (("rewards", "groups"), ("rewards", "groups", "lengths"), ("table",))
CreditMethod = str | CreditFunction  # one of METHODS, or a user's


def own_method(fn: Callable[..., Any], name: str) -> CreditFunction:
    """Make a credit method of a user's function; its positional parameters say what it takes.

    (rewards, groups) or (rewards, groups, lengths), where lengths are sampled tokens: it returns one number per
    episode. (table), a `StepTable`: one number per step. Keyword-only parameters are its numbers. Raises ConfigError.

    >>> own_method(lambda rewards, groups: rewards - rewards.mean(), "mine.py:mine").by_step
    False
    """
    with boundary(ConfigError, f"the parameters of credit {name} cannot be read"):
        parameters = signature(fn).parameters.values()
    columns = tuple(
        p.name for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    )
    if columns not in COLUMNS:
        raise ConfigError(
            f"credit {name} takes ({', '.join(columns)}): write it as function(rewards, groups), which returns a "
            "number for each episode, or as function(table), which returns one for each step"
        )
    return CreditFunction(name=name, fn=fn, columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedBatch:
    """The credited episodes of a batch."""

    episodes: tuple[CreditedEpisode, ...]  # every scored episode, in the order of the groups
    health: Mapping[str, Metric]  # whether the advantages carry a signal
    table: StepTable  # what advantages and health were computed from


def credit(
    groups: Sequence[Group],
    *,
    method: CreditMethod = "grpo",
    params: Mapping[str, float | str] = NO_PARAMS,
    keys: KeysFn = default_keys,
) -> CreditedBatch:
    """Compute advantages by `method`, one per step (equal in an episode for an episode-level method).

    Failed episodes take no part. The order in which episodes ended plays no part. Steps are compared by the anchor
    states that `keys` names. Raises ConfigError on an unknown method or parameter.
    """
    check_method(method, params)
    anchors = anchors_of(groups, keys)
    table = step_table(groups, anchors)
    advantages = step_advantages(table, method=method, params=params)
    ends_E = np.cumsum(table.length_E).tolist()
    values, parts = advantages.values.tolist(), _step_credits(advantages.parts, anchors)
    scored = [(group.id, scored) for group in groups for scored in group.episodes]
    return CreditedBatch(
        episodes=tuple(
            CreditedEpisode(
                scored=episode,
                group_id=group_id,
                advantages=tuple(values[end - len(episode.episode.steps) : end]),
                parts=parts[end - len(episode.episode.steps) : end],
            )
            for (group_id, episode), end in zip(scored, ends_E, strict=True)
        ),
        health=advantages.health,
        table=table,
    )


def _step_credits(parts: AdvantageParts | None, anchors: Keys) -> tuple[StepCredit, ...]:
    assert parts is not None, "rows of credited groups are steps"
    columns = (parts.returns_S, parts.episode_S, parts.step_S, parts.peers_S)
    return tuple(
        StepCredit(returns=returns, episode=episode, step=step, peers=count, anchor=anchor)
        for returns, episode, step, count, anchor in zip(*(column.tolist() for column in columns), anchors, strict=True)
    )


def step_advantages(
    table: StepTable, *, method: CreditMethod, params: Mapping[str, float | str] = NO_PARAMS
) -> Advantages:
    """Compute the advantages of a table, for a million steps. An episode-level method's return is not discounted."""
    options = check_method(method, params)
    if isinstance(method, CreditFunction):
        if method.by_step:
            return _own_steps(method, table, options)
        advantages = _own_episodes(method, table, options)
    elif method in STEP_METHODS:
        return in_chunks(table, partial(STEP_METHODS[method], **options))
    else:
        rows = (table.total_E, table.group_E, table.tokens_E) if method == "opo" else (table.total_E, table.group_E)
        advantages = EPISODE_METHODS[method](*rows, **options)
    values_S = np.repeat(advantages.values, table.length_E)
    parts = in_chunks(table, _without_credit).parts
    assert parts is not None
    return Advantages(values=values_S, health=advantages.health, parts=replace(parts, episode_S=values_S))


def _without_credit(table: StepTable) -> Advantages:
    """Compute returns and sizes of anchors, for reports only: all advantages are 0."""
    nothing_S = np.zeros(len(table.reward_S))
    returns_S = discount(table.reward_S, table.length_E, 1.0)
    parts = AdvantageParts(returns_S=returns_S, episode_S=nothing_S, step_S=nothing_S, peers_S=peers(table))
    return Advantages(values=nothing_S, health={}, parts=parts)


def _own_episodes(method: CreditFunction, table: StepTable, options: Mapping[str, Any]) -> Advantages:
    columns = {"rewards": table.total_E, "groups": table.group_E, "lengths": table.tokens_E}
    arguments = [columns[name].copy() for name in method.columns]
    values_E = _own_values(method, arguments, options, len(table.total_E), "episode")
    return measured(values_E, table.total_E, table.group_E)


def _own_steps(method: CreditFunction, table: StepTable, options: Mapping[str, Any]) -> Advantages:
    values_S = _own_values(method, [table], options, len(table.reward_S), "step")
    parts = in_chunks(table, _without_credit).parts
    assert parts is not None
    episodes = measured(np.zeros(len(table.total_E)), table.total_E, table.group_E)
    health = {**episodes.health, **advantage_health(values_S)}
    return Advantages(values=values_S, health=health, parts=replace(parts, step_S=values_S))


def _own_values(
    method: CreditFunction, arguments: Sequence[Any], options: Mapping[str, Any], num_rows: int, row: str
) -> Floats:
    """Call a user's function. Raises ConfigError unless it returns a finite number for each row."""
    with boundary(ConfigError, f"credit {method.name} failed"):
        returned = method.fn(*arguments, **options)
    what = f"credit {method.name} returned a {type(returned).__name__}"
    with boundary(ConfigError, f"{what}: return a number for each {row}"):
        values = np.array(returned.values if isinstance(returned, Advantages) else returned, dtype=np.float64)
    if values.shape != (num_rows,):
        shape = "x".join(map(str, values.shape)) or "one"
        raise ConfigError(f"{what} of {shape} numbers for {num_rows} {row}s: return one for each {row}")
    if not np.isfinite(values).all():
        raise ConfigError(f"{what} with {values[~np.isfinite(values)][0]} in it: return finite numbers")
    return values


def check_method(method: CreditMethod, params: Mapping[str, float | str]) -> dict[str, Any]:
    """Convert parameters to the types that the method takes. Raises ConfigError that says what to write instead."""
    if isinstance(method, CreditFunction):
        return _check_own(method, params)
    fn = lookup(METHODS, method, "credit method")
    defaults = {p.name: p.default for p in signature(fn).parameters.values() if p.kind is Parameter.KEYWORD_ONLY}
    words = {name: value for name, value in params.items() if isinstance(defaults.get(name), StrEnum)}
    numbers = {name: value for name, value in params.items() if name not in words}
    check_numbers(numbers, defaults, f"{method!r}")
    for name, value in numbers.items():
        _check_range(name, float(value), method)
    return {**params, **{name: _choice(type(defaults[name]), name, value, method) for name, value in words.items()}}


def _check_own(method: CreditFunction, params: Mapping[str, float | str]) -> dict[str, Any]:
    keywords = [p for p in signature(method.fn).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    words = [p.name for p in keywords if isinstance(p.default, str)]
    numbers = {name: value for name, value in params.items() if not (name in words and isinstance(value, str))}
    check_numbers(numbers, [p.name for p in keywords], f"credit {method.name}")
    for parameter in keywords:
        if parameter.default is Parameter.empty and parameter.name not in params:
            raise ConfigError(f"credit {method.name} needs a number {parameter.name!r}: write it into the parameters")
    return dict(params)


def _check_range(name: str, value: float, method: str) -> None:
    """Refuse a number that would not fail but train something else: a discount above 1, a penalty that rewards."""
    if name in SIGNED:
        return
    most = 1.0 if name in SHARES else float("inf")
    if not 0.0 <= value <= most or (name in WHOLE and value != int(value)):
        kind = "a whole number" if name in WHOLE else "a number"
        limits = "from 0 to 1" if name in SHARES else "of 0 or more"
        raise ConfigError(f"parameter {name!r} of {method!r} must be {kind} {limits}, not {value:g}")


def _choice(kind: type[StrEnum], name: str, value: object, method: str) -> StrEnum:
    choices = [str(choice) for choice in kind]
    if value not in choices:
        raise ConfigError(f"parameter {name!r} of {method!r} must be one of {', '.join(choices)}, not {value!r}")
    return kind(str(value))
