"""Show what the model will see: the first training example with its mask, the first prompt, the first reward calls.

One row of each source is read. No weights are loaded, and no code of the user is run: a reward function is read as
text, and a stand-in with its parameters shows what it would be called with.
"""

import ast
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace.config import Config, RewardTermConfig, SourceConfig
from headrace.config.paths import term_name
from headrace.data.conversations import Conversation, ToolConversation, first_conversation, messages_of
from headrace.data.preferences import LabelledReply, first_preference, num_shared
from headrace.data.task_rows import first_task
from headrace.envs import BUILT_IN
from headrace.envs.containers.harbor_env import BASH
from headrace.errors import ConfigError, DataError, HeadraceError, boundary
from headrace.loops.preference.examples import render_reply
from headrace.model.tokenizer import TokenizerOnly, load_tokenizer
from headrace.names import SMOLLM2
from headrace.pictures import PlacedImage
from headrace.printable import single_line, visible
from headrace.render import Rendered, Renderer
from headrace.reward.user_function import ENTRY, VERL_ENTRY, RewardFunction, RewardSignature, read_signature
from headrace.storage.hub import hub_name, missing_bytes, model_files
from headrace.types import Message, Task, wire_message
from headrace.wiring.build.chat_template import set_template
from headrace.wiring.build.data import conversations_of, data_source, pairs_of, tasks_of
from headrace.wiring.build.model_sizes import tiny_words
from headrace.wiring.build.rewards import reward_terms
from headrace.wiring.picture_reader import OnDemandReader, reader_of

Value = TypeVar("Value")
MOST_CHARS = 3000  # of one text
MOST_VALUE_CHARS = 70  # of an argument
ANSWER = "<the model's answer>"
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
OPEN, CLOSE = "⟦", "⟧"  # around trained tokens, where there are no colours


def show_samples(config: Config, *, color: bool) -> str:
    """Return the sections of the samples; what cannot be shown is replaced by a sentence that says why."""
    lines: list[str] = []
    renderer = _Lazy(lambda: _renderer(config))
    if config.sft is not None:
        lines += ["", "The first example of [sft], as it is trained"]
        lines += _lines(lambda: _example(config, renderer.get(), color=color))
    if config.dpo is not None:
        lines += ["", "The first example of [dpo], as it is trained"]
        lines += _lines(lambda: _preference(config, renderer.get(), color=color))
    source = _task_source(config)
    if source is not None:
        task = _Lazy(lambda: _first_task(source))
        lines += ["", "The first task, as the model sees it"]
        lines += _lines(lambda: _prompt(task.get(), source, renderer.get()))
        if config.rl is not None:
            terms = reward_terms(config.rl)
            lines += ["", "The first reward calls"]
            lines += _lines(lambda: [line for term in terms for line in reward_call(term, task.get())])
    return "".join(f"{line}\n" for line in lines)


