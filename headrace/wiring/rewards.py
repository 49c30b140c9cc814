"""`rl.rewards` to terms and their runner; a reward model is one of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.algo.scalar_data import scored_datum
from headrace.config import Config, Model, RewardTerm, Rl
from headrace.errors import ModelError
from headrace.model.scalar import is_scalar_folder
from headrace.reward.by_model import NAME as REWARD_MODEL
from headrace.reward.by_model import reward_by_model
from headrace.reward.runner import InProcessRewardRunner
from headrace.reward.terms import BUILTIN, RewardFn, Term
from headrace.rollout.load_function import load_function
from headrace.train.scorer import FrozenScorer
from headrace.types import IntArray
from headrace.wiring.models import load_scalar


def make_terms(config: Config, reward_model_path: str | None) -> list[Term]:
    """The terms that can judge now: those of [rl] (what the world gives, if there is none), without a reward model
    that is not there yet."""
    rewards = (RewardTerm(fn="env"),) if config.rl is None else config.rl.rewards
    tokens = 8192 if config.rl is None else config.rl.micro_batch_tokens
    there = [term for term in rewards if term.fn != REWARD_MODEL or (term.path or reward_model_path) is not None]
    return [_term(term, config.model, reward_model_path, tokens) for term in there]


def make_reward_runner(terms: Sequence[Term], rl: Rl) -> InProcessRewardRunner:
    """A reward model judges one episode after another: those that wait for it have as long as an episode has."""
    if any(term.fn == REWARD_MODEL for term in rl.rewards):
        return InProcessRewardRunner(terms, timeout_s=rl.asynchronous.task_timeout_s)
    return InProcessRewardRunner(terms)


def _term(term: RewardTerm, model: Model, reward_model_path: str | None, micro_batch_tokens: int) -> Term:
    name = term.name or term.fn.rpartition(":")[2]
    if term.fn == REWARD_MODEL:
        path = term.path or reward_model_path
        assert path is not None
        return Term(name=name, fn=_model_reward(path, model, micro_batch_tokens), weight=term.weight)
    fn = BUILTIN[term.fn] if term.fn in BUILTIN else load_function(term.fn)
    return Term(name=name, fn=fn, weight=term.weight)


def _model_reward(path: str, model: Model, micro_batch_tokens: int) -> RewardFn:
    """A saved reward model as a reward function. One episode at a time, so a reward depends on nothing beside it."""
    if not is_scalar_folder(Path(path)):
        raise ModelError(f"{path} is not a reward model: give the folder of a sequence classifier with one label")
    lm = load_scalar(replace(model, lora=None, recompute=False), path, seed=0)
    lm.model.requires_grad_(False)
    scorer = FrozenScorer(lm, micro_batch_tokens=micro_batch_tokens)
    alone = asyncio.Lock()

    async def score(tokens: IntArray) -> float:
        async with alone:
            (scores,) = await asyncio.to_thread(scorer.score, [scored_datum(tokens)])
        return float(scores[-1])

    return reward_by_model(score, max_tokens=lm.context)
