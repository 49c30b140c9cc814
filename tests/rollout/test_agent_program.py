"""Agent programs as episodes: what is trained is what the engine saw and sampled, whatever the program did with it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import openai
import pytest

from headrace.algo.datum import chains
from headrace.errors import EpisodeError, SamplerError
from headrace.infer.openai_api import OpenAIEndpoint, serve
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import BUILTIN, Term
from headrace.rollout.agent_program import play_program, program_fn
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeEnv, FakeSampler
from headrace.types import Completion, EndReason, Episode, Message, SampleRequest, SamplingParams, Task
from support.agent_programs import (
    ADD,
    SAMPLING,
    THINKING,
    Heard,
    KeepingSampler,
    Noise,
    client_of,
    heard_spans,
    make_tokenizer,
    scripted,
    trained_spans,
)
from support.paths import DOCS

TASK = Task(id="t", data={"question": "what is 1 + 2 + 3?", "answer": "6"})


def call_of(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"b": {b}, "a": {a}}}}}\n</tool_call>'


# --- programs --------------------------------------------------------------------------------------------------------


async def single_turn(base_url: str, task: Task) -> None:
    async with client_of(base_url) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


async def multi_turn(base_url: str, task: Task) -> None:
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    async with client_of(base_url) as client:
        for question in ("one", "two", "three"):
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})


async def tool_user(base_url: str, task: Task) -> bool:
    """Three turns: two calls of a tool, as the client's own objects, then an answer; some replies are streamed."""
    messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
    async with client_of(base_url) as client:
        for _ in range(3):
            async with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return (message.content or "").strip() == task.data["answer"]
            for call in message.tool_calls:
                asked = json.loads(call.function.arguments)
                result = str(asked["a"] + asked["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return False


async def forgetful(base_url: str, task: Task) -> None:
    """Keeps the first message and the last three, so that history is cut from the second turn on."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    async with client_of(base_url) as client:
        for number in range(4):
            messages.append({"role": "user", "content": f"question {number}"})
            sent = messages if len(messages) <= 4 else [messages[0], *messages[-3:]]
            reply = await client.chat.completions.create(model="m", messages=sent)
            messages.append(reply.choices[0].message)


async def rewriting(base_url: str, task: Task) -> None:
    """Corrects what the model said before it goes on."""
    messages: list[Any] = []
    async with client_of(base_url) as client:
        for number in range(3):
            messages.append({"role": "user", "content": f"question {number}"})
            reply = await client.chat.completions.create(model="m", messages=messages)
            better = (reply.choices[0].message.content or "").upper() + "!"
            messages.append({"role": "assistant", "content": better})


async def two_at_once(base_url: str, task: Task) -> None:
    """Two conversations side by side, each of two turns."""

    async def talk(client: openai.AsyncOpenAI, topic: str) -> None:
        messages: list[Any] = [{"role": "user", "content": topic}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "more"}]

    async with client_of(base_url) as client:
        await asyncio.gather(talk(client, "cats"), talk(client, "dogs"))


PROGRAMS = (single_turn, multi_turn, tool_user, forgetful, rewriting, two_at_once)


async def play(
    program: Callable[[str, Task], Any],
    sampler: Any,
    renderer: Renderer,
    *,
    max_turns: int = 8,
    max_episode_tokens: int = 4000,
    sampling: SamplingParams = SAMPLING,
) -> Episode:
    async with serve(renderer) as endpoint:
        return await play_program(
            program,
            task=TASK,
            endpoint=endpoint,
            sampler=sampler,
            sampling=sampling,
            seed=5,
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
            id="0/0",
        )


# --- token truth -----------------------------------------------------------------------------------------------------

TURNS = ("first  answer", "second", "third\n\nanswer", "fourth")
CALLS = (f"hm\n{call_of(1, 2)}", call_of(3, 3), "6")


@pytest.mark.parametrize(
    ("program", "texts", "samples"),
    [
        (single_turn, TURNS, [(0,)]),
        (multi_turn, TURNS, [(0, 1, 2)]),
        (tool_user, CALLS, [(0, 1, 2)]),
        (forgetful, TURNS, [(0, 1), (2,), (3,)]),
        (rewriting, TURNS, [(0,), (1,), (2,)]),
    ],
)
async def test_trained_tokens_are_what_the_engine_saw_and_sampled(
    program: Callable[[str, Task], Awaitable[Any]], texts: tuple[str, ...], samples: list[tuple[int, ...]]
) -> None:
    sampler, renderer = scripted(*texts)
    episode = await play(program, sampler, renderer)
    assert trained_spans(episode) == heard_spans(sampler)
    assert list(chains(episode.steps)) == samples


@pytest.mark.parametrize("program", PROGRAMS)
async def test_so_they_are_for_a_model_that_babbles(program: Callable[[str, Task], Awaitable[Any]]) -> None:
    tokenizer = make_tokenizer()
    sampler = KeepingSampler(Noise(tokenizer))
    episode = await play(program, sampler, Renderer(tokenizer))
    assert sorted(trained_spans(episode)) == sorted(heard_spans(sampler))
    assert len(episode.steps) == len(sampler.heard)


async def test_tokens_that_no_text_would_give_again_are_extended_as_they_are() -> None:
    tokenizer = make_tokenizer()
    sampler = KeepingSampler(Noise(tokenizer))
    episode = await play(multi_turn, sampler, Renderer(tokenizer))
    assert list(chains(episode.steps)) == [(0, 1, 2)]
    for heard, step in zip(sampler.heard, episode.steps, strict=True):
        assert tokenizer(step.action)["input_ids"] != heard.sampled


async def test_a_template_that_strips_thinking_starts_new_samples() -> None:
    sampler, renderer = scripted("<think>hm</think>one", "<think>so</think>two", "three", template=THINKING)
    episode = await play(multi_turn, sampler, renderer)
    assert trained_spans(episode) == heard_spans(sampler)
    assert list(chains(episode.steps)) == [(0,), (1,), (2,)]
    assert "hm" not in renderer.decode(episode.steps[1].prompt)


async def test_a_call_written_otherwise_than_the_template_would_still_extends() -> None:
    # the model puts "b" before "a" and adds spaces; the template would not
    sampler, renderer = scripted('<tool_call> {"arguments":{"b":2,  "a":1},"name":"add"} </tool_call>', "3")
    episode = await play(tool_user, sampler, renderer)
    first, second = sampler.heard
    seen = [*first.prompt, *first.sampled]
    assert second.prompt[: len(seen)] == seen
    assert make_tokenizer().decode(second.prompt[len(seen) :]) == (
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained_spans(episode) == heard_spans(sampler)


async def test_other_tools_start_a_new_sample_that_shows_them() -> None:
    async def late(base_url: str, task: Task) -> None:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        async with client_of(base_url) as client:
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "now with tools"}]
            await client.chat.completions.create(model="m", messages=messages, tools=[ADD])

    sampler, renderer = scripted("hi", "6")
    episode = await play(late, sampler, renderer)
    assert list(chains(episode.steps)) == [(0,), (1,)]
    assert ["Add two numbers" in renderer.decode(step.prompt) for step in episode.steps] == [False, True]
    assert trained_spans(episode) == heard_spans(sampler)


async def test_a_cut_reply_is_closed_and_goes_on() -> None:
    sampler, renderer = scripted("a long answer", "b", "c")
    episode = await play(multi_turn, sampler, renderer, sampling=SamplingParams(max_tokens=6))
    first, second, _ = sampler.heard
    seen = [*first.prompt, *first.sampled, make_tokenizer().eos_token_id]
    assert second.prompt[: len(seen)] == seen
    assert trained_spans(episode) == heard_spans(sampler)
    assert not episode.truncated  # the last reply was whole


def test_the_comparison_notices_one_other_token() -> None:
    sampler, renderer = scripted(*TURNS)
    episode = asyncio.run(play(multi_turn, sampler, renderer))
    first = sampler.heard[0]
    sampler.heard[0] = Heard(
        first.prompt, [*first.sampled[:-2], first.sampled[-2] + 1, first.sampled[-1]], first.params
    )
    assert trained_spans(episode) != heard_spans(sampler)


# --- episodes --------------------------------------------------------------------------------------------------------


async def test_a_tool_using_program_is_an_episode() -> None:
    sampler, renderer = scripted(*CALLS)
    episode = await play(tool_user, sampler, renderer)
    assert (episode.id, episode.seed, episode.success, episode.truncated) == ("0/0", 5, True, False)
    assert episode.ended is EndReason.DONE
    assert [step.reward for step in episode.steps] == [0.0, 0.0, 1.0]
    assert [step.action for step in episode.steps] == list(CALLS)
    assert [(message.role, message.content) for message in episode.messages] == [
        ("user", "what is 1 + 2 + 3?"),
        ("assistant", "hm"),
        ("tool", "3"),
        ("assistant", ""),
        ("tool", "6"),
        ("assistant", "6"),
    ]
    assert [call.arguments for call in episode.messages[1].tool_calls] == ['{"b": 2, "a": 1}']


async def test_the_example_of_the_document_runs() -> None:
    text = (DOCS / "agents.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    sampler, renderer = scripted(*CALLS)
    task = replace(TASK, messages=(Message(role="user", content=TASK.data["question"]),))
    async with serve(renderer) as endpoint:
        play = program_fn(names["agent"], endpoint, sampling=SAMPLING, max_turns=8, max_episode_tokens=4000)
        episode = await play(task, sampler, renderer, 5)
    assert (episode.success, len(episode.steps)) == (True, 3)


async def test_messages_that_a_program_repeats_are_told_once() -> None:
    sampler, renderer = scripted(*TURNS)
    episode = await play(forgetful, sampler, renderer)
    assert [message.content for message in episode.messages] == [
        "be brief", "question 0", TURNS[0], "question 1", TURNS[1], "question 2", TURNS[2], "question 3", TURNS[3],
    ]  # fmt: skip


def plain(base_url: str, task: Task) -> float:
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    return 0.25


async def test_a_plain_function_runs_on_a_thread_and_its_number_is_the_reward() -> None:
    episode = await play(plain, *scripted("hi"))
    assert (episode.env_reward, episode.success) == (0.25, None)


async def test_a_program_stopped_by_a_limit_is_truncated() -> None:
    sampler, renderer = scripted(*TURNS)
    episode = await play(multi_turn, sampler, renderer, max_turns=2)
    assert (len(episode.steps), episode.truncated, episode.ended) == (2, True, EndReason.MAX_TURNS)
    sampler, renderer = scripted(*TURNS)
    episode = await play(multi_turn, sampler, renderer, max_episode_tokens=100)
    assert (len(episode.steps), episode.truncated, episode.ended) == (2, True, EndReason.MAX_TOKENS)
    assert all(len(heard.prompt) + len(heard.sampled) <= 100 for heard in sampler.heard)


async def test_a_program_that_shortens_what_was_too_long_goes_on() -> None:
    async def compacting(base_url: str, task: Task) -> bool:
        async with client_of(base_url) as client:
            for content in ("x" * 500, "short"):
                with suppress(openai.BadRequestError):
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        return True

    sampler, renderer = scripted("ok")
    episode = await play(compacting, sampler, renderer, max_episode_tokens=100)
    assert (len(episode.steps), episode.truncated, episode.ended) == (1, False, EndReason.DONE)


async def raising(base_url: str, task: Task) -> None:
    await single_turn(base_url, task)
    raise KeyError("lost")


async def silent(base_url: str, task: Task) -> float:
    return 1.0


async def wordy(base_url: str, task: Task) -> Any:
    await single_turn(base_url, task)
    return "well done"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (raising, "task t: the agent program failed: KeyError: 'lost'"),
        (silent, "task t: the agent program never called the model"),
        (wordy, "task t: the agent program returned 'well done': return None, a finite number"),
    ],
)
async def test_what_goes_wrong_is_said(program: Callable[[str, Task], Any], reason: str) -> None:
    with pytest.raises(EpisodeError, match=reason):
        await play(program, *scripted("hi"))


async def test_a_failing_sampler_fails_the_episode_even_if_the_program_makes_do() -> None:
    class Broken(FakeSampler):
        async def sample(self, request: SampleRequest) -> Completion:
            raise SamplerError("the engine is gone")

    async def stubborn(base_url: str, task: Task) -> float:
        with pytest.raises(openai.InternalServerError):
            await single_turn(base_url, task)
        return 1.0

    with pytest.raises(SamplerError, match="the engine is gone"):
        await play(stubborn, Broken(), scripted("")[1])


async def test_an_episode_is_closed_when_its_program_ends() -> None:
    kept: list[str] = []

    async def keeping(base_url: str, task: Task) -> None:
        kept.append(base_url)
        await single_turn(base_url, task)

    sampler, renderer = scripted("hi")
    async with serve(renderer) as endpoint:
        await play_program(
            keeping,
            task=TASK,
            endpoint=endpoint,
            sampler=sampler,
            sampling=SAMPLING,
            seed=5,
            max_turns=8,
            max_episode_tokens=4000,
        )
        with pytest.raises(openai.NotFoundError):
            await single_turn(kept[0], TASK)
    assert len(sampler.heard) == 1


# --- groups ----------------------------------------------------------------------------------------------------------


async def test_programs_are_played_in_groups_with_rewards_as_usual() -> None:
    def by_seed(request: SampleRequest) -> list[int]:
        text = "6" if request.params.seed % 2 else "7"
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer)
    sampler = KeepingSampler(by_seed)

    async def group_of(endpoint: OpenAIEndpoint) -> list[tuple[str, str, float]]:
        group = await GroupPlayer(
            group_size=6,
            make_env=FakeEnv,
            sampler=sampler,
            renderer=renderer,
            reward_runner=InProcessRewardRunner(
                [
                    Term(name="env", fn=BUILTIN["env"]),
                    Term(name="exact_match", fn=BUILTIN["exact_match"], weight=0.5),
                ]
            ),
            sampling=SAMPLING,
            max_turns=4,
            max_episode_tokens=2000,
            timeout_s=30.0,
            run_seed=1,
            generate_fn=program_fn(tool_user, endpoint, sampling=SAMPLING, max_turns=4, max_episode_tokens=2000),
        )(TASK, 3)
        assert group.failed == ()
        return [(scored.episode.id, scored.episode.steps[0].action, scored.reward.total) for scored in group.episodes]

    async with serve(renderer) as endpoint:
        played = await group_of(endpoint)
        again = await group_of(endpoint)
    assert [id for id, _, _ in played] == [f"3/{index}" for index in range(6)]
    assert {(action, reward) for _, action, reward in played} == {("6", 1.5), ("7", 0.0)}
    assert played == again
