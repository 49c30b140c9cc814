"""Episodes made by hand for the reward tests."""

from headrace.types import Completion, Episode, Message, Step, StopReason, Task, float_array, int_array


def episode(*answers: str, rewards: tuple[float, ...] = (), **data: object) -> Episode:
    """One step per answer; `data` is the task's."""
    completion = Completion(
        tokens=int_array([5]),
        sampler_logprobs=float_array([-1.0]),
        raw_logprobs=float_array([-1.0]),
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    steps = tuple(
        Step(prompt=int_array([1]), completion=completion, action=answer, reward=reward)
        for answer, reward in zip(answers, rewards or [0.0] * len(answers), strict=True)
    )
    messages = tuple(
        Message(role=role, content=text) for answer in answers for role, text in (("user", "q"), ("assistant", answer))
    )
    return Episode(id="0/0", task=Task(id="t", data=data), seed=0, steps=steps, messages=messages, temperature=1.0)
