"""Rollouts judged by other rewards and credited by another method, without a model.

Advantages of a critic are computed from the values that the file has of it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from headrace.algo.advantages.by_values import check_gae, credit_by_values
from headrace.algo.advantages.credit import METHODS, check_method, credit
from headrace.algo.advantages.keys import Keys, KeysFn, default_keys
from headrace.algo.lookup import hint, lookup
from headrace.config import Config, RewardRunner, RewardTerm, Rl, Source, absolute_paths, load_config
from headrace.config.paths import find_path, is_code_path, split_function
from headrace.errors import ConfigError, RewardError
from headrace.names import CREDITS, CRITIC_CREDITS, JUDGE, REWARD_MODEL, REWARDS
from headrace.observe.files import write_whole
from headrace.observe.lines import EpisodeLine, MethodLine, iter_raw, parse_line
from headrace.observe.recredited import Comparison, compare_credit
from headrace.observe.trajectories import About, episode_of, outline_of, recredited, token_values_of
from headrace.observe.view_catalog import find_file, group_of
from headrace.reward import calling
from headrace.reward.runner import GroupRewardRunner
from headrace.reward.sandbox.pool import Settings
from headrace.reward.sandboxed import UserReward, check_importable, shape_told
from headrace.reward.terms import GroupTerm, Term
from headrace.types import CreditedEpisode, Episode, FailedEpisode, Group, ScoredEpisode, TokenValues, float_array
from headrace.wiring.rewards import close_terms, make_terms, term_name

GroupKey = tuple[int | None, str]  # training step, group
EpisodeKey = tuple[int | None, str]  # training step, episode
Values = dict[EpisodeKey, TokenValues | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recredit:
    """`rewards` none: those of the file are kept; each is a function, or a table as in [[rl.rewards]]. `weights`: of
    some of them, by name. `method` None: the file's own, with its numbers. `trusted`: reward functions run in this
    process. `partial`: groups of which not all episodes were saved are compared all the same."""

    path: Path
    rewards: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    method: str | None = None
    params: Mapping[str, float | str] | None = None
    step: int | None = None
    out: Path | None = None
    trusted: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    out: Path
    method: MethodLine
    comparison: Comparison


def recredit(c: Recredit) -> Result:
    """Score, credit, write the new file (by default `recredited_<name>` beside the old one) and compare."""
    file = find_file(c.path, step=c.step)
    out = c.out or file.with_name(f"recredited_{file.name}")
    if out.absolute() == file.absolute():
        raise ConfigError(f"{out} is the file that is read: give --out another name")
    return asyncio.run(_recredit(c, file, out))


async def _recredit(c: Recredit, file: Path, out: Path) -> Result:
    """All that can be refused is refused before a function is called: scoring may take hours."""
    asked = _asked(c)
    before: list[EpisodeLine] = []
    values: Values = {}
    for line in _lines(file, c.step):
        if (line.training_step, line.id) in values:
            raise ConfigError(f"{file} has the episode {line.id} twice: give the files of several runs one by one")
        before.append(_numbers(line))
        values[line.training_step, line.id] = _values(line, c.method)
    if all(line.failed is not None for line in before):
        raise ConfigError(f"{file} has no episodes to compare")
    _check_whole(before, file, partial=c.partial)
    method = _method(c, before, file)
    known = _all_known(values, before, method, file) if method.method in CRITIC_CREDITS else {}
    judged = await _judged(c, asked, file)
    results = _credited_by_values(judged, known, method) if known else _credited(judged, before, method)
    about = About(method=method.method, params=method.params, group_sizes=_sizes(results.values()))
    after: list[EpisodeLine] = []

    def rewritten() -> Iterator[str]:
        for raw, line in iter_raw(file):
            if c.step is None or line.training_step == c.step:
                kept = line.failed is not None
                text = (
                    f"{raw.decode().rstrip()}\n"
                    if kept
                    else recredited(raw, results[line.training_step, line.id], about)
                )
                after.append(_numbers(parse_line(text)))
                yield text

    write_whole(out, rewritten())
    return Result(out=out, method=method, comparison=compare_credit(before, after))


def _lines(file: Path, step: int | None) -> Iterator[EpisodeLine]:
    return (line for _, line in iter_raw(file) if step is None or line.training_step == step)


def _key(line: EpisodeLine) -> GroupKey:
    return line.training_step, group_of(line)


def _numbers(line: EpisodeLine) -> EpisodeLine:
    """What is compared of a line; texts and tokens are not held."""
    steps = tuple(replace(step, tokens=None, action="") for step in line.steps)
    return replace(line, steps=steps, messages=(), task=replace(line.task, messages=(), data={}))


# --- reward ----------------------------------------------------------------------------------------------------------


async def _judged(
    c: Recredit, asked: tuple[RewardTerm, ...], file: Path
) -> dict[GroupKey, list[ScoredEpisode | FailedEpisode]]:
    """Neighbouring lines of one group at a time, so that few tokens are held at once."""
    judge = _Judge(c, asked)
    judged: dict[GroupKey, list[ScoredEpisode | FailedEpisode]] = {}
    try:
        for key, lines in groupby(_lines(file, c.step), key=_key):
            played = [line for line in lines if line.failed is None]
            judged.setdefault(key, []).extend(await judge.score(played))
    finally:
        await judge.close()
    _check_some(judged)
    return judged


class _Judge:
    """The reward functions that were asked for; with none, every episode keeps its reward."""

    def __init__(self, c: Recredit, asked: tuple[RewardTerm, ...]) -> None:
        self._c, self._asked = c, asked
        self._terms: list[Term | GroupTerm] = make_terms(_config(c, self._asked), None) if c.rewards else []
        self._runner = GroupRewardRunner(self._terms) if self._terms else None
        self._takes_tokens: str | None = None  # a function that does, once somebody asks

    async def score(self, lines: Sequence[EpisodeLine]) -> list[ScoredEpisode | FailedEpisode]:
        """Outlines of the episodes with their new rewards; failed where a function could not tell."""
        outlines = [_outline(line) for line in lines]
        if self._runner is None or not lines:
            return list(outlines)
        scored = await self._runner.score([self._seen_by_functions(line) for line in lines])
        return [
            replace(outline, reward=result.reward) if isinstance(result, ScoredEpisode) else result
            for outline, result in zip(outlines, scored, strict=True)
        ]

    def _seen_by_functions(self, line: EpisodeLine) -> Episode:
        if not line.lean:
            whole = episode_of(line, f"episode {line.id}")
            return (whole.scored if isinstance(whole, CreditedEpisode) else whole).episode
        if self._takes_tokens is None:
            self._takes_tokens = next((term.fn for term in self._asked if _takes_tokens(term, self._c)), "")
        if self._takes_tokens:
            raise RewardError(
                f"{self._takes_tokens} takes episodes with their tokens, but episode {line.id} was saved lean: "
                "set rl.save.lean = false, or write the function for messages"
            )
        return outline_of(line).episode

    async def close(self) -> None:
        await close_terms(self._terms)


def _outline(line: EpisodeLine) -> ScoredEpisode:
    """What credit reads of an episode: its messages only where they tell its states apart."""
    scored = outline_of(line)
    return scored if _anchors(line) is None else replace(scored, episode=replace(scored.episode, messages=()))


def _asked(c: Recredit) -> tuple[RewardTerm, ...]:
    """The rewards that were asked for, as a run would have them. Raises ConfigError that says what to write instead."""
    tables = [text if text.lstrip().startswith("{") else f"{{ fn = {json.dumps(text)} }}" for text in c.rewards]
    text = f"rl = {{ steps = 1, tasks = {{ type = 'world' }}, rewards = [{', '.join(tables)}] }}"
    rl = load_config(text, file="--reward").rl
    assert rl is not None
    terms = rl.rewards if c.rewards else ()
    for term in terms:
        _check_term(term)
    names = [term_name(term) for term in terms]
    if len(set(names)) < len(names):
        raise ConfigError(f"two rewards are called {max(names, key=names.count)}: give one of them a name in its table")
    if wrong := next((name for name in c.weights if name not in names), None):
        raise ConfigError(f"--weight {wrong}: no --reward has this name; {hint(wrong, names)}")
    return tuple(
        replace(term, weight=c.weights.get(name, term.weight)) for term, name in zip(terms, names, strict=True)
    )


def _check_term(term: RewardTerm) -> None:
    place = term.fn if is_code_path(term.fn) else split_function(term.fn)[0]
    if term.fn == REWARD_MODEL and term.path is None:
        raise ConfigError(f'a reward model is a model: write --reward \'{{ fn = "{REWARD_MODEL}", path = "FOLDER" }}\'')
    if term.fn == JUDGE and not term.kwargs:
        raise ConfigError(
            f'a judge is a language model: write --reward \'{{ fn = "{JUDGE}", kwargs = {{ url = ..., model = ..., '
            'rubric = ... } }\', or path = "FOLDER" for one that is loaded here'
        )
    if term.fn in REWARDS:
        return
    if place.endswith(".py") and find_path(place, Path.cwd()) is None:
        raise ConfigError(f"there is no file {place}: give --reward a Python file, or file.py:function")
    if not place:
        raise ConfigError(f"--reward {term.fn} is not known: write file.py, file.py:function, or {', '.join(REWARDS)}")


def _config(c: Recredit, terms: tuple[RewardTerm, ...]) -> Config:
    """What a run with these rewards would have been given."""
    runner = RewardRunner(type="inprocess" if c.trusted else "process")
    rl = Rl(steps=1, tasks=Source(type="world"), rewards=terms, reward_runner=runner)
    return absolute_paths(Config(rl=rl), base=Path.cwd())


def _takes_tokens(term: RewardTerm, c: Recredit) -> bool:
    if term.fn in REWARDS:
        return term.fn == REWARD_MODEL
    rl = _config(c, (term,)).rl
    assert rl is not None
    user = UserReward(name=term.fn, spec=rl.rewards[0].fn)
    if c.trusted:
        return calling.load(user.target).shape.takes_tokens
    with ThreadPoolExecutor(max_workers=1) as aside:  # it has an event loop of its own
        about = aside.submit(check_importable, user, Settings()).result()
    return shape_told(about).takes_tokens


# --- credit ----------------------------------------------------------------------------------------------------------


def _method(c: Recredit, lines: Sequence[EpisodeLine], file: Path) -> MethodLine:
    """What was asked for, else what the file was credited by; numbers of the same method are kept."""
    own = next((line.credit for line in lines if line.credit is not None), None)
    name = c.method or (own.method if own is not None else None)
    if name is None:
        raise ConfigError(f"{file} was not credited: say how with --credit, one of {', '.join(METHODS)}")
    if name not in CRITIC_CREDITS:
        lookup(dict.fromkeys(CREDITS), name, "credit method")
    alike = own is not None and (own.method == name or {own.method, name} <= set(CRITIC_CREDITS))
    kept = dict(own.params) if own is not None and alike else {}
    method = MethodLine(method=name, params={**kept, **(c.params or {})})
    if name not in CRITIC_CREDITS:
        check_method(method.method, method.params)
    elif check_gae(method.method, method.params)["kl_coef"] not in (0.0, kept.get("kl_coef", 0.0)):
        was = f"{kept['kl_coef']:g}, which it was, or 0" if kept.get("kl_coef") else "0: no KL is in the file"
        raise ConfigError(f"'kl_coef' is {method.params['kl_coef']}: write {was}")
    return method


def _credited(
    judged: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]], lines: Sequence[EpisodeLine], method: MethodLine
) -> dict[EpisodeKey, CreditedEpisode | FailedEpisode]:
    """Every episode by training step and id; each step's groups are compared among themselves, as they were trained."""
    anchors = {(line.training_step, line.id): _anchors(line) for line in lines}
    results: dict[EpisodeKey, CreditedEpisode | FailedEpisode] = {}
    for step, groups in _groups(judged):
        keys = _keys({id: keys for (at, id), keys in anchors.items() if at == step})
        for one in credit(groups, method=method.method, params=method.params, keys=keys).episodes:
            results[step, one.scored.episode.id] = one
        results |= {(step, failed.id): failed for group in groups for failed in group.failed}
    return results


