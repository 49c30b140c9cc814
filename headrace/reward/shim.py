"""Stands in for the packages `reward_kit`, `reward_protocol` and `eval_protocol` where they are not installed.

Reward functions written for them run unmodified: the shim has the public names such files import, as a superset of
both packages' fields. It is found last, so an installed package is used as it is. What it does not have (the reward
library, rollouts, hosted evaluation) raises an ImportError that says what to install.

Everything pydantic is made when a file first imports one of the names: importing this module costs nothing.
"""

import importlib.machinery
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

PACKAGES = ("reward_kit", "reward_protocol", "eval_protocol")
_MODULES = ("models", "typed_interface", "reward_function", "common_utils", "pytest")


def install() -> None:
    """Make the shim importable in this process, behind whatever is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder:
    """A finder of `sys.meta_path` and the loader of what it finds."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        package, _, rest = name.partition(".")
        if package not in PACKAGES:
            return None
        if rest and rest not in _MODULES:
            wheel = "reward-kit" if package != "eval_protocol" else "eval-protocol"
            raise ImportError(f"headrace's stand-in for {package} has no {rest}: run  pip install {wheel}")
        return importlib.machinery.ModuleSpec(name, self, is_package=not rest)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_names())
        if module.__name__.count(".") == 0:
            module.__path__ = []


@cache
def _names() -> dict[str, Any]:
    return {
        **_models(),
        "reward_function": reward_function,
        "evaluation_test": evaluation_test,
        "load_jsonl": load_jsonl,
    }


# --- decorators ------------------------------------------------------------------------------------------------------


def reward_function(
    function: Callable[..., Any] | None = None,
    *,
    mode: str = "pointwise",
    id: str | None = None,
    requirements: list[str] | None = None,
    resources: dict[str, list[Any]] | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
) -> Any:
    """Messages become `Message`s where the function's annotation says so, and what it returns an EvaluateResult, or a
    list of them in batch mode. Raises ValueError when it takes no **kwargs or returns something else."""

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(inner).parameters
        if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
            raise ValueError(f"Function '{inner.__name__}' must accept **kwargs parameter.")
        wrapped = _async_wrapper(inner, mode) if inspect.iscoroutinefunction(inner) else _wrapper(inner, mode)
        described: dict[str, Any] = {"id": id, "requirements": requirements, "mode": mode, "resources": resources}
        for key, value in described.items():
            setattr(wrapped, f"_reward_function_{key}", value)
        for key, value in {**described, "concurrency": concurrency, "timeout": timeout}.items():
            setattr(wrapped, f"_{key}", value)
        return wrapped

    return decorate if function is None else decorate(function)


def _wrapper(inner: Callable[..., Any], mode: str) -> Callable[..., Any]:
    @wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = _bound(inner, args, kwargs)
        return _validated(inner, mode, inner(*bound.args, **bound.kwargs))

    return call


def _async_wrapper(inner: Callable[..., Any], mode: str) -> Callable[..., Any]:
    @wraps(inner)
    async def call(*args: Any, **kwargs: Any) -> Any:
        bound = _bound(inner, args, kwargs)
        return _validated(inner, mode, await inner(*bound.args, **bound.kwargs))

    return call


