"""Compute digests of what a step trained on and of its numbers; equal digests mean equal bits."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.observe.json_lines import json_line
from headrace.observe.sinks.jsonl import UNREPRODUCIBLE
from headrace.types import CreditedEpisode, Episode, Group

DIGEST_BYTES = 16


def numbers_digest(values: Mapping[str, float]) -> str:
    """Digest a record of metrics without what a clock measured, which no repetition gives again."""
    measured = {name: float(value) for name, value in values.items() if not name.startswith(UNREPRODUCIBLE)}
    return _hash(json_line(measured, sort_keys=True).encode())


def rollouts_digest(groups: Sequence[Group], episodes: Sequence[CreditedEpisode]) -> str:
    """Digest everything that a step trains on: groups and their failures, tokens, log-probs, rewards and advantages."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for group in groups:
        failed = [(failed.id, failed.reason) for failed in group.failed]
        digest.update(repr((group.id, group.task.id, failed)).encode("utf-8", "surrogatepass"))
    for credited in episodes:
        scored = credited.scored
        digest.update(repr((credited.group_id, *_identity(scored.episode))).encode("utf-8", "surrogatepass"))
        digest.update(_floats([scored.reward.total, *credited.advantages]))
        for step in scored.episode.steps:
            completion = step.completion
            for array in (step.prompt, completion.tokens, completion.sampler_logprobs, completion.versions):
                digest.update(len(array).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Digest the contents of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def _identity(episode: Episode) -> tuple[Any, ...]:
    return episode.id, episode.task.id, episode.seed, episode.truncated, len(episode.steps)


def _floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype=np.float64).tobytes()


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
