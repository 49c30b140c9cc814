"""Environments made with the package OpenEnv, as their authors write them."""

import random
from typing import Any, Literal

from openenv.core.env_server import Action, Environment, Observation, State


class Move(Action):
    direction: Literal["left", "right"]
    steps: int = 1


class Shown(Observation):
    place: int
    goal: int


class Kept(State):
    place: int = 0
    goal: int = 0


class Line(Environment):
    """Walk along a line to the goal."""

    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self._length = length
        self._state = Kept()
        self.closed = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **kwargs: Any) -> Shown:
        self._state = Kept(episode_id=episode_id, place=start, goal=random.Random(seed).randint(1, self._length))
        return self._show()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Shown:
        if action.steps > self._length:
            raise ValueError("off the line")
        way = action.steps if action.direction == "right" else -action.steps
        self._state = self._state.model_copy(
            update={"place": self._state.place + way, "step_count": self._state.step_count + 1}
        )
        return self._show()

    def _show(self) -> Shown:
        done = self._state.place == self._state.goal
        return Shown(place=self._state.place, goal=self._state.goal, done=done, reward=1.0 if done else -0.1)

    @property
    def state(self) -> Kept:
        return self._state

    def close(self) -> None:
        self.closed = True


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    """Says again what it hears; "bye" ends it. Its state is the counters only."""

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self._state = State()
        return Heard(text="say something")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        return Heard(text=f"heard {action.message}", done=action.message == "bye", reward=None)

    @property
    def state(self) -> State:
        return self._state


class Untyped(Echo):
    def step(self, action, timeout_s=None, **kwargs):  # type: ignore[no-untyped-def]
        return Heard(text="")


class OneThread(Echo):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class Listed(Line):
    """A line that lists its moves."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [(f"{steps} on", {"direction": "right", "steps": steps}) for steps in (1, 2)]
