"""The reward "math" by math-verify: equal forms are right, hedges and quotations are not, and nothing hangs."""

import pytest

from headrace.errors import RewardError
from headrace.reward.builtin.math_answer import equal, find_answer, score


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5"),
        ("The answer is 1/2.", r"\frac{1}{2}"),
        ("#### 1,000", "So we get 1000.\n#### 1000"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{5\text{ cm}}", "5"),
        ("#### 18 dollars", "18"),
        (r"\boxed{\$18}", "18"),
        ("#### \u22125", "-5"),
        (r"\boxed{10^{400}}", "1" + "0" * 400),
        (r"\boxed{x=4}", "4"),
        (r"We have $x^2 + 2x + 1$", "(x+1)^2"),
        (r"\boxed{2, 1}", r"\{1, 2\}"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        (r"\boxed{x^3+y^3+z^3}", "z^3+y^3+x^3"),
        (r"\boxed{2^{2^3}}", "256"),
        (r"Not \boxed{3} but \boxed{4}", "4"),
        ("3 + 1 makes 4", 4),
        (r"so \(\sqrt{8}\)", r"2\sqrt{2}"),
        (r"\boxed{\text{Monday}}", r"\text{Monday}"),
    ],
)
def test_equal_answers_are_right(given: str, truth: object) -> None:
    assert score(given, {"answer": truth})


@pytest.mark.parametrize(
    ("given", "truth"),
    [
        (r"\boxed{4}, or perhaps \boxed{3}", "4"),
        (r"\boxed{3 \text{ or } 4}", "4"),
        (r"\boxed{3, 4}", "4"),
        (r"\boxed{}", "4"),
        ("", "4"),
        ("the answer is four or five", "4"),
        (r"\boxed{0.3333}", r"\frac{1}{3}"),
        (r"\boxed{5 million}", "5"),
        ("#### 41 (the key says 42)", "42"),
        (r"\boxed{10^{10^{10^{10}}}}", "4"),
        (r"\boxed{4!!!!}", "4"),
        (r"\boxed{" + "(" * 300 + "}", "4"),
        (r"\boxed{1/0}", "4"),
    ],
)
def test_other_answers_are_wrong(given: str, truth: str) -> None:
    assert not score(given, {"answer": truth})


def test_with_boxed_only_a_box_counts() -> None:
    assert not score("#### 4", {"answer": "4"}, boxed=True)
    assert score(r"#### 3, \boxed{4}", {"answer": "4"}, boxed=True)


def test_an_expected_answer_that_is_empty_is_not_a_wrong_answer() -> None:
    with pytest.raises(RewardError, match="the expected answer is empty"):
        score("4", {"answer": "####"})
    assert equal("x + 1", "1 + x")
    assert find_answer("nothing") is None
