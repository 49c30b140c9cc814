"""Small rollout files whose every number can be worked out by hand, for the tests of what looks at them.

A corridor S - A - B, then the goal. Group 7 has three episodes: straight on (solved), straight on after a step to the
left that goes nowhere (solved), and one that turns back and gives up. Group 8 has one that never moves, twice.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.algo.advantages.credit import credit
from headrace.observe.rollouts.files import RolloutFileInfo, save_trajectories
from headrace.observe.rollouts.records import EpisodeRecord, read_lines
from headrace.types import (
    Completion,
    CreditedEpisode,
    EndReason,
    Episode,
    FailedEpisode,
    Group,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)

PARAMS = {"gamma": 0.5, "norm": "none"}
ATTACK = (
    "[red]\x1b]0;owned\x07\x1b[5m\u202e\"'&"
    "<script>document.title='owned'</script><img src=http://evil.invalid/x onerror=alert(1)>"
)


def step(state: str | None, action: str, *, prompt: Sequence[int], version: int = 3, valid: bool = True) -> Step:
    logprobs = float_array([-0.05, -2.0])
    completion = Completion(
        tokens=int_array([11, 12]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([version, version + 1]),
        stop=StopReason.STOP,
    )
    return Step(prompt=int_array(prompt), completion=completion, action=action, state=state, valid=valid)


def episode(
    id: str, task: str, path: Sequence[tuple[str | None, str]], *, solved: bool, note: str = ""
) -> ScoredEpisode:
    """A step for each (state, action); the reward is 1 for a solved one."""
    steps: list[Step] = []
    messages = [Message(role="system", content=f"Walk to the goal.{note}")]
    for state, action in path:
        seen = [*steps[-1].prompt, *steps[-1].completion.tokens] if steps else []
        steps.append(step(state, action + note, prompt=[*seen, 1, 2], valid=action != "jump"))
        messages += [
            Message(role="user", content=f"You are at {state}.{note}"),
            Message(role="assistant", content=action + note),
        ]
    messages.append(Message(role="user", content=f"{'The goal!' if solved else 'Time is up.'}{note}"))
    played = Episode(
        id=id,
        task=Task(id=task, data={"answer": "north"}),
        seed=5,
        steps=tuple(steps),
        messages=tuple(messages),
        temperature=1.0,
        truncated=not solved,
        success=solved,
        ended=EndReason.DONE if solved else EndReason.MAX_TURNS,
    )
    return ScoredEpisode(episode=played, reward=Reward(total=float(solved), parts={f"env{note}": float(solved)}))


def groups(note: str = "") -> list[Group]:
    corridor = (
        episode("7/0", f"corridor{note}", [("S", "on"), ("A", "on"), ("B", "on")], solved=True, note=note),
        episode(
            "7/1", f"corridor{note}", [("S", "left"), ("S", "on"), ("A", "on"), ("B", "on")], solved=True, note=note
        ),
        episode("7/2", f"corridor{note}", [("S", "on"), ("A", "back"), ("S", "jump")], solved=False, note=note),
    )
    still = (
        episode("8/0", "still", [("S", "jump"), ("S", "jump")], solved=False, note=note),
        episode("8/1", "still", [("S", "jump")], solved=False, note=note),
    )
    lost = FailedEpisode(id="8/2", task=Task(id="still"), reason=f"the world ended{note}")
    return [
        Group(id=7, task=corridor[0].episode.task, episodes=corridor),
        Group(id=8, task=still[0].episode.task, episodes=still, failed=(lost,)),
    ]


def credited(note: str = "", method: str = "gigpo") -> list[CreditedEpisode]:
    params = PARAMS if method == "gigpo" else {}
    return list(credit(groups(note), method=method, params=params).episodes)


def save(path: Path, *, lean: bool = False, note: str = "", training_step: int | None = 4, run: str = "walk") -> Path:
    """Both groups, credited by GiGPO with gamma 0.5 and no division; and the failed episode."""
    failed = [one for group in groups(note) for one in group.failed]
    about = RolloutFileInfo(run=run + note, training_step=training_step, method="gigpo", params=PARAMS)
    save_trajectories(path, [*credited(note), *failed], lean=lean, about=about)
    return path


def lines(path: Path, group: int = 7) -> tuple[EpisodeRecord, ...]:
    """The episodes of a group of a saved file, without their tokens."""
    return tuple(line for line in read_lines(save(path)) if line.group_id == group)


def uncredited() -> list[ScoredEpisode]:
    return [replace(one.scored) for one in credited()]
