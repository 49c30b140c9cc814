"""Advantages of a critic computed again from the values in a file: those of the run, and with another reward or GAE."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algo.advantages.gae_from_values import credit_by_values
from headrace.errors import ConfigError
from headrace.loops.critic import Critic, CriticSettings
from headrace.observe.rollouts.files import RolloutFileInfo, load_trajectories, save_trajectories
from headrace.observe.rollouts.records import read_lines
from headrace.testing import FakeBackend
from headrace.types import (
    CreditedEpisode,
    Datum,
    ForwardOut,
    Group,
    LossSpec,
    Reward,
    ScoredEpisode,
    TokenValues,
    float_array,
)
from headrace.wiring.commands.recredit import RecreditRequest, recredit
from support import rollout_files

JUDGE = "def judge(messages, **kwargs):\n    return len(messages) / 10\n"


class Wavy(FakeBackend):
    """Values that differ from token to token and have no short decimals."""

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        values = [float_array(np.sin(1.7 * d.inputs + 0.3 * np.arange(d.num_tokens)) / 3) for d in data]
        done: Future[ForwardOut] = Future()
        done.set_result(ForwardOut(loss=0.0, logprobs=tuple(values), metrics={}))
        return done


async def reference(data: Sequence[Datum]) -> list[Any]:
    return [float_array(-1.1 - 0.1 * np.cos(np.arange(d.num_tokens))) for d in data]


def groups() -> list[Group]:
    """Those of the corridor; of the second group, an episode has a first turn without a token, and pays for it."""
    corridor, still = rollout_files.groups()
    first, *rest = still.episodes
    steps = first.episode.steps
    empty = replace(
        steps[0].completion,
        tokens=steps[0].completion.tokens[:0],
        sampler_logprobs=steps[0].completion.sampler_logprobs[:0],
        raw_logprobs=steps[0].completion.raw_logprobs[:0],
        versions=steps[0].completion.versions[:0],
    )
    episode = replace(first.episode, steps=(*steps, replace(steps[-1], completion=empty)))
    reward = Reward(total=0.5, steps=(*(0.0,) * len(steps), 0.5))
    return [corridor, replace(still, episodes=(ScoredEpisode(episode=episode, reward=reward), *rest))]


def saved(path: Path, *, lean: bool = False, **numbers: Any) -> tuple[CreditedEpisode, ...]:
    settings = CriticSettings(**{"gamma": 0.9, "lam": 0.8, **numbers})
    critic = Critic(settings=settings, backend=Wavy(), updater=None, reference=reference)
    batch = asyncio.run(critic.credit(groups()))
    c = settings
    params = {"gamma": c.gamma, "lam": c.lam, "whiten": c.whiten, "bootstrap": c.bootstrap, "kl_coef": c.kl_coef}
    about = RolloutFileInfo(
        training_step=4, method=c.credit, params={key: float(value) for key, value in params.items()}
    )
    save_trajectories(path, batch.episodes, lean=lean, about=about)
    return batch.episodes


NUMBERS: list[dict[str, Any]] = [
    {"credit": "token_gae"},
    {"credit": "turn_gae"},
    {"credit": "token_gae", "kl_coef": 0.2},
    {"credit": "turn_gae", "kl_coef": 0.2, "whiten": False},
    {"credit": "token_gae", "bootstrap": False, "whiten": False},
]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_the_run_s_advantages_come_out_again_to_the_last_bit(tmp_path: Path, numbers: dict[str, Any]) -> None:
    file = tmp_path / "step_000004.jsonl"
    made = saved(file, **numbers)
    assert len({a for episode in made for a in episode.advantages}) > 8, "they tell steps apart"
    result = _recredit(RecreditRequest(path=file))
    assert [line.advantages for line in read_lines(result)] == [episode.advantages for episode in made]
    for before, after in zip(made, load_trajectories(result), strict=True):
        assert isinstance(after, CreditedEpisode)
        np.testing.assert_array_equal(before.values or (), after.values or ())
        assert before.token_values is not None
        assert after.token_values is not None
        assert before.token_values.after == after.token_values.after
        for one, other in zip(before.token_values.steps, after.token_values.steps, strict=True):
            np.testing.assert_array_equal(one, other)


def test_other_numbers_another_gae_and_no_penalty_are_what_that_run_would_have_had(tmp_path: Path) -> None:
    file = tmp_path / "step_000004.jsonl"
    saved(file, credit="token_gae", kl_coef=0.2)
    other = saved(tmp_path / "other.jsonl", credit="turn_gae", lam=0.5, whiten=False)
    params: dict[str, float | str] = {"lam": 0.5, "whiten": 0.0, "kl_coef": 0.0}
    again = read_lines(_recredit(RecreditRequest(path=file, method="turn_gae", params=params)))
    assert [line.advantages for line in again] == [episode.advantages for episode in other]


def test_turns_need_no_tokens_and_tokens_do(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.jsonl", credit="turn_gae")
    lean = tmp_path / "lean.jsonl"
    saved(lean, lean=True, credit="turn_gae")
    assert [line.advantages for line in read_lines(_recredit(RecreditRequest(path=lean)))] == [
        e.advantages for e in whole
    ]
    with pytest.raises(ConfigError, match=r"'token_gae' needs the values of a critic, .* unless rl.save.lean"):
        recredit(RecreditRequest(path=lean, method="token_gae"))
    saved(lean, lean=True, credit="turn_gae", kl_coef=0.2)
    with pytest.raises(ConfigError, match="a lean file does not have: add --param kl_coef=0"):
        recredit(RecreditRequest(path=lean))


def test_another_reward_under_the_same_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file that another method credited in between still has the critic's values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(JUDGE)
    file = tmp_path / "step_000004.jsonl"
    saved(file, credit="token_gae")
    gigpo = _recredit(RecreditRequest(path=file, method="gigpo"), "between.jsonl")
    asked = RecreditRequest(
        path=gigpo, rewards=("mine.py:judge",), method="token_gae", params={"gamma": 0.9, "lam": 0.8}, trusted=True
    )
    after = _recredit(asked, "after.jsonl")
    [first, *_] = read_lines(after)
    assert first.reward.total == 0.8, "it has 8 messages"
    assert first.by_critic
    before = _recredit(replace(asked, path=file), "direct.jsonl")
    assert [line.advantages for line in read_lines(after)] == [line.advantages for line in read_lines(before)]


def test_by_hand() -> None:
    """Two turns of one token, values 0.5 and 0.25, reward 1 at the end, gamma 1, lam 0.5: delta = -0.25, 0.75, so A =
    0.125, 0.75. Cut off with 2 to come: delta_2 = 2.75, A = 1.125, 2.75."""
    path = [("S", "on"), ("A", "on")]
    params = {"lam": 0.5, "whiten": 0.0}
    for cut_off, expected in ((False, (0.125, 0.75)), (True, (1.125, 2.75))):
        scored = rollout_files.episode("1/0", "t", path, solved=True)
        steps = tuple(
            replace(
                step,
                completion=replace(
                    step.completion,
                    tokens=step.completion.tokens[:1],
                    sampler_logprobs=step.completion.sampler_logprobs[:1],
                    raw_logprobs=step.completion.raw_logprobs[:1],
                    versions=step.completion.versions[:1],
                ),
            )
            for step in scored.episode.steps
        )
        scored = replace(scored, episode=replace(scored.episode, steps=steps, truncated=cut_off))
        group = Group(id=1, task=scored.episode.task, episodes=(scored,))
        known = {"1/0": TokenValues(steps=(float_array([0.5]), float_array([0.25])), after=2.0)}
        for method in ("token_gae", "turn_gae"):
            [made] = credit_by_values([group], known, method=method, params=params)
            assert made.advantages == pytest.approx(expected)
            assert made.values == (0.5, 0.25)


def _recredit(asked: RecreditRequest, name: str = "again.jsonl") -> Path:
    return recredit(replace(asked, out=asked.path.with_name(name))).out
