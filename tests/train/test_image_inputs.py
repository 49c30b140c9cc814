"""The tower computes each image once, features are forgotten when its weights change, and bad images are refused."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.errors import BackendError, ModelError, SamplerError
from headrace.infer.engine import EmbeddedEngine
from headrace.infer.hf_generate import GenerateSampler
from headrace.infer.sampling import refuse_images
from headrace.model.load import LanguageModel, full_copy, load_model, recompute_layers
from headrace.model.tiny import save_tiny
from headrace.model.value_head import with_scalar_head
from headrace.pictures import ModelImage
from headrace.train.frozen_model import FrozenScorer
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    SampleRequest,
    SamplingParams,
    SharedWeights,
    float_array,
    int_array,
)
from support.vision_models import VisionFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> VisionFolder:
    return VisionFolder(tmp_path_factory.mktemp("vision"), "qwen3_vl", layers=1, tower_layers=1)


def make_datum(folder: VisionFolder, parts: Sequence[Sequence[int] | ModelImage]) -> Datum:
    tokens, images = folder.place(parts)
    weights = float_array(np.ones(len(tokens) - 1))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": weights}, images=images)


def test_a_frozen_tower_computes_an_image_once_however_often_it_is_trained_on(folder: VisionFolder) -> None:
    """In four micro-batches of two requests, before and after an update."""
    backend = TorchBackend(load_model(folder.path, vision="frozen"), micro_batch_tokens=24)
    data = [make_datum(folder, [[9, 10 + index], folder.image(index % 2), [11, 12]]) for index in range(4)]
    before = backend.forward(data, CROSS_ENTROPY).result().logprobs
    backend.forward_backward(data, CROSS_ENTROPY)
    backend.optim_step(Adam(learning_rate=1e-2)).result()
    after = backend.forward(data, CROSS_ENTROPY).result().logprobs
    assert backend._micro_batches.images.computed == 2
    assert np.abs(after[0] - before[0]).max() > 1e-3
    backend.close()


def test_micro_batches_and_recomputation_do_not_change_the_gradient_of_a_trained_tower(folder: VisionFolder) -> None:
    data = [make_datum(folder, [[9, 10 + index], folder.image(index % 3), [11, 12]]) for index in range(5)]
    gradients = []
    for budget in (16, 4096):
        lm = load_model(folder.path, vision="train")
        if budget == 16:
            recompute_layers(lm.model)
        backend = TorchBackend(lm, micro_batch_tokens=budget)
        backend.forward_backward(data, CROSS_ENTROPY).result()
        gradients.append(backend.gradients().result())
        backend.close()
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-5), name


def sample(engine: EmbeddedEngine, folder: VisionFolder) -> Completion:
    tokens, images = folder.place([[9, 10], folder.image(1), [11, 12]])
    params = SamplingParams(max_tokens=3, seed=1, stop_tokens=())
    return asyncio.run(engine.sample(SampleRequest(prompt=tokens, images=images, params=params)))


@pytest.mark.parametrize("copied", [False, True])
def test_the_engine_forgets_images_when_weights_change(folder: VisionFolder, copied: bool) -> None:
    """The tower itself is changed, as training does that: what is sampled then is what a fresh engine samples."""
    lm = load_model(folder.path, vision="train")
    engine = EmbeddedEngine(full_copy(lm) if copied else lm, source=lm if copied else None, max_num_seqs=8)
    first = sample(engine, folder)
    with torch.no_grad():
        for parameter in lm.model.base_model.visual.parameters():
            parameter.add_(0.3)
    asyncio.run(engine.load(SharedWeights(fingerprint=""), 1))
    second = sample(engine, folder)
    engine.close()
    fresh = EmbeddedEngine(lm, max_num_seqs=8)
    expected = sample(fresh, folder)
    fresh.close()
    assert second.tokens.tolist() == expected.tokens.tolist()
    assert second.raw_logprobs.tobytes() == expected.raw_logprobs.tobytes()
    assert first.raw_logprobs.tobytes() != second.raw_logprobs.tobytes()


def test_a_trained_towers_features_follow_its_updates(folder: VisionFolder) -> None:
    """Also when an update is scaled back, and when a state is loaded."""
    lm = load_model(folder.path, vision="train")
    backend = TorchBackend(lm)
    data = [make_datum(folder, [[9, 10], folder.image(1), [11, 12]])]
    state = backend.read_state().result()

    def score() -> bytes:
        return backend.forward(data, CROSS_ENTROPY).result().logprobs[0].tobytes()

    def fresh() -> bytes:
        return FrozenScorer(lm).score(data)[0].tobytes()

    first = score()
    assert first == fresh()
    backend.forward_backward(data, CROSS_ENTROPY)
    backend.optim_step(Adam(learning_rate=1e-2)).result()
    second = score()
    assert second == fresh() != first
    backend.write_state(state).result()
    assert score() == first
    backend.close()


def test_what_cannot_be_used_is_refused_in_one_sentence(folder: VisionFolder, tmp_path: Path) -> None:
    good = make_datum(folder, [[9, 10], folder.image(1), [11, 12]])
    image = good.images[0]
    lm = load_model(folder.path, vision="frozen")
    backend = TorchBackend(lm)
    outside = replace(good, images=(replace(image, at=int_array(image.at + 3)),))
    split = replace(good, images=(replace(image, at=int_array([0, *image.at[1:]])),))
    for bad, reason in (
        (outside, "outside of"),
        (split, "side by side"),
        (replace(good, images=(image, image)), "the same tokens"),
    ):
        with pytest.raises(BackendError, match=reason):
            backend.forward([bad], CROSS_ENTROPY).result()
    backend.close()
    with pytest.raises(ModelError, match="no scalar head"):
        with_scalar_head(lm)
    save_tiny(tmp_path / "text", words=["a"], width=32, layers=1)
    with pytest.raises(ModelError, match="no vision tower"):
        load_model(tmp_path / "text", vision="frozen")
    text = load_model(tmp_path / "text")
    with pytest.raises(BackendError, match="without a vision tower"):
        forward_once(text, replace(good, inputs=good.inputs % 5, targets=good.targets % 5))
    request = SampleRequest(
        prompt=int_array(good.inputs % 5), images=good.images, params=SamplingParams(max_tokens=1, seed=0)
    )
    engine = EmbeddedEngine(text, max_num_seqs=8)
    with pytest.raises(SamplerError, match="without a vision tower"):
        asyncio.run(engine.sample(request))
    engine.close()
    with pytest.raises(SamplerError, match="a vLLM or SGLang server is not given"):
        refuse_images(request, "a vLLM or SGLang server")
    generate = GenerateSampler(text.model, text.tokenizer, eos_tokens=text.eos_tokens)
    with pytest.raises(SamplerError, match="transformers' generate is not given"):
        asyncio.run(generate.sample(request))


def forward_once(lm: LanguageModel, datum: Datum) -> None:
    backend = TorchBackend(lm)
    try:
        backend.forward([datum], CROSS_ENTROPY).result()
    finally:
        backend.close()


def test_a_template_beside_the_processor_is_the_tokenizers(folder: VisionFolder, tmp_path: Path) -> None:
    """As older folders have it."""
    shutil.copytree(folder.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    assert load_model(tmp_path).tokenizer.chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_model(tmp_path).tokenizer.chat_template == "{{ messages }}"
