"""Build the reward terms of `rl.rewards`, and the runner that scores groups with them."""

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

from headrace.algo.datum import scored_datum
from headrace.config import Config, ModelConfig, RewardRunnerConfig, RewardTermConfig, RlConfig
from headrace.config.paths import remote_reward, term_name
from headrace.errors import ConfigError, ModelError, boundary
from headrace.names import FORMAT, JUDGE, LENGTH, REWARD_MODEL
from headrace.reward.alignment import Alignment
from headrace.reward.builtin import code_tests
from headrace.reward.builtin.table import ANSWER_REWARDS, check_options, check_rows
from headrace.reward.format import SPEC as FORMAT_SPEC
from headrace.reward.format import matches
from headrace.reward.judge import Ask, JudgeSettings, ask_endpoint, ask_sampler, judge_term
from headrace.reward.remote_term import RemoteReward, remote_term
from headrace.reward.reward_runner import GroupRewardRunner, PartNames
from headrace.reward.sandbox.limits import CallLimits
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.terms import BUILTIN, GroupTerm, RewardFn, Term, answer_reward, length, reward_by_model
from headrace.reward.truncation import TruncatedReward, TruncatedRule
from headrace.reward.user_term import UserRewardSpec, check_importable, sandboxed_term, trusted_term
from headrace.types import IntArray, SamplingParams, Task

logger = logging.getLogger(__name__)

REWARD_SERVER_KEY = "HEADRACE_REFERENCE_KEY"  # the environment variable with the key of a server of rewards
ENV = "env"  # the reward of the environment
MATH_CPU_S, MATH_WALL_S = 5, 60.0  # to compare two formulas


def make_terms(config: Config, reward_model_path: str | None) -> list[Term | GroupTerm]:
    """Build the terms that can judge now: those of [rl] (what the environment gives, if there is none), without a
    reward model that is not trained yet."""
    tokens = 8192 if config.rl is None else config.rl.micro_batch_tokens
    runner = RewardRunnerConfig() if config.rl is None else config.rl.reward_runner
    return [
        _make_term(term, config.model, runner, reward_model_path, tokens)
        for term in _usable_terms(config, reward_model_path)
    ]


def _make_term(
    term: RewardTermConfig, model: ModelConfig, runner: RewardRunnerConfig, reward_model_path: str | None, tokens: int
) -> Term | GroupTerm:
    if (url := remote_reward(term)) is not None:
        return _remote_term(term, url)
    return _term(term, model, reward_model_path, tokens) if _runs_in_process(term) else _user_term(term, runner)


def _remote_term(term: RewardTermConfig, url: str) -> GroupTerm:
    """Connect to the server of a reward, which is asked now whether it has it. Raises ConfigError."""
    remote = RemoteReward(url, key=os.environ.get(REWARD_SERVER_KEY))
    try:
        remote.check()
    except ConfigError as exc:
        remote.close()
        raise ConfigError(f"reward {term_name(term)}: {exc}") from exc
    return remote_term(term_name(term), remote, weight=term.weight)


def has_terms(config: Config, reward_model_path: str | None) -> bool:
    """Return whether `make_terms` would build any term."""
    return bool(_usable_terms(config, reward_model_path))


def _usable_terms(config: Config, reward_model_path: str | None) -> list[RewardTermConfig]:
    rewards = (RewardTermConfig(fn=ENV),) if config.rl is None else reward_terms(config.rl)
    return [term for term in rewards if term.fn != REWARD_MODEL or (term.path or reward_model_path) is not None]


def _runs_in_process(term: RewardTermConfig) -> bool:
    """Return whether a built-in reward runs in this process; those that may take long on a text do not."""
    answer = ANSWER_REWARDS.get(term.fn)
    return term.fn in (REWARD_MODEL, JUDGE, LENGTH, *BUILTIN) or (answer is not None and answer.fn is not None)


def reward_terms(rl: RlConfig) -> tuple[RewardTermConfig, ...]:
    """Return `rl.rewards` as `rl.reward_source` says: with the environment's reward, or with no other that counts."""
    env = (RewardTermConfig(fn=ENV),) if all(term.fn != ENV for term in rl.rewards) else ()
    match rl.reward_source:
        case None | "function":
            return rl.rewards
        case "sum":
            return (*rl.rewards, *env)
        case "env":
            measured = (term if term.fn == ENV else replace(term, weight=0.0) for term in rl.rewards)
            return (*measured, *env)


def make_reward_runner(
    terms: Sequence[Term | GroupTerm],
    rl: RlConfig,
    truncation: TruncatedReward | None = None,
    part_names: PartNames | None = None,
) -> GroupRewardRunner:
    """Build the runner. A reward model scores one episode at a time, so terms may take as long as an episode may."""
    waits = any(term.fn == REWARD_MODEL or remote_reward(term) is not None for term in rl.rewards)
    return GroupRewardRunner(
        terms,
        timeout_s=rl.asynchronous.task_timeout_s if waits else 60.0,
        group_timeout_s=rl.asynchronous.task_timeout_s,
        max_invalid_share=rl.reward_runner.max_invalid_share,
        truncation=truncation,
        part_names=part_names,
    )


