"""Score saved rollouts with other rewards and credit them by another method, without a model.

A critic's advantages are computed from the values saved in the file.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from headrace.algo.advantages.anchor_keys import Keys, KeysFn, default_keys
from headrace.algo.advantages.credit import METHODS, CreditFunction, CreditMethod, check_method, credit
from headrace.algo.advantages.gae_from_values import check_gae, credit_by_values
from headrace.algo.name_lookup import lookup
from headrace.errors import ConfigError, RewardError
from headrace.names import CRITIC_CREDITS
from headrace.observe.json_lines import write_whole
from headrace.observe.rollouts.files import RolloutFileInfo, episode_of, outline_of, recredited, token_values_of
from headrace.observe.rollouts.records import EpisodeRecord, MethodRecord, iter_raw, parse_line
from headrace.observe.viewer.catalog import group_of
from headrace.observe.viewer.recredit_tables import CreditComparison, compare_credit
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.types import CreditedEpisode, Episode, FailedEpisode, Group, ScoredEpisode, TokenValues, float_array

GroupKey = tuple[int | None, str]  # training step, group
EpisodeKey = tuple[int | None, str]  # training step, episode
ScoredGroups = dict[GroupKey, list[ScoredEpisode | FailedEpisode]]
Values = dict[EpisodeKey, TokenValues | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRollouts:
    """The episodes of a rollout file that can be credited by `method`."""

    file: Path
    step: int | None  # only this training step; None: all of the file
    lines: tuple[EpisodeRecord, ...]  # without texts and tokens
    values: Mapping[EpisodeKey, TokenValues]  # a critic's, for the methods that need them; else empty
    method: MethodRecord
    credit: CreditMethod  # of that name


def read_saved(
    file: Path,
    *,
    step: int | None,
    method: str | CreditFunction | None,
    params: Mapping[str, float | str],
    partial: bool,
) -> SavedRollouts:
    """Read a rollout file and choose its credit: `method`, or else the one the file was credited by, if it is ours.

    Raises ConfigError for every error that can be found before a reward function is called: scoring may take hours.
    `partial` accepts groups of which not all episodes were saved.
    """
    lines: list[EpisodeRecord] = []
    values: Values = {}
    name = method.name if isinstance(method, CreditFunction) else method
    for line in _lines(file, step):
        if (line.training_step, line.id) in values:
            raise ConfigError(f"{file} has the episode {line.id} twice: give the files of several runs one by one")
        lines.append(_numbers(line))
        values[line.training_step, line.id] = _values(line, name)
    if all(line.failed is not None for line in lines):
        raise ConfigError(f"{file} has no episodes to compare")
    _check_whole(lines, file, partial=partial)
    chosen = _method(name, params, lines, file, own=method if isinstance(method, CreditFunction) else None)
    critic_values = _require_values(values, lines, chosen, file) if chosen.method in CRITIC_CREDITS else {}
    by = method if isinstance(method, CreditFunction) else chosen.method
    return SavedRollouts(file=file, step=step, lines=tuple(lines), values=critic_values, method=chosen, credit=by)


async def score_saved(
    saved: SavedRollouts, runner: GroupRewardRunner | None, *, needs_tokens: Callable[[], str | None]
) -> ScoredGroups:
    """Score every episode with the runner; without a runner, episodes keep their rewards.

    Neighbouring lines of one group are scored together, so that few tokens are held at once. `needs_tokens` names a
    reward function that reads tokens; it is called at the first episode without tokens.
    """
    scorer = _Scorer(runner, needs_tokens, saved.file.parent)
    scored: ScoredGroups = {}
    for key, lines in groupby(_lines(saved.file, saved.step), key=_key):
        played = [line for line in lines if line.failed is None]
        scored.setdefault(key, []).extend(await scorer.score(played))
    _check_some(scored)
    return scored


def write_recredited(saved: SavedRollouts, scored: ScoredGroups, out: Path) -> CreditComparison:
    """Credit the scored episodes, write the new file, and compare it with the old one."""
    if saved.values:
        results = _credited_by_values(scored, saved.values, saved.method)
    else:
        results = _credited(scored, saved.lines, saved.credit, saved.method.params)
    info = RolloutFileInfo(method=saved.method.method, params=saved.method.params, group_sizes=_sizes(results.values()))
    after: list[EpisodeRecord] = []

    def rewritten() -> Iterator[str]:
        for raw, line in iter_raw(saved.file):
            if saved.step is None or line.training_step == saved.step:
                if line.failed is not None:
                    text = f"{raw.decode().rstrip()}\n"
                else:
                    text = recredited(raw, results[line.training_step, line.id], info)
                after.append(_numbers(parse_line(text)))
                yield text

    write_whole(out, rewritten())
    return compare_credit(saved.lines, after)


def _lines(file: Path, step: int | None) -> Iterator[EpisodeRecord]:
    return (line for _, line in iter_raw(file) if step is None or line.training_step == step)


def _key(line: EpisodeRecord) -> GroupKey:
    return line.training_step, group_of(line)


def _numbers(line: EpisodeRecord) -> EpisodeRecord:
    """Return the line without its texts and tokens, which are not compared."""
    steps = tuple(replace(step, tokens=None, action="") for step in line.steps)
    return replace(line, steps=steps, messages=(), task=replace(line.task, messages=(), data={}))


# --- reward ----------------------------------------------------------------------------------------------------------


class _Scorer:
    """Scores episodes of a file; remembers whether a reward function reads tokens."""

    def __init__(self, runner: GroupRewardRunner | None, needs_tokens: Callable[[], str | None], folder: Path) -> None:
        self._runner, self._needs_tokens, self._folder = runner, needs_tokens, folder
        self._checked_lean = False  # whether episodes without tokens may be scored

    async def score(self, lines: Sequence[EpisodeRecord]) -> list[ScoredEpisode | FailedEpisode]:
        """Return outlines of the episodes with their new rewards, failed if a function gave none."""
        outlines = [_outline(line) for line in lines]
        if self._runner is None or not lines:
            return list(outlines)
        scored = await self._runner.score([self._for_functions(line) for line in lines])
        return [
            replace(outline, reward=result.reward) if isinstance(result, ScoredEpisode) else result
            for outline, result in zip(outlines, scored, strict=True)
        ]

    def _for_functions(self, line: EpisodeRecord) -> Episode:
        """Return the episode for reward functions; raises RewardError if one needs tokens that were not saved."""
        if not line.lean:
            episode = episode_of(line, f"episode {line.id}", self._folder)
            return (episode.scored if isinstance(episode, CreditedEpisode) else episode).episode
        if not self._checked_lean:
            if function := self._needs_tokens():
                raise RewardError(
                    f"{function} takes episodes with their tokens, but episode {line.id} was saved lean: "
                    "set rl.save.lean = false, or write the function for messages"
                )
            self._checked_lean = True
        return outline_of(line, self._folder).episode


def _outline(line: EpisodeRecord) -> ScoredEpisode:
    """Return the part of an episode that credit reads: its messages only if they identify its states."""
    scored = outline_of(line)
    return scored if _anchors(line) is None else replace(scored, episode=replace(scored.episode, messages=()))


# --- credit ----------------------------------------------------------------------------------------------------------


def _method(
    name: str | None,
    params: Mapping[str, float | str],
    lines: Sequence[EpisodeRecord],
    file: Path,
    *,
    own: CreditFunction | None,
) -> MethodRecord:
    """Choose the named method, else the file's; a method that is not changed keeps the file's parameters."""
    saved = next((line.credit for line in lines if line.credit is not None), None)
    name = name or (saved.method if saved is not None else None)
    if name is None:
        raise ConfigError(f"{file} was not credited: say how with --credit, one of {', '.join(METHODS)}")
    if own is None and ":" in name:
        raise ConfigError(
            f"{file} was credited by {name}, and code that a file names is not run: name it with --credit, or one of "
            f"{', '.join(METHODS)}"
        )
    if own is None and name not in CRITIC_CREDITS:
        lookup(dict.fromkeys((*METHODS, *CRITIC_CREDITS)), name, "credit method")
    alike = saved is not None and (saved.method == name or {saved.method, name} <= set(CRITIC_CREDITS))
    saved_params = dict(saved.params) if saved is not None and alike else {}
    method = MethodRecord(method=name, params={**saved_params, **params})
    if name not in CRITIC_CREDITS:
        check_method(own or method.method, method.params)
    elif check_gae(method.method, method.params)["kl_coef"] not in (0.0, saved_params.get("kl_coef", 0.0)):
        saved_coef = saved_params.get("kl_coef")
        allowed = f"{saved_coef:g}, which it was, or 0" if saved_coef else "0: no KL is in the file"
        raise ConfigError(f"'kl_coef' is {method.params['kl_coef']}: write {allowed}")
    return method


def _credited(
    scored: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]],
    lines: Sequence[EpisodeRecord],
    method: CreditMethod,
    params: Mapping[str, float | str],
) -> dict[EpisodeKey, CreditedEpisode | FailedEpisode]:
    """Credit every episode, by training step and id; the groups of a step are compared with each other."""
    anchors = {(line.training_step, line.id): _anchors(line) for line in lines}
    results: dict[EpisodeKey, CreditedEpisode | FailedEpisode] = {}
    for step, groups in _groups(scored):
        keys = _keys({id: keys for (at, id), keys in anchors.items() if at == step})
        for episode in credit(groups, method=method, params=params, keys=keys).episodes:
            results[step, episode.scored.episode.id] = episode
        results |= {(step, failed.id): failed for group in groups for failed in group.failed}
    return results


def _values(line: EpisodeRecord, chosen: str | None) -> TokenValues | None:
    """Return a critic's values of every token, for turn_gae at least of each step's start; None if not saved."""
    method = chosen or (line.credit.method if line.credit is not None else None)
    if method not in CRITIC_CREDITS or line.failed is not None:
        return None
    values = token_values_of(line)
    if values is not None or method == "token_gae" or line.value_after is None:
        return values
    first_values = [step.credit.V if step.credit is not None else None for step in line.steps]
    if any(value is None and step.num_sampled for value, step in zip(first_values, line.steps, strict=True)):
        return None
    steps = [np.full(step.num_sampled, value or 0.0) for value, step in zip(first_values, line.steps, strict=True)]
    return TokenValues(steps=tuple(map(float_array, steps)), after=line.value_after)


def _require_values(
    values: Values, lines: Sequence[EpisodeRecord], method: MethodRecord, file: Path
) -> dict[EpisodeKey, TokenValues]:
    """Return the values of every episode; raises ConfigError if they, or the KL in its rewards, were not saved."""
    complete = {}
    for line in (line for line in lines if line.failed is None):
        token_values = values[line.training_step, line.id]
        if token_values is None:
            raise ConfigError(
                f"credit '{method.method}' needs the values of a critic, and {file} does not have those of episode "
                f"{line.id}: they are in files of runs with [rl.critic], of every token unless rl.save.lean; give "
                f"--credit one of {', '.join(METHODS)}"
            )
        if method.params.get("kl_coef") and token_values.penalties is None:
            raise ConfigError(
                f"rewards of {file} had a KL to a reference in them, which a lean file does not have: add "
                "--param kl_coef=0 to leave it out"
            )
        complete[line.training_step, line.id] = token_values
    return complete


def _credited_by_values(
    scored: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]],
    values: Mapping[EpisodeKey, TokenValues],
    method: MethodRecord,
) -> dict[EpisodeKey, CreditedEpisode | FailedEpisode]:
    """Credit the episodes of each training step from the critic's values."""
    results: dict[EpisodeKey, CreditedEpisode | FailedEpisode] = {}
    for step, groups in _groups(scored):
        step_values = {id: token_values for (at, id), token_values in values.items() if at == step}
        for episode in credit_by_values(groups, step_values, method=method.method, params=method.params):
            results[step, episode.scored.episode.id] = episode
        results |= {(step, failed.id): failed for group in groups for failed in group.failed}
    return results


