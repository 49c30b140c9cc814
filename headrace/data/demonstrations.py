"""Write conversations for [sft] from episodes that a policy played: one JSON row each, with the tools offered.

A source of `type = "jsonl"` reads them again. Knows no policy: the caller plays the groups and passes them in.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import DataError, boundary
from headrace.protocols import Env
from headrace.types import Group, Observation, ScoredEpisode, Task, wire_message

Tools = tuple[Mapping[str, Any], ...]


class ToolRecordingEnv:
    """Wraps an environment and records the tools it offers at reset, by task id."""

    def __init__(self, env: Env, tools: dict[str, Tools]) -> None:
        self._env, self._tools = env, tools

    def reset(self, task: Task, seed: int) -> Observation:
        observation = self._env.reset(task, seed)
        self._tools[task.id] = observation.tools
        return observation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def record_tools(make_env: Callable[[], Env], tools: dict[str, Tools]) -> Callable[[], Env]:
    """Let every environment of `make_env` record its tools into `tools`."""

    def make() -> Env:
        recording: Any = ToolRecordingEnv(make_env(), tools)
        env: Env = recording
        return env

    return make


def demonstration(scored: ScoredEpisode, tools: Tools = ()) -> dict[str, Any]:
    """Make a row of an episode: the conversation up to the policy's last turn, its reward and its success."""
    episode = scored.episode
    last = max(place for place, message in enumerate(episode.messages) if message.role == "assistant")
    row: dict[str, Any] = {
        "id": f"{episode.task.id}#{episode.id}",
        "messages": [wire_message(message) for message in episode.messages[: last + 1]],
        "reward": scored.reward.total,
        "success": scored.success,
    }
    return {**row, "tools": [dict(tool) for tool in tools]} if tools else row


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSelection:
    """Says which episodes are written: those with enough reward, else the successes; of a task maybe only the best."""

    min_reward: float | None = None  # None: the episode must have succeeded
    best_only: bool = False  # one episode of a task: the one of the highest reward, the first of several
    failures: bool = False  # keep failures too

    def select(self, group: Group) -> list[ScoredEpisode]:
        """Return the episodes of a task that are kept, in their order."""
        kept = [scored for scored in group.episodes if self._is_good(scored)]
        return [max(kept, key=lambda scored: scored.reward.total)] if self.best_only and kept else kept

    def _is_good(self, scored: ScoredEpisode) -> bool:
        if self.min_reward is not None:
            return scored.reward.total >= self.min_reward
        return self.failures or scored.success is True

    @property
    def nothing(self) -> str:
        """Say why no episode was kept."""
        if self.min_reward is not None:
            return f"none has a reward of {self.min_reward:g}; lower --min-reward, or take a better policy"
        return "none succeeded; keep all of them (--all), choose by --min-reward, or take a better policy"


def write_demonstrations(
    path: Path,
    groups: Iterable[Group],
    tools: Mapping[str, Tools],
    *,
    selection: EpisodeSelection | None = None,  # None: the successes
) -> int:
    """Write the selected episodes; return their number. Raises DataError, and writes nothing, when there is none."""
    selection = selection or EpisodeSelection()
    rows = [
        demonstration(scored, tools.get(scored.episode.task.id, ()))
        for group in groups
        for scored in selection.select(group)
    ]
    if not rows:
        raise DataError(f"no episode is worth showing: {selection.nothing}")
    with boundary(DataError, f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