def _bound(inner: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    signature = inspect.signature(inner, eval_str=True)
    bound = signature.bind_partial(*args, **kwargs)
    for name in ("messages", "rollouts_messages", "ground_truth"):
        if name in bound.arguments:
            bound.arguments[name] = as_annotated(signature.parameters[name].annotation, bound.arguments[name])
    return bound


def _validated(inner: Callable[..., Any], mode: str, result: Any) -> Any:
    import pydantic

    kind: Any = _models()["EvaluateResult"]
    try:
        return pydantic.TypeAdapter(list[kind] if mode == "batch" else kind).validate_python(result)
    except pydantic.ValidationError as exc:
        raise ValueError(
            f"Return value from function '{inner.__name__}' failed Pydantic validation for mode '{mode}':\n{exc}"
        ) from None


def evaluation_test(*args: Any, mode: str = "pointwise", **options: Any) -> Any:
    """Keeps the function and its mode; data sets, rollouts and thresholds are the run's own business here."""

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            return inner(*call_args, **call_kwargs)

        call._origin_func = inner  # type: ignore[attr-defined]
        call._metainfo = {"mode": mode}  # type: ignore[attr-defined]
        return call

    return decorate(args[0]) if args and callable(args[0]) else decorate


def load_jsonl(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def as_annotated(annotation: Any, value: Any) -> Any:
    """Messages as the class inside list[Message] or list[list[Message]]; anything else as it is."""
    if get_origin(annotation) is not list or not isinstance(value, Sequence) or isinstance(value, str):
        return value
    (inner,) = get_args(annotation) or (None,)
    if get_origin(inner) is list:
        return [as_annotated(inner, item) for item in value]
    if isinstance(inner, type) and inner.__name__ == "Message" and hasattr(inner, "model_validate"):
        return [inner.model_validate(item) if isinstance(item, dict) else item for item in value]
    return value


# --- models ----------------------------------------------------------------------------------------------------------


@cache
def _models() -> dict[str, Any]:
    from pydantic import BaseModel, ConfigDict, Field

    class Model(BaseModel):
        """Fields can be read like a mapping's."""

        model_config = ConfigDict(extra="allow")

        def __getitem__(self, key: str) -> Any:
            if key not in type(self).model_fields:
                raise KeyError(key)
            return getattr(self, key)

        def __contains__(self, key: str) -> bool:
            return key in type(self).model_fields

        def get(self, key: str, default: Any = None) -> Any:
            return getattr(self, key, default)

        def keys(self) -> Any:
            return type(self).model_fields.keys()

        def values(self) -> list[Any]:
            return [getattr(self, key) for key in self.keys()]

        def items(self) -> list[tuple[str, Any]]:
            return [(key, getattr(self, key)) for key in self.keys()]

        def __iter__(self) -> Iterator[str]:  # type: ignore[override]
            return iter(self.keys())

    class FunctionCall(BaseModel):
        name: str
        arguments: str

    class ChatCompletionMessageToolCall(BaseModel):
        id: str = ""
        type: str = "function"
        function: FunctionCall

    class Message(BaseModel):
        model_config = ConfigDict(extra="allow")
        role: str
        content: str | list[Any] | None = ""
        name: str | None = None
        tool_call_id: str | None = None
        tool_calls: list[ChatCompletionMessageToolCall] | None = None
        function_call: FunctionCall | None = None
        reasoning_content: str | None = None
        control_plane_step: dict[str, Any] | None = None
        weight: float | None = None
        logprobs: Any = None

    class MetricResult(Model):
        is_score_valid: bool = True
        score: float
        reason: str
        data: dict[str, Any] = Field(default_factory=dict)

    class StepOutput(Model):
        step_index: int | str
        base_reward: float
        terminated: bool = False
        control_plane_info: dict[str, Any] | None = None
        metrics: dict[str, Any] = Field(default_factory=dict)
        reason: str | None = None

    class EvaluateResult(Model):
        score: float
        is_score_valid: bool = True
        reason: str | None = None
        metrics: dict[str, MetricResult] = Field(default_factory=dict)
        step_outputs: list[StepOutput] | None = None
        error: str | None = None
        trajectory_info: dict[str, Any] | None = None
        final_control_plane_info: dict[str, Any] | None = None
        agg_score: float | None = None
        standard_error: float | None = None

    class InputMetadata(BaseModel):
        model_config = ConfigDict(extra="allow")
        row_id: str | None = None
        completion_params: dict[str, Any] = Field(default_factory=dict)
        dataset_info: dict[str, Any] | None = None
        session_data: dict[str, Any] | None = None

    class EvaluationRow(BaseModel):
        model_config = ConfigDict(extra="allow")
        messages: list[Message] = Field(default_factory=list)
        tools: list[dict[str, Any]] | None = None
        input_metadata: InputMetadata = Field(default_factory=InputMetadata)
        ground_truth: Any = None
        evaluation_result: EvaluateResult | None = None

        def last_assistant_message(self) -> Message | None:
            return next((message for message in reversed(self.messages) if message.role == "assistant"), None)

    made: tuple[type[BaseModel], ...] = (
        FunctionCall,
        ChatCompletionMessageToolCall,
        Message,
        MetricResult,
        StepOutput,
        EvaluateResult,
        InputMetadata,
        EvaluationRow,
    )
    return {model.__name__: model for model in made}
