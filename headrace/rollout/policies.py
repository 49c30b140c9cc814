"""Policies act in an episode: `SampledPolicy` keeps every sampled token, `RemotePolicy` asks a remote chat model.

Prompts of a sampled policy extend the tokens before them. Where the chat template cannot extend them, the next turn
starts from a newly rendered prompt. Knows no environment: `episode.py` passes messages to a policy and gets its turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import EpisodeError, RolloutError
from headrace.pictures import PlacedImage
from headrace.protocols import Sampler
from headrace.render import PlacedTokens, Renderer, Tools
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.tool_calls import (
    ToolForm,
    call_problem,
    extended_placed_prompt,
    find_form,
    how_to_call,
    is_object,
    parse_reply,
    tool_names,
    tool_schemas,
    with_ids,
)
from headrace.types import (
    Action,
    Completion,
    IntArray,
    Message,
    SampleRequest,
    SamplingParams,
    StopReason,
    float_array,
    int_array,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """Hold one turn of a policy."""

    prompt: IntArray  # what the engine saw
    completion: Completion  # what it sampled
    action: Action  # the same for the environment
    reply: Message  # the same for the transcript
    images: tuple[PlacedImage, ...] = ()  # of the prompt


class Policy(Protocol):
    """Act in one episode: `reset` once, then `act` and `observe` in turn."""

    def reset(self, messages: Sequence[Message], tools: Tools) -> None: ...

    async def act(self) -> PolicyTurn: ...

    def observe(self, new: Sequence[Message], tools: Tools) -> bool:
        """Take the environment's answer to the last turn. Returns False if there is no room for another turn."""


class SampledPolicy:
    """Act by sampling. Turn i samples with the seed derive_seed(seed, i), unless `partial_episode` has recorded it."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        sampling: SamplingParams,
        seed: int,
        max_tokens: int,  # of the whole episode, the prompt included
        partial_episode: PartialEpisode,
    ) -> None:
        self._sampler, self._renderer, self._sampling = sampler, renderer, sampling
        self._seed, self._max_tokens, self._partial_episode = seed, max_tokens, partial_episode
        self._messages: list[Message] = []  # as the environment and people see them
        self._rendered: tuple[Message, ...] = ()  # as they stand in the prompt
        self._tools: Tools = ()
        self._form: ToolForm | None = None
        self._prompt = PlacedTokens(tokens=int_array([]))
        self._last: PolicyTurn | None = None
        self._num_turns = 0

    def reset(self, messages: Sequence[Message], tools: Tools) -> None:
        """Render the first prompt. Raises EpisodeError when it leaves no room for a turn, and RolloutError when there
        are tools and the chat template shows none."""
        self._messages = list(messages)
        self._render_prompt(tools)
        if len(self._prompt.tokens) >= self._max_tokens:
            raise EpisodeError(
                f"the prompt has {len(self._prompt.tokens)} tokens and an episode may have {self._max_tokens}; "
                "raise max_episode_tokens or leave the task out"
            )

    async def act(self) -> PolicyTurn:
        """Sample the next turn and parse the tool calls in it."""
        room = min(self._sampling.max_tokens, self._max_tokens - len(self._prompt.tokens))
        params = replace(self._sampling, max_tokens=room, seed=derive_seed(self._seed, self._num_turns))
        prompt, images = self._prompt.tokens, self._prompt.images
        request = SampleRequest(prompt=prompt, params=params, images=images)
        completion = await self._partial_episode.sample(self._sampler, request)
        action = await self._parse(completion.tokens)
        reply = Message(role="assistant", content=action.content, tool_calls=action.calls)
        self._num_turns += 1
        self._last = PolicyTurn(prompt=prompt, completion=completion, action=action, reply=reply, images=images)
        return self._last

    def observe(self, new: Sequence[Message], tools: Tools) -> bool:
        """Extend the prompt by the environment's messages, or render it anew where the template cannot extend it."""
        assert self._last is not None
        last, self._last = self._last, None
        self._messages += [last.reply, *new]
        extended = None
        if tuple(tools) == tuple(self._tools):
            tokens = int_array(np.concatenate([last.prompt, last.completion.tokens]))
            sampled = Message(role="assistant", content=last.action.text)
            ways = (sampled, last.reply) if last.reply != sampled else (sampled,)
            so_far = PlacedTokens(tokens=tokens, images=last.images)
            extended = extended_placed_prompt(self._renderer, so_far, self._rendered, ways, new, tools or None)
        if extended is None:
            self._render_prompt(tools)
        else:
            self._prompt, self._rendered = extended
        return len(self._prompt.tokens) < self._max_tokens

    def _render_prompt(self, tools: Tools) -> None:
        """Render the whole conversation; the tokens so far are not continued."""
        prompt = self._renderer.placed_prompt(self._messages, tools or None)
        if tools and tuple(tools) != tuple(self._tools):
            if np.array_equal(prompt.tokens, self._renderer.prompt(self._messages)):
                raise RolloutError(  # true of every episode, so the run ends before anything is sampled
                    "the environment offers tools and this model's chat template shows none: take a model whose "
                    "template does, set 'model.chat_template' to one, or take an environment that is played in words"
                )
            self._form = find_form(self._renderer)
        self._tools = tools
        self._prompt, self._rendered = prompt, tuple(self._messages)

    async def _parse(self, tokens: IntArray) -> Action:
        """Decode the turn, and parse the calls in it where there are tools."""
        if not self._tools:
            text = await self._renderer.decode_soon(tokens)
            return Action(text=text, content=text)
        text = self._renderer.spoken(tokens)
        names = tool_schemas(self._tools)
        parsed = parse_reply(text, self._form, names)
        if parsed.calls:
            calls = with_ids(parsed.calls, self._seed, self._num_turns)
            return Action(text=text, content=parsed.content, calls=calls)
        content = self._renderer.decode(tokens) if parsed.content == text else parsed.content
        return Action(text=text, content=content, problem=call_problem(text, self._form, names))