def make_truncation(rl: RlConfig) -> TruncatedReward:
    """Build the rule for cut-off episodes in training; evaluation keeps rewards as they are."""
    return TruncatedReward(rule=TruncatedRule(rl.truncated_reward), penalty=rl.truncated_penalty)


def check_rewards(rl: RlConfig) -> None:
    """Raise ConfigError when a user's reward function cannot be found or imported."""
    for term in reward_terms(rl):
        if (url := remote_reward(term)) is not None:
            RemoteReward(url, key=os.environ.get(REWARD_SERVER_KEY)).check()
        elif not _runs_in_process(term):
            _user_term(term, rl.reward_runner)


def check_reward_data(rl: RlConfig, tasks: Sequence[Task]) -> None:
    """Raise ConfigError for wrong kwargs of the package's own rewards, and for tasks without the columns they read.

    Warns where "exact_match" can never be right: it compares whole answers, and the tasks have worked solutions.
    """
    for position, term in enumerate(rl.rewards):
        try:
            if term.fn in ANSWER_REWARDS:
                check_options(term.fn, term.kwargs)
                check_rows(term.fn, term.kwargs, tasks)
            elif term.fn == "exact_match":
                _check_exact_match(tasks)
            elif term.fn == LENGTH:
                _length(term)
            elif term.fn == FORMAT:
                _check_format(term)
            elif term.fn == JUDGE:
                _judge_parts(term)
        except ConfigError as exc:
            raise ConfigError(f"'rl.rewards[{position}]': {exc}") from exc


def _check_exact_match(tasks: Sequence[Task]) -> None:
    lacking = [task for task in tasks if "answer" not in task.data]
    if tasks and len(lacking) == len(tasks):
        columns = ", ".join(map(str, tasks[0].data)) or "none"
        raise ConfigError(
            f'the reward "exact_match" reads the column answer, which no task has; their columns are {columns}: map '
            'one with columns = { answer = "NAME" } of the source'
        )
    worked = sum("####" in str(task.data.get("answer")) for task in tasks)
    if worked:
        logger.warning(
            '%d of %d tasks have an answer with "####", and the reward "exact_match" wants the whole of it, word for '
            "word: "
            'fn = "math" or "final_number" compare what is behind the mark',
            worked,
            len(tasks),
            extra={"about_run": "exact_match"},
        )


async def close_terms(terms: Sequence[Term | GroupTerm]) -> None:
    """End the processes of users' functions."""
    for term in terms:
        if isinstance(term, GroupTerm):
            await term.close()


def _user_term(term: RewardTermConfig, c: RewardRunnerConfig) -> GroupTerm:
    """Build the term of a user's function, which is imported once now: one that cannot work fails before the run."""
    own = ANSWER_REWARDS.get(term.fn)
    if term.fn == FORMAT:
        _check_format(term)
    if own is not None:
        check_options(term.fn, term.kwargs)
    user = UserRewardSpec(
        name=term_name(term),
        spec=FORMAT_SPEC if term.fn == FORMAT else term.fn if own is None else own.spec,
        weight=term.weight,
        kwargs=term.kwargs,
        alignment=Alignment(
            step_index=term.step_index,
            default_step_reward=term.default_step_reward,
            terminal_score=term.terminal_score,
            score_range=term.score_range,
            keep_invalid=term.keep_invalid,
        ),
        beyond_limits=0.0 if term.fn == "math" else None,
    )
    limits = _call_limits(term, c)
    if c.type == "inprocess":
        return trusted_term(user, timeout_s=limits.wall_s)
    settings = SandboxSettings(
        limits=limits,
        workers=c.workers or min(8, os.cpu_count() or 1),
        strict=c.strict,
        readable=c.readable,
    )
    with ThreadPoolExecutor(max_workers=1) as aside:  # it has an event loop of its own
        aside.submit(check_importable, user, settings).result()
    return sandboxed_term(user, settings, fork_groups=c.fork == "group")


def _call_limits(term: RewardTermConfig, c: RewardRunnerConfig) -> CallLimits:
    """Return the limits of a call. A formula that takes long ends by its CPU time, which no busy machine shortens; the
    time of programs adds up."""
    wall_s, cpu_s = c.wall_s, c.cpu_s
    if term.fn == "math":
        wall_s, cpu_s = max(wall_s, MATH_WALL_S), min(cpu_s, MATH_CPU_S)
    if term.fn == "code":
        wall_s = max(wall_s, code_tests.call_limit_s(**term.kwargs))
        cpu_s = max(cpu_s, math.ceil(term.kwargs.get("timeout_s", 0)))
    return CallLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=c.memory_mb, processes=c.processes, import_s=c.import_s)


