"""A reward function with a reward for every turn, in the form that reward-kit's files have. It runs in the sandbox.

`gigpo_ppo_training.py` uses it; in a run file it is  fn = "turn_rewards.py:evaluate".
"""

from reward_kit import EvaluateResult, StepOutput, reward_function


@reward_function
def evaluate(messages, task_achieved=None, **kwargs):
    """1 for the turn that solves the task, and a little off for every turn after which nothing looks different."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    outputs = []
    for place in turns:
        before, after = messages[place - 1], messages[place + 1] if place + 1 < len(messages) else {}
        wasted = 0.05 if before["content"] == after.get("content") else 0.0
        solved = 1.0 if task_achieved and place == turns[-1] else 0.0
        outputs.append(StepOutput(step_index=place, base_reward=solved - wasted))
    return EvaluateResult(
        score=sum(output.base_reward for output in outputs),
        reason="solved" if task_achieved else "not solved",
        step_outputs=outputs,
    )
