"""The service runtime: the model of a stage at [model] service = "http://...". None of it is computed in this process.

A stage is a session with an adapter of its own. Its states are kept by the service under names that the checkpoints in
the run folder point at; what the store of checkpoints forgets is deleted there too.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.config import Config, LoraConfig, ModelConfig, length_problems
from headrace.config.checks.service_runs import service_layers
from headrace.config.paths import SERVICE_STATE
from headrace.envs import ENVIRONMENTS
from headrace.errors import BackendError, ConfigError
from headrace.loops.checkpointer import CheckpointWriter
from headrace.loops.distill import TopTokens
from headrace.loops.step_batch import Score, backend_scorer
from headrace.model.tokenizer import TokenizerOnly, load_tokenizer
from headrace.names import NAMED_MODELS
from headrace.protocols import TrainBackend
from headrace.render import Renderer
from headrace.rollout.executor.turns import NO_TURNS, Turns
from headrace.service.client import ServiceBackend, ServiceClient, ServiceSampler
from headrace.service.client.backend import read_pointer
from headrace.service.client.transport import RequestRefused
from headrace.storage.hub import hub_name, model_files
from headrace.train.checkpoint import CheckpointStore
from headrace.wiring.build.chat_template import set_template

logger = logging.getLogger(__name__)

FIRST_ANSWER_S = 5.0  # how long the service may take to be there before a run starts
DENIED = 401


def starting_state(model: ModelConfig) -> str:
    """Return the folder of the state that the first stage starts from; "" for the base model that is served."""
    is_state = model.path not in NAMED_MODELS and (Path(model.path) / SERVICE_STATE).is_file()
    return model.path if is_state else ""


def check_service(config: Config) -> TokenizerOnly:
    """Return the tokenizer of the model at the service.

    Raises ConfigError or BackendError for what would fail later: no answer, a refused key, an adapter that cannot be
    made, lengths, a tokenizer that is not on this machine or not the model's.
    """
    model = config.model
    assert model.service is not None
    try:
        with connect(model, retry_s=FIRST_ANSWER_S) as service:
            context = min(service.models().result().values())
            for sentence in length_problems(config, context):
                raise ConfigError(sentence)
            backend = new_model(service, config)
            if start := starting_state(model):
                backend.start_from(Path(start)).result()
            tokens = tokens_of(model, backend)
            _check_words(config, tokens)
            return tokens
    except BackendError as exc:
        if isinstance(exc.__cause__, RequestRefused) and exc.__cause__.status == DENIED:
            credentials = (
                f"the key in ${model.service_key_env}" if _key(model) else f"no key (${model.service_key_env})"
            )
            raise ConfigError(
                f"the service at {model.service} does not let in {credentials}: set one of its keys"
            ) from exc
        raise


def connect(model: ModelConfig, *, retry_s: float = 120.0) -> ServiceClient:
    assert model.service is not None
    return ServiceClient(model.service, api_key=_key(model), retry_s=retry_s)


def _key(model: ModelConfig) -> str | None:
    return os.environ.get(model.service_key_env) or None if model.service_key_env else None


def new_model(service: ServiceClient, config: Config) -> ServiceBackend:
    """Create an adapter at the service, as [model.lora] or its defaults say."""
    lora = config.model.lora or LoraConfig()
    layers = service_layers(lora.layers)
    assert layers is not None, "the configuration was checked"
    training = service.create_training(
        rank=lora.rank,
        seed=config.run.seed,
        train_attn=layers["train_attn"],
        train_mlp=layers["train_mlp"],
        train_unembed=layers["train_unembed"],
    )
    return ServiceBackend(training.result())


def tokens_of(model: ModelConfig, backend: ServiceBackend) -> TokenizerOnly:
    """Load the tokenizer in the folder `model.path`, else the one that the service names; raises ConfigError."""
    name = backend.client.info().result().tokenizer
    folder = Path(name) if name is not None and Path(name).is_dir() else None
    if name is not None and folder is None and (on_hub := hub_name(name)) is not None:
        folder = model_files(on_hub, weights=False)
    served = None if folder is None else load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    if model.path in NAMED_MODELS or starting_state(model):
        if served is None:
            raise ConfigError(
                f"the tokenizer of the model at {model.service} is '{name}', which is no folder here: "
                "give 'model.path' a folder with the same tokenizer"
            )
        set_template(served.tokenizer, model)
        return served
    local = load_tokenizer(Path(model.path), trust_remote_code=model.trust_remote_code)
    if served is not None and served.tokenizer.get_vocab() != local.tokenizer.get_vocab():
        raise ConfigError(
            f"the tokenizer in {model.path} is not that of the model at {model.service}, which is in {name}: "
            "leave 'model.path' out"
        )
    set_template(local.tokenizer, model)
    return local


def _check_words(config: Config, tokens: TokenizerOnly) -> None:
    """Raise ConfigError when words of an environment are unknown: they would all become the same token."""
    unknown = tokens.tokenizer.unk_token_id
    sources = [*(config.sft.sources if config.sft else ()), *(config.rl.tasks if config.rl else ())]
    for name in dict.fromkeys(
        source.name for source in sources if source.type == "env" and source.name in ENVIRONMENTS
    ):
        ids = tokens.tokenizer(list(ENVIRONMENTS[str(name)].vocabulary()), add_special_tokens=False)["input_ids"]
        if unknown is not None and any(unknown in word_ids for word_ids in ids):
            raise ConfigError(
                f"the model at {config.model.service} does not know all words of the environment '{name}': "
                "use an environment that it knows, or serve another model"
            )


class ServiceRuntime:
    """Implements `Runtime` at a service."""

    def __init__(
        self,
        config: Config,
        *,
        start: str,  # the folder of the state whose weights a new stage takes; "": the base model's
        state: Path | None,  # the checkpoint to go on from
        samples: bool,  # whether episodes are played
    ) -> None:
        self._config, self._start = config, start
        self.turns: Turns = NO_TURNS
        with contextlib.ExitStack() as opened:
            self._service = opened.enter_context(connect(config.model))
            self.backend = new_model(self._service, config)
            if state is not None:
                self.backend.load_state(state).result()
            elif start:
                self.backend.start_from(Path(start)).result()
            tokens = tokens_of(config.model, self.backend)
            self.renderer = Renderer(tokens.tokenizer, tokens.eos_tokens, config.model.template_options)
            self.sampler = self._sampler() if samples else None
            self._opened = opened.pop_all()

    def _sampler(self) -> ServiceSampler:
        """Sample from the weights as they are now."""
        handle = self.backend.client.snapshot().result()
        return ServiceSampler(self._service, self._service.create_sampling(snapshot=handle).result())

    def open_frozen(self, path: str | None, *, micro_batch_tokens: int) -> Score:
        """Score with the model that the stage started from, under another adapter, which nothing trains."""
        assert path is None, "the configuration was checked"
        backend = new_model(self._service, self._config)
        if self._start:
            backend.start_from(Path(self._start)).result()
        return backend_scorer(backend)

    def open_teacher(self, path: str, *, micro_batch_tokens: int) -> TopTokens:
        raise AssertionError("a service has no teacher, and the configuration was checked")

    def open_critic(self, path: str, *, micro_batch_tokens: int, state: Path | None) -> TrainBackend:
        raise AssertionError("a service trains no critic, and the configuration was checked")

    def checkpoint_store(self, store: CheckpointStore, folder: Path) -> CheckpointWriter:
        return RemoteCheckpointStore(store, folder, self._service)

    def check_memory(self) -> None:
        """Do nothing: memory is the service's own business."""

    def close(self) -> None:
        self._opened.close()


class RemoteCheckpointStore:
    """Saves checkpoints that point at states of the service; a state is deleted together with its checkpoint."""

    def __init__(self, store: CheckpointWriter, folder: Path, service: ServiceClient) -> None:
        self._store, self._folder, self._service = store, folder, service

    def save(
        self, step: int, write: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        before = set(_pointers(self._folder))
        saved = self._store.save(step, write, state, score)
        for path in before - set(_pointers(self._folder)):
            try:
                self._service.delete_checkpoint(path).result()
            except BackendError as exc:
                logger.warning("%s stays at the service: %s", path, exc)
        return saved


def _pointers(folder: Path) -> Iterator[str]:
    for pointer in folder.glob(f"step_*/{SERVICE_STATE}"):
        with contextlib.suppress(BackendError):
            yield read_pointer(pointer.parent)
