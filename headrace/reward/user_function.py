"""Load a user's reward function, recognise its signature, and call it.

Knows the signatures of reward functions in other libraries (docs/authoring-rewards.md). Runs inside and outside of the
sandbox, so it needs the standard library only; numpy and the package's own types are imported when a function takes an
episode. It is trusted as little as the function it calls: `result.py` checks the numbers in the trainer.
"""

import asyncio
import copy
import dis
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from headrace.errors import ConfigError, HeadraceError, RewardError, boundary
from headrace.reward.compat import reward_kit
from headrace.reward.raised import describe
from headrace.reward.result import parse_result
from headrace.user_code import find_function, import_file

Row = Mapping[str, Any]  # one episode as JSON: see `episode_json.py`
ENTRY = "evaluate"  # the function of a folder's main.py
VERL_ENTRY = "compute_score"  # the function of a file written for verl
_DECORATED = ("_reward_function_mode", "_mode", "_metainfo")  # attributes that decorators set, by package and version


class RewardSignature(StrEnum):
    """The ways in which a reward function can be called."""

    MESSAGES = "messages"  # f(messages, ground_truth, **kwargs): reward-kit, pointwise
    BATCH = "batch"  # f(rollouts_messages, ground_truths, **kwargs): reward-kit, a whole group
    ROW = "row"  # eval-protocol: an EvaluationRow whose evaluation_result is set
    ROWS = "rows"
    TRL = "trl"  # f(prompts, completions, **columns) -> list[float]
    VERIFIERS = "verifiers"  # f(prompt, completion, answer, state, info)
    VERL = "verl"  # compute_score(data_source, solution_str, ground_truth, extra_info)
    VERL_BATCH = "verl batch"  # compute_score(data_sources, solution_strs, ground_truths, extra_infos)
    PLAIN = "plain"  # f(text, truth)
    ANSWER = "answer"  # f(text, task_data, **options): the package's own rewards
    EPISODE = "episode"  # f(episode): headrace.types.Episode
    EPISODES = "episodes"

    @property
    def takes_group(self) -> bool:
        return self in _OF_GROUPS

    @property
    def takes_tokens(self) -> bool:
        return self in (RewardSignature.EPISODE, RewardSignature.EPISODES)


_OF_GROUPS = (
    RewardSignature.BATCH,
    RewardSignature.ROWS,
    RewardSignature.TRL,
    RewardSignature.VERL_BATCH,
    RewardSignature.EPISODES,
)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function."""

    function: Callable[..., Any]
    signature: RewardSignature
    kwargs: Mapping[str, Any]  # the configured arguments
    about: dict[str, Any]  # its description for the trainer

    def call(self, argument: Any) -> list[dict[str, Any]]:
        """Judge the rows of a group; a function of one episode is called for one after another.

        Among several rows, an exception is the verdict on its own row only; for a single row it is raised.
        """
        rows = argument["rows"]
        if self.signature.takes_group:
            return [parse_result(answer) for answer in _check_list(self._call(rows), len(rows))]
        if len(rows) == 1:
            return [parse_result(self._call(rows))]
        return [self._call_one(row) for row in rows]

    def _call_one(self, row: Row) -> dict[str, Any]:
        try:
            with boundary(RewardError, row["id"]):
                return parse_result(self._call([row]))
        except HeadraceError as exc:
            return {"invalid": str(exc) if exc.__cause__ is None else describe(exc.__cause__)}

    def _call(self, rows: Sequence[Row]) -> Any:
        answer = _CALLS[self.signature](self.function, rows, self.kwargs)
        return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer


async def _awaited(answer: Any) -> Any:
    return await answer


def _check_list(answers: Any, count: int) -> list[Any]:
    if not isinstance(answers, list | tuple):
        raise TypeError(f"a function of a whole group must return a list, not a {type(answers).__name__}")
    if len(answers) != count:
        raise ValueError(f"it returned {len(answers)} results for {count} episodes: return one for each, in order")
    return list(answers)


# --- loading ---------------------------------------------------------------------------------------------------------


def load(target: Mapping[str, Any]) -> RewardFunction:
    """Load the function of `target`, which has "spec" and maybe "kwargs" and "alone" (this process is for it alone, and
    its folder goes on the path)."""
    reward_kit.install()
    function = load_user_function(target["spec"], alone=target.get("alone", False))
    signature = read_signature(function)
    if target.get("alone") and _decorator_value(function, "resources"):
        raise ConfigError(
            "this reward function declares resources, and there is no network in the sandbox: "
            'set rl.reward_runner.type = "inprocess" if you trust it'
        )
    about = {
        "shape": str(signature),
        "step_index": getattr(function, "step_index", None),
        "notices": [
            *_missing_requirements(_decorator_value(function, "requirements") or ()),
            *(_late_imports(function) if target.get("alone") and not target["spec"].startswith("headrace.") else ()),
        ],
    }
    return RewardFunction(function, signature, dict(target.get("kwargs") or {}), about)


def _late_imports(function: Callable[..., Any]) -> list[str]:
    """Say which packages a function imports at every call: its process is a fresh one each time."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = [] if code is None else [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
    packages = dict.fromkeys(name.partition(".")[0] for name in names if name)
    late = [name for name in packages if name not in sys.modules and name not in sys.stdlib_module_names]
    if not late:
        return []
    return [f"it imports {', '.join(late)} at every call: import at the top of the file, which is done once"]


