"""Convert messages to tokens and back, and mark the tokens that were (or would have been) sampled.

Everything is derived from the chat template by comparing token sequences: a turn adds the tokens that its rendering has
beyond the prompt before it. Where a template rewrites history (strips thinking, say) the rendering does not extend the
prompt, and a new sequence starts; tokens are never patched. Knows nothing of datasets, environments or engines.

A picture is what the model's processor makes of it (`PictureReader`): the chat template writes a mark for it, which
becomes as many image tokens as it has. Where they stand is taken from where that text came to lie, never from the
tokens: a text or a sampled turn may hold the same ones.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError, ModelError, boundary
from headrace.pictures import ModelImage, Picture, PictureReader, PlacedImage
from headrace.types import FloatArray, IntArray, Message, float_array, int_array

if TYPE_CHECKING:  # a second to import, and a configuration is checked without it
    from transformers import PreTrainedTokenizerBase

BoolArray = npt.NDArray[np.bool_]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as chat templates take them
PendingDecode = tuple[IntArray, "asyncio.Future[str]"]  # tokens, and the future of their text

MAX_KEPT_PIXELS = 2**26  # floats of prepared pictures that a renderer keeps: 256 MiB
WRITTEN_MARK = "\ufdd0"  # in place of a template's mark for a picture that a text itself has; not a character

NO_PICTURES = (
    "the messages have pictures and the model reads text alone: take a vision model (docs/models.md), or data without "
    "pictures"
)

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
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.trained)
        assert self.weights is None or len(self.weights) == len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedTokens:
    """Tokens, and the pictures among them."""

    tokens: IntArray
    images: tuple[PlacedImage, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Encoded:
    """Tokens of a rendering; pictures as positions of their image tokens."""

    tokens: list[int]
    images: list[tuple[ModelImage, list[int]]]

    def placed(self, start: int = 0, shift: int = 0) -> tuple[PlacedImage, ...]:
        """Return the pictures whose tokens stand at `start` or later, moved by `shift`."""
        return tuple(
            PlacedImage(image=image, at=int_array(np.array(at, dtype=np.int32) + shift))
            for image, at in self.images
            if at[0] >= start
        )


class Renderer:
    """Renders messages to tokens and decodes tokens to text, with one tokenizer and its chat template.

    `eos_tokens` is every token that ends an assistant turn: the tokenizer's end-of-sequence, the one the template
    closes a turn with, and those passed in (a generation config's list). `options` are passed to the template, such as
    `enable_thinking`. `pictures` prepares pictures for the model; without it messages with pictures are refused.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        eos_tokens: Iterable[int] = (),
        options: Mapping[str, Any] | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._pictures = pictures
        self._prepared: OrderedDict[str, ModelImage] = OrderedDict()  # by the picture's digest, the oldest first
        self._last: tuple[tuple[Message, ...], PlacedTokens] | None = None  # the last prompt rendered without tools
        self._pending: WeakKeyDictionary[asyncio.AbstractEventLoop, list[PendingDecode]] = WeakKeyDictionary()
        self._decodes_plainly = _decodes_plainly(tokenizer)
        self._template: str | None = None
        if tokenizer.chat_template is None:
            self._template = plain_template(tokenizer)
        ends = [*eos_tokens, tokenizer.eos_token_id, self._probe_end_of_turn()]
        self.eos_tokens: tuple[int, ...] = tuple(dict.fromkeys(int(token) for token in ends if token is not None))

    def __reduce__(self) -> tuple[type["Renderer"], tuple[Any, ...]]:
        """Pickle the tokenizer, its ends, the options and the processor, for a worker in another process."""
        return Renderer, (self._tokenizer, self.eos_tokens, self._options, self._pictures)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer of the model."""
        return self._tokenizer

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> IntArray:
        """Render the tokens that an engine reads before it samples the assistant's next turn."""
        return self.placed_prompt(messages, tools).tokens

    def placed_prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> PlacedTokens:
        """Render the same with the pictures among the tokens."""
        conversation, last = tuple(messages), self._last
        if tools is None and last is not None and last[0] == conversation:  # the episodes of a group begin alike
            return last[1]
        encoded = self._encoded(messages, tools, generate=True)
        prompt = PlacedTokens(tokens=int_array(encoded.tokens), images=encoded.placed())
        if tools is None:
            self._last = conversation, prompt
        return prompt

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
        images: list[tuple[PlacedImage, ...]] = []  # of each sequence
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if index == 0:
                raise DataError("a conversation must not start with the assistant: put a user or system message first")
            if message.images:
                raise DataError("a turn of the assistant has a picture: the model writes text alone, so leave it out")
            encoded, reply = self._turn(messages[: index + 1], tools)
            prompt, placed = encoded.tokens, encoded.placed()
            if not sequences or prompt[: len(sequences[-1][0])] != sequences[-1][0]:
                sequences.append(([], []))
                images.append(())
            images[-1] = placed
            tokens, token_weights = sequences[-1]
            weight = weights[index] if weights else 1.0
            token_weights += [0.0] * (len(prompt) - len(tokens)) + [weight] * len(reply)
            tokens[:] = prompt + reply
        return tuple(
            _rendered(tokens, of, max_tokens, weighted=bool(weights), images=placed)
            for (tokens, of), placed in zip(sequences, images, strict=True)
        )

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
        extended = self.placed_continuation(PlacedTokens(tokens=tokens_so_far), messages_before, new_messages, tools)
        return None if extended is None else extended.tokens

    def placed_continuation(
        self,
        so_far: PlacedTokens,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> PlacedTokens | None:
        """Extend as `continue_prompt`, with the pictures: those so far keep their places, new ones follow."""
        assert messages_before
        assert messages_before[-1].role == "assistant", "the last message is the sampled turn"
        before = self._tokens(messages_before, tools, generate=False)
        encoded = self._encoded([*messages_before, *new_messages], tools, generate=True)
        after, tokens = encoded.tokens, so_far.tokens.tolist()
        end = self._end_of_turn(before)
        if end is None or after[: end + 1] != before[: end + 1]:
            return None
        closed = bool(tokens) and tokens[-1] in self.eos_tokens
        if closed and tokens[-1] != before[end]:
            return None
        if self._squeezed(tokens[:-1] if closed else tokens) != self._squeezed(before[:end]):
            return None
        start = end + 1 if closed else end
        return PlacedTokens(
            tokens=int_array(tokens + after[start:]),
            images=(*so_far.images, *encoded.placed(start, len(tokens) - start)),
        )

    def picture_tokens(self, picture: Picture) -> PlacedTokens:
        """Return the tokens that stand for a picture, without what the chat template writes around it."""
        if self._pictures is None:
            raise ModelError(NO_PICTURES)
        image = self._prepare(picture)
        shown = self._pictures.text(image)
        encoded = self._placed(shown, [(image, 0, len(shown))])
        return PlacedTokens(tokens=int_array(encoded.tokens), images=encoded.placed())

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

    def _turn(self, messages: Sequence[Message], tools: Tools | None) -> tuple[_Encoded, list[int]]:
        """Return the prompt of the last message, an assistant's, and the tokens that follow that prompt."""
        encoded = self._encoded(messages[:-1], tools, generate=True)
        prompt = encoded.tokens
        full = self._tokens(messages, tools, generate=False)
        if full[: len(prompt)] == prompt:
            reply = full[len(prompt) :]
        else:  # a token spans the border, which sampling cannot produce: tokenize the two sides separately
            prompt_text = self._plain_text(messages[:-1], tools, generate=True)
            full_text = self._plain_text(messages, tools, generate=False)
            if not full_text.startswith(prompt_text):
                raise ModelError(
                    "the chat template shows an assistant turn otherwise than its generation prompt begins it "
                    f"({prompt_text[-40:]!r}): give the tokenizer a template whose assistant turns start with that"
                )
            reply = self._encode(full_text[len(prompt_text) :])
        end = self._end_of_turn(reply)
        return encoded, reply if end is None else reply[: end + 1]

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
        return self._encoded(messages, tools, generate=generate).tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _encoded(self, messages: Sequence[Message], tools: Tools | None, *, generate: bool) -> _Encoded:
        """Render and tokenize, with the places of pictures."""
        if not any(message.images for message in messages):
            return _Encoded(tokens=self._encode(self._text(messages, tools, generate=generate)), images=[])
        return self._placed(*self._picture_text(messages, tools, generate=generate))

    def _placed(self, text: str, spans: Sequence[tuple[ModelImage, int, int]]) -> _Encoded:
        """Tokenize a text, and find the image tokens of each picture in its span of the text."""
        assert self._pictures is not None
        if not self._tokenizer.is_fast:
            raise ModelError(
                "the tokenizer is a slow one, which does not say where pictures are: convert it to a fast one"
            )
        read = self._tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        tokens, offsets = list(read["input_ids"]), read["offset_mapping"]
        where = [
            (index, offsets[index][0]) for index, token in enumerate(tokens) if token == self._pictures.image_token
        ]
        images: list[tuple[ModelImage, list[int]]] = []
        for image, start, end in spans:
            at = [index for index, offset in where if start <= offset < end]
            if len(at) != image.num_tokens:
                raise ModelError(
                    f"the tokenizer makes {len(at)} image tokens of a picture that has {image.num_tokens}: tokenizer "
                    "and processor of the model are not of one release"
                )
            images.append((image, at))
        return _Encoded(tokens=tokens, images=images)

    def _picture_text(
        self, messages: Sequence[Message], tools: Tools | None, *, generate: bool
    ) -> tuple[str, list[tuple[ModelImage, int, int]]]:
        """Render with the text of each picture in place of the template's mark, and say where these texts are."""
        reader = self._pictures
        if reader is None:
            raise ModelError(NO_PICTURES)
        mark = reader.template_mark
        pieces = self._text([_without_mark(message, mark) for message in messages], tools, generate=generate).split(
            mark
        )
        pictures = [picture for message in messages for picture in message.images]
        if len(pieces) != len(pictures) + 1:
            raise DataError(
                f"the chat template shows {len(pieces) - 1} of {len(pictures)} pictures ({_roles(messages)}): it takes "
                "none in one of these messages"
            )
        text, spans = pieces[0], []
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            image = self._prepare(picture)
            shown = reader.text(image)
            spans.append((image, len(text), len(text) + len(shown)))
            text += shown + piece
        if WRITTEN_MARK not in text:
            return text, spans
        return _with_written_marks(text, spans, mark)

    def _plain_text(self, messages: Sequence[Message], tools: Tools | None, *, generate: bool) -> str:
        if not any(message.images for message in messages):
            return self._text(messages, tools, generate=generate)
        return self._picture_text(messages, tools, generate=generate)[0]

    def _prepare(self, picture: Picture) -> ModelImage:
        """Return what the processor makes of a picture; the last ones are kept, for the episodes of a group."""
        assert self._pictures is not None
        image = self._prepared.pop(picture.digest, None) or self._pictures.read(picture)
        self._prepared[picture.digest] = image
        while len(self._prepared) > 1 and sum(kept.pixels.size for kept in self._prepared.values()) > MAX_KEPT_PIXELS:
            self._prepared.popitem(last=False)
        return image

    def _text(self, messages: Sequence[Message], tools: Tools | None, *, generate: bool) -> str:
        with boundary(DataError, "the chat template refuses the messages " + _roles(messages)):
            rendered = self._tokenizer.apply_chat_template(
                [self._template_message(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self._template,
                add_generation_prompt=generate,
                tokenize=False,
                **self._options,
            )
        return str(rendered)

    def _template_message(self, message: Message) -> dict[str, Any]:
        if not message.images:
            return _template_message(message, message.content)
        assert self._pictures is not None
        return _template_message(message, self._pictures.template_content(message.content, len(message.images)))


def _without_mark(message: Message, mark: str) -> Message:
    """Put another mark where a message itself has the text that a template writes for a picture."""
    calls = tuple(
        replace(call, arguments=call.arguments.replace(mark, WRITTEN_MARK)) if mark in call.arguments else call
        for call in message.tool_calls
    )
    return replace(message, content=message.content.replace(mark, WRITTEN_MARK), tool_calls=calls)


def _with_written_marks(
    text: str, spans: Sequence[tuple[ModelImage, int, int]], mark: str
) -> tuple[str, list[tuple[ModelImage, int, int]]]:
    """Put the template's mark back where a text had it, and move the pictures' places."""
    longer = len(mark) - len(WRITTEN_MARK)
    moved = []
    for image, start, end in spans:
        before = longer * text.count(WRITTEN_MARK, 0, start)
        moved.append((image, start + before, end + before))
    return text.replace(WRITTEN_MARK, mark), moved


def _rendered(
    tokens: list[int],
    weights: list[float],
    max_tokens: int | None,
    *,
    weighted: bool,
    images: Sequence[PlacedImage] = (),
) -> Rendered:
    cut = None
    if max_tokens is not None:  # before a picture that is not whole, or that would end the sequence: see `datum.shift`
        cut = next((int(placed.at[0]) for placed in images if placed.at[-1] >= max_tokens - 1), None)
    max_tokens = max_tokens if cut is None else cut
    mask = np.array(weights[:max_tokens], dtype=np.float64) != 0
    mask.setflags(write=False)
    return Rendered(
        tokens=int_array(tokens[:max_tokens]),
        trained=mask,
        truncated=max_tokens is not None and len(tokens) > max_tokens,
        weights=float_array(weights[:max_tokens]) if weighted else None,
        images=tuple(placed for placed in images if cut is None or placed.at[0] < cut),
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


def _template_message(message: Message, content: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": content}
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
