"""Provide public fakes, one per protocol: small, deterministic, and held to the contract tests of the real ones.

`FakeSampler` encodes its version in every token it samples, so a test can prove which weights produced which token.
`FakeBackend` trains one number. On a `VirtualLoop` the clock jumps ahead when all tasks wait. Nothing here needs torch.
"""

import asyncio
import hashlib
import json
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.errors import BackendError, NoGradientError, PictureError, RewardError, SamplerError
from headrace.metrics import Mean, Sum
from headrace.pictures import PICTURE_MARK, ModelImage, Picture
from headrace.types import (
    Action,
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    Episode,
    FailedEpisode,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    Message,
    Observation,
    Reward,
    SampleRequest,
    ScaleUpdate,
    ScoredEpisode,
    SharedWeights,
    StepResult,
    StopReason,
    Task,
    UpdateOut,
    WeightsHandle,
    float_array,
    int_array,
    known_next_logprobs,
)

VERSION_STRIDE = 1000
R = TypeVar("R")


class FakeSampler:
    """A sampler whose tokens are version * 1000 + position, with log-prob -0.5; scores are `token_score()`, also -0.5.

    It samples one token per `tick` (an awaitable; the default yields to the event loop once), so tests decide how slow
    a sequence is. A sequence ends with STOP after `length(request)` tokens, or with LENGTH at max_tokens.
    """

    def __init__(
        self,
        *,
        length: Callable[[SampleRequest], int] = lambda request: request.params.max_tokens + 1,
        tick: Callable[[], "asyncio.Future[None] | object"] | None = None,
        max_prompt: int = 4096,
    ) -> None:
        self._length = length
        self._tick = tick
        self._max_prompt = max_prompt
        self._version = 0
        self._fingerprint = "fake"
        self._open = 0
        self._interrupt = False
        self._running = asyncio.Event()
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, request: SampleRequest) -> Completion:
        if len(request.prompt) > self._max_prompt:
            raise SamplerError(f"a prompt of {len(request.prompt)} tokens does not fit into {self._max_prompt}")
        done = request.continue_from
        tokens = [] if done is None else done.tokens.tolist()
        versions = [] if done is None else done.versions.tolist()
        await self._running.wait()
        self._open += 1
        self._idle.clear()
        stop, score = StopReason.LENGTH, self.token_score()
        try:
            end = min(self._length(request), request.params.max_tokens)
            while len(tokens) < end:
                if self._interrupt:
                    stop = StopReason.INTERRUPTED
                    break
                tokens.append(self._version * VERSION_STRIDE + len(tokens) % VERSION_STRIDE)
                versions.append(self._version)
                await self._wait_tick()
            else:
                stop = StopReason.STOP if self._length(request) <= request.params.max_tokens else StopReason.LENGTH
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        logprobs = float_array(np.full(len(tokens), -0.5))
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=int_array(versions),
            stop=stop,
            next_logprobs=known_next_logprobs(done, len(tokens)),
            prefix_logprobs=None
            if request.score_from is None
            else float_array([score] * (request.num_given - request.score_from)),
        )

    def token_score(self) -> float:
        """Return the log-prob of any token under the loaded weights."""
        return -0.5

    async def _wait_tick(self) -> None:
        if self._tick is None:
            await asyncio.sleep(0)
            return
        waited = self._tick()
        if asyncio.isfuture(waited) or asyncio.iscoroutine(waited):
            await waited

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        return tuple(float_array([math.nan, *[self.token_score()] * (len(sequence) - 1)]) for sequence in sequences)

    async def load(self, handle: WeightsHandle, version: int) -> str:
        if self._open:
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        self._version = version
        self._fingerprint = handle.fingerprint
        return self._fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._running.clear()
        self._interrupt = interrupt
        await self._idle.wait()
        self._interrupt = False

    async def resume(self) -> None:
        self._running.set()


