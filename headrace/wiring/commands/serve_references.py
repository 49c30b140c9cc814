"""Open the frozen models and reward functions of a serve.toml by name, and the process that only scores."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from fastapi import FastAPI

from headrace.config import Config, ModelConfig, RewardRunnerConfig, RewardTermConfig, RlConfig, SourceConfig
from headrace.errors import ConfigError, ModelError
from headrace.model.device import choose_device, choose_dtype, free_bytes
from headrace.model.load import LanguageModel, load_model, model_folder, no_progress_bars
from headrace.model.memory import num_parameters, read_model_dims
from headrace.model.quantized import Quantization, choose_quantizer
from headrace.names import REWARD_MODEL
from headrace.process.watchdog import watching_start
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import UserRewardSpec, check_importable, sandboxed_term, trusted_term
from headrace.service.evaluation.completion_rewards import RewardRule, reward_rule
from headrace.service.evaluation.reference_scoring import Score
from headrace.service.http.auth import Access
from headrace.service.http.server import check_reach
from headrace.service.reference.scoring_app import make_reference_app
from headrace.service.reference.scoring_client import RemoteReference
from headrace.service.settings import ReferenceModel, ServeConfig
from headrace.storage.adapter_files import find_adapter
from headrace.train.frozen_cache import ReferenceModels
from headrace.wiring.build.models import fuse_cuda_layers
from headrace.wiring.build.rewards import make_terms

logger = logging.getLogger(__name__)
REWARD_S = 600.0  # most time that one group takes a reward


@contextlib.contextmanager
def open_references(config: ServeConfig, *, vocabulary: int = 0) -> Iterator[dict[str, Score]]:
    """Yield the scoring function of each reference by name. A model loads when it is first used; one that has fewer
    tokens than `vocabulary` is refused then. Raises ConfigError."""
    local = {reference.name: reference for reference in config.references if reference.path}
    _check_quantizers(config, local)
    models = ReferenceModels(
        partial(_load, config, local, vocabulary),
        limit=config.engine.reference_models,
        room_bytes=config.engine.reference_bytes or None,
        micro_batch_tokens=config.engine.micro_batch_tokens,
    )
    named: dict[str, Score] = {name: partial(models.score, name) for name in local}
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_progress_bars())
        for reference in config.references:
            if reference.url:
                remote = RemoteReference(reference.url, key=os.environ.get(reference.key_env))
                stack.callback(remote.close)
                named[reference.name] = remote.score
        yield named


def _check_quantizers(config: ServeConfig, references: Mapping[str, ReferenceModel]) -> None:
    """Raise ConfigError before the server starts if a quantizer is not installed or cannot work on this machine."""
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    for name, reference in references.items():
        if (quantization := _quantization(reference)) is not None:
            try:
                choose_quantizer(quantization, device=torch.device(device), dtype=dtype)
            except ModelError as exc:
                raise ConfigError(f"reference '{name}': {exc}") from exc


def _load(config: ServeConfig, references: Mapping[str, ReferenceModel], vocabulary: int, name: str) -> LanguageModel:
    reference, device = references[name], choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    quantization = _quantization(reference)
    if reference.bits == "auto":
        room = config.engine.reference_bytes or free_bytes(device)
        quantization = _quantization_that_fits(reference, dtype, room_bytes=room)
    lm = load_model(reference.path, device=device, dtype=dtype, quantization=quantization)
    if lm.vocabulary < vocabulary:
        raise ModelError(
            f"the reference model '{name}' knows {lm.vocabulary} tokens, and the model that is served {vocabulary}: "
            "choose one with the same tokenizer"
        )
    if quantization is None:
        fuse_cuda_layers(lm)
    return lm


def _quantization(reference: ReferenceModel) -> Quantization | None:
    """Return what the settings say; "auto" is decided when the model is loaded, and may need eight bits."""
    if reference.bits == "full":
        return None
    return Quantization(bits=8 if reference.bits == "auto" else reference.bits, quantizer=reference.quantizer)


def _quantization_that_fits(
    reference: ReferenceModel, dtype: torch.dtype, *, room_bytes: int | None
) -> Quantization | None:
    """Choose eight bits if the model would not fit as it is: the size of its weights, from its config.json, is more
    than `room_bytes`. An adapter stays as it is, because it is merged into its base."""
    if room_bytes is None or find_adapter(reference.path) is not None:
        return None
    size = num_parameters(read_model_dims(model_folder(reference.path))) * dtype.itemsize
    if size <= room_bytes:
        return None
    logger.warning(
        "the reference model '%s' needs %.1f GiB and %.1f GiB are free: its weights are kept in 8 bits; "
        'bits = "full" would keep them as they are',
        reference.name,
        size / 2**30,
        room_bytes / 2**30,
    )
    return _quantization(reference)


def make_rewards(config: ServeConfig, lm: LanguageModel) -> dict[str, RewardRule]:
    """Load the functions of [[rewards]], which read decoded tokens. Raises ConfigError if one cannot be imported."""
    judges = {}
    for reward in config.rewards:
        user = UserRewardSpec(name=reward.name, spec=reward.fn, kwargs=reward.kwargs)
        if reward.trusted:
            term = trusted_term(user)
        else:
            with ThreadPoolExecutor(max_workers=1) as aside:  # it has an event loop of its own
                aside.submit(check_importable, user, SandboxSettings()).result()
            term = sandboxed_term(user, SandboxSettings())
        judges[reward.name] = reward_rule(term, partial(_decoded, lm))
    return judges


def _decoded(lm: LanguageModel, tokens: object) -> str:
    return str(lm.tokenizer.decode(tokens, skip_special_tokens=True))


def make_reward_runners(config: ServeConfig) -> dict[str, GroupRewardRunner]:
    """Load the reward models of [[reward_models]] and the rewards of [[rewards]], which may be built-in ones here, as
    a run does. Raises ConfigError and ModelError."""
    terms = [
        (RewardTermConfig(fn=reward.fn, name=reward.name, kwargs=dict(reward.kwargs)), reward.trusted)
        for reward in config.rewards
    ]
    terms += [
        (RewardTermConfig(fn=REWARD_MODEL, name=model.name, path=model.path), False) for model in config.reward_models
    ]
    runners = {}
    for term, trusted in terms:
        rl = RlConfig(
            steps=1,
            tasks=(SourceConfig(type="env"),),
            rewards=(term,),
            reward_runner=RewardRunnerConfig(type="inprocess" if trusted else "process"),
        )
        model = ModelConfig(device=config.model.device, dtype=config.model.dtype)
        (made,) = make_terms(Config(model=model, rl=rl), None)
        assert term.name is not None
        runners[term.name] = GroupRewardRunner([made], timeout_s=REWARD_S, group_timeout_s=REWARD_S)
    return runners


@contextlib.contextmanager
def open_reference_server(config: ServeConfig) -> Iterator[tuple[FastAPI, tuple[str, ...]]]:
    """Yield the application that scores, and the names of its models and rewards: those of [[references]],
    [[reward_models]] and [[rewards]], or the model of [model]."""
    check_reach(config.serve.host, has_keys=bool(config.keys))
    if not (config.references or config.reward_models or config.rewards):
        if config.model.path == "tiny":
            raise ConfigError("there is no model to score with: name some in [[references]], or write model.path")
        name = Path(config.model.path).name
        config = replace(config, references=(ReferenceModel(name=name, path=config.model.path),))
    with watching_start("the start of the server"):
        runners = make_reward_runners(config)
    with open_references(config) as named:
        app = make_reference_app(named, Access(config.keys), rewards=runners, body_bytes=config.limits.body_bytes)
        yield app, tuple(sorted({*named, *runners}))
