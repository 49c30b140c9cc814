"""Stands in for the packages `reward_kit`, `reward_protocol` and `eval_protocol` where they are not installed.

Reward functions written for them run unmodified: this module has the public names such files import, as a superset of
both packages' fields. It is found last, so an installed package is used as it is. What it does not have (the reward
library, hosted evaluation) raises an ImportError that says what to install. What only says how eval-protocol would play
and load (rollout processors, data loaders) can be named, made and derived from, and does nothing.

Everything pydantic is made when a file first imports one of the names: importing this module costs nothing.
"""

import importlib
import importlib.machinery
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin

PACKAGES = ("reward_kit", "reward_protocol", "eval_protocol")
_MODULES = ("models", "typed_interface", "reward_function", "common_utils", "pytest", "types", "data_loader")
_HIDING = {"": ("reward_function",), "pytest": ("evaluation_test",)}  # modules that have the name of a function
_NOT_HERE = (
    "AgentRolloutProcessor",
    "BackoffConfig",
    "DefaultParameterIdGenerator",
    "DynamicDataLoader",
    "EvaluationRowJsonlDataLoader",
    "ExceptionHandlerConfig",
    "GithubActionRolloutProcessor",
    "InlineDataLoader",
    "KlavisSandboxRolloutProcessor",
    "LangGraphRolloutProcessor",
    "MCPGymRolloutProcessor",
    "NoOpRolloutProcessor",
    "NoOpRolloutResultPostProcessor",
    "OpenEnvRolloutProcessor",
    "PydanticAgentRolloutProcessor",
    "RemoteRolloutProcessor",
    "RolloutProcessor",
    "RolloutProcessorConfig",
    "RolloutResultPostProcessor",
    "SingleTurnRolloutProcessor",
    "default_dataset_adapter",
)


def install() -> None:
    """Make the stand-ins importable in this process, behind whatever is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder:
    """A finder of `sys.meta_path` and the loader of what it finds."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        package, _, rest = name.partition(".")
        if package not in PACKAGES:
            return None
        if rest and rest not in _MODULES and not rest.startswith("pytest."):
            wheel = "reward-kit" if package != "eval_protocol" else "eval-protocol"
            raise ImportError(f"headrace's stand-in for {package} has no {rest}: run  pip install {wheel}")
        return importlib.machinery.ModuleSpec(name, self, is_package=rest in ("", "pytest"))  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """A name that is a module too is the function, as in the packages: importing the module later would hide it."""
        for name in _HIDING.get(module.__name__.partition(".")[2], ()):
            importlib.import_module(f"{module.__name__}.{name}")
        vars(module).update(_names())


class NotHere:
    """Stands for what says how eval-protocol would play or load; here the run does both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


@cache
def _names() -> dict[str, Any]:
    return {
        **{name: type(name, (NotHere,), {}) for name in _NOT_HERE},
        **_models(),
        "reward_function": reward_function,
        "evaluation_test": evaluation_test,
        "load_jsonl": load_jsonl,
    }


def _models() -> dict[str, Any]:
    """Imported when a file asks for them: they bring pydantic along."""
    models: dict[str, Any] = importlib.import_module("headrace.reward.compat.models").PUBLIC
    return models


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
            value = bound.arguments[name]
            given = _as_messages(value) if name == "ground_truth" else value
            made = as_annotated(signature.parameters[name].annotation, given)
            bound.arguments[name] = value if made is given else made
    return bound


def _as_messages(truth: Any) -> Any:
    """A ground truth as the list of messages that an annotation may ask for, as eval-protocol makes it."""
    if isinstance(truth, str):
        return [{"role": "system", "content": truth}]
    return [truth] if isinstance(truth, dict) else truth


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
    """Messages as the class inside list[Message] or list[list[Message]], or one of them or None; anything else as it
    is."""
    if get_origin(annotation) in (Union, UnionType):
        choices = [choice for choice in get_args(annotation) if choice is not NoneType]
        annotation = choices[0] if len(choices) == 1 else None
    if get_origin(annotation) is not list or not isinstance(value, Sequence) or isinstance(value, str):
        return value
    (inner,) = get_args(annotation) or (None,)
    if get_origin(inner) is list:
        return [as_annotated(inner, item) for item in value]
    if isinstance(inner, type) and inner.__name__ == "Message" and hasattr(inner, "model_validate"):
        return [inner.model_validate(item) if isinstance(item, dict) else item for item in value]
    return value