class _Lazy(Generic[Value]):
    """Makes a value once, when it is first asked for; a failure is raised every time."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make, self._made = make, list[Value]()
        self._error: HeadraceError | None = None

    def get(self) -> Value:
        if self._error is not None:
            raise self._error
        if not self._made:
            try:
                self._made.append(self._make())
            except HeadraceError as exc:
                self._error = exc
                raise
        return self._made[0]


def _lines(make: Callable[[], Sequence[str]]) -> list[str]:
    """Return indented lines, or the sentence of why there are none."""
    try:
        with boundary(HeadraceError, "it cannot be shown"):
            return [f"  {line}" for line in make()]
    except HeadraceError as exc:
        return [f"  not shown: {single_line(str(exc))}"]


def _renderer(config: Config) -> Renderer:
    model = config.model
    if model.service is not None:
        raise DataError(f"the tokenizer is at {model.service}, which is not asked")
    name = None if model.path == "tiny" or Path(model.path).exists() else hub_name(model.path)
    if model.path == SMOLLM2 or (name is not None and missing_bytes(name) != 0):
        raise DataError(f"the tokenizer of {model.path} is fetched by a run")
    pictures: OnDemandReader | None = None
    if model.path == "tiny" and model.vision is not None:
        from headrace.model.load import no_progress_bars  # loads torch
        from headrace.model.vision.tiny_vision import write_tiny_vision_model

        with tempfile.TemporaryDirectory() as folder_name, no_progress_bars():
            write_tiny_vision_model(Path(folder_name), words=tiny_words(config))
            tokens, pictures = load_tokenizer(Path(folder_name)), reader_of(model, folder_name)
            _ = pictures.loaded
    elif model.path == "tiny":
        from headrace.model.tiny import make_tokenizer  # loads torch

        tokens = TokenizerOnly(tokenizer=make_tokenizer(tiny_words(config)), eos_tokens=())
    else:
        folder = Path(model.path) if name is None else model_files(name, weights=False)
        tokens = load_tokenizer(folder)  # code in the folder is not run here, whatever the file says
        pictures = OnDemandReader(str(folder))
    set_template(tokens.tokenizer, model)
    return Renderer(tokens.tokenizer, tokens.eos_tokens, model.template_options, pictures)


def _check_readable(source: SourceConfig) -> None:
    """Raise DataError for a source whose rows come from code, or from the network."""
    if source.type == "python":
        raise DataError(f"the rows come from {source.path}, which is not run here")
    if source.type == "hub" and not Path(source.path or "").exists():
        raise DataError(f"the rows come from {source.path} on the Hugging Face hub, which a run fetches")
    if source.type == "env" and source.name not in BUILT_IN:
        raise DataError(f"the environment {source.name} is of another package, and is not started here")


# --- the first example -----------------------------------------------------------------------------------------------


def _example(config: Config, renderer: Renderer, *, color: bool) -> list[str]:
    assert config.sft is not None
    source, max_tokens = config.sft.sources[0], config.sft.max_tokens
    _check_readable(source)
    conversation: Conversation
    if source.type == "env":
        [conversation] = conversations_of(replace(source, size=1))
    else:
        conversation = first_conversation(data_source(source))
    tools, weights = (
        (conversation.tools or None, conversation.weights) if isinstance(conversation, ToolConversation) else (None, ())
    )
    sequences = renderer.conversation(messages_of(conversation), tools=tools, max_tokens=max_tokens, weights=weights)
    lines = [_source_line(source, color=color)]
    for number, rendered in enumerate(sequences):
        cut = f", cut at sft.max_tokens = {max_tokens}" if rendered.truncated else ""
        several = f"sequence {number + 1} of {len(sequences)}: " if len(sequences) > 1 else ""
        lines += _sequence(rendered, renderer, label=several, note=cut, color=color)
    return lines


def _preference(config: Config, renderer: Renderer, *, color: bool) -> list[str]:
    assert config.dpo is not None
    source = config.dpo.sources[0]
    _check_readable(source)
    first = pairs_of(source)[0] if source.type == "env" else first_preference(data_source(source))
    if isinstance(first, LabelledReply):
        whole, kind = (*first.prompt, *first.reply), "good" if first.label else "bad"
        sides = [(kind, part) for part in render_reply(whole, len(first.prompt), renderer)]
    else:
        shared = num_shared(first)
        named = (("chosen", first.chosen), ("rejected", first.rejected))
        sides = [(name, part) for name, side in named for part in render_reply(side, shared, renderer)]
    lines = [_source_line(source, color=color)]
    for name, rendered in sides:
        too_long = len(rendered.tokens) > config.dpo.max_tokens
        note = f", left out because of dpo.max_tokens = {config.dpo.max_tokens}" if too_long else ""
        lines += _sequence(rendered, renderer, label=f"{name}: ", note=note, color=color)
    return lines


def _source_line(source: SourceConfig, *, color: bool) -> str:
    marked = "green" if color else f"between {OPEN} and {CLOSE}"
    return f"from {visible(source.path or source.name or source.type)}; tokens that are trained are {marked}"


def _sequence(rendered: Rendered, renderer: Renderer, *, label: str, note: str, color: bool) -> list[str]:
    text = mask_text(rendered, renderer.exact_text, color=color)
    counts = f"{label}{len(rendered.tokens)} tokens, {rendered.num_trained} of them trained{note}"
    return [counts, *_picture_lines(rendered.images), *(f"| {line}" for line in text.split("\n"))]


def _picture_lines(images: Sequence[PlacedImage]) -> list[str]:
    """Say how many tokens each picture has, and which."""
    lines = []
    for number, placed in enumerate(images, start=1):
        frames, rows, columns = placed.image.grid
        grid = f"{rows} x {columns}" if frames == 1 else f"{frames} x {rows} x {columns}"
        where = f"from token {placed.at[0]} to {placed.at[-1]}"
        lines.append(f"picture {number}: {placed.image.num_tokens} image tokens {where}, of {grid} patches or crops")
    return lines


def mask_text(rendered: Rendered, decode: Callable[[Sequence[int]], str], *, color: bool) -> str:
    """Return the text of a training sequence with its trained spans marked; of a long text, the beginning and the end.

    >>> import numpy as np
    >>> rendered = Rendered(tokens=np.array([1, 2, 3]), trained=np.array([False, True, True]))
    >>> mask_text(rendered, lambda tokens: " ".join(map(str, tokens)) + " ", color=False)
    '1 ⟦2 3 ⟧'
    """
    spans = [
        (trained, decode([token for _, token in pairs]))
        for trained, pairs in groupby(
            zip(rendered.trained.tolist(), rendered.tokens.tolist(), strict=True), key=lambda pair: pair[0]
        )
    ]
    room = max(MOST_CHARS // max(len(spans), 1), 80)
    return "".join(_marked(_shorten(text, room), trained=trained, color=color) for trained, text in spans)


def _marked(text: str, *, trained: bool, color: bool) -> str:
    shown = visible(text)
    if not trained:
        return shown
    if not color:
        return f"{OPEN}{shown}{CLOSE}"
    return "\n".join(f"{GREEN}{line}{PLAIN}" if line else line for line in shown.split("\n"))


def _shorten(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    half = room // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} more characters) ... {text[-half:]}"


# --- the first task --------------------------------------------------------------------------------------------------


def _task_source(config: Config) -> SourceConfig | None:
    if config.rl is not None:
        return config.rl.tasks[0]
    return config.distill.teachers[0].tasks if config.distill is not None else config.eval.source


def _first_task(source: SourceConfig) -> Task:
    _check_readable(source)
    if source.type in ("env", "task", "harbor"):
        return tasks_of(replace(source, size=1))[0]
    return first_task(data_source(source))


def _prompt(task: Task, source: SourceConfig, renderer: Renderer) -> list[str]:
    messages, tools, note = opening(task, source)
    lines = [f"task {single_line(task.id, 80)} of {visible(source.path or source.name or source.type)}{note}"]
    prompt = renderer.placed_prompt(messages, tools or None)
    lines += [f"{len(prompt.tokens)} tokens", *_picture_lines(prompt.images)]
    text = visible(_shorten(renderer.exact_text(prompt.tokens), MOST_CHARS))
    return [*lines, *(f"| {line}" for line in text.split("\n"))]


def opening(task: Task, source: SourceConfig) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...], str]:
    """Return the messages and tools before the first answer; what only a user's environment knows is left out, and the
    note says so."""
    if source.type == "env" and source.name is not None:
        env = BUILT_IN[source.name].make_env()
        try:
            observation = env.reset(task, source.seed)
        finally:
            env.close()
        return (*task.messages, *observation.messages), observation.tools, ""
    if source.env is not None:
        return task.messages, (), f"; the environment {source.env} may say more, and is not started here"
    if source.type == "task":
        return task.messages, (), "; its tools are offered too, and are not started here"
    if source.type == "harbor":
        return task.messages, (BASH,), "; its container is not started here"
    return task.messages, (), ""


# --- the first reward call -------------------------------------------------------------------------------------------


def reward_call(term: RewardTermConfig, task: Task) -> Iterator[str]:
    """Describe the first call of a reward: the function, its file and line, and the arguments that it would get."""
    name, weight = visible(term_name(term)), f"weight {term.weight:g}"
    file, wanted = _file_of(term.fn)
    if file is None:
        answer = task.data.get("answer", task.data.get("ground_truth"))
        knows = "" if answer is None else f"; the task's answer is {_value(answer)}"
        options = f", kwargs {_value(dict(term.kwargs))}" if term.kwargs else ""
        yield f"{name} ({weight}): fn = {visible(term.fn)!r}, called with the episode{options}{knows}"
        return
    found = find_definition(file, wanted)
    stand_in = _StandIn(found)
    signature = read_signature(stand_in.function)
    if signature in (RewardSignature.ROW, RewardSignature.ROWS, RewardSignature.EPISODE, RewardSignature.EPISODES):
        first = next(iter(stand_in.signature.parameters), "episode")
        shown = f"{first}=<the {'episodes of a group' if signature.takes_group else 'episode'}>"
    else:
        RewardFunction(stand_in.function, signature, dict(term.kwargs), {}).call({"rows": [_row(task)]})
        shown = ", ".join(f"{key}={_value(value)}" for key, value in stand_in.arguments.items())
    times = "once for each group" if signature.takes_group else "once for each episode"
    yield f"{name} ({weight}): {file}, line {found.lineno}, called {times}:"
    yield f"  {found.name}({shown})"


def _file_of(fn: str) -> tuple[Path | None, str]:
    """Return the file of a user's reward function and the function's name; "" if the file has to say which it is."""
    place, colon, name = fn.rpartition(":")
    if not colon:
        place, name = fn, ""
    path = Path(place)
    if path.is_dir():
        return path / "main.py", name or ENTRY
    return (path, name) if place.endswith(".py") else (None, name)


def find_definition(file: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Find a function in a file without running it: by its name, else the only decorated one or verl's entry."""
    with boundary(ConfigError, f"{file} cannot be read as Python"):
        module = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if name:
        found = [node for node in functions if node.name == name]
    else:
        found = [node for node in functions if node.decorator_list]
        found = found if len(found) == 1 else [node for node in functions if node.name == VERL_ENTRY]
    if not found:
        raise DataError(f"{file} defines no function {name or VERL_ENTRY} at its top level")
    return found[-1]


