"""Episodes with tools and the ways an episode ends: calls from sampled text, ids, token truth, end reasons."""

import asyncio
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from headrace.config import SourceConfig
from headrace.data.conversations import ToolConversation
from headrace.envs.calculator import CalculatorEnv
from headrace.errors import EpisodeError, RolloutError
from headrace.loops.sft import render_batch
from headrace.protocols import Env
from headrace.render import Renderer
from headrace.rollout.episode import EndRules, end_reason, run_sampled_episode
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.testing import FakeEnv, FakeToolEnv
from headrace.tool_calls import tool_names
from headrace.types import (
    Action,
    EndReason,
    Episode,
    FailedEpisode,
    Observation,
    SamplingParams,
    StepResult,
    Task,
    ToolCall,
)
from headrace.wiring.build.data import conversations_of
from support.agent_programs import THINKING, KeepingSampler, Noise, heard_spans, make_tokenizer, scripted, trained_spans

TASK = Task(id="t")
UP = '<tool_call>\n{"name": "up", "arguments": {}}\n</tool_call>'
SUM = Task(id="sum", data={"question": "( 12 + 7 ) * 3", "max_turns": 6, "tools": True})
ADD = '<tool_call>\n{"name": "calculate", "arguments": {"left": 12, "operator": "+", "right": 7}}\n</tool_call>'
TIMES = '<tool_call>{"name":"calculate","arguments":{"left":19,"operator":"*","right":3}}</tool_call>'
ANSWER = '{"name": "answer", "arguments": {"number": 57}}'


async def play(
    env: Env,
    sampler: KeepingSampler,
    renderer: Renderer,
    *,
    task: Task = TASK,
    max_turns: int = 8,
    max_tokens: int = 120,
    end_tool: str | None = None,
    end_pattern: str | None = None,
    threads: ThreadPoolExecutor | None = None,
    partial_episode: PartialEpisode | None = None,
) -> Episode | FailedEpisode:
    return await run_sampled_episode(
        id="0/0",
        task=task,
        env=env,
        sampler=sampler,
        renderer=renderer,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=7,
        env_seed=3,
        max_turns=max_turns,
        max_episode_tokens=4000,
        timeout_s=20.0,
        end_tool=end_tool,
        end_pattern=None if end_pattern is None else re.compile(end_pattern),
        threads=threads,
        partial_episode=partial_episode,
    )


async def played(env: Env, sampler: KeepingSampler, renderer: Renderer, **rules: Any) -> Episode:
    episode = await play(env, sampler, renderer, **rules)
    assert isinstance(episode, Episode), episode
    return episode


# --- calls -----------------------------------------------------------------------------------------------------------


async def test_an_expression_is_worked_out_with_calls_in_the_templates_form_and_as_json() -> None:
    sampler, renderer = scripted("I add first. " + ADD, TIMES, ANSWER)
    episode = await played(CalculatorEnv(), sampler, renderer, task=SUM)
    assert (episode.success, episode.truncated, episode.ended) == (True, False, EndReason.DONE)
    assert [step.state for step in episode.steps] == ["known 3 7 12", "known 3 7 12 19", "known 3 7 12 19 57"]
    said = [message for message in episode.messages if message.role == "assistant"]
    assert [message.content for message in said] == ["I add first.", "", ""]
    assert [[call.name for call in message.tool_calls] for message in said] == [
        ["calculate"], ["calculate"], ["answer"],
    ]  # fmt: skip
    told = [message for message in episode.messages if message.role == "tool"]
    assert [message.content for message in told] == ["19", "57", "right"]
    assert [message.tool_call_id for message in told] == [call.id for m in said for call in m.tool_calls]
    assert len({message.tool_call_id for message in told}) == 3
    assert trained_spans(episode) == heard_spans(sampler)


async def test_the_policy_is_shown_the_tools_and_the_results() -> None:
    sampler, renderer = scripted(ADD, ANSWER)
    await played(CalculatorEnv(), sampler, renderer, task=SUM, max_turns=2)
    first = renderer.spoken(sampler.heard[0].prompt)
    assert '"name": "calculate"' in first
    assert '"name": "answer"' in first
    second = renderer.spoken(sampler.heard[1].prompt)
    assert second.startswith(first.rstrip())
    assert "tool\n19" in second


