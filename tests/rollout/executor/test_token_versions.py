"""A token's version is the one that was loaded when it was sampled, through interruptions and continuations.

The engine writes its version into every token it samples, so what is recorded can be compared with what happened.
"""

import asyncio

import numpy as np
import pytest

from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.rollout.publisher import Publisher
from headrace.testing import VERSION_STRIDE, run_virtual
from headrace.types import (
    Completion,
    Episode,
    Group,
    Reward,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    SharedWeights,
    Step,
    Task,
    int_array,
)
from support.executor_sim import TOKEN_S, ShowingSampler, score_of

LONG, SHORT = 20, 2


async def through_updates(publish_at_s: list[float], *, reads: bool) -> Completion:
    """One long sequence, while weights are published at the given moments for short ones that come and go."""
    sampler, partial_rollouts = ShowingSampler(), PartialRollouts(next_logprobs=reads)
    lengths = {"t0": LONG}

    async def play(task: Task, id: int) -> Group:
        request = SampleRequest(prompt=int_array([5]), params=SamplingParams(max_tokens=lengths.get(task.id, SHORT)))
        completion = await partial_rollouts.open(id, 1)[0].sample(sampler, request)
        step = Step(prompt=request.prompt, completion=completion, action="")
        episode = Episode(id=str(id), task=task, seed=0, steps=(step,), messages=(), temperature=1.0)
        return Group(id=id, task=task, episodes=(ScoredEpisode(episode=episode, reward=Reward(total=0.0)),))

    names = iter(range(100))
    executor = RolloutExecutor(
        play=play,
        next_task=lambda: Task(id=f"t{next(names)}"),
        batch_groups=1,
        settings=AsyncSettings(max_staleness=len(publish_at_s) + 1, next_logprobs=True),
        publisher=Publisher([sampler]),
        partial_rollouts=partial_rollouts,
    )
    loop = asyncio.get_running_loop()
    async with executor:
        began_s = loop.time()
        for number, at_s in enumerate(publish_at_s):
            executor.done(await executor.take_batch())
            await asyncio.sleep(began_s + at_s - loop.time())
            await executor.publish(SharedWeights(fingerprint=f"w{number}"))
        await asyncio.sleep(LONG * TOKEN_S)  # it has ended by now
        while True:
            groups = await executor.take_batch()
            executor.done(groups)
            if groups[0].task.id == "t0":
                return groups[0].episodes[0].episode.steps[0].completion
            await executor.publish(SharedWeights(fingerprint="later"))


@pytest.mark.parametrize("reads", [True, False], ids=["read off", "by calls"])
@pytest.mark.parametrize(
    ("publish_at_s", "segments"),
    [
        ([4.5], [5, 15]),
        ([4.5, 9.5], [5, 5, 10]),
        ([4.5, 6.5, 9.5], [5, 2, 3, 10]),
        ([4.5, 4.75, 5.0], [5, 1, 1, 13]),  # the token that was being made when the update came belongs to before it
    ],
)
def test_every_token_has_the_version_that_sampled_it(
    publish_at_s: list[float], segments: list[int], reads: bool
) -> None:
    completion = run_virtual(through_updates(publish_at_s, reads=reads))
    expected = [version for version, length in enumerate(segments) for _ in range(length)]
    written = completion.tokens // VERSION_STRIDE
    assert completion.versions.tolist() == written.tolist()
    assert written.tolist() == expected, "what happened is not what the clock says"
    assert (completion.tokens % VERSION_STRIDE).tolist() == list(range(LONG)), "nothing is lost or sampled twice"
    # what was read off is all that went on under the next version; calls score what has seen a second update
    newest = len(publish_at_s) - 1 if reads else len(publish_at_s) - 2
    known = [score_of(version + 1) if version <= newest else np.nan for version in expected]
    found = np.full(LONG, np.nan) if completion.next_logprobs is None else completion.next_logprobs
    np.testing.assert_array_equal(found, np.float32(known))