def _check_format(term: RewardTermConfig) -> None:
    """Raise ConfigError for wrong kwargs of "format": a pattern that cannot be compiled fails on no text at all."""
    with boundary(ConfigError, 'a reward with fn = "format" needs kwargs pattern and maybe turns, and these are wrong'):
        matches([], [], **term.kwargs)


def _judge_parts(term: RewardTermConfig) -> tuple[JudgeSettings, Ask | SamplingParams]:
    """Read the kwargs of a judge: its settings, and the way to its endpoint or how it is sampled here."""
    judge_keys = {field.name for field in fields(JudgeSettings)}
    judge = {key: value for key, value in term.kwargs.items() if key in judge_keys}
    rest = {key: value for key, value in term.kwargs.items() if key not in judge_keys}
    needs = "url, model and rubric" if term.path is None else "rubric, maybe max_tokens and temperature"
    with boundary(ConfigError, f'a reward with fn = "judge" needs kwargs {needs}, and these are wrong'):
        settings = JudgeSettings(**judge)
        if term.path is not None:
            return settings, SamplingParams(**{"max_tokens": 512, "temperature": 0.3, **rest})
        key = rest.get("api_key_env")
        if key and not os.environ.get(key):
            raise ConfigError(f"the environment variable {key}, which has the judge's key, is not set: export it")
        return settings, ask_endpoint(**rest)


def _judge_term(term: RewardTermConfig, model: ModelConfig) -> GroupTerm:
    """Build a judge. Keys of `kwargs` that are not the judge's go to its endpoint, or to sampling if it is local."""
    chosen, params = _judge_parts(term)
    if not isinstance(params, SamplingParams):
        return judge_term(term_name(term), params, chosen, weight=term.weight)
    assert term.path is not None
    from headrace.infer.engine import EmbeddedEngine
    from headrace.render import Renderer
    from headrace.wiring.build.models import load_policy, whole
    from headrace.wiring.picture_reader import OnDemandReader

    lm = load_policy(replace(model, lora=None, recompute=False, vision=None), whole(term.path), seed=0)
    engine = EmbeddedEngine(lm, max_num_seqs=chosen.at_once)
    pictures = None if lm.vision is None else OnDemandReader(lm.source)
    ask = ask_sampler(engine, Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens, pictures=pictures), params)

    async def close() -> None:
        await asyncio.to_thread(engine.close)

    return replace(judge_term(term_name(term), ask, chosen, weight=term.weight), close=close)


def _term(
    term: RewardTermConfig, model: ModelConfig, reward_model_path: str | None, micro_batch_tokens: int
) -> Term | GroupTerm:
    name = term_name(term)
    if term.fn == JUDGE:
        return _judge_term(term, model)
    if term.fn == REWARD_MODEL:
        path = term.path or reward_model_path
        assert path is not None
        return Term(name=name, fn=_model_reward(path, model, micro_batch_tokens), weight=term.weight)
    if term.fn == LENGTH:
        return Term(name=name, fn=_length(term), weight=term.weight)
    if term.fn in ANSWER_REWARDS:
        check_options(term.fn, term.kwargs)
        own = ANSWER_REWARDS[term.fn].fn
        assert own is not None
        return Term(name=name, fn=answer_reward(own, term.kwargs), weight=term.weight)
    if term.kwargs:
        raise ConfigError(f'a reward with fn = "{term.fn}" takes no kwargs: leave them out')
    return Term(name=name, fn=BUILTIN[term.fn], weight=term.weight)


def _length(term: RewardTermConfig) -> RewardFn:
    with boundary(ConfigError, 'a reward with fn = "length" needs kwargs max_tokens and margin, and no others'):
        return length(**term.kwargs)


def _model_reward(path: str, model: ModelConfig, micro_batch_tokens: int) -> RewardFn:
    """Load a reward model as a reward function. It scores episodes one at a time: no reward depends on others."""
    from headrace.model.value_head import is_scalar_folder
    from headrace.train.frozen_model import FrozenScorer
    from headrace.wiring.build.models import load_scalar, whole

    if not is_scalar_folder(Path(path)):
        raise ModelError(f"{path} is not a reward model: give the folder of a sequence classifier with one label")
    lm = load_scalar(replace(model, lora=None, recompute=False), whole(path), seed=0)
    lm.model.requires_grad_(False)
    scorer = FrozenScorer(lm, micro_batch_tokens=micro_batch_tokens)
    alone = asyncio.Lock()

    async def score(tokens: IntArray) -> float:
        async with alone:
            (scores,) = await asyncio.to_thread(scorer.score, [scored_datum(tokens)])
        return float(scores[-1])

    return reward_by_model(score, max_tokens=lm.context)
