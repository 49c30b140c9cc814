"""The answer of an episode, spelt so that equal answers are equal texts."""

import pytest

from headrace.reward.builtin.final_answer import final_answer


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        ("2 + 2 is 4.0", "4", "4"),
        ("#### 1,000", "#### 1000", "1000"),
        (r"\boxed{0.5}", "1/2", "1/2"),
        ("I give up", "7", ""),
        ("The answer is New  York.", "new york", "new york"),
        ("Rome\n", "Paris", "rome"),
        ("born in 1999", "the year 2000", "born in 1999"),  # a number in words is no number
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_answers(text: str, expected: str, answer: str) -> None:
    assert final_answer(text, {"answer": expected}) == answer


def test_a_task_that_expects_nothing_has_no_vote() -> None:
    assert final_answer("42", {"salt": 1}) is None
    assert final_answer("42", {"reward_model": {"ground_truth": "42"}}) == "42"