async def test_a_call_that_cannot_be_made_is_told_as_the_environment_wants_and_is_an_invalid_step() -> None:
    sampler, renderer = scripted("<tool_call>{up}</tool_call>", "up", UP + UP + UP)
    episode = await played(FakeToolEnv(target=3), sampler, renderer)
    assert [step.valid for step in episode.steps] == [False, False, True]
    told = [message for message in episode.messages if message.role == "user"]
    assert [message.content for message in told[1:]] == [
        'this is no call that can be made: write {"name": ..., "arguments": {...}} between <tool_call> and '
        "</tool_call> with one of the tools up",
        "call up",
    ]
    assert [len(message.tool_calls) for message in episode.messages if message.role == "assistant"] == [0, 0, 3]
    told_ids = [message.tool_call_id for message in episode.messages if message.role == "tool"]
    assert len(set(told_ids)) == 3  # of one turn
    assert (episode.success, episode.ended) == (True, EndReason.DONE)


async def test_ids_follow_from_the_seed_so_that_an_episode_can_be_played_again() -> None:
    ids = []
    for _ in range(2):
        sampler, renderer = scripted(UP)
        episode = await played(FakeToolEnv(target=2), sampler, renderer)
        ids.append([call.id for message in episode.messages for call in message.tool_calls])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


async def test_an_episode_with_calls_is_played_back_from_its_journal_without_sampling() -> None:
    sampler, renderer = scripted("I add first. " + ADD, TIMES, ANSWER)
    partial_episode = PartialEpisode()
    first = await played(CalculatorEnv(), sampler, renderer, task=SUM, partial_episode=partial_episode)
    silent = KeepingSampler(lambda request: pytest.fail("sampled again"))
    again = await played(
        CalculatorEnv(), silent, renderer, task=SUM, partial_episode=PartialEpisode(turns=partial_episode.turns)
    )
    assert again.messages == first.messages
    assert partial_episode.replayable
    assert [step.prompt.tolist() for step in again.steps] == [step.prompt.tolist() for step in first.steps]


async def test_tools_that_the_template_does_not_show_end_the_run_before_anything_is_sampled() -> None:
    sampler, renderer = scripted(UP, template=make_tokenizer().chat_template.replace("{% if tools %}", "{% if 0 %}"))
    with pytest.raises(RolloutError, match="the environment offers tools and this model's chat template shows none"):
        await play(FakeToolEnv(), sampler, renderer)
    assert not sampler.heard


async def test_tools_without_the_verb_for_them_fail_the_episode() -> None:
    class Half(FakeEnv):
        def reset(self, task: Task, seed: int) -> Observation:
            return replace(super().reset(task, seed), tools=FakeToolEnv.TOOLS)

    sampler, renderer = scripted(UP)
    failed = await play(Half(), sampler, renderer)
    assert isinstance(failed, FailedEpisode)
    assert "has no method `call`" in failed.reason


class Changing(FakeToolEnv):
    """Offers a tool in the first turn, another in the second, and none after that."""

    OTHER = ({"type": "function", "function": {"name": "down", "parameters": {"type": "object"}}},)

    def __init__(self) -> None:
        super().__init__(target=9)
        self.called: list[str] = []

    def call(self, action: Action) -> StepResult:
        self.called += [call.name for call in action.calls]
        result = super().call(action)
        tools = self.OTHER if len(self.called) == 1 else ()
        return replace(result, observation=replace(result.observation, tools=tools))

    def step(self, action: str) -> StepResult:
        self.called.append(f"words: {action}")
        return super().step(action)


async def test_other_tools_start_a_new_sample_and_without_tools_the_words_go_to_step() -> None:
    sampler, renderer = scripted(UP, UP.replace("up", "down"), UP)
    env = Changing()
    episode = await played(env, sampler, renderer, max_turns=3)
    assert env.called == ["up", "down", f"words: {UP}"]
    prompts = [renderer.spoken(heard.prompt) for heard in sampler.heard]
    assert ['"name": "up"' in prompts[0], '"name": "down"' in prompts[1]] == [True, True]
    assert not prompts[1].startswith(prompts[0])
    assert trained_spans(episode) == heard_spans(sampler)


# --- what is trained is what was seen and sampled --------------------------------------------------------------------


THOUGHT = "<think>one more</think>" + UP