class Chat(Protocol):
    """Answer messages with a message (`infer.openai_client.RemoteModel`)."""

    async def reply(self, messages: Sequence[Message], tools: Tools) -> tuple[Message, StopReason]: ...


class RemotePolicy:
    """Act by asking a remote chat model. Its turns have no tokens and no log-probs, so they can be evaluated and shown
    as demonstrations, but not trained."""

    def __init__(self, chat: Chat, *, seed: int) -> None:
        self._chat, self._seed = chat, seed
        self._messages: list[Message] = []
        self._tools: Tools = ()
        self._reply: Message | None = None
        self._num_turns = 0

    def reset(self, messages: Sequence[Message], tools: Tools) -> None:
        """Start a conversation."""
        self._messages, self._tools = list(messages), tools

    async def act(self) -> PolicyTurn:
        """Ask the model for its next message."""
        message, stop = await self._chat.reply(self._messages, self._tools)
        action = self._parse(message)
        self._num_turns += 1
        self._reply = Message(role="assistant", content=action.content, tool_calls=action.calls)
        return PolicyTurn(prompt=int_array([]), completion=_no_tokens(stop), action=action, reply=self._reply)

    def observe(self, new: Sequence[Message], tools: Tools) -> bool:
        """Add the environment's messages; a remote conversation has no token limit of ours."""
        assert self._reply is not None
        self._messages += [self._reply, *new]
        self._tools = tools
        return True

    def _parse(self, message: Message) -> Action:
        """Take the message's tool calls, or parse them from its text where the server supports none."""
        names = tool_names(self._tools)
        calls = message.tool_calls
        written = [f"{call.name} {call.arguments}" for call in calls]
        text = "\n".join([*([message.content] if message.content else []), *written])
        if any(call.name not in names or not is_object(call.arguments) for call in calls):
            return Action(text=text, content=text, problem=how_to_call(names))
        if calls or not names:
            return Action(text=text, content=message.content, calls=with_ids(calls, self._seed, self._num_turns))
        parsed = parse_reply(text, None, names)
        calls = with_ids(parsed.calls, self._seed, self._num_turns)
        problem = None if calls else call_problem(text, None, names)
        return Action(text=text, content=parsed.content, calls=calls, problem=problem)


def _no_tokens(stop: StopReason) -> Completion:
    none = float_array([])
    return Completion(tokens=int_array([]), sampler_logprobs=none, raw_logprobs=none, versions=int_array([]), stop=stop)
