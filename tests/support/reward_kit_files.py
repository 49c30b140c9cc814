"""Reward functions as people write them for other packages, one file each; `written` puts them into a folder."""

from pathlib import Path

POINTWISE = """
from typing import Any, Dict, List, Optional
from reward_kit import EvaluateResult, Message, MetricResult, reward_function

@reward_function(id="concise", requirements=["no-such-package>=1"])
def evaluate(messages: List[Message], ground_truth: Optional[str] = None, **kwargs: Any) -> EvaluateResult:
    words = len((messages[-1].content or "").split())
    right = messages[-1].content == ground_truth
    return EvaluateResult(
        score=0.5 * right + 0.5 * (words <= 3),
        reason="short and right",
        metrics={"right": MetricResult(score=float(right), reason="same text", is_score_valid=True),
                 "words": MetricResult(score=min(1.0, words / 10), reason="a tenth for each")},
    )
"""

STEPS = """
from reward_kit.models import EvaluateResult, StepOutput
from reward_kit.typed_interface import reward_function

@reward_function
def evaluate(messages, ground_truth=None, **kwargs):
    outputs = [StepOutput(step_index=place, base_reward=float(len(message["content"])))
               for place, message in enumerate(messages) if message["role"] == "assistant"]
    return EvaluateResult(score=1.0, reason="done", step_outputs=outputs)
"""

BATCH = """
from typing import List
from reward_kit import EvaluateResult, Message, reward_function

@reward_function(mode="batch")
def rank(rollouts_messages: List[List[Message]], ground_truths=None, **kwargs) -> List[EvaluateResult]:
    lengths = [len(messages[-1].content) for messages in rollouts_messages]
    return [EvaluateResult(score=length / max(1, *lengths), reason=str(truth))
            for length, truth in zip(lengths, ground_truths)]
"""

ASYNC = """
import asyncio
from eval_protocol import reward_function

@reward_function
async def evaluate(messages, ground_truth=None, **kwargs):
    await asyncio.sleep(0)
    return {"score": 0.25, "reason": "after a while", "is_score_valid": True}
"""

ROW = """
from eval_protocol.models import EvaluateResult, EvaluationRow
from eval_protocol.pytest import evaluation_test

@evaluation_test(input_dataset=["data.jsonl"], mode="pointwise", passed_threshold=0.5)
def test_answer(row: EvaluationRow) -> EvaluationRow:
    said = row.last_assistant_message().content
    row.evaluation_result = EvaluateResult(score=float(said == row.ground_truth), reason=row.input_metadata.row_id)
    return row
"""

ROWS = """
from eval_protocol.models import EvaluateResult, EvaluationRow
from eval_protocol.pytest import evaluation_test

@evaluation_test(mode="groupwise")
async def test_group(rows):
    for place, row in enumerate(rows):
        row.evaluation_result = EvaluateResult(score=place / len(rows))
    return rows
"""

TRL = """
def of_chats(prompts, completions, answer, **kwargs):
    return [1.0 if chat[-1]["content"] == right else None for chat, right in zip(completions, answer)]

def of_texts(completions: list[str], **kwargs) -> list[float]:
    return [float(len(text)) for text in completions]
"""

OTHERS = """
def verifiers_style(prompt, completion, answer, state, info):
    return float(completion[-1]["content"] == answer) + len(prompt)

def plain(text, truth):
    return text == truth

def plain_with_option(text, truth, *, bonus=0.0):
    return (text == truth) + bonus

def pair(messages, ground_truth, **kwargs):
    return 0.5, {"format": 1.0}

def with_column(messages, difficulty):
    return float(difficulty)

async def of_episode(episode):
    return {"score": float(episode.steps[0].completion.tokens[0]), "steps": [step.reward for step in episode.steps]}

def of_episodes(episodes):
    return [index for index, _ in enumerate(episodes)]

def unclear(a, b, c):
    return 0.0
"""

FOLDER = """
from helper import LIMIT

def evaluate(messages, ground_truth=None, tools=None, **kwargs):
    return {"score": float(len(messages) <= LIMIT), "reason": "as many as it may"}
"""


def written(folder: Path) -> Path:
    """All of them, and a folder with a main.py that imports its neighbour."""
    for name, text in {
        "pointwise": POINTWISE, "steps": STEPS, "batch": BATCH, "asynchronous": ASYNC, "row": ROW, "rows": ROWS,
        "trl": TRL, "others": OTHERS,
    }.items():  # fmt: skip
        (folder / f"{name}.py").write_text(text)
    (folder / "metric").mkdir()
    (folder / "metric" / "main.py").write_text(FOLDER)
    (folder / "metric" / "helper.py").write_text("LIMIT = 2\n")
    return folder
