"""Episodes with pictures: what a sampler is asked with, what environments answer, and what a checkpoint stores."""

import json
from dataclasses import replace

import numpy as np

from headrace.algo.datum import to_data
from headrace.model.tiny import make_tokenizer
from headrace.pictures import PICTURE_MARK, Picture
from headrace.render import Renderer
from headrace.reward.episode_json import episode_from_row, episode_to_row
from headrace.reward.judge import JudgeSettings, write_question
from headrace.reward.user_function import available_arguments
from headrace.rollout.episode import run_sampled_episode
from headrace.rollout.group import start_hash
from headrace.rollout.group_json import group_from_json, group_to_json
from headrace.testing import FakePictureReader
from headrace.types import (
    CreditedEpisode,
    Episode,
    Group,
    Message,
    Observation,
    Reward,
    SamplingParams,
    ScoredEpisode,
    StepResult,
    Task,
    wire_message,
)
from support.pictures import counted
from support.scripted_episodes import WORDS, ScriptedSampler

TWO, FOUR = counted(2), counted(4)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_renderer() -> Renderer:
    tokenizer = make_tokenizer(WORDS)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATE
    [image_token] = tokenizer("<image>", add_special_tokens=False)["input_ids"]
    return Renderer(tokenizer, pictures=FakePictureReader(image_token=image_token))


def show(*pictures: Picture) -> Message:
    return Message(role="user", content=f"{PICTURE_MARK * len(pictures)}count", images=pictures)


class SecondPictureEnv:
    """Answers the first turn with another picture."""

    deterministic = True

    def reset(self, task: Task, seed: int) -> Observation:
        self._turns = 0
        return Observation(messages=(), state="start")

    def step(self, action: str) -> StepResult:
        self._turns += 1
        shown = (show(FOUR),) if self._turns == 1 else ()
        return StepResult(observation=Observation(messages=shown), reward=1.0, done=self._turns == 2)

    def close(self) -> None:
        pass


async def play(*pictures: Picture) -> tuple[Episode, ScriptedSampler]:
    sampler = ScriptedSampler(lambda request: "2")
    episode = await run_sampled_episode(
        id="0/0",
        task=Task(id="t", messages=(show(*pictures),), data={"answer": "2"}),
        env=SecondPictureEnv(),
        sampler=sampler,
        renderer=make_renderer(),
        sampling=SamplingParams(max_tokens=4),
        seed=1,
        env_seed=1,
        max_turns=3,
        max_episode_tokens=100,
        timeout_s=20.0,
    )
    assert isinstance(episode, Episode), episode
    return episode, sampler


async def test_every_turn_is_sampled_and_trained_with_the_pictures_of_its_prompt() -> None:
    episode, sampler = await play(TWO)
    assert [[placed.image.num_tokens for placed in request.images] for request in sampler.requests] == [[2], [2, 4]]
    first, second = episode.steps
    assert [placed.at.tolist() for placed in first.images] == [placed.at.tolist() for placed in second.images[:1]]
    image_token = first.prompt[first.images[0].at[0]]
    for placed in second.images:
        assert (second.prompt[placed.at] == image_token).all()
    assert len(np.flatnonzero(second.prompt == image_token)) == 6
    scored = ScoredEpisode(episode=episode, reward=Reward(total=1.0))
    [datum] = to_data([CreditedEpisode(scored=scored, group_id=0, advantages=(1.0, 1.0))])
    assert [placed.at.tolist() for placed in datum.images] == [placed.at.tolist() for placed in second.images]
    assert not any(datum.arrays["weights"][placed.at - 1].any() for placed in datum.images), "no picture is a target"
    assert episode.messages[2].images == (FOUR,)


async def test_another_picture_is_another_start() -> None:
    (one, _), (other, _), (again, _) = [await play(picture) for picture in (TWO, FOUR, TWO)]
    renamed = Picture(data=TWO.data + b"\x00", name="same tokens, other bytes")
    (twin, _) = await play(renamed)
    assert np.array_equal(twin.steps[0].prompt, one.steps[0].prompt)
    assert start_hash(one) == start_hash(again) != start_hash(other)
    assert start_hash(twin) != start_hash(one)


async def test_a_checkpoint_stores_pictures_once_and_a_group_without_them_as_before() -> None:
    episode, _ = await play(TWO, FOUR)
    scored = ScoredEpisode(episode=episode, reward=Reward(total=1.0))
    group = Group(id=1, task=episode.task, episodes=(scored, scored))
    encoded = json.loads(json.dumps(group_to_json(group)))
    assert len(encoded["pictures"]) == 4, "two files, and what the processor made of them"
    again = group_from_json(encoded)
    assert group_to_json(again) == group_to_json(group)
    assert again.task == group.task
    assert again.episodes[1].episode.messages == episode.messages
    for step, before in zip(again.episodes[0].episode.steps, episode.steps, strict=True):
        assert len(step.images) == len(before.images)
        for placed, was in zip(step.images, before.images, strict=True):
            assert placed.image == was.image
            assert np.array_equal(placed.image.pixels, was.image.pixels)
            assert np.array_equal(placed.at, was.at)
    plain = Task(id="t", messages=(Message(role="user", content="a"),))
    assert "images" not in json.dumps(group_to_json(Group(id=1, task=plain, episodes=())))


async def test_rewards_see_pictures_in_another_process_and_judges_are_shown_them() -> None:
    episode, _ = await play(TWO)
    row = json.loads(json.dumps(episode_to_row(episode, with_tokens=True)))
    assert episode_from_row(row).messages == episode.messages
    arguments = available_arguments(row)
    assert arguments["messages"][0]["content"][0]["image_url"]["url"] == TWO.data_uri
    assert arguments["text"] == "2"
    [_, question] = write_question([episode], JudgeSettings(rubric="is it right?"), "XYZ")
    assert question.images == (TWO, FOUR)
    assert [part["type"] for part in wire_message(question)["content"]] == [
        "text",
        "image_url",
        "text",
        "image_url",
        "text",
    ]
    stray = replace(episode, messages=(*episode.messages, Message(role="user", content=f"a {PICTURE_MARK}")))
    assert write_question([stray], JudgeSettings(rubric="r"), "XYZ")[1].images == (TWO, FOUR)
