"""Sample at an engine replica from a rollout worker, without the coordinator in between.

The coordinator lends a replica for one sequence (`Lease`) and hears when it is free again (`LeaseEnd`): how many tokens
were sampled and by which versions, not the tokens. A replica that is paused ends its sequences; the worker keeps what
it has and asks for another lease. Imports no torch: workers are to be there in a second or two.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from headrace.errors import HeadraceError
from headrace.types import Completion, SampleRequest, StopReason, float_array, int_array

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ReplicaLostError(Exception):
    """The replica of a lease is gone or does not answer. `partial` is what it had sampled of the request."""

    def __init__(self, reason: str, partial: Completion | None = None) -> None:
        super().__init__(reason)
        self.partial = partial


class ReplicaClients:
    """Keeps a worker's connections to inference servers, by address. The tokenizer finds stop strings."""

    def __init__(self, node: str, tokenizer: Any) -> None:
        self.node, self.tokenizer = node, tokenizer  # the address of the worker's machine
        self._servers: dict[str, Any] = {}

    def server(self, access: "ServerAccess") -> Any:
        """Return the `ServerSampler` of a server, which is made at its first use."""
        if access.url not in self._servers:
            from headrace.infer.servers.server_sampler import SampledModel, ServerSampler
            from headrace.infer.servers.sglang import SglangApi
            from headrace.infer.servers.vllm import VllmApi

            api = {"vllm": VllmApi, "sglang": SglangApi}[access.kind](access.url)
            model = SampledModel(
                context=access.context,
                vocabulary=access.vocabulary,
                eos_tokens=access.eos_tokens,
                tokenizer=self.tokenizer,
            )
            self._servers[access.url] = ServerSampler(api, model, sync=None, prover=None)
        return self._servers[access.url]


class EngineAccess(Protocol):
    """Reaches one replica. It is sent to a worker, so it must pickle."""

    def reached_from(self, node: str) -> bool:
        """Return whether the replica can be reached from a machine."""

    async def sample(self, request: SampleRequest, clients: ReplicaClients) -> Completion:
        """Sample, or return what there was if the replica is paused. Raises ReplicaLostError, or SamplerError if the
        replica refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCall:
    """Ask the coordinator for a replica to sample the next tokens of an episode at."""

    id: int
    attempt: int  # at playing a group
    index: int  # of the episode in its group
    replayable: bool  # the episode's environment is deterministic


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Allow a worker to sample one sequence at a replica, until its end or an interrupt."""

    access: EngineAccess
    version: int  # that the replica holds


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnd:
    """Tell the coordinator that a lease is over."""

    id: int  # of the call that was answered with the lease
    attempt: int
    index: int
    num_tokens: int = 0  # sampled under the lease
    head_version: int = 0  # of the first of them
    tail_version: int = 0  # of the last
    lost: str = ""  # why the replica could not be used; empty: it could


def lease_end(call: LeaseCall, before: Completion | None, after: Completion | None, *, lost: str = "") -> LeaseEnd:
    """Count what was sampled under a lease."""
    start = 0 if before is None else len(before.tokens)
    versions = int_array([]) if after is None else after.versions[start:]
    return LeaseEnd(
        id=call.id,
        attempt=call.attempt,
        index=call.index,
        num_tokens=len(versions),
        head_version=int(versions[0]) if len(versions) else 0,
        tail_version=int(versions[-1]) if len(versions) else 0,
        lost=lost,
    )


def interrupted(request: SampleRequest) -> Completion:
    """Return a request's completion as it was before it was sent."""
    if request.continue_from is not None:
        return replace(request.continue_from, stop=StopReason.INTERRUPTED)
    none = float_array([])
    return Completion(
        tokens=int_array([]),
        sampler_logprobs=none,
        raw_logprobs=none,
        versions=int_array([]),
        stop=StopReason.INTERRUPTED,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorAccess:
    """Reaches an embedded engine that is an actor."""

    actor: Any
    name: str

    def reached_from(self, node: str) -> bool:
        return True

    async def sample(self, request: SampleRequest, clients: ReplicaClients) -> Completion:
        from ray.exceptions import RayError

        answer = self.actor.sample_lent.remote(request)
        try:
            result = await answer
        except asyncio.CancelledError:
            import ray

            ray.cancel(answer)
            raise
        except RayError as exc:
            raise ReplicaLostError(f"{self.name}: {(str(exc).strip().splitlines() or ['?'])[0]}") from exc
        if isinstance(result, HeadraceError):
            raise result
        assert isinstance(result, Completion)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """Reaches an inference server over HTTP, and knows what it holds."""

    kind: str  # "vllm" or "sglang"
    url: str
    home: str  # the machine of the coordinator, by whose names and routes the address is meant
    adapter: str | None
    version: int
    context: int
    vocabulary: int
    eos_tokens: tuple[int, ...]

    def reached_from(self, node: str) -> bool:
        return node == self.home or urlsplit(self.url).hostname not in LOOPBACK

    async def sample(self, request: SampleRequest, clients: ReplicaClients) -> Completion:
        server = clients.server(self)
        from headrace.infer.servers.api import ServerLostError

        try:
            completion: Completion = await server.sample_borrowed(request, adapter=self.adapter, version=self.version)
        except ServerLostError as exc:
            raise ReplicaLostError(str(exc), exc.partial) from exc
        return completion