@pytest.mark.parametrize(
    ("env", "texts", "template", "samples"),
    [
        (FakeEnv(target=1), ["up"], None, 1),  # single turn
        (FakeEnv(target=3), ["up", "down", "up ", "up"], None, 1),  # multi-turn
        (FakeToolEnv(target=3), [UP, "what?", UP + "\n" + UP], None, 1),  # tools
        (FakeToolEnv(target=3), [UP.replace("\n", ""), '{"name":"up"}', UP], None, 1),  # written in other ways
        (FakeEnv(target=3, limit=3), ["<think>a</think>up"], THINKING, 3),  # the template forgets what was thought
        (FakeToolEnv(target=3), [THOUGHT], THINKING, 3),
    ],
)
async def test_trained_tokens_are_those_that_the_engine_saw_and_sampled(
    env: Env, texts: Sequence[str], template: str | None, samples: int
) -> None:
    sampler, renderer = scripted(*texts) if template is None else scripted(*texts, template=template)
    episode = await played(env, sampler, renderer)
    assert trained_spans(episode) == heard_spans(sampler)
    grown = sum(
        after.prompt[: len(before.prompt) + len(before.sampled)] == before.prompt + before.sampled
        for before, after in zip(sampler.heard, sampler.heard[1:], strict=False)
    )
    assert len(sampler.heard) - grown == samples


@pytest.mark.parametrize("env", [FakeEnv, FakeToolEnv])
async def test_so_they_are_when_the_policy_says_anything_at_all(env: type[FakeEnv]) -> None:
    tokenizer = make_tokenizer()
    sampler = KeepingSampler(Noise(tokenizer))
    episode = await played(env(target=9, limit=4), sampler, Renderer(tokenizer), max_tokens=31)
    assert len(episode.steps) == 4
    assert trained_spans(episode) == heard_spans(sampler)


def test_demonstrations_of_a_world_with_tools_show_the_tools_and_teach_the_calls() -> None:
    source = SourceConfig(
        type="env", name="calculator", size=1, options={"tools": True, "operations": 1}, system="reckon"
    )
    [talk] = conversations_of(source)
    assert isinstance(talk, ToolConversation)
    tokenizer = make_tokenizer()
    [datum] = render_batch([talk], Renderer(tokenizer), max_tokens=4000).data
    shown = tokenizer.decode(datum.inputs)
    assert ['"name": "calculate"' in shown, "reckon" in shown] == [True, True]
    taught = tokenizer.decode(datum.targets[datum.arrays["weights"] != 0])
    said = [call for message in talk.messages for call in message.tool_calls]
    assert [call.name for call in said] == ["calculate", "answer"]
    assert taught == "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call><|im_end|>'
        for call in said
    )


# --- how it ends -----------------------------------------------------------------------------------------------------


def outcome(**fields: Any) -> StepResult:
    return StepResult(observation=Observation(messages=()), reward=0.0, **{"done": False, **fields})


END = Action(text="stop", content="stop", calls=(ToolCall(name="finish", arguments="{}"),))
RULES = EndRules(max_turns=3, tool="finish", pattern=re.compile("FINAL"))


@pytest.mark.parametrize(
    ("result", "action", "turns", "ended"),
    [
        (outcome(), Action(text="go", content="go"), 1, None),
        (outcome(), Action(text="go", content="go"), 3, EndReason.MAX_TURNS),
        (outcome(), Action(text="so FINAL: 3", content=""), 3, EndReason.END_PATTERN),
        (outcome(), END, 3, EndReason.END_TOOL),
        (outcome(truncated=True), END, 3, EndReason.ENV_LIMIT),
        (outcome(done=True), END, 3, EndReason.DONE),
    ],
)
def test_the_environments_word_counts_first_then_the_policys_then_the_limit(
    result: StepResult, action: Action, turns: int, ended: EndReason | None
) -> None:
    assert end_reason(result, action, turns, RULES) is ended


async def test_a_pattern_in_the_policys_turn_ends_it_after_the_environment_has_seen_it() -> None:
    sampler, renderer = scripted("up", "up I am done", "up")
    env = FakeEnv(target=9, limit=9)
    episode = await played(env, sampler, renderer, end_pattern=r"\bdone\b")
    assert [step.action for step in episode.steps] == ["up", "up I am done"]
    assert (episode.ended, episode.truncated, episode.success) == (EndReason.END_PATTERN, False, False)
    assert episode.messages[-1].content == "count 1 of 9"  # it was told, and thought nothing of it


