"""A sampler that says what a script says, and episodes of a user's own code that sample with it."""

from collections.abc import Callable

from headrace.model.tiny import END_ID, make_tokenizer
from headrace.render import Renderer
from headrace.rollout.group import BlockingSampler
from headrace.testing import FakeSampler
from headrace.types import (
    Completion,
    Episode,
    IntArray,
    Message,
    SampleRequest,
    SamplingParams,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)

OPENING = (Message(role="user", content="count"),)
WORDS = ("up", "down", "count", "of", *"0123456789")
TOKENIZER = make_tokenizer(WORDS)


class ScriptedSampler(FakeSampler):
    """Says what `script(request)` says, in words of the tokenizer, and keeps every request."""

    def __init__(self, script: Callable[[SampleRequest], str]) -> None:
        super().__init__()
        self._script = script
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Completion:
        self.requests.append(request)
        tokens = [*TOKENIZER(self._script(request))["input_ids"], END_ID][: request.params.max_tokens]
        logprobs = float_array([-0.25] * len(tokens))
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=int_array([self.version] * len(tokens)),
            stop=StopReason.STOP if tokens[-1] == END_ID else StopReason.LENGTH,
        )


async def own_async(task: Task, sampler: FakeSampler, renderer: Renderer, seed: int) -> Episode:
    prompt = renderer.prompt(OPENING)
    params = SamplingParams(max_tokens=3, seed=seed)
    return own_episode(task, prompt, await sampler.sample(SampleRequest(prompt=prompt, params=params)), renderer)


def own_plain(task: Task, sampler: BlockingSampler, renderer: Renderer, seed: int) -> Episode:
    assert sampler.version == 0
    prompt = renderer.prompt(OPENING)
    params = SamplingParams(max_tokens=3, seed=seed)
    completion = sampler.sample(SampleRequest(prompt=prompt, params=params))
    [scores] = sampler.score([prompt])
    assert len(scores) == len(prompt)
    return own_episode(task, prompt, completion, renderer)


def own_episode(task: Task, prompt: IntArray, completion: Completion, renderer: Renderer) -> Episode:
    step = Step(prompt=prompt, completion=completion, action=renderer.decode(completion.tokens))
    return Episode(id="mine", task=task, seed=0, steps=(step,), messages=(), temperature=1.0)
