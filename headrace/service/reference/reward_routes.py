"""Reward episodes over HTTP: reward models and reward functions of this server, by name, for runs elsewhere.

Nothing is kept, so nothing is journalled, and a request may be sent again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from headrace.errors import RequestError, boundary
from headrace.protocols import RewardRunner
from headrace.reward.episode_json import episode_from_row
from headrace.reward.remote_term import reward_to_json
from headrace.service.http.auth import ApiUser
from headrace.service.store.registry import NotFound
from headrace.service.wire.messages import decompress
from headrace.types import Episode, ScoredEpisode

MAX_EPISODES = 1024


def reward_routes(rewards: Mapping[str, RewardRunner], limited_user: Any, *, body_bytes: int) -> APIRouter:
    """Make the routes; each runner has one term, which has the runner's name."""
    routes = APIRouter()

    @routes.get("/rewards")
    async def names(user: ApiUser = limited_user) -> dict[str, list[str]]:
        """List the names of the rewards: models and functions."""
        return {"rewards": sorted(rewards)}

    @routes.post("/rewards/{name}")
    async def score(name: str, request: Request, user: ApiUser = limited_user) -> dict[str, list[dict[str, Any]]]:
        """Reward the episodes of a group: {"episodes": [...]} as `episode_to_row` writes them, tokens included.

        Each answer is a reward, or {"error": why there is none}.
        """
        if name not in rewards:
            raise NotFound(f"there is no reward '{name[:80]}' here: {', '.join(sorted(rewards)) or 'none is'}")
        body = decompress(await request.body(), request.headers.get("content-encoding"), limit=4 * body_bytes)
        episodes = _episodes(body)
        results = await rewards[name].score(episodes)
        return {
            "rewards": [
                reward_to_json(result.reward, term=name)
                if isinstance(result, ScoredEpisode)
                else {"error": result.reason}
                for result in results
            ]
        }

    return routes


def _episodes(body: bytes) -> Sequence[Episode]:
    with boundary(RequestError, "the body is not JSON"):
        asked = json.loads(body)
    rows = asked.get("episodes") if isinstance(asked, dict) else None
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_EPISODES:
        raise RequestError(f'the body must be {{"episodes": [...]}} with 1 to {MAX_EPISODES} episodes of one group')
    episodes = []
    for index, row in enumerate(rows):
        with boundary(RequestError, f"episode {index} is not one as a run sends it"):
            episodes.append(episode_from_row(row))
    return episodes
