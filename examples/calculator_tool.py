"""An agent with a tool: the environment, its tasks, demonstrations to start from, and the reward. Needs no download.

    headrace train examples/calculator_tool.toml

A question such as "What is 19 + 3?" is answered by a call, `calculator(expression="19+3")`, and then by "#### 22". A
player of the demonstrations guesses every second time instead of calling; by RL the agent learns that calls pay.
"""

import random
import re

from headrace.envs.tool_env import arguments_of, describe_tool, tool_message
from headrace.types import Action, Message, Observation, StepResult, Task

TOOLS = (describe_tool("calculator", "Work out a sum.", {"expression": {"type": "string"}}),)
SUM = re.compile(r"\s*(\d{1,4})\s*\+\s*(\d{1,4})\s*")


class Calculator:
    """Offers the tool until an answer comes; the answer ends the episode and is judged by `right`."""

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(messages=(), state="asked", tools=TOOLS)  # the task's own messages ask

    def call(self, action: Action) -> StepResult:
        if action.calls:
            results = tuple(tool_message(call, work_out(arguments_of(call).get("expression"))) for call in action.calls)
            observation = Observation(messages=results, state="worked out", tools=TOOLS)
            return StepResult(observation=observation, reward=0.0, done=False)
        if action.problem is not None:  # half a call, or a tool that there is not: say so, and let it try again
            told = Message(role="user", content=action.problem)
            observation = Observation(messages=(told,), state="asked", tools=TOOLS)
            return StepResult(observation=observation, reward=0.0, done=False, valid=False)
        return StepResult(observation=Observation(messages=(), state="answered"), reward=0.0, done=True)

    def step(self, action: str) -> StepResult:
        raise AssertionError("every observation but the last offers tools")

    def close(self) -> None:
        pass


def work_out(expression: object) -> str:
    """Add two numbers; anything else is an error that the model reads."""
    terms = SUM.fullmatch(expression) if isinstance(expression, str) else None
    return "error" if terms is None else str(int(terms[1]) + int(terms[2]))


def right(text: str, truth: str) -> bool:
    """Tell whether the last turn ends with "#### " and the expected number: the reward, 1 or 0, and success."""
    return "####" in text and text.rpartition("####")[2].strip() == truth


def questions(size: int, seed: int, held_out: bool = False) -> list[dict[str, str]]:
    """Make the rows of `rl.tasks` and `eval.source`: a prompt, and the answer that `right` compares with.

    Every eighth sum is only ever held out.
    """
    sums = [(a, b) for a in range(1, 21) for b in range(1, 21) if ((3 * a + b) % 8 == 0) == held_out]
    pairs = random.Random(seed).choices(sums, k=size)
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def demonstrations(size: int, seed: int) -> list[dict[str, object]]:
    """Make conversations for [sft], with the tools that the chat template shows; every second one only guesses."""
    draw, rows = random.Random(seed), []
    for number, row in enumerate(questions(size, seed)):
        asked = {"role": "user", "content": row["prompt"]}
        if number % 2:
            turns = [{"role": "assistant", "content": f"#### {draw.randint(2, 40)}"}]
        else:
            expression = row["prompt"].removeprefix("What is ").removesuffix("?").replace(" ", "")
            function = {"name": "calculator", "arguments": f'{{"expression": "{expression}"}}'}
            call = {"id": "1", "type": "function", "function": function}
            turns = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": row["answer"], "tool_call_id": "1"},
                {"role": "assistant", "content": f"#### {row['answer']}"},
            ]
        rows.append({"messages": [asked, *turns], "tools": list(TOOLS)})
    return rows
