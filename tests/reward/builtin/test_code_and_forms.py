"""The rewards "code", "json_schema" and "regex": programs against tests and cases, JSON by a schema, patterns."""

import json

import pytest

from headrace.errors import ConfigError, RewardError
from headrace.reward.builtin import code_tests, json_schema, pattern
from headrace.reward.builtin.code_tests import CodeCase, find_cases, find_program, spread

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\n"
CASES = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}]


def test_unit_tests_give_partial_credit() -> None:
    row = {"tests": ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add('a', 'b') == 'ab'"]}
    assert code_tests.score(ADD, row, timeout_s=60.0) == {"score": 2 / 3, "success": False}
    assert code_tests.score(ADD, row, partial=False, timeout_s=60.0) == {"score": 0.0, "success": False}


def test_a_program_that_ends_early_or_fails_passes_no_unit_test() -> None:
    row = {"tests": ["assert add(1, 2) == 3"]}
    for body in ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "print('ok')", "def add(a, b): return a - b"):
        assert code_tests.score(f"```python\n{body}\n```", row, timeout_s=60.0) == {"score": 0.0, "success": False}, (
            body
        )
    assert code_tests.score("", row, timeout_s=60.0) == {"score": 0.0, "success": False}


def test_cases_compare_the_output_and_stop_what_has_no_end() -> None:
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert code_tests.score(right, {"input_output": json.dumps(CASES)}, timeout_s=60.0) == {
        "score": 1.0,
        "success": True,
    }
    endless = "```python\nif input().startswith('5'):\n    while True: print('10' * 1000)\nprint(3)\n```"
    assert code_tests.score(endless, {"tests": CASES}, timeout_s=60.0) == {"score": 0.5, "success": False}


def test_functions_are_called_by_name() -> None:
    row = {"tests": {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 5]}}
    assert code_tests.score(ADD, row, timeout_s=60.0) == {"score": 0.5, "success": False}
    forged = "```python\nclass Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()\n```"
    assert code_tests.score(forged, row, timeout_s=60.0) == {"score": 0.0, "success": False}


def test_the_last_python_block_is_the_program() -> None:
    text = "```python\nfirst\n```\nno:\n```python\nsecond\n```\n```json\n{}\n```"
    assert find_program(text) == "second\n"
    assert find_program("print(1)") == "print(1)"
    assert find_program("```\n\n```") is None


def test_cases_are_read_in_the_forms_of_public_datasets() -> None:
    check = "def check(candidate):\n    assert candidate(1) == 1"
    assert find_cases({"test": check, "entry_point": "f"}, None) == [CodeCase(test=f"{check}\ncheck(f)")]
    pairs = {"inputs": ["1\n", ["2", "3"]], "outputs": ["x", "y"]}
    assert find_cases({"io": pairs}, "io") == [CodeCase(stdin="1\n", stdout="x"), CodeCase(stdin="2\n3", stdout="y")]
    assert find_cases({"tests": "[x for x in []]"}, None) == [CodeCase(test="[x for x in []]")]
    with pytest.raises(RewardError, match="has no tests: write a test as text"):
        find_cases({"tests": [1, 2]}, None)
    with pytest.raises(RewardError, match="the task has no tests: name their column"):
        find_cases({"answer": "4"}, None)
    assert spread([CodeCase(test=str(number)) for number in range(10)], 4) == [CodeCase(test=name) for name in "0369"]


SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"city": "Rome"}', 1.0),
        ('Sure:\n```json\n{"city": 1}\n```\nNo:\n```json\n{"city": "Rome"}\n```', 1.0),
        ('{"city": 1}', 0.25),
        ("[]", 0.25),
        ('{"city": "Rome"', 0.0),
        ('{"city": NaN}', 0.0),
        ('{"city": 1, "city": "Rome"}', 0.0),
        ("[" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_json_must_fit_the_schema(text: str, score: float) -> None:
    assert json_schema.score(text, {}, schema=SCHEMA, parses=0.25)["score"] == score


def test_a_schema_may_be_the_rows_and_follows_no_address() -> None:
    assert json_schema.score("4", {"form": '{"type": "integer"}'}, column="form")["success"]
    with pytest.raises(ConfigError, match="the schema is not valid at type: "):
        json_schema.validator({"type": "nothing"})
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema.score("4", {}, schema={"$ref": "http://127.0.0.1:9/other.json"})


def test_a_pattern_is_found_or_its_group_is_the_expected_text() -> None:
    assert pattern.score("yes, SIR", {}, pattern="sir", ignore_case=True)
    assert not pattern.score("yes, SIR", {}, pattern="sir")
    tags = "<a>(.*?)</a>"
    assert pattern.score("<a>3</a> no, <a> 4\n</a>", {"answer": 4}, pattern=tags, column="answer")
    assert not pattern.score("<a>4</a> no, <a>3</a>", {"answer": 4}, pattern=tags, column="answer")
    assert not pattern.score("", {"answer": ""}, pattern=tags, column="answer")
