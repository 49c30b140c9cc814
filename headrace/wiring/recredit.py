"""Rollouts judged by another reward function and credited by another method, without a model."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.algo.advantages.credit import METHODS, check_method, credit
from headrace.algo.advantages.keys import Keys, KeysFn, default_keys
from headrace.config import Config, RewardRunner, RewardTerm, Rl, Source, absolute_paths
from headrace.config.paths import find_path, is_code_path, split_function
from headrace.errors import ConfigError, RewardError
from headrace.observe.files import write_whole
from headrace.observe.lines import EpisodeLine, MethodLine, iter_raw, parse_line
from headrace.observe.recredited import Comparison, compare_credit
from headrace.observe.trajectories import About, episode_of, outline_of, recredited
from headrace.observe.view_catalog import find_file, group_of
from headrace.reward import calling
from headrace.reward.runner import GroupRewardRunner
from headrace.reward.sandbox.pool import Settings
from headrace.reward.sandboxed import UserReward, check_importable
from headrace.reward.terms import BUILTIN, GroupTerm, Term
from headrace.types import CreditedEpisode, Episode, FailedEpisode, Group, ScoredEpisode
from headrace.wiring.rewards import close_terms, make_terms

GroupKey = tuple[int | None, str]  # training step, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Recredit:
    """`rewards` none: those of the file are kept. `method` None: the file's own, with its numbers. `trusted`: reward
    functions run in this process. `partial`: groups of which not all episodes were saved are compared all the same."""

    path: Path
    rewards: tuple[str, ...] = ()
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
    judge = _Judge(c)
    before: list[EpisodeLine] = []
    judged: dict[GroupKey, list[ScoredEpisode | FailedEpisode]] = {}
    try:
        async for key, lines in _by_group(file, c.step):
            before += [_numbers(line) for line in lines]
            judged.setdefault(key, []).extend(await judge.score([line for line in lines if line.failed is None]))
    finally:
        await judge.close()
    _check_some(judged, file)
    _check_whole(before, file, partial=c.partial)
    method = _method(c, before, file)
    results = _credited(judged, before, method)
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


async def _by_group(file: Path, step: int | None) -> AsyncIterator[tuple[GroupKey, list[EpisodeLine]]]:
    """Neighbouring lines of one group at a time, so that few tokens are held at once."""
    run: list[EpisodeLine] = []
    for _, line in iter_raw(file):
        if step is not None and line.training_step != step:
            continue
        if run and _key(run[0]) != _key(line):
            yield _key(run[0]), run
            run = []
        run.append(line)
    if run:
        yield _key(run[0]), run


def _key(line: EpisodeLine) -> GroupKey:
    return line.training_step, group_of(line)


def _numbers(line: EpisodeLine) -> EpisodeLine:
    """What is compared of a line; texts and tokens are not held."""
    steps = tuple(replace(step, tokens=None, action="") for step in line.steps)
    return replace(line, steps=steps, messages=(), task=replace(line.task, messages=(), data={}))


# --- reward ----------------------------------------------------------------------------------------------------------


class _Judge:
    """The reward functions that were asked for; with none, every episode keeps its reward."""

    def __init__(self, c: Recredit) -> None:
        self._c = c
        self._terms: list[Term | GroupTerm] = _terms(c) if c.rewards else []
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
            self._takes_tokens = next((fn for fn in self._c.rewards if _takes_tokens(fn, self._c)), "")
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


def _terms(c: Recredit) -> list[Term | GroupTerm]:
    for fn in c.rewards:
        place = fn if is_code_path(fn) else split_function(fn)[0]
        if fn not in BUILTIN and place.endswith(".py") and find_path(place, Path.cwd()) is None:
            raise ConfigError(f"there is no file {place}: give --reward a Python file, or file.py:function")
        if fn not in BUILTIN and not place:
            raise ConfigError(f"--reward {fn} is not known: write file.py, file.py:function, or {', '.join(BUILTIN)}")
    return make_terms(_config(c), None)


def _config(c: Recredit) -> Config:
    """What a run with these rewards would have been given."""
    runner = RewardRunner(type="inprocess" if c.trusted else "process")
    rl = Rl(
        steps=1,
        tasks=Source(type="world"),
        rewards=tuple(RewardTerm(fn=fn) for fn in c.rewards),
        reward_runner=runner,
    )
    return absolute_paths(Config(rl=rl), base=Path.cwd())


def _takes_tokens(fn: str, c: Recredit) -> bool:
    if fn in BUILTIN:
        return False
    rl = _config(replace(c, rewards=(fn,))).rl
    assert rl is not None
    user = UserReward(name=fn, spec=rl.rewards[0].fn)
    if c.trusted:
        return calling.load(user.target).shape.takes_tokens
    with ThreadPoolExecutor(max_workers=1) as aside:  # it has an event loop of its own
        about = aside.submit(check_importable, user, Settings()).result()
    return calling.Shape(about["shape"]).takes_tokens


# --- credit ----------------------------------------------------------------------------------------------------------


def _method(c: Recredit, lines: Sequence[EpisodeLine], file: Path) -> MethodLine:
    """What was asked for, else what the file was credited by; numbers of the same method are kept."""
    own = next((line.credit for line in lines if line.credit is not None), None)
    name = c.method or (own.method if own is not None else None)
    if name is None:
        raise ConfigError(f"{file} was not credited: say how with --credit, one of {', '.join(METHODS)}")
    if name not in METHODS and name in ("token_gae", "turn_gae"):
        raise ConfigError(
            f"credit '{name}' asks a critic, which is not there: give --credit one of {', '.join(METHODS)}"
        )
    kept = dict(own.params) if own is not None and own.method == name else {}
    method = MethodLine(method=name, params={**kept, **(c.params or {})})
    check_method(method.method, method.params)
    return method


def _credited(
    judged: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]], lines: Sequence[EpisodeLine], method: MethodLine
) -> dict[tuple[int | None, str], CreditedEpisode | FailedEpisode]:
    """Every episode by training step and id; each step's groups are compared among themselves, as they were trained."""
    anchors = {(line.training_step, line.id): _anchors(line) for line in lines}
    results: dict[tuple[int | None, str], CreditedEpisode | FailedEpisode] = {}
    for step in dict.fromkeys(step for step, _ in judged):
        own = [(number, key, found) for number, (key, found) in enumerate(judged.items()) if key[0] == step and found]
        groups = [_group(*one) for one in own]
        keys = _keys({id: keys for (at, id), keys in anchors.items() if at == step})
        for one in credit(groups, method=method.method, params=method.params, keys=keys).episodes:
            results[step, one.scored.episode.id] = one
        for group in groups:
            results |= {(step, failed.id): failed for failed in group.failed}
    return results


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


def _check_some(judged: Mapping[GroupKey, Sequence[ScoredEpisode | FailedEpisode]], file: Path) -> None:
    """A function that can tell of no episode at all is broken; a file of nothing but its failures helps nobody."""
    everyone = [one for found in judged.values() for one in found]
    if not everyone:
        raise ConfigError(f"{file} has no episodes to compare")
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