def _decorator_value(function: Callable[..., Any], key: str) -> Any:
    """Return the attribute that a decorator of either package set on the function."""
    return getattr(function, f"_reward_function_{key}", None) or getattr(function, f"_{key}", None)


def load_user_function(spec: str, *, alone: bool) -> Callable[..., Any]:
    """Load "file.py:function", "file.py" with one decorated function or verl's compute_score, a folder with main.py,
    "package.module:function" or "package.module.function"."""
    place, colon, name = spec.rpartition(":")
    if not colon:
        place, name = spec, ""
    path = Path(place)
    if path.is_dir():
        return find_function(import_file(path / "main.py", own_process=alone), name or ENTRY, spec=spec)
    if place.endswith(".py"):
        module = import_file(path, own_process=alone)
        return find_function(module, name, spec=spec) if name else _only_decorated(module, spec)
    if not colon:
        place, _, name = spec.rpartition(".")
    return find_function(importlib.import_module(place), name, spec=spec)


def _only_decorated(module: ModuleType, spec: str) -> Callable[..., Any]:
    decorated = [
        (name, value)
        for name, value in vars(module).items()
        if callable(value) and any(hasattr(value, attribute) for attribute in _DECORATED)
    ]
    if not decorated and callable(getattr(module, VERL_ENTRY, None)):
        return find_function(module, VERL_ENTRY, spec=spec)
    if len(decorated) != 1:
        names = ", ".join(name for name, _ in decorated) or "none"
        raise ConfigError(f'"{spec}" has not exactly one decorated function ({names}): write "file.py:function"')
    return find_function(module, decorated[0][0], spec=spec)


