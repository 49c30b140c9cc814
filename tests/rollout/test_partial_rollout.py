"""Partial groups are resumed in the middle, by deterministic environments and by a user's own code."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.model.tiny import END_ID
from headrace.render import Renderer
from headrace.rollout.group import GroupPlayer
from headrace.rollout.group_json import group_to_json
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.testing import FakeEnv, FakeRewardRunner
from headrace.types import Group, SampleRequest, SamplingParams, Task, float_array
from support.scripted_episodes import TOKENIZER, ScriptedSampler, own_async, own_plain

TASK = Task(id="t")


def speak(request: SampleRequest) -> str:
    """One word of two by the request's seed, so that episodes of a group differ."""
    return "up" if request.params.seed % 3 else "down"


async def play(sampler: ScriptedSampler, partial_rollouts: PartialRollouts | None, generate_fn: Any = None) -> Group:
    return await GroupPlayer(
        group_size=3,
        make_env=FakeEnv,
        sampler=sampler,
        renderer=Renderer(TOKENIZER, eos_tokens=(END_ID,)),
        reward_runner=FakeRewardRunner(),
        sampling=SamplingParams(max_tokens=3),
        max_turns=4,
        max_episode_tokens=200,
        timeout_s=20.0,
        run_seed=1,
        generate_fn=generate_fn,
        partial_rollouts=partial_rollouts,
    )(TASK, 5)


async def test_a_group_that_is_taken_up_again_is_the_group_it_would_have_been() -> None:
    """Cut after every turn of every episode: what was on record is not sampled again, and nothing else changes."""
    expected = await play(ScriptedSampler(speak), None)
    kept = PartialRollouts()
    await play(ScriptedSampler(speak), kept)
    state = kept.snapshot()()
    turns = [len(entry["turns"]) for entry in state["5"]]
    assert max(turns) > 1
    for cut in range(max(turns) + 1):
        partial = json.loads(json.dumps(state))
        for entry in partial["5"]:
            entry["turns"] = entry["turns"][:cut]
            entry["episode"] = None
        partial_rollouts, sampler = PartialRollouts(), ScriptedSampler(speak)
        partial_rollouts.load_state_dict(partial)
        assert partial_rollouts.resumable(5)
        assert group_to_json(await play(sampler, partial_rollouts)) == group_to_json(expected)
        assert len(sampler.requests) == sum(max(0, n - cut) for n in turns)


async def test_episodes_that_had_ended_are_not_played_again() -> None:
    kept = PartialRollouts()
    expected = await play(ScriptedSampler(speak), kept)
    partial_rollouts, sampler = PartialRollouts(), ScriptedSampler(speak)
    partial_rollouts.load_state_dict(json.loads(json.dumps(kept.snapshot()())))
    assert group_to_json(await play(sampler, partial_rollouts)) == group_to_json(expected)
    assert sampler.requests == []


@pytest.mark.parametrize("generate_fn", [own_async, own_plain])
async def test_a_users_own_rollout_is_scored_too(generate_fn: Any) -> None:
    """What was recorded for its completions while it ran is in the group that comes out of it."""
    partial_rollouts = PartialRollouts()
    group = await play(ScriptedSampler(speak), partial_rollouts, generate_fn)
    for partial_episode in partial_rollouts:
        for turn in partial_episode.turns:
            assert turn.completion is not None
            turn.completion = replace(turn.completion, next_logprobs=float_array([-3.0] * len(turn.completion.tokens)))
    for scored in partial_rollouts.refreshed(group).episodes:
        [step] = scored.episode.steps
        np.testing.assert_array_equal(step.completion.next_logprobs, np.float32([-3.0] * len(step.completion.tokens)))
    partial_rollouts.close(5)
    assert partial_rollouts.refreshed(group) is group
