"""Answers are found where they are marked, the last mark counts, and numbers are exact."""

from fractions import Fraction

import pytest

from headrace.errors import RewardError
from headrace.reward.builtin import final_number
from headrace.reward.builtin.answers import expected, expected_text, last_boxed, marked_answer
from headrace.reward.builtin.choice import chosen_letter, expected_letter, option_texts
from headrace.reward.builtin.choice import score as choice_score
from headrace.reward.builtin.final_number import last_number, number_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}, no: \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{4} and then \boxed{never closed", "4"),
        ("They say #### 3\nbut it is #### 4\nthanks", "4"),
        (r"#### 3, or rather \boxed{4}", "4"),
        ("<answer>3</answer> no <answer> 4 </answer>", "4"),
        ("The answer is 3. Wrong. The final answer is: **4**.", "4"),
        (r"The answer is $\boxed{4}$.", "4"),
        ("Answer: 3.5 apples\nThank you.", "3.5 apples"),
        ("It is 4", None),
        ("", None),
        ("####", None),
        (r"\boxed{" + "9" * 5000 + "}", None),
    ],
)
def test_the_last_mark_gives_the_answer(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


def test_an_expected_answer_is_read_from_a_worked_solution() -> None:
    assert expected_text("She has 16 - 3 = <<16-3=13>>13.\n#### 13") == "13"
    assert expected_text(r"So $x = \boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    assert expected_text("the answer is blowing in the wind") == "the answer is blowing in the wind"
    assert expected({"reward_model": {"ground_truth": "7"}}, None) == "7"
    assert last_boxed("no box") is None
    with pytest.raises(RewardError, match="the task has no solution: map a column"):
        expected({"answer": "7"}, "solution")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", Fraction(1000)),
        ("$1,234,567.50 in all", Fraction(2469135, 2)),
        (r"1{,}000", Fraction(1000)),
        ("12\u202f345", Fraction(12345)),
        ("\u22125", Fraction(-5)),  # a typographic minus
        ("-$5", Fraction(-5)),
        ("5-3", Fraction(3)),  # a range or a difference, not minus three
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("10^400", Fraction(10**400)),
        ("1e400", Fraction(10**400)),
        ("0.1", Fraction(1, 10)),
        ("5 cm", Fraction(5)),
        ("the answer is 42.", Fraction(42)),
        ("1/0", None),
        ("1e99999", None),
        ("2^99999", None),
        ("9" * 3000, None),
        ("H2O", None),
        ("", None),
    ],
)
def test_numbers_are_exact(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


def test_final_number_takes_the_marked_number_and_not_a_later_one() -> None:
    assert number_of("#### 7\nI am 100 % sure, after 3 tries") == 7
    assert final_number.score("no, not 3: 4", {"answer": "2 + 2\n#### 4"})
    assert not final_number.score("either 4 or 5", {"answer": 4})
    assert final_number.score("3.1416", {"value": 3.14159}, column="value", tolerance=1e-4)
    assert not final_number.score("", {"answer": "0"})
    with pytest.raises(RewardError, match="the expected answer has no number"):
        final_number.score("4", {"answer": "four"})


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B**.", "B"),
        ("B) Paris", "B"),
        ("Some say the answer is A, but the answer is B.", "B"),
        (r"\boxed{\text{B}}", "B"),
        ("I think so.\n\nAnswer: B", "B"),
        ("Because of this,\nC.", "C"),
        ("Paris", "B"),
        ("The answer is Paris.", "B"),
        ("B) Rome", None),  # letter and text contradict each other
        ("A or B", None),
        ("A man walks", None),
        ("(A) or (B)", None),
        ("The answer is A or B", None),
        ("Z", None),
        ("", None),
    ],
)
def test_an_answer_chooses_one_option_or_none(text: str, letter: str | None) -> None:
    assert chosen_letter(text, ("Rome", "Paris", "Oslo", "Bern")) == letter


def test_the_expected_option_is_a_letter_a_position_or_a_text() -> None:
    options = ("Rome", "Paris")
    assert expected_letter("B", options) == expected_letter(1, options) == expected_letter(" paris ", options) == "B"
    assert option_texts({"choices": {"text": ["Rome", "Paris"], "label": ["A", "B"]}}, "choices") == options
    assert option_texts({"choices": {"A": "Rome", "B": "Paris"}}, "choices") == options
    assert choice_score("The answer is 2", {"answer": "2", "o": ["1", "2"]}, choices="o")
    with pytest.raises(RewardError, match="no letter of ABCDEFGHIJ, no position and no option"):
        expected_letter("Berlin", options)