def _values(line: EpisodeLine, asked: str | None) -> TokenValues | None:
    """What a critic said of an episode: of every token, or, for turn_gae, where each step began; None: not there."""
    method = asked or (line.credit.method if line.credit is not None else None)
    if method not in CRITIC_CREDITS or line.failed is not None:
        return None
    known = token_values_of(line)
    if known is not None or method == "token_gae" or line.value_after is None:
        return known
    begun = [step.credit.V if step.credit is not None else None for step in line.steps]
    if any(value is None and step.num_sampled for value, step in zip(begun, line.steps, strict=True)):
        return None
    steps = [np.full(step.num_sampled, value or 0.0) for value, step in zip(begun, line.steps, strict=True)]
    return TokenValues(steps=tuple(map(float_array, steps)), after=line.value_after)


def _all_known(
    values: Values, lines: Sequence[EpisodeLine], method: MethodLine, file: Path
) -> dict[EpisodeKey, TokenValues]:
    """Raises ConfigError where the values of an episode, or the KL in its rewards, are not known."""
    known = {}
    for line in (line for line in lines if line.failed is None):
        said = values[line.training_step, line.id]
        if said is None:
            raise ConfigError(
                f"credit '{method.method}' needs the values of a critic, and {file} does not have those of episode "
                f"{line.id}: they are in files of runs with [rl.critic], of every token unless rl.save.lean; give "
                f"--credit one of {', '.join(METHODS)}"
            )
        if method.params.get("kl_coef") and said.penalties is None:
            raise ConfigError(
                f"rewards of {file} had a KL to a reference in them, which a lean file does not have: add "
                "--param kl_coef=0 to leave it out"
            )
        known[line.training_step, line.id] = said
    return known