async def test_a_tool_of_that_name_is_offered_and_ends_it_without_troubling_the_environment() -> None:
    finish = '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>'
    sampler, renderer = scripted(UP, UP + finish, UP)
    episode = await played(FakeToolEnv(target=9, limit=9), sampler, renderer, end_tool="finish")
    assert '"name": "finish"' in renderer.spoken(sampler.heard[0].prompt)
    assert (episode.ended, episode.truncated, len(episode.steps)) == (EndReason.END_TOOL, False, 2)
    assert [step.valid for step in episode.steps] == [True, True]  # its own call was made, the other is not its own
    assert episode.messages[-1].content == "count 2 of 9"
    sampler, renderer = scripted(UP, finish)
    alone = await played(FakeToolEnv(target=9, limit=9), sampler, renderer, end_tool="finish")
    assert (alone.ended, len(alone.steps), alone.success) == (EndReason.END_TOOL, 2, False)
    assert alone.messages[-1].role == "assistant"
    assert trained_spans(alone) == heard_spans(sampler)


async def test_a_tool_of_the_environments_own_can_end_it_too() -> None:
    sampler, renderer = scripted(UP)
    episode = await played(FakeToolEnv(target=9), sampler, renderer, end_tool="up")
    assert (episode.ended, len(episode.steps), episode.messages[-1].content) == (EndReason.END_TOOL, 1, "count 1 of 9")


async def test_a_world_of_words_can_have_a_tool_that_ends_it() -> None:
    sampler, renderer = scripted("up", '{"name": "finish", "arguments": {}}')
    episode = await played(FakeEnv(target=9), sampler, renderer, end_tool="finish")
    assert (episode.ended, episode.steps[0].action) == (EndReason.END_TOOL, "up")
    assert episode.messages[-1].tool_calls[0].name == "finish"


@pytest.mark.parametrize(
    ("env", "rules", "ended"),
    [
        (FakeEnv(target=2), {}, EndReason.DONE),
        (FakeEnv(target=9, limit=2), {}, EndReason.ENV_LIMIT),
        (FakeEnv(target=9, limit=9), {"max_turns": 2}, EndReason.MAX_TURNS),
    ],
)
async def test_each_end_has_its_name(env: Env, rules: dict[str, int], ended: EndReason) -> None:
    sampler, renderer = scripted("up")
    episode = await played(env, sampler, renderer, **rules)
    assert (episode.ended, len(episode.steps)) == (ended, 2)
    assert episode.truncated == (ended is not EndReason.DONE)


async def test_a_reply_cut_at_its_limit_is_truncated_whatever_ended_the_episode() -> None:
    sampler, renderer = scripted("up and up and up")
    episode = await played(FakeEnv(target=9), sampler, renderer, max_tokens=4, end_pattern="up")
    assert (episode.ended, episode.truncated) == (EndReason.END_PATTERN, True)


# --- slow environments -----------------------------------------------------------------------------------------------


async def test_blocking_environments_run_on_the_threads_they_are_given_at_most_so_many_at_once() -> None:
    inside, most, lock = 0, 0, threading.Lock()
    entered = threading.Barrier(3)

    class Slow(FakeEnv):
        blocking = True

        def step(self, action: str) -> StepResult:
            nonlocal inside, most
            assert threading.current_thread().name.startswith("slow")
            with lock:
                inside += 1
                most = max(most, inside)
            entered.wait(timeout=100)  # three are inside together, or this fails
            with lock:
                inside -= 1
            return super().step(action)

    tokenizer = make_tokenizer()
    script = tokenizer("up", add_special_tokens=False)["input_ids"]
    sampler = KeepingSampler(lambda request: [*script, tokenizer.eos_token_id])
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="slow") as threads:
        episodes = await asyncio.gather(
            *(played(Slow(target=1), sampler, Renderer(tokenizer), threads=threads) for _ in range(9))
        )
    assert [episode.success for episode in episodes] == [True] * 9
    assert most == 3


def test_an_action_has_calls_or_a_problem() -> None:
    with pytest.raises(AssertionError):
        Action(text="", content="", calls=(ToolCall(name="a", arguments="{}"),), problem="none")


def test_a_tool_that_is_described_otherwise_is_refused() -> None:
    with pytest.raises(EpisodeError, match="described otherwise"):
        tool_names(({"name": "up"},))