def _groups(
    scored: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]],
) -> Iterator[tuple[int | None, list[Group]]]:
    """Yield the groups of each training step."""
    for step in dict.fromkeys(step for step, _ in scored):
        numbered = enumerate(scored.items())
        yield step, [_group(n, key, episodes) for n, (key, episodes) in numbered if key[0] == step and episodes]


def _group(number: int, key: GroupKey, episodes: Sequence[ScoredEpisode | FailedEpisode]) -> Group:
    return Group(
        id=int(key[1]) if key[1].isdigit() else number,
        task=(episodes[0].episode.task if isinstance(episodes[0], ScoredEpisode) else episodes[0].task),
        episodes=tuple(episode for episode in episodes if isinstance(episode, ScoredEpisode)),
        failed=tuple(episode for episode in episodes if isinstance(episode, FailedEpisode)),
    )


def _anchors(line: EpisodeRecord) -> Keys | None:
    """Return the keys under which the steps were compared; None if they never were."""
    if any(step.credit is None or step.credit.peers is None for step in line.steps):
        return None
    return [step.credit.anchor for step in line.steps if step.credit is not None]


def _keys(saved: Mapping[str, Keys | None]) -> KeysFn:
    def keys(episode: Episode) -> Keys:
        anchors = saved[episode.id]
        return default_keys(episode) if anchors is None else anchors

    return keys


def _sizes(results: Iterable[CreditedEpisode | FailedEpisode]) -> Counter[int]:
    return Counter(result.group_id for result in results if isinstance(result, CreditedEpisode))


def _check_some(scored: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]]) -> None:
    """Raise RewardError when no episode at all could be scored."""
    episodes = [episode for group in scored.values() for episode in group]
    reasons = Counter(episode.reason for episode in episodes if isinstance(episode, FailedEpisode))
    if reasons.total() == len(episodes):
        [(reason, _)] = reasons.most_common(1)
        raise RewardError(f"none of the {len(episodes)} episodes could be scored; most often: {reason}")


def _check_whole(lines: Sequence[EpisodeRecord], file: Path, *, partial: bool) -> None:
    counts = Counter(_key(line) for line in lines if line.failed is None)
    for line in lines:
        if not partial and line.group_size is not None and counts[_key(line)] < line.group_size:
            raise ConfigError(
                f"{file} has {counts[_key(line)]} of the {line.group_size} episodes of group {group_of(line)}, so they "
                "would be compared among themselves: save whole groups (rl.save.whole_groups), or add --partial"
            )
