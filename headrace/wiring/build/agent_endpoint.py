"""Build what plays an episode in place of the episode worker: a user's function, or an agent program behind an
endpoint; and own the threads of environments that block."""

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack

from headrace.config import RlConfig
from headrace.render import Renderer
from headrace.rollout.agent_program import ChatEndpoint, program_fn
from headrace.rollout.group import GenerateFn
from headrace.rollout.partial_rollout import ResumableSampler
from headrace.types import Episode, SamplingParams, Task
from headrace.user_code import load_function


class AgentEndpoint:
    """Owns the endpoint of agent programs, which starts with the first episode that needs it, and the threads of
    environments that block. Training and evaluation share both."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._endpoint: ChatEndpoint | None = None
        self._starting = asyncio.Lock()
        self._started = AsyncExitStack()
        self._threads: ThreadPoolExecutor | None = None

    def threads(self, count: int) -> Executor:
        """Return the threads that blocking environments run on; the first call says how many."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="environment")
        return self._threads

    def generate_fn(self, c: RlConfig, sampling: SamplingParams) -> GenerateFn | None:
        """Load what [rl] program or generate_fn names; None if the episode worker plays."""
        if c.program is None:
            return load_function(c.generate_fn) if c.generate_fn else None
        program = load_function(c.program)

        async def generate(task: Task, sampler: ResumableSampler, renderer: Renderer, seed: int) -> Episode:
            endpoint = await self._served()
            play = program_fn(
                program,
                endpoint,
                sampling=sampling,
                max_turns=c.max_turns,
                max_episode_tokens=c.max_episode_tokens,
            )
            return await play(task, sampler, renderer, seed)

        return generate

    async def close(self) -> None:
        """Close the endpoint, and the threads without waiting for environments that still compute."""
        await self._started.aclose()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _served(self) -> ChatEndpoint:
        from headrace.infer.openai_api import serve  # a web framework, which most runs have no use for

        async with self._starting:
            if self._endpoint is not None:
                return self._endpoint
            endpoint: ChatEndpoint = await self._started.enter_async_context(serve(self._renderer))
            self._endpoint = endpoint
            return endpoint
