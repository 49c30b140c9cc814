"""Episodes and conversations become data: the only shift by one, with every number worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import booleans, composite, integers, lists, sampled_from

from headrace.algo.datum import SequenceUnit, conversation_datum, shift, split_samples, to_data
from headrace.errors import DataError
from headrace.pictures import PICTURE_MARK, ModelImage, Picture, PlacedImage
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)


def step(prompt: list[int], sampled: list[int], logprobs: list[float], versions: list[int]) -> Step:
    completion = Completion(
        tokens=int_array(sampled),
        sampler_logprobs=float_array(logprobs),
        raw_logprobs=float_array([-9.0] * len(sampled)),
        versions=int_array(versions),
        stop=StopReason.STOP,
    )
    return Step(prompt=int_array(prompt), completion=completion, action="")


def credited(steps: list[Step], advantages: list[float], temperature: float = 1.0) -> CreditedEpisode:
    episode = Episode(
        id="e", task=Task(id="t"), seed=0, steps=tuple(steps), messages=(), temperature=temperature, truncated=False
    )
    scored = ScoredEpisode(episode=episode, reward=Reward(total=0.0))
    return CreditedEpisode(scored=scored, group_id=0, advantages=tuple(advantages))


def test_position_t_predicts_token_t_plus_1() -> None:
    datum = shift(int_array([5, 6, 7]), {"weights": float_array([9.0, 0.25, 0.5])}, temperature=0.7, unit=3)
    assert datum.inputs.tolist() == [5, 6]
    assert datum.targets.tolist() == [6, 7]
    assert datum.arrays["weights"].tolist() == [0.25, 0.5]
    assert (datum.temperature, datum.unit) == (0.7, 3)


def test_a_conversation_trains_the_marked_tokens_and_no_other() -> None:
    # tokens 7 and 8 are the assistant's: they are the targets of positions 1 and 2
    datum = conversation_datum(int_array([5, 6, 7, 8, 9]), np.array([False, False, True, True, False]))
    assert datum.targets[datum.arrays["weights"] == 1].tolist() == [7, 8]
    assert datum.arrays["weights"].tolist() == [0, 1, 1, 0]


def test_a_conversation_that_only_grows_is_one_datum() -> None:
    episode = credited(
        [
            step([1, 2], [3, 4], [-0.5, -0.25], [0, 0]),
            step([1, 2, 3, 4, 5, 6], [7], [-1.5], [1]),
        ],
        [2.0, -3.0],
        temperature=0.5,
    )
    [datum] = to_data([episode])
    # the sequence is 1 2 | 3 4 | 5 6 | 7: sampled tokens are at 2, 3 and 6, so the targets at 1, 2 and 5
    assert datum.inputs.tolist() == [1, 2, 3, 4, 5, 6]
    assert datum.targets.tolist() == [2, 3, 4, 5, 6, 7]
    assert datum.arrays["weights"].tolist() == [0, 1, 1, 0, 0, 1]
    assert datum.arrays["advantages"].tolist() == [0, 2, 2, 0, 0, -3]
    assert datum.arrays["sampler_logprobs"].tolist() == [0, -0.5, -0.25, 0, 0, -1.5]
    assert datum.arrays["versions"].tolist() == [-1, 0, 0, -1, -1, 1]
    assert (datum.temperature, datum.unit) == (0.5, None)


def test_next_version_logprobs_travel_with_their_tokens_and_unknown_is_nan() -> None:
    first, second = step([1, 2], [3, 4], [-0.5, -0.25], [0, 0]), step([1, 2, 3, 4, 5], [7], [-1.5], [1])
    known = replace(first, completion=replace(first.completion, next_logprobs=float_array([-0.75, np.nan])))
    [datum] = to_data([credited([known, second], [2.0, -3.0])])
    # the sequence is 1 2 | 3 4 | 5 | 7, the targets are 2 3 4 5 7: only token 3 has one
    np.testing.assert_array_equal(datum.arrays["next_logprobs"], np.float32([np.nan, -0.75, np.nan, np.nan, np.nan]))


def test_a_rewritten_history_starts_a_new_datum() -> None:
    # the second prompt has 9 where 3 was sampled (thinking was cut, say); the third extends the second
    episode = credited(
        [
            step([1, 2], [3, 4], [-0.5, -0.25], [0, 0]),
            step([1, 2, 9, 5], [6], [-1.0], [0]),
            step([1, 2, 9, 5, 6, 7], [8], [-2.0], [0]),
        ],
        [1.0, 2.0, 3.0],
    )
    first, second = to_data([episode])
    assert first.inputs.tolist() == [1, 2, 3]
    assert first.targets.tolist() == [2, 3, 4]
    assert first.arrays["weights"].tolist() == [0, 1, 1]
    assert first.arrays["advantages"].tolist() == [0, 1, 1]
    assert second.inputs.tolist() == [1, 2, 9, 5, 6, 7]
    assert second.targets.tolist() == [2, 9, 5, 6, 7, 8]
    assert second.arrays["weights"].tolist() == [0, 0, 0, 1, 0, 1]
    assert second.arrays["advantages"].tolist() == [0, 0, 0, 2, 0, 3]
    assert second.arrays["sampler_logprobs"].tolist() == [0, 0, 0, -1, 0, -2]


def placed(digest: str, first: int) -> PlacedImage:
    image = ModelImage(digest=digest, pixels=np.zeros((2, 1), dtype=np.float32), grid=(1, 1, 2), num_tokens=2)
    return PlacedImage(image=image, at=np.arange(first, first + 2, dtype=np.int32))


@pytest.mark.parametrize(("second", "data"), [("a", 1), ("b", 2)])
def test_a_prompt_continues_only_with_the_same_pictures(second: str, data: int) -> None:
    """The tokens are those of one sequence; a picture of the first prompt is another one in the second."""
    steps = [
        replace(step([7, 9, 9], [4], [-0.1], [0]), images=(placed("a", 1),)),
        replace(step([7, 9, 9, 4, 9, 9, 5], [6], [-0.2], [0]), images=(placed(second, 1), placed("c", 4))),
    ]
    made = to_data([credited(steps, [1.0, 2.0])])
    assert len(made) == data
    assert [one.image.digest for one in made[-1].images] == [second, "c"]
    assert [one.at.tolist() for one in made[-1].images] == [[1, 2], [4, 5]]
    if data == 2:
        assert made[0].images == steps[0].images


def test_an_episode_whose_pictures_were_not_kept_is_not_trained_on() -> None:
    """Nothing is trained on a blank."""
    message = Message(role="user", content=PICTURE_MARK, images=(Picture(data=b"x"),))
    one = credited([step([7, 9, 9], [4], [-0.1], [0])], [1.0])
    episode = replace(one.scored.episode, messages=(message,))
    with pytest.raises(DataError, match="sample it again"):
        to_data([replace(one, scored=replace(one.scored, episode=episode))])


def test_rows_of_steps_repeat_the_past_without_training_it_again() -> None:
    episode = credited([step([1, 2], [3], [-0.5], [0]), step([1, 2, 3, 4], [5, 6], [-1.0, -2.0], [0, 1])], [1.0, -2.0])
    [whole] = to_data([episode])
    first, second = to_data([episode], SequenceUnit.STEP)
    assert whole.targets.tolist() == second.targets.tolist() == [2, 3, 4, 5, 6]
    assert whole.arrays["advantages"].tolist() == [0, 1, 0, -2, -2]
    assert first.targets.tolist() == [2, 3]
    assert first.arrays["advantages"].tolist() == [0, 1]
    assert second.arrays["weights"].tolist() == [0, 0, 0, 1, 1]
    assert second.arrays["advantages"].tolist() == [0, 0, 0, -2, -2]
    assert second.arrays["sampler_logprobs"].tolist() == [0, 0, 0, -1, -2]
    assert second.arrays["versions"].tolist() == [-1, -1, -1, 0, 1]


@pytest.mark.parametrize(
    ("second", "num_samples"),
    [([1, 2, 3, 4], 1), ([1, 2, 3], 2), ([1, 2, 3, 5], 2), ([1, 2], 2), ([0, 2, 3, 4, 5], 2)],
    ids=["exactly so far", "shorter", "last token changed", "the same prompt again", "first token changed"],
)
def test_only_a_prompt_that_begins_with_all_tokens_so_far_continues(second: list[int], num_samples: int) -> None:
    episode = credited(
        [step([1, 2], [3, 4], [-1.0, -1.0], [0, 0]), step(second, [7], [-1.0], [0])], [1.0, 1.0]
    ).scored.episode
    assert len(split_samples(episode)) == num_samples


def test_episodes_keep_their_own_advantages_in_order() -> None:
    one = credited([step([1], [2], [-0.5], [4])], [0.5])
    two = credited([step([1], [3], [-0.75], [5])], [-0.5])
    data = to_data([one, two])
    assert [datum.targets.tolist() for datum in data] == [[2], [3]]
    assert [datum.arrays["advantages"].tolist() for datum in data] == [[0.5], [-0.5]]
    assert [datum.arrays["versions"].tolist() for datum in data] == [[4], [5]]


@composite
def episodes(draw) -> Episode:  # type: ignore[no-untyped-def]
    """Any mixture of turns that extend the conversation and turns whose history was rewritten."""
    steps: list[Step] = []
    so_far: list[int] = []
    tokens = lists(integers(0, 3), min_size=1, max_size=3)
    for _ in range(draw(integers(1, 5))):
        extends = draw(booleans())
        prompt = so_far + draw(tokens) if extends else draw(tokens)
        sampled = draw(tokens)
        steps.append(step(prompt, sampled, [-0.25 - len(steps)] * len(sampled), [len(steps)] * len(sampled)))
        so_far = prompt + sampled
    return credited(steps, [0.0] * len(steps)).scored.episode


@given(episodes(), sampled_from(SequenceUnit))
def test_every_sampled_token_is_trained_once_in_the_context_it_was_sampled_in(
    episode: Episode, rows: SequenceUnit
) -> None:
    seen: list[int] = []
    for sample in split_samples(episode, rows):
        for index in sorted(set(sample.step[sample.step >= 0].tolist())):
            seen.append(index)
            own = episode.steps[index]
            (where,) = np.nonzero(sample.step == index)
            assert sample.tokens[where].tolist() == own.completion.tokens.tolist()
            assert sample.tokens[: where[0]].tolist() == own.prompt.tolist()
            assert sample.sampler_logprobs[where].tolist() == own.completion.sampler_logprobs.tolist()
            assert sample.versions[where].tolist() == own.completion.versions.tolist()
    assert seen == list(range(len(episode.steps)))
