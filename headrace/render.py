"""Convert messages to tokens and back, and mark the tokens that were (or would have been) sampled.

Everything is derived from the chat template by comparing token sequences: a turn adds the tokens that its rendering has
beyond the prompt before it. Where a template rewrites history (strips thinking, say) the rendering does not extend the
prompt, and a new sequence starts; tokens are never patched. Knows nothing of datasets, environments or engines.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError, ModelError, boundary
from headrace.types import FloatArray, IntArray, Message, float_array, int_array

if TYPE_CHECKING:  # a second to import, and a configuration is checked without it
    from transformers import PreTrainedTokenizerBase

BoolArray = npt.NDArray[np.bool_]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as chat templates take them
PendingDecode = tuple[IntArray, "asyncio.Future[str]"]  # tokens, and the future of their text

# For a tokenizer without a chat template: contents on lines of their own, the assistant's closed by end-of-sequence.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A training sequence."""

    tokens: IntArray
    trained: BoolArray  # the tokens the assistant must produce, end-of-turn token included
    truncated: bool = False  # tokens were cut off the end; possibly no trained token is left
    weights: FloatArray | None = None  # of the trained tokens, 0 elsewhere; None: all 1

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.trained)
        assert self.weights is None or len(self.weights) == len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(self.trained.sum())


