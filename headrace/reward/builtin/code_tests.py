"""The reward "code": the program in the last answer, run against the tests or the input and output cases of the row.

Every test runs in an isolated interpreter of its own (`sandbox.program`), which the reward function's process is not
part of. Expected outputs never enter it, so the output of a case is proof. A unit test runs in the program's own
process: the mark that it prints at its end is random, but a program that searches its interpreter can find it.
"""

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.errors import RewardError
from headrace.reward.sandbox.limits import CallLimits, Outcome
from headrace.reward.sandbox.program import ProgramResult, run_untrusted

COLUMNS = ("tests", "test_cases", "test_list", "input_output", "test")  # that are looked for unless one is named
MOST_CASES = 20
_START_S, _REST_S = 2.0, 10.0  # to start a program; for the reward function itself
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)```", re.DOTALL)
_HARNESS = """\
import json, os, sys

def main():
    order = json.loads(sys.stdin.buffer.read())
    read, write = os.pipe()
    os.close(write)
    os.dup2(read, 0)
    out, names = os.dup(1), {"__name__": "solution"}
    exec(compile(order["code"], "solution.py", "exec"), names)
    exec(compile(order["test"], "test.py", "exec"), names)
    sys.stdout.flush()
    os.write(out, order["mark"].encode())

main()
"""
_CALL = """\
import json as _json
_name, _args, _wanted = {name!r}, _json.loads({args!r}), _json.loads({wanted!r})
_function = globals().get(_name) or getattr(Solution(), _name)
assert _json.loads(_json.dumps(_function(*_args))) == _wanted
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCase:
    """One check of a program: a unit test, or a standard input with the output that is expected."""

    test: str = ""
    stdin: str = ""
    stdout: str | None = None  # None: a unit test


def score(
    text: str,
    task_data: Mapping[str, Any],
    *,
    column: str | None = None,
    partial: bool = True,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    max_cases: int = MOST_CASES,
) -> dict[str, Any] | None:
    """Score the share of cases that the program passes; without `partial`, 1 if it passes all, else 0.

    `timeout_s` is the CPU time of a case; on a busy machine it may take twice that, and 3 s more, by the clock.
    Of more than `max_cases` cases, so many are taken, spread evenly. None if a program could not be run.
    """
    code, cases = find_program(text), spread(find_cases(task_data, column), max_cases)
    limits = CallLimits(wall_s=_wall_s(timeout_s), cpu_s=math.ceil(timeout_s), memory_mb=memory_mb, processes=4)
    passed = 0
    for case in cases if code is not None else ():
        verdict = _passes(code or "", case, limits)
        if verdict is None:
            return None
        passed += verdict
        if not (verdict or partial):
            break
    right = passed == len(cases)
    return {"score": passed / len(cases) if partial else float(right), "success": right}


def call_limit_s(*, timeout_s: float = 5.0, max_cases: int = MOST_CASES, **others: object) -> float:
    """Return the time that one call needs if every case takes as long as it may."""
    return max_cases * (_wall_s(timeout_s) + _START_S) + _REST_S


def _wall_s(timeout_s: float) -> float:
    return 2.0 * timeout_s + 3.0


def find_program(text: str) -> str | None:
    """Return the last Python block of an answer, else its last block, else the whole answer; None if it is empty."""
    blocks = _BLOCK.findall(text)
    python = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    code = (python or [code for _, code in blocks] or [text])[-1]
    return code if code.strip() else None


def find_cases(task_data: Mapping[str, Any], column: str | None) -> list[CodeCase]:
    """Read the cases of a row. Raises RewardError that says which forms there are."""
    names = COLUMNS if column is None else (column,)
    name = next((name for name in names if task_data.get(name) is not None), None)
    if name is None:
        raise RewardError(
            f"the task has no tests: name their column with kwargs.column (looked for {', '.join(names)})"
        )
    value = task_data[name]
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError):  # a test that begins with a bracket
            value = json.loads(value)
    entry = task_data.get("entry_point")
    cases = _cases(value, str(entry) if isinstance(entry, str) else "")
    if not cases:
        raise RewardError(
            f"the column {name} has no tests: write a test as text, a list of them, a list of objects with input and "
            "output, or an object with inputs and outputs"
        )
    return cases


def _cases(value: Any, entry: str) -> list[CodeCase]:
    if isinstance(value, str):
        called = f"\ncheck({entry})" if entry and re.search(r"^def check\(", value, re.MULTILINE) else ""
        return [CodeCase(test=value + called)] if value.strip() else []
    if isinstance(value, Mapping):
        inputs: Any = value.get("inputs")
        outputs: Any = value.get("outputs")
        name = value.get("fn_name")
        if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
            return _cases([value], entry) if "output" in value else []
        pairs = zip(inputs, outputs, strict=True)
        if isinstance(name, str):
            return [
                CodeCase(test=_CALL.format(name=name, args=json.dumps(_as_list(given)), wanted=json.dumps(wanted)))
                for given, wanted in pairs
            ]
        return [CodeCase(stdin=_lines(given), stdout=_lines(wanted)) for given, wanted in pairs]
    if not _is_list(value):
        return []
    cases = []
    for item in value:
        if isinstance(item, str):
            cases += _cases(item, entry)
        elif isinstance(item, Mapping) and "output" in item:
            cases.append(CodeCase(stdin=_lines(item.get("input", "")), stdout=_lines(item["output"])))
        else:
            return []
    return cases


def spread(cases: Sequence[CodeCase], most: int) -> Sequence[CodeCase]:
    """Choose `most` cases, evenly spread, first and last among them."""
    if len(cases) <= most:
        return cases
    return [cases[round(place * (len(cases) - 1) / max(most - 1, 1))] for place in range(most)]


def _passes(code: str, case: CodeCase, limits: CallLimits) -> bool | None:
    """Run a case; None if how it ended says nothing about the program."""
    began_s, mark = time.monotonic(), secrets.token_hex(16)
    if case.stdout is not None:
        result = run_untrusted(code, case.stdin, limits)
    else:
        result = run_untrusted(_HARNESS, json.dumps({"code": code, "test": case.test, "mark": mark}), limits)
    cut_short = result.outcome is Outcome.TIMEOUT and time.monotonic() - began_s < 0.9 * limits.wall_s
    if result.outcome is Outcome.NOT_RUN or cut_short:
        return None
    return _ended_well(result) and (
        mark in result.stdout if case.stdout is None else result.stdout.split() == case.stdout.split()
    )


def _ended_well(result: ProgramResult) -> bool:
    return result.outcome is Outcome.RETURNED and result.status == 0


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _as_list(value: Any) -> list[Any]:
    return list(value) if _is_list(value) else [value]


def _lines(value: Any) -> str:
    """Return a text as it is, and a list as lines."""
    return "\n".join(map(str, value)) if _is_list(value) else str(value)
