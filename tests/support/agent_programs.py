"""A tokenizer whose template shows tools, samplers that keep what the engine saw, and agent programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.algo.datum import to_data
from headrace.render import Renderer
from headrace.testing import FakeSampler
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    Reward,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    StopReason,
    float_array,
    int_array,
)

HERMES = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = HERMES.replace(  # the last reply keeps its thinking, earlier ones lose it
    "m.content }}", "(m.content if loop.last else m.content.split('</think>')[-1]) }}"
)
SAMPLING = SamplingParams(max_tokens=120)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def make_tokenizer(template: str = HERMES) -> Any:
    """One token per byte, the marks of turns, and `<tool_call>` as a token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bpe.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@dataclass(slots=True)
class Heard:
    """What the engine was given and returned, kept apart from everything that is tested."""

    prompt: list[int]
    sampled: list[int]
    params: SamplingParams


class KeepingSampler(FakeSampler):
    """Asks `speak(request)` for the tokens of a reply, the last of them included, and keeps both."""

    def __init__(self, speak: Callable[[SampleRequest], Sequence[int]]) -> None:
        super().__init__()
        self._speak = speak
        self.heard: list[Heard] = []

    async def sample(self, request: SampleRequest) -> Completion:
        tokens = list(self._speak(request))[: request.params.max_tokens]
        self.heard.append(Heard(request.prompt.tolist(), tokens, request.params))
        ended = len(tokens) < request.params.max_tokens
        logprobs = float_array([-0.25 * (1 + place) for place in range(len(tokens))])
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=int_array([self.version] * len(tokens)),
            stop=StopReason.STOP if ended else StopReason.LENGTH,
        )


@dataclass(slots=True)
class Script:
    """Replies in turn, as tokens with the end of the turn."""

    tokenizer: Any
    texts: Sequence[str]
    said: int = field(default=0)

    def __call__(self, request: SampleRequest) -> list[int]:
        text = self.texts[self.said % len(self.texts)]
        self.said += 1
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]


@dataclass(slots=True)
class Noise:
    """Any tokens at all, as an untrained model says them: broken characters, half-written marks, no end."""

    tokenizer: Any
    length: int = 30

    def __call__(self, request: SampleRequest) -> list[int]:
        rng = np.random.default_rng(request.params.seed)
        return [int(token) for token in rng.integers(0, len(self.tokenizer), size=self.length)]


def scripted(*texts: str, template: str = HERMES) -> tuple[KeepingSampler, Renderer]:
    tokenizer = make_tokenizer(template)
    return KeepingSampler(Script(tokenizer, texts)), Renderer(tokenizer)


def client_of(base_url: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", **options)


def trained_spans(episode: Episode) -> list[tuple[list[int], list[int]]]:
    """What a training step would train: every run of tokens with a weight, and all that stands before it."""
    scored = ScoredEpisode(episode=episode, reward=Reward(total=1.0))
    credited = CreditedEpisode(scored=scored, group_id=0, advantages=(1.0,) * len(episode.steps))
    spans: list[tuple[list[int], list[int]]] = []
    for datum in to_data([credited]):
        tokens = [int(datum.inputs[0]), *datum.targets.tolist()]
        trained = [False, *(datum.arrays["weights"] != 0).tolist()]
        start = None
        for place, weight in enumerate([*trained, False]):
            if weight and start is None:
                start = place
            elif not weight and start is not None:
                spans.append((tokens[:start], tokens[start:place]))
                start = None
    return spans


def heard_spans(sampler: KeepingSampler) -> list[tuple[list[int], list[int]]]:
    return [(heard.prompt, heard.sampled) for heard in sampler.heard]
