"""eval-protocol's own functions give the same results through the stand-in as through the real package.

The package has a folder of its own beside the rest of the virtual environment, which `make install` fills;
HEADRACE_EVAL_PROTOCOL names another one. Its clients of hosted models and its log database are shams here: they are
hundreds of megabytes that no reward function calls.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.reward.episode_json import episode_to_row
from support.real_package import in_the_sandbox, through_the_package, through_the_stand_in
from support.reward_episodes import episode

FOLDER = Path(os.environ.get("HEADRACE_EVAL_PROTOCOL") or Path(sys.prefix) / "eval-protocol")
pytestmark = pytest.mark.skipif(
    not (FOLDER / "eval_protocol").is_dir(), reason=f"eval-protocol is not in {FOLDER}: run  make install"
)

ABSENT = ("litellm", "peewee", "playhouse", "backoff")
# the package has modules and functions of the same names, and only under pytest keeps them apart
FIRST = "import pytest; from eval_protocol.pytest import evaluation_test"
EXPECTED = [{"role": "assistant", "content": "(B) 4"}]
TRUTH = [{"role": "assistant", "content": "4"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}]}

# functions of its library that need nothing but the standard library: module, function, arguments
LIBRARY: list[tuple[str, str, dict[str, Any]]] = [
    ("format", "format_reward", {}),
    ("length", "length_reward", {"target_length": 5}),
    ("tag_count", "tag_count_reward", {"required_tags": ["answer"]}),
    ("repetition", "diversity_reward", {}),
    ("accuracy", "accuracy_reward", {"ground_truth": TRUTH}),
    ("multiple_choice_math_reward", "multiple_choice_math_reward", {"ground_truth": EXPECTED}),
    ("math", "math_reward", {}),
    ("function_calling", "exact_tool_match_reward", {"ground_truth": CALL}),
]
BENCHMARKS = {  # whole files as they are: @evaluation_test, rollout processors, dataset adapters
    "test_aime25": "test_aime25_pointwise",
    "test_frozen_lake": "test_frozen_lake_evaluation",
}
USERS = {
    "of_rows": """
from typing import List, Optional
from eval_protocol import EvaluateResult, EvaluationRow, Message, MetricResult, SingleTurnRolloutProcessor
from eval_protocol import evaluation_test
from eval_protocol.models import Status, StepOutput
from eval_protocol.pytest import NoOpRolloutProcessor, RolloutProcessor

class Mine(RolloutProcessor):
    def __init__(self):
        super().__init__()
        self.inner = SingleTurnRolloutProcessor()
    def __call__(self, rows, config):
        return self.inner(rows, config)

@evaluation_test(
    input_messages=[[[Message(role="user", content="2 + 2?")]]],
    completion_params=[{"model": "none"}],
    rollout_processor=Mine(),
    mode="groupwise",
)
async def test_rank(rows: List[EvaluationRow]) -> List[EvaluationRow]:
    lengths = [len(row.last_assistant_message().content) for row in rows]
    for row, length in zip(rows, lengths):
        about = {"asked": row.get_first_user_message().content, "system": row.get_system_message().content,
                 "turns": len(row.get_assistant_messages()), "said": row.get_conversation_length(),
                 "finished": row.rollout_status.is_finished(), "failed": row.rollout_status.is_error(),
                 "code": row.rollout_status.code == Status.Code.FINISHED, "steps": row.get_steps(),
                 "ended": row.get_terminated(), "why": row.get_termination_reason(),
                 "extra": row.execution_metadata.extra, "long": row.is_trajectory_evaluation()}
        metric = MetricResult(score=float(length), reason=str(sorted(about.items(), key=str)), data={"n": length})
        assert [key for key, _ in metric.items()] == list(metric) == ["is_score_valid", "score", "reason"], metric
        row.evaluation_result = EvaluateResult(
            score=length / max(1, *lengths) + row.get_total_reward(),
            reason=metric["reason"],
            metrics={"length": metric, **{name: MetricResult(score=float(value), reason=name)
                                          for name, value in about.items() if isinstance(value, bool | int)}},
            step_outputs=[StepOutput(step_index=0, base_reward=float(length), terminated=True)],
        )
    return rows
""",
    "of_a_row": """
import pytest
from eval_protocol.models import EvaluateResult, EvaluationRow, InputMetadata
from eval_protocol.pytest import evaluation_test
from eval_protocol.pytest.default_no_op_rollout_processor import NoOpRolloutProcessor

@pytest.mark.asyncio
@evaluation_test(input_rows=[[EvaluationRow(input_metadata=InputMetadata(row_id="a"))]],
                 rollout_processor=NoOpRolloutProcessor(), mode="pointwise")
def test_short(row: EvaluationRow) -> EvaluationRow:
    said = row.last_assistant_message().content
    if not said:
        return EvaluateResult(score=-1.0, reason="nothing was said")  # in place of the row, as its examples do
    row.evaluation_result = EvaluateResult(score=float(len(said) < 20), reason=str(row.ground_truth))
    return row