class FakeBackend:
    """A backend whose model is one number, the log-prob of every token.

    The loss is sum(-w * logprob), so an update moves the number by the learning rate.
    """

    def __init__(self, logprob: float = -2.0) -> None:
        self.logprob = logprob
        self._gradient: float | None = None
        self._updates = 0
        self._before: float | None = None  # the number before the last reversible update

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        return _resolved(lambda: self._forward(data))

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        def run() -> ForwardOut:
            self._gradient, before = None, self._gradient or 0.0
            out = self._forward(data)
            self._gradient = before - sum(float(datum.arrays["weights"].sum()) for datum in data)
            return out

        return _resolved(run)

    def _forward(self, data: Sequence[Datum]) -> ForwardOut:
        if not data:
            raise BackendError("there is nothing to train on: the batch is empty")
        if any("weights" not in datum.arrays for datum in data):
            raise BackendError("a datum has no array named 'weights'")
        weight = sum(float(datum.arrays["weights"].sum()) for datum in data)
        logprobs = tuple(float_array(np.full(datum.targets.shape, self.logprob)) for datum in data)
        tokens = sum(datum.num_tokens for datum in data)
        total = -weight * self.logprob
        return ForwardOut(
            loss=total, logprobs=logprobs, metrics={"loss/total": Sum(total), "loss/mean": Mean(total, tokens)}
        )

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        def run() -> UpdateOut:
            if isinstance(update, ScaleUpdate):
                if self._before is None:
                    raise BackendError("there is no update to scale back: make one with Adam(reversible=True)")
                change = update.share * (self.logprob - self._before) if update.share else 0.0
                self.logprob = self._before + change
                return UpdateOut(grad_norm=0.0, updated=True, num_updates=self._updates)
            gradient, self._gradient = self._gradient, None
            if isinstance(update, DiscardGradient):
                return UpdateOut(grad_norm=0.0, updated=False, num_updates=self._updates)
            if gradient is None:
                raise NoGradientError("optim_step needs a forward_backward before it")
            self._before = self.logprob if update.reversible else None
            if not math.isfinite(gradient) or 0 < update.max_norm < abs(gradient):
                return UpdateOut(grad_norm=abs(gradient), updated=False, num_updates=self._updates)
            self.logprob = min(self.logprob - update.learning_rate * float(np.sign(gradient)), 0.0)
            self._updates += 1
            return UpdateOut(grad_norm=abs(gradient), updated=True, num_updates=self._updates)

        return _resolved(run)

    def save_state(self, folder: Path) -> "Future[None]":
        def run() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "fake.json").write_text(json.dumps({"logprob": self.logprob, "updates": self._updates}))

        return _resolved(run)

    def load_state(self, folder: Path) -> "Future[None]":
        def run() -> None:
            if not (folder / "fake.json").is_file():
                raise BackendError(f"{folder} holds no state of this backend")
            state = json.loads((folder / "fake.json").read_text())
            self.logprob, self._updates, self._gradient = state["logprob"], state["updates"], None
            self._before = None

        return _resolved(run)

    def export_weights(self) -> "Future[WeightsHandle]":
        return _resolved(
            lambda: SharedWeights(fingerprint=hashlib.blake2b(repr(self.logprob).encode()).hexdigest()[:16])
        )


def _resolved(run: Callable[[], R]) -> "Future[R]":
    future: Future[R] = Future()
    try:
        future.set_result(run())
    except BackendError as exc:
        future.set_exception(exc)
    return future


class FakeEnv:
    """An environment that counts to `target`: the action "up" adds one, anything else is invalid.

    The episode succeeds if it reaches the target within `limit` actions.
    """

    deterministic = True

    def __init__(self, *, target: int = 3, limit: int = 6) -> None:
        self._target, self._limit = target, limit
        self._count = self._taken = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self._count = self._taken = 0
        return self._observe()

    def step(self, action: str) -> StepResult:
        valid = action.strip() == "up"
        self._count += valid
        self._taken += 1
        done = self._count >= self._target
        return StepResult(
            observation=self._observe(),
            reward=1.0 if done else 0.0,
            done=done,
            truncated=not done and self._taken >= self._limit,
            valid=valid,
            success=done,
        )

    def _observe(self) -> Observation:
        text = f"count {self._count} of {self._target}"
        return Observation(messages=(Message(role="user", content=text),), state=str(self._count), actions=("up",))

    def close(self) -> None:
        self._count = 0


