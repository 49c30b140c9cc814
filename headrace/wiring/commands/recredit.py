"""Run `headrace recredit`: reward functions and a method from the command line, over `loops/rescore_saved.py`."""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.algo.advantages.credit import CreditFunction, own_method
from headrace.algo.name_lookup import nearest_name_hint
from headrace.config import (
    Config,
    RewardRunnerConfig,
    RewardTermConfig,
    RlConfig,
    SourceConfig,
    absolute_paths,
    load_config,
)
from headrace.config.paths import find_path, is_code_path, is_url, split_function, term_name
from headrace.errors import ConfigError
from headrace.loops.rescore_saved import read_saved, score_saved, write_recredited
from headrace.names import JUDGE, REWARD_MODEL, REWARDS
from headrace.observe.rollouts.records import MethodRecord
from headrace.observe.viewer.catalog import find_file
from headrace.observe.viewer.recredit_tables import CreditComparison
from headrace.reward import user_function
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import UserRewardSpec, check_importable, signature_from
from headrace.user_code import load_function
from headrace.wiring.build.rewards import close_terms, make_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class RecreditRequest:
    """The arguments of `headrace recredit`."""

    path: Path  # a rollout file, a rollouts folder or a run folder
    rewards: tuple[str, ...] = ()  # each a function, or a table as in [[rl.rewards]]; none: the file's are kept
    weights: Mapping[str, float] = field(default_factory=dict)  # of some rewards, by name
    method: str | None = None  # None: the file's own, with its parameters
    params: Mapping[str, float | str] = field(default_factory=dict)
    step: int | None = None  # the training step; None: the latest
    out: Path | None = None  # None: `recredited_<name>` beside the file
    trusted: bool = False  # reward functions run in this process
    partial: bool = False  # groups of which not all episodes were saved are compared all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RecreditResult:
    out: Path
    method: MethodRecord
    comparison: CreditComparison


def recredit(request: RecreditRequest) -> RecreditResult:
    """Score, credit, write the new file and compare it with the old one."""
    file = find_file(request.path, step=request.step)
    out = request.out or file.with_name(f"recredited_{file.name}")
    if out.absolute() == file.absolute():
        raise ConfigError(f"{out} is the file that is read: give --out another name")
    return asyncio.run(_recredit(request, file, out))


async def _recredit(request: RecreditRequest, file: Path, out: Path) -> RecreditResult:
    rewards = _reward_terms(request)
    method = request.method
    saved = read_saved(
        file,
        step=request.step,
        method=method if method is None or ":" not in method else _own_credit(method),
        params=request.params,
        partial=request.partial,
    )
    terms = make_terms(_config(request, rewards), None) if rewards else []
    try:
        scored = await score_saved(
            saved,
            GroupRewardRunner(terms) if terms else None,
            needs_tokens=lambda: next((term.fn for term in rewards if _takes_tokens(term, request)), None),
        )
    finally:
        await close_terms(terms)
    return RecreditResult(out=out, method=saved.method, comparison=write_recredited(saved, scored, out))


def _own_credit(spec: str) -> CreditFunction:
    """Load a credit method of the user, named with the absolute path of its file."""
    place, function = split_function(spec)
    if place.endswith(".py") and (file := find_path(place, Path.cwd())) is not None:
        spec = f"{file.resolve()}:{function}"
    return own_method(load_function(spec), spec)


def _reward_terms(request: RecreditRequest) -> tuple[RewardTermConfig, ...]:
    """Parse the rewards as a run would have them; raises ConfigError that says what to write instead."""
    if not request.rewards and not request.weights:
        return ()
    tables = [text if text.lstrip().startswith("{") else f"{{ fn = {json.dumps(text)} }}" for text in request.rewards]
    text = f"rl = {{ steps = 1, tasks = {{ type = 'env' }}, rewards = [{', '.join(tables)}] }}"
    rl = load_config(text, file="--reward").rl
    assert rl is not None
    terms = rl.rewards if request.rewards else ()
    for term in terms:
        _check_term(term)
    names = [term_name(term) for term in terms]
    if len(set(names)) < len(names):
        raise ConfigError(f"two rewards are called {max(names, key=names.count)}: give one of them a name in its table")
    if wrong := next((name for name in request.weights if name not in names), None):
        raise ConfigError(f"--weight {wrong}: no --reward has this name; {nearest_name_hint(wrong, names)}")
    return tuple(
        replace(term, weight=request.weights.get(name, term.weight)) for term, name in zip(terms, names, strict=True)
    )


def _check_term(term: RewardTermConfig) -> None:
    if is_url(term.fn):
        return
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
        names = ", ".join(REWARDS)
        raise ConfigError(f"--reward {term.fn} is not known: write file.py, file.py:function, or {names}")


def _config(request: RecreditRequest, terms: tuple[RewardTermConfig, ...]) -> Config:
    """Return the configuration of a run with these rewards."""
    runner = RewardRunnerConfig(type="inprocess" if request.trusted else "process")
    rl = RlConfig(steps=1, tasks=(SourceConfig(type="env"),), rewards=terms, reward_runner=runner)
    return absolute_paths(Config(rl=rl), base=Path.cwd())


def _takes_tokens(term: RewardTermConfig, request: RecreditRequest) -> bool:
    if is_url(term.fn):  # whole episodes are sent
        return True
    if term.fn in REWARDS:
        return term.fn == REWARD_MODEL
    rl = _config(request, (term,)).rl
    assert rl is not None
    user = UserRewardSpec(name=term.fn, spec=rl.rewards[0].fn)
    if request.trusted:
        return user_function.load(user.target).signature.takes_tokens
    with ThreadPoolExecutor(max_workers=1) as thread:  # it has an event loop of its own
        about = thread.submit(check_importable, user, SandboxSettings()).result()
    return signature_from(about).takes_tokens
