"""What plays an episode: a sampler, whose every token is kept as it was, or a model elsewhere that is only spoken to.

Tokens only ever grow. Where the chat template cannot extend the tokens so far, the next turn starts from a prompt of
its own. Knows no environment: `episode.py` hands messages to a policy and gets its moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import EpisodeError
from headrace.protocols import Sampler
from headrace.render import Renderer, Tools
from headrace.rollout.journal import EpisodeJournal
from headrace.tool_calls import (
    ToolForm,
    call_problem,
    extended_prompt,
    find_form,
    how_to_call,
    is_object,
    parse_reply,
    with_ids,
)
from headrace.types import (
    Action,
    Completion,
    IntArray,
    Message,
    SampleRequest,
    SamplingParams,
    Stop,
    float_array,
    int_array,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One turn of a policy: what the engine saw and sampled, and the same for the environment and the transcript."""

    prompt: IntArray
    completion: Completion
    action: Action
    reply: Message


class Policy(Protocol):
    """One episode's player. `begin` once, then `move` and `tell` in turn."""

    def begin(self, messages: Sequence[Message], tools: Tools) -> None: ...

    async def move(self) -> Move: ...

    def tell(self, new: Sequence[Message], tools: Tools) -> bool:
        """What came of the last move. False: there is no room for another turn."""


class SampledPolicy:
    """Any sampler. Turn i samples with the seed derive_seed(seed, i), unless the journal has it on record.

    An episode may have `max_tokens` tokens, the prompt included.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        sampling: SamplingParams,
        seed: int,
        max_tokens: int,
        journal: EpisodeJournal,
    ) -> None:
        self._sampler, self._renderer, self._sampling = sampler, renderer, sampling
        self._seed, self._max_tokens, self._journal = seed, max_tokens, journal
        self._messages: list[Message] = []  # as the environment and people see them
        self._told: tuple[Message, ...] = ()  # as they stand in the prompt
        self._tools: Tools = ()
        self._form: ToolForm | None = None
        self._prompt = int_array([])
        self._last: Move | None = None
        self._moves = 0

    def begin(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises EpisodeError when there is no room for a turn, or the template shows no tools and there are some."""
        self._messages = list(messages)
        self._start_anew(tools)
        if len(self._prompt) >= self._max_tokens:
            raise EpisodeError(
                f"the prompt has {len(self._prompt)} tokens and an episode may have {self._max_tokens}; "
                "raise max_episode_tokens or leave the task out"
            )

    async def move(self) -> Move:
        room = min(self._sampling.max_tokens, self._max_tokens - len(self._prompt))
        params = replace(self._sampling, max_tokens=room, seed=derive_seed(self._seed, self._moves))
        completion = await self._journal.sample(self._sampler, SampleRequest(prompt=self._prompt, params=params))
        action = await self._read(completion.tokens)
        reply = Message(role="assistant", content=action.content, tool_calls=action.calls)
        self._moves += 1
        self._last = Move(prompt=self._prompt, completion=completion, action=action, reply=reply)
        return self._last

    def tell(self, new: Sequence[Message], tools: Tools) -> bool:
        assert self._last is not None
        last, self._last = self._last, None
        self._messages += [last.reply, *new]
        found = None
        if tuple(tools) == tuple(self._tools):
            seen = int_array(np.concatenate([last.prompt, last.completion.tokens]))
            sampled = Message(role="assistant", content=last.action.text)
            ways = (sampled, last.reply) if last.reply != sampled else (sampled,)
            found = extended_prompt(self._renderer, seen, self._told, ways, new, tools or None)
        if found is None:
            self._start_anew(tools)
        else:
            self._prompt, self._told = found
        return len(self._prompt) < self._max_tokens

    def _start_anew(self, tools: Tools) -> None:
        prompt = self._renderer.prompt(self._messages, tools or None)
        if tools and tuple(tools) != tuple(self._tools):
            if np.array_equal(prompt, self._renderer.prompt(self._messages)):
                raise EpisodeError(
                    "the environment offers tools and this model's chat template shows none: take a model whose "
                    "template does, or an environment that is played in words"
                )
            self._form = find_form(self._renderer)
        self._tools = tools
        self._prompt, self._told = prompt, tuple(self._messages)

    async def _read(self, tokens: IntArray) -> Action:
        """The turn as text, and the calls in it where tools were offered."""
        if not self._tools:
            text = await self._renderer.decode_soon(tokens)
            return Action(text=text, content=text)
        text = self._renderer.spoken(tokens)
        names = tool_names(self._tools)
        parsed = parse_reply(text, self._form, names)
        if parsed.calls:
            calls = with_ids(parsed.calls, self._seed, self._moves)
            return Action(text=text, content=parsed.content, calls=calls)
        content = self._renderer.decode(tokens)
        return Action(text=text, content=content, problem=call_problem(text, self._form, names))


class Chat(Protocol):
    """A model that is given messages and answers with one (`infer.remote.RemoteModel`)."""

    async def reply(self, messages: Sequence[Message], tools: Tools) -> tuple[Message, Stop]: ...


class RemotePolicy:
    """A model elsewhere. Its moves have no tokens and no log-probs, so they are for evaluation and demonstrations:
    there is nothing in them that could be trained."""

    def __init__(self, chat: Chat, *, seed: int) -> None:
        self._chat, self._seed = chat, seed
        self._messages: list[Message] = []
        self._tools: Tools = ()
        self._reply: Message | None = None
        self._moves = 0

    def begin(self, messages: Sequence[Message], tools: Tools) -> None:
        self._messages, self._tools = list(messages), tools

    async def move(self) -> Move:
        said, stop = await self._chat.reply(self._messages, self._tools)
        action = self._read(said)
        self._moves += 1
        self._reply = Message(role="assistant", content=action.content, tool_calls=action.calls)
        return Move(prompt=int_array([]), completion=_no_tokens(stop), action=action, reply=self._reply)

    def tell(self, new: Sequence[Message], tools: Tools) -> bool:
        assert self._reply is not None
        self._messages += [self._reply, *new]
        self._tools = tools
        return True

    def _read(self, said: Message) -> Action:
        """Calls come as such, or, from servers that know none, as JSON in the text."""
        names = tool_names(self._tools)
        made = said.tool_calls
        text = "\n".join([*([said.content] if said.content else []), *(f"{c.name} {c.arguments}" for c in made)])
        if any(call.name not in names or not is_object(call.arguments) for call in made):
            return Action(text=text, content=text, problem=how_to_call(names))
        if made or not names:
            return Action(text=text, content=said.content, calls=with_ids(made, self._seed, self._moves))
        parsed = parse_reply(text, None, names)
        calls = with_ids(parsed.calls, self._seed, self._moves)
        problem = None if calls else call_problem(text, None, names)
        return Action(text=text, content=parsed.content, calls=calls, problem=problem)


def tool_names(tools: Tools) -> tuple[str, ...]:
    """Raises EpisodeError on a tool that is not described as OpenAI does it."""
    try:
        return tuple(str(tool["function"]["name"]) for tool in tools)
    except (KeyError, TypeError) as exc:
        raise EpisodeError(
            'a tool is described otherwise than as {"type": "function", "function": {"name": ..., "parameters": ...}}'
        ) from exc


def _no_tokens(stop: Stop) -> Completion:
    none = float_array([])
    return Completion(tokens=int_array([]), sampler_logprobs=none, raw_logprobs=none, versions=int_array([]), stop=stop)
