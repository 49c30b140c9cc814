"""Open the frozen models and reward functions of a serve.toml by name, and the process that only scores."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from fastapi import FastAPI

from headrace.errors import ConfigError, ModelError
from headrace.model.device import choose_device, choose_dtype
from headrace.model.load import LanguageModel, load_model, no_progress_bars
from headrace.model.quantized import Quantization, choose_quantizer
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import UserRewardSpec, check_importable, sandboxed_term, trusted_term
from headrace.service.evaluation.completion_rewards import RewardRule, reward_rule
from headrace.service.evaluation.reference_scoring import Score
from headrace.service.http.auth import Access
from headrace.service.http.server import check_reach
from headrace.service.reference.scoring_app import make_reference_app
from headrace.service.reference.scoring_client import RemoteReference
from headrace.service.settings import ReferenceModel, ServeConfig
from headrace.train.frozen_cache import ReferenceModels
from headrace.wiring.build.models import fuse_cuda_layers


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
    lm = load_model(reference.path, device=device, dtype=dtype, quantization=_quantization(reference))
    if lm.vocabulary < vocabulary:
        raise ModelError(
            f"the reference model '{name}' knows {lm.vocabulary} tokens, and the model that is served {vocabulary}: "
            "choose one with the same tokenizer"
        )
    if reference.bits is None:
        fuse_cuda_layers(lm)
    return lm


def _quantization(reference: ReferenceModel) -> Quantization | None:
    return None if reference.bits is None else Quantization(bits=reference.bits, quantizer=reference.quantizer)


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


@contextlib.contextmanager
def open_reference_server(config: ServeConfig) -> Iterator[tuple[FastAPI, tuple[str, ...]]]:
    """Yield the application that scores, and the names of its models: those of [[references]], or that of [model]."""
    check_reach(config.serve.host, has_keys=bool(config.keys))
    if not config.references:
        if config.model.path == "tiny":
            raise ConfigError("there is no model to score with: name some in [[references]], or write model.path")
        name = Path(config.model.path).name
        config = replace(config, references=(ReferenceModel(name=name, path=config.model.path),))
    with open_references(config) as named:
        yield make_reference_app(named, Access(config.keys), body_bytes=config.limits.body_bytes), tuple(sorted(named))