class Renderer:
    """Renders messages to tokens and decodes tokens to text, with one tokenizer and its chat template.

    `eos_tokens` is every token that ends an assistant turn: the tokenizer's end-of-sequence, the one the template
    closes a turn with, and those passed in (a generation config's list). `options` are passed to the template, such as
    `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        eos_tokens: Iterable[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._last: tuple[tuple[Message, ...], IntArray] | None = None  # the last prompt rendered without tools
        self._pending: WeakKeyDictionary[asyncio.AbstractEventLoop, list[PendingDecode]] = WeakKeyDictionary()
        self._decodes_plainly = _decodes_plainly(tokenizer)
        self._template: str | None = None
        if tokenizer.chat_template is None:
            self._template = plain_template(tokenizer)
        ends = [*eos_tokens, tokenizer.eos_token_id, self._probe_end_of_turn()]
        self.eos_tokens: tuple[int, ...] = tuple(dict.fromkeys(int(token) for token in ends if token is not None))

    def __reduce__(self) -> tuple[type["Renderer"], tuple["PreTrainedTokenizerBase", tuple[int, ...], dict[str, Any]]]:
        """Pickle the tokenizer, its ends and the options, for a worker in another process."""
        return Renderer, (self._tokenizer, self.eos_tokens, self._options)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer of the model."""
        return self._tokenizer

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> IntArray:
        """Render the tokens that an engine reads before it samples the assistant's next turn."""
        conversation, last = tuple(messages), self._last
        if tools is None and last is not None and last[0] == conversation:  # the episodes of a group begin alike
            return last[1]
        tokens = int_array(self._tokens(messages, tools, generate=True))
        if tools is None:
            self._last = conversation, tokens
        return tokens

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        max_tokens: int | None = None,
        weights: Sequence[float] = (),
    ) -> tuple[Rendered, ...]:
        """Render training sequences in which exactly the assistant's tokens are marked; one, if the template allows.

        The marked span of turn i is what follows `prompt(messages[:i])`, up to and including the end-of-turn token.
        A turn whose prompt does not extend the tokens before it, token for token, starts a sequence of its own.
        A sequence ends with its last marked token. Raises DataError if the template refuses the messages.
        `weights`, one for each message if there are any, are those of the assistant's tokens; 0: not marked.
        """
        assert not weights or len(weights) == len(messages)
        sequences: list[tuple[list[int], list[float]]] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if index == 0:
                raise DataError("a conversation must not start with the assistant: put a user or system message first")
            prompt, reply = self._turn(messages[: index + 1], tools)
            if not sequences or prompt[: len(sequences[-1][0])] != sequences[-1][0]:
                sequences.append(([], []))
            tokens, token_weights = sequences[-1]
            weight = weights[index] if weights else 1.0
            token_weights += [0.0] * (len(prompt) - len(tokens)) + [weight] * len(reply)
            tokens[:] = prompt + reply
        return tuple(_rendered(tokens, of, max_tokens, weighted=bool(weights)) for tokens, of in sequences)

    def continue_prompt(
        self,
        tokens_so_far: IntArray,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> IntArray | None:
        """Extend the exact tokens so far by the tokens that the template adds for the new messages.

        `tokens_so_far` is the last prompt and its sampled turn, `messages_before` the same as messages (the last one is
        the assistant's). A turn that ended without its end-of-turn token gets one. Returns None if the template cannot
        extend these tokens: it renders the past differently from what the engine read, or closes the turn with another
        token than the one sampled. Then the episode goes on in a new sequence, from `prompt(messages)`.
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
        """Tokenize plain text, after the token that the tokenizer begins every text with, if there is one."""
        begin = [self._tokenizer.bos_token_id] if _starts_with_bos(self._tokenizer) else []
        return [*begin, *self._encode(text)]

    def decode(self, tokens: IntArray | Sequence[int]) -> str:
        """Decode to text for people, environments and reward functions, without special and end-of-turn tokens."""
        return str(
            self._tokenizer.decode(
                self._without_ends(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def decode_all(self, sequences: Sequence[IntArray]) -> list[str]:
        """Decode several sequences, on all cores if the tokenizer is a plain one of the tokenizers library."""
        if not self._decodes_plainly:
            return [self.decode(tokens) for tokens in sequences]
        token_lists = [self._without_ends(tokens).tolist() for tokens in sequences]
        texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(token_lists, skip_special_tokens=True)
        return texts

    async def decode_soon(self, tokens: IntArray) -> str:
        """Decode in one batch with every other call made in the same pass of the event loop.

        Hundreds of sequences may end in one step of a sampler, and each of their episodes waits until all are decoded.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._pending:
            self._pending[loop] = []
            loop.call_soon(self._decode_pending, loop)
        text: asyncio.Future[str] = loop.create_future()
        self._pending[loop].append((tokens, text))
        return await text

    def _decode_pending(self, loop: asyncio.AbstractEventLoop) -> None:
        pending = [(tokens, text) for tokens, text in self._pending.pop(loop) if not text.done()]
        try:
            with boundary(DataError, "the tokenizer cannot decode these tokens"):
                decoded = self.decode_all([tokens for tokens, _ in pending])
        except DataError as exc:
            for _, text in pending:
                text.set_exception(exc)
            return
        for (_, text), result in zip(pending, decoded, strict=True):
            text.set_result(result)

    def spoken(self, tokens: IntArray | Sequence[int]) -> str:
        """Decode with special tokens except those that end a turn: the marks of a tool call stay, for example."""
        return str(self._tokenizer.decode(self._without_ends(tokens), clean_up_tokenization_spaces=False))

    def exact_text(self, tokens: IntArray | Sequence[int]) -> str:
        """Decode with all special tokens, for people who want to see what a model sees."""
        array = np.asarray(tokens, dtype=np.int64)
        return str(self._tokenizer.decode(array, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _without_ends(self, tokens: IntArray | Sequence[int]) -> npt.NDArray[np.int64]:
        """Remove end-of-turn tokens. Returns an array, which the tokenizer takes without checking every element."""
        array = np.asarray(tokens, dtype=np.int64)
        inside = np.ones(len(array), dtype=np.bool_)
        for end in self.eos_tokens:
            inside &= array != end
        return array[inside]

    def token_texts(self, tokens: IntArray | Sequence[int]) -> list[str]:
        """Decode each token by itself; part of a character decodes to the replacement character."""
        return [str(self._tokenizer.decode([int(token)], clean_up_tokenization_spaces=False)) for token in tokens]

    def _turn(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[int], list[int]]:
        """Return the prompt of the last message, an assistant's, and the tokens that follow that prompt."""
        prompt = self._tokens(messages[:-1], tools, generate=True)
        full = self._tokens(messages, tools, generate=False)
        if full[: len(prompt)] == prompt:
            reply = full[len(prompt) :]
        else:  # a token spans the border, which sampling cannot produce: tokenize the two sides separately
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
        """Find the end of the last turn: the first of the last run of end-of-turn tokens (sampling stops there)."""
        ends = [index for index, token in enumerate(tokens) if token in self.eos_tokens]
        if not ends:
            return None
        end = ends[-1]
        while end > 0 and tokens[end - 1] in self.eos_tokens:
            end -= 1
        return end

    def _probe_end_of_turn(self) -> int | None:
        """Find the special token with which the template closes every assistant turn; None if there is none."""
        opening = [Message(role="user", content="a")]
        replies = []
        try:
            prompt = self._tokens(opening, None, generate=True)
            for content in ("a", "b"):
                full = self._tokens([*opening, Message(role="assistant", content=content)], None, generate=False)
                if full[: len(prompt)] != prompt:
                    return None
                replies.append(full[len(prompt) :])
        except DataError:  # the template refuses these messages; the tokenizer's own list must do
            return None
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        closing: list[int] = []
        for left, right in zip(reversed(replies[0]), reversed(replies[1]), strict=False):
            if left != right:
                break
            closing.insert(0, left)
        return next((token for token in closing if token in special - {self._tokenizer.unk_token_id}), None)

    def _squeezed(self, tokens: list[int]) -> str:
        """Decode with special tokens and drop white space: templates may trim turns or re-indent tool calls."""
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
                **self._options,
            )
        return str(rendered)


def _rendered(tokens: list[int], weights: list[float], max_tokens: int | None, *, weighted: bool) -> Rendered:
    mask = np.array(weights[:max_tokens], dtype=np.float64) != 0
    mask.setflags(write=False)
    return Rendered(
        tokens=int_array(tokens[:max_tokens]),
        trained=mask,
        truncated=max_tokens is not None and len(tokens) > max_tokens,
        weights=float_array(weights[:max_tokens]) if weighted else None,
    )


def _decodes_plainly(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether the tokenizer's class leaves `decode` to the tokenizers library."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    methods = (getattr(kind, name, None) for name in ("decode", "_decode"))
    return isinstance(tokenizer, PreTrainedTokenizerFast) and tuple(methods) == (
        PreTrainedTokenizerFast.decode,
        PreTrainedTokenizerFast._decode,
    )


def plain_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the template of a tokenizer that has none; raises ModelError if it has no end-of-sequence token either."""
    if tokenizer.eos_token is None:
        raise ModelError(
            "the tokenizer has neither a chat template nor an end-of-sequence token: set tokenizer.chat_template, "
            "or tokenizer.eos_token for the plain one"
        )
    return "{{ bos_token }}" + PLAIN_TEMPLATE if _starts_with_bos(tokenizer) else PLAIN_TEMPLATE


def _starts_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
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
    """Parse a call's arguments, because templates write them with `tojson`; text that is not JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _roles(messages: Sequence[Message]) -> str:
    roles = ", ".join(message.role for message in messages[:6])
    return f"({roles}{', ...' if len(messages) > 6 else ''})"
