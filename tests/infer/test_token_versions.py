"""The real engine under weights that write their own version: every token comes from the weights its label names."""

import asyncio
import copy

import pytest
import torch

from headrace.model.load import LanguageModel, fingerprint, prepare
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.rollout.publisher import Publisher
from headrace.types import Completion, SharedWeights
from support.engines import VOCABULARY, opened, request_of, small_model

FIRST, LONG, SHORT = 20, 400, 8


def write_version(lm: LanguageModel, version: int) -> None:
    """Weights that say token FIRST + version after anything.

    Layers add nothing and the last norm keeps the first coordinate alone, so logits are the first column of the (tied)
    embedding times a constant: 1 for the token of the version, 0.1 for all others.
    """
    with torch.no_grad():
        for name, parameter in lm.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embedding = lm.model.get_input_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = 0.1
        embedding[FIRST + version, 0] = 1.0
        norm = lm.model.model.norm.weight
        norm.zero_()
        norm[0] = 20.0


async def through_updates(versions: int) -> list[Completion]:
    """Sequences that are longer than the time between updates; short ones in between make sure that all go on."""
    trained = small_model()
    write_version(trained, 0)
    own = prepare(copy.deepcopy(trained.model), trained.tokenizer, source="tests")
    with opened(own, max_num_seqs=8, source=trained) as engine:
        publisher = Publisher([engine])
        prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
        requests = [request_of(prompt, LONG) for prompt in prompts]
        open_calls = [asyncio.create_task(PartialEpisode().sample(engine, request)) for request in requests]
        for version in range(1, versions + 1):
            await engine.sample(request_of([9, 9], SHORT, seed=version))
            write_version(trained, version)  # the engine has a copy: nothing changes before it is published
            async with publisher.publish(SharedWeights(fingerprint=fingerprint(trained.model.named_parameters()))):
                assert engine.version == version
        return [await call for call in open_calls]


def test_labels_of_the_embedded_engine_are_true_through_interruptions() -> None:
    assert FIRST + 4 < VOCABULARY
    for completion in asyncio.run(through_updates(4)):
        assert len(completion.tokens) == LONG
        assert (completion.tokens - FIRST).tolist() == completion.versions.tolist()
        assert set(completion.versions.tolist()) == {0, 1, 2, 3, 4}, "each version had its turn"
        assert completion.sampler_logprobs.tolist() == pytest.approx([0.0] * LONG, abs=1e-3)
