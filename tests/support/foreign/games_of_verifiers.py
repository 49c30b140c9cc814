"""Environments made with the package verifiers, as their authors write them."""

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1].content.strip() == answer)


def short(completion: Any) -> float:
    return float(len(completion[-1].content) <= 3)


def sums(rows: int = 30, **kwargs: Any) -> vf.Environment:
    """One question, one answer; the rubric is 1.0 exact + 0.25 short."""
    data = [{"question": f"{n} + {n}", "answer": str(2 * n), "info": {"n": n}} for n in range(rows)]
    rubric = vf.Rubric(funcs=[exact, short], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(data), system_prompt="Add.", rubric=rubric, **kwargs)


class Hunt(vf.MultiTurnEnv):
    """Find a number by "higher" and "lower"."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["low"], state["high"] = 0, 7
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        said, wanted = str(messages[-1].content), int(state["answer"])
        guess = int(said) if said.isdigit() else -1
        if guess == wanted:
            state["final_env_response"] = [{"role": "user", "content": "found"}]
            return []
        if guess >= 0:
            state["low"] = max(state["low"], guess + 1) if guess < wanted else state["low"]
            state["high"] = min(state["high"], guess - 1) if guess > wanted else state["high"]
        hint = "what" if guess < 0 else "higher" if guess < wanted else "lower"
        return [{"role": "user", "content": hint}]


def found(state: vf.State) -> float:
    return 0.0 if state["final_env_response"] is None else 1.0 / len(state["trajectory"])


def hunt(max_turns: int = 4) -> vf.Environment:
    data = [{"question": "a number from 0 to 7", "answer": str(n)} for n in range(8)]
    held_out = [{"question": "a number from 0 to 7, again", "answer": str(n)} for n in range(3)]
    return Hunt(
        dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(held_out),
        rubric=vf.Rubric(funcs=[found]),
        max_turns=max_turns,
    )


async def multiply(a: int, b: int) -> int:
    """The product of two whole numbers.

    Args:
        a: the first
        b: the second
    """
    await asyncio.sleep(0)
    return a * b


def products(broken: bool = False) -> vf.Environment:
    """A question to be answered with a tool."""

    def broken_reward(completion: Any) -> float:
        raise KeyError("no such judge")

    data = [{"question": f"{n} * 7", "answer": str(7 * n)} for n in range(30)]
    funcs = [exact, broken_reward] if broken else [exact]
    return vf.ToolEnv(dataset=Dataset.from_list(data), tools=[multiply], rubric=vf.Rubric(funcs=funcs), max_turns=3)


def grouped() -> vf.Environment:
    def best(completions: Any, **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "a", "answer": "b"}]), rubric=vf.Rubric([best]))


class Forgetful(Hunt):
    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        return state["prompt"] if not state["trajectory"] else [{"role": "user", "content": "start again"}]


ROWS = [{"question": str(n), "answer": "1"} for n in range(9)]


def forgetful() -> vf.Environment:
    return Forgetful(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([found]))


class Failing(Hunt):
    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        if messages[-1].content == "2":
            raise vf.ToolError("out of paper")
        return [{"role": "user", "content": str(1 // 0)}]


def failing() -> vf.Environment:
    return Failing(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([found]))


def evaluated() -> vf.Environment:
    return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([exact]))