def _credited_by_values(
    judged: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]],
    known: Mapping[EpisodeKey, TokenValues],
    method: MethodLine,
) -> dict[EpisodeKey, CreditedEpisode | FailedEpisode]:
    """As the critic of each training step did it, over all of its episodes."""
    results: dict[EpisodeKey, CreditedEpisode | FailedEpisode] = {}
    for step, groups in _groups(judged):
        own = {id: said for (at, id), said in known.items() if at == step}
        for one in credit_by_values(groups, own, method=method.method, params=method.params):
            results[step, one.scored.episode.id] = one
        results |= {(step, failed.id): failed for group in groups for failed in group.failed}
    return results


def _groups(
    judged: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]],
) -> Iterator[tuple[int | None, list[Group]]]:
    """The groups of each training step."""
    for step in dict.fromkeys(step for step, _ in judged):
        own = [(number, key, found) for number, (key, found) in enumerate(judged.items()) if key[0] == step and found]
        yield step, [_group(*one) for one in own]


def _group(number: int, key: GroupKey, found: Sequence[ScoredEpisode | FailedEpisode]) -> Group:
    return Group(
        id=int(key[1]) if key[1].isdigit() else number,
        task=(found[0].episode.task if isinstance(found[0], ScoredEpisode) else found[0].task),
        episodes=tuple(one for one in found if isinstance(one, ScoredEpisode)),
        failed=tuple(one for one in found if isinstance(one, FailedEpisode)),
    )


