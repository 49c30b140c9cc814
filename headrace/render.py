"""Messages <-> tokens, and which tokens were (or would have been) sampled.

Everything is read off the chat template by comparing token sequences: what a turn adds is what its rendering has
beyond the prompt before it. Where a template rewrites history (strips thinking, say) there is no such extension, and
a new sample starts; nothing is patched. Knows nothing of datasets, environments or engines.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headrace.errors import DataError, ModelError, boundary
from headrace.types import IntArray, Message, int_array

BoolArray = npt.NDArray[np.bool_]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as chat templates take them
PendingDecode = tuple[IntArray, "asyncio.Future[str]"]  # tokens, and who waits for their text

# For a tokenizer without a chat template: contents on lines of their own, the assistant's closed by end-of-sequence.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A training sequence. `trained` marks the tokens the assistant must produce, end-of-turn token included."""

    tokens: IntArray
    trained: BoolArray
    truncated: bool = False  # tokens were cut off the end; possibly no trained token is left

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.trained)

    @property
    def num_trained(self) -> int:
        return int(self.trained.sum())


class Renderer:
    """A tokenizer and its chat template. `eos_tokens` is every token that ends an assistant turn: the tokenizer's
    end-of-sequence, the one the template closes a turn with, and those passed in (a generation config's list)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_tokens: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._last: tuple[tuple[Message, ...], IntArray] | None = None  # what was rendered last, without tools
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, list[PendingDecode]] = WeakKeyDictionary()
        self._decodes_plainly = _decodes_plainly(tokenizer)
        self._template: str | None = None
        if tokenizer.chat_template is None:
            self._template = _plain_template(tokenizer)
        ends = [*eos_tokens, tokenizer.eos_token_id, self._probe_end_of_turn()]
        self.eos_tokens: tuple[int, ...] = tuple(dict.fromkeys(int(token) for token in ends if token is not None))

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> IntArray:
        """The tokens an engine is given before it samples the assistant's next turn."""
        asked, last = tuple(messages), self._last
        if tools is None and last is not None and last[0] == asked:  # the episodes of a group begin alike
            return last[1]
        tokens = int_array(self._tokens(messages, tools, generate=True))
        if tools is None:
            self._last = asked, tokens
        return tokens

    def conversation(
        self, messages: Sequence[Message], *, tools: Tools | None = None, max_tokens: int | None = None
    ) -> tuple[Rendered, ...]:
        """Training sequences in which exactly the assistant's tokens are marked; one, if the template allows.

        The marked span of turn i is what follows `prompt(messages[:i])`, up to and including the end-of-turn token.
        A turn whose prompt does not extend the tokens before it, token for token, starts a sequence of its own.
        A sequence ends with its last marked token. Raises DataError if the template refuses the messages.
        """
        sequences: list[tuple[list[int], list[bool]]] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if index == 0:
                raise DataError("a conversation must not start with the assistant: put a user or system message first")
            prompt, reply = self._turn(messages[: index + 1], tools)
            if not sequences or prompt[: len(sequences[-1][0])] != sequences[-1][0]:
                sequences.append(([], []))
            tokens, trained = sequences[-1]
            trained += [False] * (len(prompt) - len(tokens)) + [True] * len(reply)
            tokens[:] = prompt + reply
        return tuple(_rendered(tokens, trained, max_tokens) for tokens, trained in sequences)

    def continue_prompt(
        self,
        tokens_so_far: IntArray,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> IntArray | None:
        """The prompt of the next turn: the exact tokens so far, then what the template adds for the new messages.

        `tokens_so_far` is the last prompt and what was sampled for it, `messages_before` the same as messages (its
        last one is the assistant's). A turn that ended without its end-of-turn token gets one. None if the template
        cannot extend these tokens: it shows the past otherwise than the engine saw it, or closes the turn with
        another token than the one sampled. Then the episode goes on in a new sample, from `prompt(messages)`.
        """
        assert messages_before
        assert messages_before[-1].role == "assistant", "the last message is the sampled turn"
        before = self._tokens(messages_before, tools, generate=False)
        after = self._tokens([*messages_before, *new_messages], tools, generate=True)
        so_far = tokens_so_far.tolist()
        end = self._end_of_turn(before)
        if end is None or after[: end + 1] != before[: end + 1]:
            return None
        closed = bool(so_far) and so_far[-1] in self.eos_tokens
        if closed and so_far[-1] != before[end]:
            return None
        if self._squeezed(so_far[:-1] if closed else so_far) != self._squeezed(before[:end]):
            return None
        return int_array(so_far + after[end + 1 if closed else end :])

    def encode(self, text: str) -> list[int]:
        """Plain text as tokens, after the token that the tokenizer begins every text with, if there is one."""
        begin = [self._tokenizer.bos_token_id] if _starts_with_bos(self._tokenizer) else []
        return [*begin, *self._encode(text)]

    def decode(self, tokens: IntArray | Sequence[int]) -> str:
        """Text for people, environments and reward functions, without special and end-of-turn tokens."""
        return str(
            self._tokenizer.decode(self._within(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decode_all(self, sequences: Sequence[IntArray]) -> list[str]:
        """As `decode` of each; by all cores where the tokenizer is a library that can."""
        if not self._decodes_plainly:
            return [self.decode(tokens) for tokens in sequences]
        within = [self._within(tokens).tolist() for tokens in sequences]
        texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(within, skip_special_tokens=True)
        return texts

    async def decode_soon(self, tokens: IntArray) -> str:
        """As `decode`, together with all others that are asked for before the event loop comes to it: hundreds of
        sequences may end in one step of a sampler, and every one of their episodes waits for all."""
        loop = asyncio.get_running_loop()
        if loop not in self._asked:
            self._asked[loop] = []
            loop.call_soon(self._decode_asked, loop)
        text: asyncio.Future[str] = loop.create_future()
        self._asked[loop].append((tokens, text))
        return await text

    def _decode_asked(self, loop: asyncio.AbstractEventLoop) -> None:
        asked = [(tokens, text) for tokens, text in self._asked.pop(loop) if not text.done()]
        try:
            with boundary(DataError, "the tokenizer cannot decode these tokens"):
                found = self.decode_all([tokens for tokens, _ in asked])
        except DataError as exc:
            for _, text in asked:
                text.set_exception(exc)
            return
        for (_, text), decoded in zip(asked, found, strict=True):
            text.set_result(decoded)

    def spoken(self, tokens: IntArray | Sequence[int]) -> str:
        """As `decode`, with the special tokens in it that do not end a turn: the marks of a tool call, for example."""
        return str(self._tokenizer.decode(self._within(tokens), clean_up_tokenization_spaces=False))

    def _within(self, tokens: IntArray | Sequence[int]) -> npt.NDArray[np.int64]:
        """Without those that end a turn; an array, which the tokenizer need not look through."""
        array = np.asarray(tokens, dtype=np.int64)
        kept = np.ones(len(array), dtype=np.bool_)
        for end in self.eos_tokens:
            kept &= array != end
        return array[kept]

    def token_texts(self, tokens: IntArray | Sequence[int]) -> list[str]:
        """Each token by itself; a part of a character shows as the replacement character."""
        return [str(self._tokenizer.decode([int(token)], clean_up_tokenization_spaces=False)) for token in tokens]

    def _turn(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[int], list[int]]:
        """The prompt of the last message, an assistant's, and the tokens it has to produce after that prompt."""
        prompt = self._tokens(messages[:-1], tools, generate=True)
        full = self._tokens(messages, tools, generate=False)
        if full[: len(prompt)] == prompt:
            reply = full[len(prompt) :]
        else:  # a token spans the border, which sampling could not produce: tokenize both sides of it apart
            prompt_text = self._text(messages[:-1], tools, generate=True)
            full_text = self._text(messages, tools, generate=False)
            if not full_text.startswith(prompt_text):
                raise ModelError(
                    "the chat template shows an assistant turn otherwise than its generation prompt begins it "
                    f"({prompt_text[-40:]!r}): give the tokenizer a template whose assistant turns start with that"
                )
            reply = self._encode(full_text[len(prompt_text) :])
        end = self._end_of_turn(reply)
        return prompt, reply if end is None else reply[: end + 1]

    def _end_of_turn(self, tokens: list[int]) -> int | None:
        """Where the last turn ends: the first of the last run of end-of-turn tokens (sampling stops there)."""
        ends = [index for index, token in enumerate(tokens) if token in self.eos_tokens]
        if not ends:
            return None
        end = ends[-1]
        while end > 0 and tokens[end - 1] in self.eos_tokens:
            end -= 1
        return end

    def _probe_end_of_turn(self) -> int | None:
        """The special token with which the template closes an assistant turn, whatever the turn says, if it does."""
        opening = [Message(role="user", content="a")]
        replies = []
        try:
            prompt = self._tokens(opening, None, generate=True)
            for content in ("a", "b"):
                full = self._tokens([*opening, Message(role="assistant", content=content)], None, generate=False)
                if full[: len(prompt)] != prompt:
                    return None
                replies.append(full[len(prompt) :])
        except DataError:  # the template wants other messages than these; the tokenizer's own list must do
            return None
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        closing: list[int] = []
        for left, right in zip(reversed(replies[0]), reversed(replies[1]), strict=False):
            if left != right:
                break
            closing.insert(0, left)
        return next((token for token in closing if token in special - {self._tokenizer.unk_token_id}), None)

    def _squeezed(self, tokens: list[int]) -> str:
        """The text, special tokens too, without white space: templates may trim turns or re-indent tool calls."""
        return "".join(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False).split())

    def _tokens(self, messages: Sequence[Message], tools: Tools | None, *, generate: bool) -> list[int]:
        return self._encode(self._text(messages, tools, generate=generate))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _text(self, messages: Sequence[Message], tools: Tools | None, *, generate: bool) -> str:
        with boundary(DataError, "the chat template refuses the messages " + _roles(messages)):
            rendered = self._tokenizer.apply_chat_template(
                [_template_message(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self._template,
                add_generation_prompt=generate,
                tokenize=False,
            )
        return str(rendered)


def _rendered(tokens: list[int], trained: list[bool], max_tokens: int | None) -> Rendered:
    mask = np.array(trained[:max_tokens], dtype=np.bool_)
    mask.setflags(write=False)
    truncated = max_tokens is not None and len(tokens) > max_tokens
    return Rendered(tokens=int_array(tokens[:max_tokens]), trained=mask, truncated=truncated)


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `decode` is what the tokenizers library says, and nothing else."""
    kind = type(tokenizer)
    own = (getattr(kind, name, None) for name in ("decode", "_decode"))
    return isinstance(tokenizer, PreTrainedTokenizerFast) and tuple(own) == (
        PreTrainedTokenizerFast.decode,
        PreTrainedTokenizerFast._decode,
    )


def _plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.eos_token is None:
        raise ModelError(
            "the tokenizer has neither a chat template nor an end-of-sequence token: set tokenizer.chat_template, "
            "or tokenizer.eos_token for the plain one"
        )
    return "{{ bos_token }}" + PLAIN_TEMPLATE if _starts_with_bos(tokenizer) else PLAIN_TEMPLATE


def _starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    begins: list[int] = list(tokenizer("a")["input_ids"])[:1]
    return tokenizer.bos_token_id is not None and begins == [tokenizer.bos_token_id]


def _template_message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parsed_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _parsed_arguments(text: str) -> Any:
    """Templates write arguments with `tojson`, so they want the object; what is not JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _roles(messages: Sequence[Message]) -> str:
    shown = ", ".join(message.role for message in messages[:6])
    return f"({shown}{', ...' if len(messages) > 6 else ''})"
