"""A reward at a server of rewards (`headrace serve --reference`): episodes go there as JSON, rewards come back."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from headrace.errors import ConfigError, RewardError, boundary
from headrace.retry import Backoff, GaveUp, TryAgain, check_transient, doubling, reply_words, retry
from headrace.reward.episode_json import episode_to_row
from headrace.reward.terms import GroupTerm
from headrace.types import Episode, Reward

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
CHECK_S = 10.0  # how long a server is asked whether it has a reward, before a run


class RemoteReward:
    """`url`: http://HOST:PORT/NAME. A server that does not answer, or is busy, is asked again for `retry_s`;
    `timeout_s` is of one answer. `transport` and `sleep` are for tests."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retry_s: float = 120.0,
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, _, self.name = url.rstrip("/").rpartition("/")
        self._retry_s, self._sleep = retry_s, sleep
        self._http = httpx.Client(
            base_url=self._server,
            headers={} if key is None else {"X-API-Key": key},
            timeout=timeout_s,
            transport=transport,
        )

    def check(self) -> None:
        """Raise ConfigError if the server does not answer within some seconds, or has no such reward."""
        try:
            known = self._ask("GET", "/rewards", None, min(CHECK_S, self._retry_s)).get("rewards")
        except RewardError as exc:
            raise ConfigError(str(exc)) from exc
        if not isinstance(known, list) or self.name not in known:
            names = ", ".join(map(str, known)) if isinstance(known, list) and known else "none"
            raise ConfigError(f"the reward server at {self._server} has no reward '{self.name}': it has {names}")

    def score(self, episodes: Sequence[Episode]) -> list[Reward | RewardError]:
        """Score the episodes of a group, in order. Blocks; an episode whose reward is not known has a RewardError."""
        try:
            with boundary(RewardError, "the task's data cannot be sent to the reward server as JSON"):
                body = {"episodes": [episode_to_row(episode, with_tokens=True) for episode in episodes]}
                answers = self._ask("POST", f"/rewards/{self.name}", body, self._retry_s).get("rewards")
        except RewardError as exc:
            return [exc] * len(episodes)
        if not isinstance(answers, list) or len(answers) != len(episodes):
            return [RewardError(f"{self._where} did not answer with one reward for each episode")] * len(episodes)
        return [reward_from_json(answer, self._where) for answer in answers]

    def close(self) -> None:
        self._http.close()

    @property
    def _where(self) -> str:
        return f"the reward server at {self._server}"

    def _ask(self, verb: str, path: str, body: object, retry_s: float) -> dict[str, Any]:
        def attempt() -> Any:
            try:
                reply = self._http.request(verb, path, json=body)
            except httpx.RequestError as exc:
                raise TryAgain(f"{type(exc).__name__}: {exc}") from exc
            if reply.status_code != 200:
                check_transient(reply.status_code, reply.headers, reply.content)
                raise RewardError(f"{self._where} refused: {reply_words(reply.status_code, reply.content)}")
            with boundary(RewardError, f"{self._where} did not answer with JSON"):
                return reply.json()

        try:
            answer = retry(attempt, Backoff(doubling(FIRST_WAIT_S, LONGEST_WAIT_S), retry_s), self._sleep)
        except GaveUp as exc:
            raise RewardError(f"{self._where} did not answer for {retry_s:g} s: {exc}") from exc
        return answer if isinstance(answer, dict) else {}


def remote_term(name: str, remote: RemoteReward, *, weight: float = 1.0) -> GroupTerm:
    """Make a term whose rewards a server computes, off the event loop."""

    async def judge(episodes: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        return await asyncio.to_thread(remote.score, episodes)

    async def close() -> None:
        remote.close()

    return GroupTerm(name=name, judge=judge, weight=weight, close=close)


def reward_to_json(reward: Reward, *, term: str) -> dict[str, Any]:
    """Write a reward of one term; its parts lose the term's name, which the reader's own term has."""
    parts = {name.removeprefix(f"{term}/"): value for name, value in reward.parts.items() if name != term}
    steps = None if reward.steps is None else list(reward.steps)
    return {"total": reward.total, "parts": parts, "steps": steps, "success": reward.success, "printed": reward.printed}


def reward_from_json(answer: object, where: str) -> Reward | RewardError:
    """Read what `reward_to_json` wrote, or the sentence of an episode without a reward."""
    if isinstance(answer, Mapping) and isinstance(answer.get("error"), str):
        return RewardError(answer["error"])
    try:
        with boundary(RewardError, f"{where} sent what is no reward"):
            if not isinstance(answer, Mapping):
                raise TypeError(f"a {type(answer).__name__}")
            steps, success = answer.get("steps"), answer.get("success")
            reward = Reward(
                total=float(answer["total"]),
                parts={str(name): float(value) for name, value in (answer.get("parts") or {}).items()},
                steps=None if steps is None else tuple(map(float, steps)),
                success=None if success is None else bool(success),
                printed=str(answer.get("printed") or ""),
            )
            if not math.isfinite(reward.total):
                raise ValueError(f"the number {reward.total}")
            return reward
    except RewardError as exc:
        return exc
