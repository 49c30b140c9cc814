"""A language model as the judge, sampled by the embedded engine: any model folder, no endpoint.

    python examples/judge.py FOLDER            # one that save_pretrained wrote, of a model that follows instructions

The default, smollm2-135m, is too small to keep to the form it is asked for; its replies show what becomes of that.
A run file says  fn = "judge"  with  path = "FOLDER"  for the same; `rl_judge.toml` asks one behind an endpoint. Either
way the judge is a term like any other: it has a weight and a curve, and an episode that it does not judge has no
reward, which is not the same as reward 0.
"""

import asyncio
import sys

from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import load_model
from headrace.render import Renderer
from headrace.reward.judge import JudgeSettings, ask_sampler, judge_term
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.types import Episode, FailedEpisode, Message, SamplingParams, ScoredEpisode, Task

QUESTION = Message(role="user", content="What is 17 + 25?")
ANSWERS = ("42", "17 + 25 = 42, because 7 + 5 = 12 and 10 + 20 + 10 = 40.", "It is about 50.")
JUDGE = JudgeSettings(rubric="Is the answer right, and is the way to it explained in a few words?", attempts=3)


async def main(path: str) -> tuple[ScoredEpisode | FailedEpisode, ...]:
    """Judge three answers to one question, each in a request of its own; prints and returns what came of it."""
    lm = load_model(path)
    renderer = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens)
    engine = EmbeddedEngine(lm, max_num_seqs=JUDGE.at_once)
    ask = ask_sampler(engine, renderer, SamplingParams(max_tokens=64, temperature=0.3))
    runner = GroupRewardRunner([judge_term("judge", ask, JUDGE)])
    try:
        results = await runner.score([answered(number, answer) for number, answer in enumerate(ANSWERS)])
    finally:
        engine.close()
    for answer, result in zip(ANSWERS, results, strict=True):
        said = f"{result.reward.total:.2f}" if isinstance(result, ScoredEpisode) else f"no reward: {result.reason}"
        print(f"{answer!r}: {said}")
    return results


def answered(number: int, answer: str) -> Episode:
    """A judge reads the conversation alone, so an episode without tokens will do."""
    messages = (QUESTION, Message(role="assistant", content=answer))
    task = Task(id="sum", messages=(QUESTION,), data={"answer": "42"})
    return Episode(id=f"0/{number}", task=task, seed=0, steps=(), messages=messages, temperature=1.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
