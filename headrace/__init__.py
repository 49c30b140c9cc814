"""Headrace: supervised fine-tuning and reinforcement learning of language-model agents, on a laptop CPU or one GPU.

These names are enough for a training loop of your own; `examples/by_hand.py` is one. They are imported on first use,
so `import headrace` costs nothing. One step of reinforcement learning:

>>> import asyncio, tempfile
>>> from pathlib import Path
>>> from headrace import *
>>> async def train_one_step(folder, rows):
...     lm = load_model(folder)
...     backend, engine = TorchBackend(lm), EmbeddedEngine(lm)  # both use the same weights
...     player = GroupPlayer(
...         group_size=4,
...         make_env=SingleTurnEnv,
...         sampler=engine,
...         renderer=Renderer(lm.tokenizer, lm.eos_tokens),
...         reward_runner=InProcessRewardRunner(["exact_match"]),
...         sampling=SamplingParams(max_tokens=4),
...     )
...     tasks = TaskSource(tasks_from_rows(rows))
...     groups = await asyncio.gather(*(player(tasks.next(), group_id) for group_id in range(8)))
...     data = reweight(to_data(credit(groups, method="rloo").episodes))
...     backend.forward_backward(data, LossSpec(fn="ppo"))
...     update = backend.optim_step(Adam(learning_rate=1e-3)).result()
...     async with Publisher([engine]).publish(backend.export_weights().result()) as version:
...         pass  # from here on the engine samples with the new weights
...     engine.close()
...     backend.close()
...     return len(data), update.updated, version
>>> folder = Path(tempfile.mkdtemp())
>>> save_tiny(folder, words=["yes", "no"], width=32, layers=1)
>>> asyncio.run(train_one_step(folder, [{"prompt": "yes", "answer": "no"}, {"prompt": "no", "answer": "yes"}]))
(32, True, 1)

Packages, from the command line down:
- `cli` is the command line, which `start` enters; `wiring` builds the parts of a run from its `config`.
- `loops` has the training loops; `service` serves training and sampling over HTTP; `verify` checks properties.
- `rollout` plays episodes of `envs` and `data` with a sampler of `infer`; `reward` scores them.
- `algo` has credit and losses as pure functions; `train` computes gradients; `model` loads and runs models.
- `observe` records runs and shows them.

Modules that all of them may use:
- `types` has the values that pass between stages, `protocols` the interfaces of the stages, `errors` every failure.
- `render` converts messages to tokens and back; `tool_calls` parses tool calls in a model's text.
- `metrics` has metrics that carry their reduction; `names` lists the names that a configuration may use.
- `storage` writes files and folders that survive crashes, and locks folders.
- `retry` repeats requests; `user_code` loads a user's functions; `process` has threads, stalls and an early Ctrl-C.
- `pictures` defines image files, what a model reads of them, and where they stand in a sequence.
- `printable` renders foreign text for logs and terminals; `testing` has a public fake for each protocol.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

__all__ = [
    "Adam",
    "ConversationMixture",
    "Datum",
    "EmbeddedEngine",
    "Episode",
    "Group",
    "GroupPlayer",
    "InProcessRewardRunner",
    "LanguageModel",
    "LossSpec",
    "Message",
    "Publisher",
    "Renderer",
    "Reward",
    "SamplingParams",
    "SingleTurnEnv",
    "Task",
    "TaskSource",
    "TorchBackend",
    "conversation_datum",
    "conversations_from_rows",
    "credit",
    "load_model",
    "reweight",
    "save_tiny",
    "tasks_from_rows",
    "to_data",
]

if TYPE_CHECKING:  # the same as in _MODULES, for type checkers and editors
    from headrace.algo.advantages.credit import credit
    from headrace.algo.datum import conversation_datum, to_data
    from headrace.algo.loss_weights import reweight
    from headrace.data.conversations import ConversationMixture, conversations_from_rows
    from headrace.data.task_rows import tasks_from_rows
    from headrace.data.task_source import TaskSource
    from headrace.envs.single_turn import SingleTurnEnv
    from headrace.infer.engine import EmbeddedEngine
    from headrace.model.load import LanguageModel, load_model
    from headrace.model.tiny import save_tiny
    from headrace.render import Renderer
    from headrace.reward.reward_runner import InProcessRewardRunner
    from headrace.rollout.group import GroupPlayer
    from headrace.rollout.publisher import Publisher
    from headrace.train.torch_backend import TorchBackend
    from headrace.types import Adam, Datum, Episode, Group, LossSpec, Message, Reward, SamplingParams, Task

# The module of every public name, in the order of docs/api.md.
_MODULES = {
    "load_model": "headrace.model.load",
    "LanguageModel": "headrace.model.load",
    "save_tiny": "headrace.model.tiny",
    "Renderer": "headrace.render",
    "conversations_from_rows": "headrace.data.conversations",
    "ConversationMixture": "headrace.data.conversations",
    "tasks_from_rows": "headrace.data.task_rows",
    "TaskSource": "headrace.data.task_source",
    "GroupPlayer": "headrace.rollout.group",
    "SingleTurnEnv": "headrace.envs.single_turn",
    "InProcessRewardRunner": "headrace.reward.reward_runner",
    "EmbeddedEngine": "headrace.infer.engine",
    "SamplingParams": "headrace.types",
    "credit": "headrace.algo.advantages.credit",
    "to_data": "headrace.algo.datum",
    "conversation_datum": "headrace.algo.datum",
    "reweight": "headrace.algo.loss_weights",
    "TorchBackend": "headrace.train.torch_backend",
    "LossSpec": "headrace.types",
    "Adam": "headrace.types",
    "Publisher": "headrace.rollout.publisher",
    "Message": "headrace.types",
    "Task": "headrace.types",
    "Episode": "headrace.types",
    "Reward": "headrace.types",
    "Group": "headrace.types",
    "Datum": "headrace.types",
}

if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