class _StandIn:
    """Has the parameters of a function that was read, and notes what it is called with."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.arguments: dict[str, Any] = {}
        self.signature = _signature(node)
        takes_group = {"completions", "rollouts_messages", "solution_strs"} & set(self.signature.parameters)

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = self.signature.bind(*args, **kwargs).arguments
            spread = [p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
            self.arguments = {key: value for key, value in bound.items() if key not in spread}
            for key in spread:
                self.arguments |= bound.get(key, {})
            return [0.0] if takes_group else 0.0

        annotated = [a.annotation for a in (*node.args.args, *node.args.kwonlyargs) if a.arg == "completions"]
        as_text = any(annotation is not None and "str" in ast.unparse(annotation) for annotation in annotated)
        function.text_completions = as_text  # type: ignore[attr-defined]  # what TRL's functions are given
        function.__signature__ = self.signature  # type: ignore[attr-defined]  # which inspect reads
        self.function = function


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Return the parameters of a function; a default is None, whatever it is in the file."""
    kinds, given = inspect.Parameter, node.args
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if index < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if index < required else None,
        )
        for index, argument in enumerate(positional)
    ]
    if given.vararg is not None:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if given.kwarg is not None:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _row(task: Task) -> dict[str, Any]:
    """Make the row of an episode that has not been played, as `episode_json` makes one."""
    prompt = [wire_message(message) for message in task.messages]
    id = f"{task.id}/0"
    step = {"id": f"{id}/0", "message": len(prompt), "action": ANSWER, "reward": 0.0, "valid": True, "state": None}
    return {
        "id": id,
        "task_id": task.id,
        "data": dict(task.data),
        "messages": [*prompt, {"role": "assistant", "content": ANSWER}],
        "prompt_count": len(prompt),
        "steps": [step],
        "task_messages": prompt,
        "seed": 0,
        "temperature": 1.0,
        "success": None,
        "truncated": False,
        "ended": None,
        "final_state": None,
    }


def _value(value: Any) -> str:
    text = repr(value)
    return single_line(text if len(text) <= MOST_VALUE_CHARS else f"{text[: MOST_VALUE_CHARS - 3]}...")
