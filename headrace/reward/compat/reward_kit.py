"""Stand in for the packages `reward_kit`, `reward_protocol` and `eval_protocol` where they are not installed.

Reward functions written for them run unmodified: this module has the public names such files import, as a superset of
both packages' fields. It is found last, so an installed package is used as it is. Modules that it lacks (the reward
library, hosted evaluation) raise an ImportError that says what to install. Classes that only configure how
eval-protocol rolls out and loads data can be imported, instantiated and subclassed, and do nothing.

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
_HIDING = {"": ("reward_function",), "pytest": ("evaluation_test",)}  # modules with the name of a function
_PLACEHOLDERS = (
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
        """Fill the module after submodules with a function's name, which would hide the function if imported later."""
        for name in _HIDING.get(module.__name__.partition(".")[2], ()):
            importlib.import_module(f"{module.__name__}.{name}")
        vars(module).update(_names())


class Placeholder:
    """Stands in for a class that configures eval-protocol's rollouts or data loading, which the run does here."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


@cache
def _names() -> dict[str, Any]:
    return {
        **{name: type(name, (Placeholder,), {}) for name in _PLACEHOLDERS},
        **_models(),
        "reward_function": reward_function,
        "evaluation_test": evaluation_test,
        "load_jsonl": load_jsonl,
    }


def _models() -> dict[str, Any]:
    """Import the models when a file needs them: they import pydantic."""
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
    """Decorate a reward function: convert messages to `Message` where its annotation says so, and its result to an
    EvaluateResult, or a list of them in batch mode.

    Raises ValueError if it takes no **kwargs or returns anything else.
    """

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
        bound = _bind_arguments(inner, args, kwargs)
        return _validate_result(inner, mode, inner(*bound.args, **bound.kwargs))

    return call


def _async_wrapper(inner: Callable[..., Any], mode: str) -> Callable[..., Any]:
    @wraps(inner)
    async def call(*args: Any, **kwargs: Any) -> Any:
        bound = _bind_arguments(inner, args, kwargs)
        return _validate_result(inner, mode, await inner(*bound.args, **bound.kwargs))

    return call


def _bind_arguments(inner: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    signature = inspect.signature(inner, eval_str=True)
    bound = signature.bind_partial(*args, **kwargs)
    for name in ("messages", "rollouts_messages", "ground_truth"):
        if name in bound.arguments:
            value = bound.arguments[name]
            messages = _as_messages(value) if name == "ground_truth" else value
            converted = as_annotated(signature.parameters[name].annotation, messages)
            bound.arguments[name] = value if converted is messages else converted
    return bound


def _as_messages(truth: Any) -> Any:
    """Convert a ground truth to the list of messages that an annotation may ask for, as eval-protocol does."""
    if isinstance(truth, str):
        return [{"role": "system", "content": truth}]
    return [truth] if isinstance(truth, dict) else truth


def _validate_result(inner: Callable[..., Any], mode: str, result: Any) -> Any:
    import pydantic

    kind: Any = _models()["EvaluateResult"]
    try:
        return pydantic.TypeAdapter(list[kind] if mode == "batch" else kind).validate_python(result)
    except pydantic.ValidationError as exc:
        raise ValueError(
            f"Return value from function '{inner.__name__}' failed Pydantic validation for mode '{mode}':\n{exc}"
        ) from None


def evaluation_test(*args: Any, mode: str = "pointwise", **options: Any) -> Any:
    """Decorate a function with its mode; data sets, rollouts and thresholds are set by the run, and ignored here."""

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
    """Convert messages to the class inside list[Message], list[list[Message]], or either | None; return anything else
    as it is."""
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