def _anchors(line: EpisodeLine) -> Keys | None:
    """The keys under which its steps were compared; None where they never were."""
    if any(step.credit is None or step.credit.peers is None for step in line.steps):
        return None
    return [step.credit.anchor for step in line.steps if step.credit is not None]


def _keys(known: Mapping[str, Keys | None]) -> KeysFn:
    def keys(episode: Episode) -> Keys:
        own = known[episode.id]
        return default_keys(episode) if own is None else own

    return keys


def _sizes(results: Iterable[CreditedEpisode | FailedEpisode]) -> Counter[int]:
    return Counter(one.group_id for one in results if isinstance(one, CreditedEpisode))


def _check_some(judged: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]]) -> None:
    """A function that can tell of no episode at all is broken; a file of nothing but its failures helps nobody."""
    everyone = [one for found in judged.values() for one in found]
    reasons = Counter(one.reason for one in everyone if isinstance(one, FailedEpisode))
    if reasons.total() == len(everyone):
        [(reason, _)] = reasons.most_common(1)
        raise RewardError(f"none of the {len(everyone)} episodes could be scored; most often: {reason}")


def _check_whole(lines: Sequence[EpisodeLine], file: Path, *, partial: bool) -> None:
    counts = Counter(_key(line) for line in lines if line.failed is None)
    for line in lines:
        if not partial and line.group_size is not None and counts[_key(line)] < line.group_size:
            raise ConfigError(
                f"{file} has {counts[_key(line)]} of the {line.group_size} episodes of group {group_of(line)}, so they "
                "would be compared among themselves: save whole groups (rl.save.whole_groups), or add --partial"
            )
