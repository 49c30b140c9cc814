"""Small groups for the rollout tests."""

from collections.abc import Sequence

from headrace.types import (
    Completion,
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


def completion(versions: Sequence[int]) -> Completion:
    return Completion(
        tokens=int_array(range(len(versions))),
        sampler_logprobs=float_array([-0.1 * (t + 1) for t in range(len(versions))]),
        raw_logprobs=float_array([-0.3] * len(versions)),
        versions=int_array(versions),
        stop=StopReason.STOP,
    )


def scored(
    task: Task, reward: float, *, versions: Sequence[int] = (0, 0), success: bool | None = None, id: str = "e"
) -> ScoredEpisode:
    step = Step(prompt=int_array([7, 8]), completion=completion(versions), action="go", state="s", reward=reward)
    episode = Episode(
        id=id,
        task=task,
        seed=1,
        steps=(step,),
        messages=(Message(role="user", content="x"), Message(role="assistant", content="go")),
        temperature=0.7,
        success=success,
    )
    return ScoredEpisode(episode=episode, reward=Reward(total=reward, parts={"env": reward}))


def group(
    id: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    versions: Sequence[int] = (0, 0),
    started_version: int = 0,
    num_failed: int = 0,
    task: Task | None = None,
) -> Group:
    task = task or Task(id=f"t{id}", data={"answer": [1, 2.5, None]})
    failed = FailedEpisode(id="f", task=task, reason="the engine died")
    return Group(
        id=id,
        task=task,
        episodes=tuple(scored(task, reward, versions=versions) for reward in rewards),
        failed=(failed,) * num_failed,
        started_version=started_version,
    )
