"""A real vLLM that serves a model with tied embeddings, whose head it packs once and then keeps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import SamplerError
from headrace.infer.servers.launch import LaunchedServer
from headrace.infer.servers.proof import trainer_score
from headrace.model.load import LanguageModel, fingerprint
from headrace.types import SampleRequest, SamplingParams, int_array
from support import real_vllm
from support.real_vllm import PYTHON, Trained, launched, servable_model, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="HEADRACE_VLLM_PYTHON names no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LaunchedServer]]:
    folder = tmp_path_factory.mktemp("tied")
    lm = servable_model(tied=True, seed=5)
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    with launched(folder, tmp_path_factory.mktemp("tied_logs")) as running:
        yield running


async def difference(trainer: Trained) -> float:
    """The largest difference between log-probs of a sample and the trainer's."""
    params = SamplingParams(max_tokens=50, stop_tokens=(), seed=1)
    completion = await trainer.sampler.sample(SampleRequest(prompt=int_array([3, 7, 4]), params=params))
    sequence = int_array([3, 7, 4, *completion.tokens.tolist()])
    [wanted] = await trainer_score(trainer.backend)([sequence], 1.0)
    return float(np.abs(wanted[2:] - completion.sampler_logprobs).max())


@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_tied_model_follows_weights_that_have_a_head_of_their_own(
    tied: list[LaunchedServer], broadcast: bool
) -> None:
    async with trained(tied, lm=servable_model(tied=True), broadcast=broadcast) as trainer:
        for version in (1, 2):
            await trainer.train(0.1)
            await trainer.publish(version)
            assert await difference(trainer) < 1e-4


async def test_a_server_that_keeps_the_old_head_is_refused(
    tied: list[LaunchedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_tied(lm: LanguageModel, folder: Path) -> str:
        lm.model.save_pretrained(folder)
        return fingerprint(lm.model.named_parameters())

    monkeypatch.setattr(real_vllm, "write_model", write_tied)
    with pytest.raises(SamplerError, match="serve a copy whose head is a tensor of its own"):
        async with trained(tied, lm=servable_model(tied=True, seed=7)):
            pass