""",
    "of_messages": """
from typing import List, Optional
from eval_protocol import EvaluateResult, Message, MetricResult, reward_function

@reward_function(id="same", concurrency=4, timeout=10)
async def evaluate(messages: Optional[List[Message]], ground_truth: Optional[List[Message]] = None, **kwargs):
    right = messages[-1].content == ground_truth[0].content
    return {"score": float(right), "reason": ground_truth[0].role,
            "metrics": {"words": MetricResult(score=float(len(messages[-1].content.split())), reason="no upper limit")}}
""",
}
FIELDS = """
from eval_protocol import models
from pydantic import BaseModel

def names(messages, ground_truth):
    kinds = (models.Message, models.MetricResult, models.StepOutput, models.EvaluateResult, models.EvaluationRow,
             models.InputMetadata, models.ExecutionMetadata)
    own = {f"{kind.__name__}.{name}" for kind in kinds for name in (*kind.model_fields, *dir(kind))
           if name[0] != "_" and not hasattr(BaseModel, name)}
    return 0.0, {name: 1.0 for name in sorted(own)}
"""
NOT_HERE = {"EvaluationRow.to_dict", "EvaluationRow.from_dict"}  # how it writes its own log
NAMES = [f"{module}.{function}" for module, function, _ in LIBRARY] + list(BENCHMARKS) + list(USERS)
ANSWERS = [
    "The answer is \\boxed{4}.",
    "<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>",
    "First, I add. Second, I check. So (B) 4, 5, 6.",
    "four four four four four four",
    "theorem two : 2 + 2 = 4 := by\n  norm_num",
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>',
    "4",
    "",
]


def rows() -> list[dict[str, Any]]:
    """The environment paid for the first answer only."""
    made = [episode_to_row(episode(answer, answer="4"), with_tokens=False) for answer in ANSWERS]
    for place, row in enumerate(made):
        row["steps"][-1]["reward"] = float(place == 0)
    return made


def written_specs(folder: Path) -> dict[str, dict[str, Any]]:
    """Each function as a user's file: those of the library with the imports that they would have outside of it."""
    specs: dict[str, dict[str, Any]] = {}
    for module, function, kwargs in LIBRARY:
        text = (FOLDER / "eval_protocol" / "rewards" / f"{module}.py").read_text(encoding="utf-8")
        for inner in ("models", "typed_interface", "reward_function"):
            text = text.replace(f"from ..{inner} import", f"from eval_protocol.{inner} import")
        (folder / f"my_{module}.py").write_text(text, encoding="utf-8")
        specs[f"{module}.{function}"] = {"spec": f"{folder / f'my_{module}.py'}:{function}", "kwargs": kwargs}
    for module, function in BENCHMARKS.items():
        text = (FOLDER / "eval_protocol" / "benchmarks" / f"{module}.py").read_text(encoding="utf-8")
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
        specs[module] = {"spec": f"{folder / module}.py:{function}", "kwargs": {}}
    for name, text in {**USERS, "fields": FIELDS}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        specs[name] = {"spec": str(folder / f"{name}.py"), "kwargs": {}}
    specs["fields"]["spec"] += ":names"
    return specs


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return written_specs(tmp_path_factory.mktemp("eval_protocol"))


@pytest.fixture(scope="module")
def real(specs: Mapping[str, dict[str, Any]]) -> Mapping[str, Any]:
    return through_the_package("eval_protocol", "0.3.33", FOLDER, specs, rows(), absent=ABSENT, first=FIRST)


@pytest.fixture(scope="module")
def here(specs: Mapping[str, dict[str, Any]]) -> Mapping[str, Any]:
    return through_the_stand_in("eval_protocol", specs, rows())


@pytest.mark.parametrize("name", NAMES)
def test_both_give_the_same(name: str, here: Mapping[str, Any], real: Mapping[str, Any]) -> None:
    assert here[name] == real[name]


async def test_so_does_the_sandbox(specs: Mapping[str, dict[str, Any]], real: Mapping[str, Any]) -> None:
    for name in ("test_aime25", "of_rows"):
        assert await in_the_sandbox(specs[name], rows()) == real[name]


def test_the_answers_tell_the_functions_apart(real: Mapping[str, Any]) -> None:
    """Every function tells some of the answers apart, so that the equality above says something."""
    told = {}
    for name in NAMES:
        results = real[name]
        told[name] = len({json.dumps(one, sort_keys=True) for result in results for one in result})
    assert [name for name, different in told.items() if different == 1] == []


def test_the_types_have_every_field_and_method_of_the_package(here: Mapping[str, Any], real: Mapping[str, Any]) -> None:
    [[own], *_], [[theirs], *_] = here["fields"], real["fields"]
    assert len(theirs["parts"]) > 50
    assert set(theirs["parts"]) - set(own["parts"]) == NOT_HERE