class FakeToolEnv(FakeEnv):
    """A FakeEnv with a tool: a call of `up` adds one, anything else is invalid."""

    TOOLS = (
        {"type": "function", "function": {"name": "up", "description": "Add one", "parameters": {"type": "object"}}},
    )

    def reset(self, task: Task, seed: int) -> Observation:
        return replace(super().reset(task, seed), tools=self.TOOLS)

    def call(self, action: Action) -> StepResult:
        """Answer each call with a message that has its id; the count after all of them is the state."""
        self._count += max(len(action.calls) - 1, 0)
        result = super().step("up" if action.calls else "")
        content = result.observation.messages[0].content
        results = tuple(
            Message(role="tool", content=content, name=call.name, tool_call_id=call.id) for call in action.calls
        )
        problem = (Message(role="user", content=action.problem or "call up"),)
        observation = replace(result.observation, messages=results or problem, tools=self.TOOLS)
        return replace(result, observation=observation)

    def _observe(self) -> Observation:
        return replace(super()._observe(), actions=('{"name": "up", "arguments": {}}',))


class FakeRewardRunner:
    """Scores with a plain function of the episode; an episode on which it raises RewardError is returned as failed."""

    def __init__(self, score: Callable[[Episode], float] = lambda episode: episode.env_reward) -> None:
        self._score = score

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        scored: list[ScoredEpisode | FailedEpisode] = []
        for episode in episodes:
            try:
                total = self._score(episode)
            except RewardError as exc:
                scored.append(FailedEpisode(id=episode.id, task=episode.task, reason=str(exc)))
            else:
                scored.append(ScoredEpisode(episode=episode, reward=Reward(total=total, parts={"fake": total})))
        return tuple(scored)

    async def close(self) -> None:
        return None


@dataclass(slots=True)
class MemorySink:
    """Keeps every record in `records` as (step, values)."""

    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    closed: bool = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.closed, "a closed sink takes no more metrics"
        self.records.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


# --- time ------------------------------------------------------------------------------------------------------------


class _NoWaiting(selectors.DefaultSelector):
    """A selector that never waits: it tells the loop how long it would have."""

    skip: Callable[[float | None], None] = staticmethod(lambda seconds: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            self.skip(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when no task can run.

    Waiting costs nothing and every run is the same. For fakes only: it does not wait for threads, processes or sockets.
    Raises `Deadlock` when no timer is left either, which on a real loop would be a hang.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        selector = _NoWaiting()
        selector.skip = self._skip
        super().__init__(selector)

    def time(self) -> float:
        return self._now_s

    def _skip(self, seconds: float | None) -> None:
        if seconds is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Deadlock(f"nothing will ever wake the tasks {', '.join(waiting)}")
        self._now_s += seconds


class Deadlock(Exception):
    """Every task waits and no timer is set."""


def run_virtual(main: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine on a `VirtualLoop`, as `asyncio.run` does: an hour of sleeping takes no time.

    >>> run_virtual(asyncio.sleep(3600, "done"))
    'done'
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True, kw_only=True)
class FakePictureReader:
    """A reader of pictures for any tokenizer: an image token is the template's mark, and a picture has from 2 to 5.

    Its pixels are the picture's bytes, so that equal pictures have equal pixels.
    """

    image_token: int
    template_mark: str = "<image>"  # a token of the tokenizer, `image_token`

    def read(self, picture: Picture) -> ModelImage:
        if not picture.media_type:
            raise PictureError(f"{picture.name}: it cannot be decoded")
        num_tokens = 2 + picture.data[-1] % 4
        values = np.frombuffer(picture.data, dtype=np.uint8).astype(np.float32)
        pixels = np.resize(values / np.float32(255), (num_tokens, 4))
        return ModelImage(
            digest=f"fake {picture.digest}", pixels=pixels, grid=(1, 1, num_tokens), num_tokens=num_tokens
        )

    def text(self, image: ModelImage) -> str:
        return self.template_mark * image.num_tokens

    def template_content(self, content: str, num_pictures: int) -> Any:
        """Write parts, as templates of vision models take them."""
        if not num_pictures:
            return content
        first, *rest = content.split(PICTURE_MARK)
        parts = [{"type": "text", "text": first}]
        for text in rest:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]