def _missing_requirements(requirements: Sequence[str]) -> list[str]:
    """Report requirements that are not installed; nothing is ever installed here."""
    absent = []
    for requirement in requirements:
        name = re.split(r"[\s\[<>=!~;]", requirement.strip(), maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(f"it asks for {requirement}, which is not installed: run  pip install '{requirement}'")
    return absent


# --- recognising -----------------------------------------------------------------------------------------------------


def read_signature(function: Callable[..., Any]) -> RewardSignature:
    """Recognise the signature by decorator first, then by the names of parameters, then by their number."""
    if hasattr(function, "_origin_func") or hasattr(function, "_metainfo"):
        mode = (getattr(function, "_metainfo", None) or {}).get("mode", "pointwise")
        return RewardSignature.ROW if mode == "pointwise" else RewardSignature.ROWS
    if _decorator_value(function, "mode") == "batch":
        return RewardSignature.BATCH
    parameters = inspect.signature(function).parameters
    by_name = (
        ("rollouts_messages", RewardSignature.BATCH),
        ("completions", RewardSignature.TRL),
        ("messages", RewardSignature.MESSAGES),
        ("completion", RewardSignature.VERIFIERS),
        ("solution_strs", RewardSignature.VERL_BATCH),
        ("solution_str", RewardSignature.VERL),
        ("task_data", RewardSignature.ANSWER),
        ("episodes", RewardSignature.EPISODES),
        ("rows", RewardSignature.ROWS),
        ("row", RewardSignature.ROW),
    )
    for name, signature in by_name:
        if name in parameters:
            return signature
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [item for item in parameters.values() if item.kind in kinds and item.default is item.empty]
    if len(needed) == 1:
        return RewardSignature.PLAIN if needed[0].name == "text" else RewardSignature.EPISODE
    if len(needed) == 2:
        return RewardSignature.PLAIN
    raise ConfigError(
        f"it is not clear how to call a reward function with the parameters ({', '.join(parameters)}): "
        "take an episode, messages and ground_truth, or what a function of TRL, verl or verifiers takes "
        "(docs/authoring-rewards.md)"
    )


# --- calling ---------------------------------------------------------------------------------------------------------


def available_arguments(row: Row) -> dict[str, Any]:
    """List the arguments that a function of one conversation can take by name, with the columns of its task."""
    data, messages = row["data"], row["messages"]
    truth = data.get("ground_truth", data.get("answer"))
    start = row["prompt_count"]
    return {
        "info": {},
        "state": _final_state(row),
        "answer": truth,
        "tools": None,
        "task_definition_name": row["task_id"],
        **data,
        "messages": messages,
        "original_messages": messages[:-1],
        "ground_truth": truth,
        "prompt": messages[:start],
        "completion": messages[start:],
        "task_achieved": row["success"],
        "step_ids": [step["id"] for step in row["steps"]],
        "text": last_text(messages),
    }


class FinalState:
    """Stands in for a reward-kit resource, and returns its state at the end of the episode."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def get_state(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)


def _final_state(row: Row) -> dict[str, Any]:
    """Return the argument `state`: reward-kit passes the resource itself, of which we have the final state."""
    if "initial_state" not in row["data"] or row.get("final_state") is None:
        return {}
    return {"resource": FinalState(json.loads(row["final_state"]))}


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last assistant turn, stripped."""
    return next((content_text(item).strip() for item in reversed(messages) if item["role"] == "assistant"), "")


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; that of one with pictures is in parts."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return str(content or "")


def answer_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last assistant turn without what it thought aloud, which ends with </think>."""
    return last_text(messages).rpartition("</think>")[2].strip()


def _accepted_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that the function has parameters for, or all if it takes **kwargs."""
    parameters = inspect.signature(function).parameters
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def _call_messages(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    values = _accepted_arguments(function, {**available_arguments(rows[0]), **kwargs})
    return function(**_as_annotated(function, values))


def _call_batch(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    arguments = [available_arguments(row) for row in rows]
    columns = {name: [item.get(name) for item in arguments] for name in arguments[0]}
    values = {
        **{name: column for name, column in columns.items() if name not in ("messages", "text")},
        "rollouts_messages": columns["messages"],
        "ground_truths": columns["ground_truth"],
        **kwargs,
    }
    return function(**_as_annotated(function, _accepted_arguments(function, values)))


def _call_trl(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    arguments = [available_arguments(row) for row in rows]
    hints = _hints(function)
    as_text = getattr(function, "text_completions", "str" in str(hints.get("completions", "")))
    columns = {
        name: [item.get(name) for item in arguments] for name in arguments[0] if name not in ("prompt", "completion")
    }
    texts = {
        "prompts": ["\n".join(map(content_text, item["prompt"])) for item in arguments],
        "completions": [item["text"] for item in arguments],
    }
    chats = {
        "prompts": [item["prompt"] for item in arguments],
        "completions": [item["completion"] for item in arguments],
    }
    return function(**_accepted_arguments(function, {**columns, **(texts if as_text else chats), **kwargs}))


def _call_plain(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    values = available_arguments(rows[0])
    first, *rest = inspect.signature(function).parameters
    extra = {name: value for name, value in _accepted_arguments(function, kwargs).items() if name != first}
    if rest and rest[0] not in extra:
        return function(values["text"], values["ground_truth"], **extra)
    return function(values["text"], **extra)


def _call_verl(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    values = {**_verl_arguments(rows[0]), **kwargs}
    answer = function(**_accepted_arguments(function, values))
    return _awaited_verl_result(answer) if inspect.isawaitable(answer) else _verl_result(answer)


def _call_verl_batch(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    arguments = [_verl_arguments(row) for row in rows]
    columns = {f"{name}s": [item[name] for item in arguments] for name in arguments[0]}
    answers = function(**_accepted_arguments(function, {**columns, **kwargs}))
    return [_verl_result(answer) for answer in _check_list(answers, len(rows))]


def _verl_arguments(row: Row) -> dict[str, Any]:
    """Return what verl passes. Its rows have `reward_model.ground_truth`, `data_source` and `extra_info`."""
    data, values = row["data"], available_arguments(row)
    truth, of_model, info = values["ground_truth"], data.get("reward_model"), data.get("extra_info")
    if truth is None and isinstance(of_model, Mapping):
        truth = of_model.get("ground_truth")
    turns = [content_text(message) for message in values["completion"]]
    return {
        "data_source": data.get("data_source", ""),
        "solution_str": "\n".join(turns),
        "ground_truth": truth,
        "extra_info": {"num_turns": len(row["messages"]), **(info if isinstance(info, Mapping) else {})},
    }


async def _awaited_verl_result(answer: Any) -> Any:
    return _verl_result(await answer)


def _verl_result(answer: Any) -> Any:
    """Leave what is not a number (such as "pred") out of a result, and read "acc" as success."""
    if not isinstance(answer, Mapping) or "score" not in answer:
        return answer
    kept = {name: value for name, value in answer.items() if name in _REWARD_KEYS or not _is_text(value)}
    right = answer.get("acc")
    return {**kept, "success": right} if isinstance(right, bool) and "success" not in kept else kept


_REWARD_KEYS = ("score", "success", "steps", "step_outputs")


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | list | tuple | dict)


def _call_answer(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    return function(answer_text(rows[0]["messages"][rows[0]["prompt_count"] :]), rows[0]["data"], **kwargs)


def _call_rows(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    evaluation_rows = [_evaluation_row(row) for row in rows]
    results = getattr(function, "_origin_func", function)(evaluation_rows, **_accepted_arguments(function, kwargs))
    return asyncio.run(_await_results(results)) if inspect.isawaitable(results) else _results(results)


def _call_row(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    result = getattr(function, "_origin_func", function)(
        _evaluation_row(rows[0]), **_accepted_arguments(function, kwargs)
    )
    [answer] = asyncio.run(_await_results([result])) if inspect.isawaitable(result) else _results([result])
    return answer


async def _await_results(results: Any) -> list[Any]:
    if inspect.isawaitable(results):
        return _results(await results)
    return _results([await item if inspect.isawaitable(item) else item for item in results])


def _results(rows: Sequence[Any]) -> list[Any]:
    """Return the results that were set on rows; a function may also return results themselves."""
    return [getattr(row, "evaluation_result", row) for row in rows]


def _evaluation_row(row: Row) -> Any:
    """Make the row that eval-protocol has after a rollout: the environment's rewards are in `control_plane_step` of the
    message of each step."""
    models = importlib.import_module("eval_protocol.models")
    values = available_arguments(row)
    evaluation_row = models.EvaluationRow(
        messages=[models.Message.model_validate(message) for message in row["messages"]],
        tools=values["tools"],
        ground_truth=values["ground_truth"],
        input_metadata=models.InputMetadata(row_id=row["id"], dataset_info=dict(row["data"])),
        rollout_status=models.Status.rollout_finished(),
    )
    for index, step in enumerate(row["steps"]):
        if step["message"] is not None:
            last = index + 1 == len(row["steps"])
            control_step = {"step": index, "reward": step["reward"], "terminated": last and not row["truncated"]}
            evaluation_row.messages[step["message"]].control_plane_step = control_step
    return evaluation_row


def _call_episode(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    return function(_episode_json().episode_from_row(rows[0]), **kwargs)


def _call_episodes(function: Callable[..., Any], rows: Sequence[Row], kwargs: Mapping[str, Any]) -> Any:
    return function([_episode_json().episode_from_row(row) for row in rows], **kwargs)


def _episode_json() -> Any:
    """Import `episode_json` when it is needed: it imports numpy, which most functions do without."""
    return importlib.import_module("headrace.reward.episode_json")


_CALLS: Mapping[RewardSignature, Callable[[Callable[..., Any], Sequence[Row], Mapping[str, Any]], Any]] = {
    RewardSignature.MESSAGES: _call_messages,
    RewardSignature.VERIFIERS: _call_messages,
    RewardSignature.BATCH: _call_batch,
    RewardSignature.TRL: _call_trl,
    RewardSignature.VERL: _call_verl,
    RewardSignature.VERL_BATCH: _call_verl_batch,
    RewardSignature.PLAIN: _call_plain,
    RewardSignature.ANSWER: _call_answer,
    RewardSignature.ROW: _call_row,
    RewardSignature.ROWS: _call_rows,
    RewardSignature.EPISODE: _call_episode,
    RewardSignature.EPISODES: _call_episodes,
}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError):
        return {}


def _as_annotated(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Convert messages to the class they are annotated with; without one they stay dictionaries."""
    if _decorator_value(function, "mode"):
        return values  # the decorator converts them
    hints = _hints(function)
    return {name: reward_kit.as_annotated(hints.get(name), value) for name, value in values.items()}
