"""Every vision-language type computes what transformers computes of sequences with pictures; others are refused."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import PeftModel

from headrace.config.schema import ALL_LINEAR
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import load_model
from headrace.model.lora import add_lora, lora_layers, save_adapter
from headrace.model.vision.kinds import KINDS, text_parameters
from headrace.names import VISION_TYPES
from headrace.pictures import PlacedImage
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Completion,
    Datum,
    IntArray,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)
from support.vision_models import TYPES, VisionFolder

Sequence = tuple[IntArray, tuple[PlacedImage, ...]]


@pytest.fixture(scope="module", params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionFolder:
    return VisionFolder(tmp_path_factory.mktemp(request.param), request.param)


def text(length: int, first: int) -> list[int]:
    return [8 + (7 * index + first) % 40 for index in range(length)]


def sequences(folder: VisionFolder) -> list[Sequence]:
    """The first two share a prompt and a picture; the third has another picture at the same place."""
    wide, high = folder.image(1), folder.image(2, 48, 64)
    prompt = text(20, 3)
    return [
        folder.place([prompt, wide, text(12, 5)]),
        folder.place([prompt, wide, text(9, 9)]),
        folder.place([prompt, high, text(12, 5)]),
        folder.place([text(4, 1), high, text(3, 2), wide, text(8, 2)]),
        folder.place([text(15, 2)]),
    ]


def datum(tokens: IntArray, images: tuple[PlacedImage, ...]) -> Datum:
    weights = float_array(np.ones(len(tokens) - 1))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": weights}, images=images)


def train_once(backend: TorchBackend, data: list[Datum]) -> None:
    backend.forward_backward(data, CROSS_ENTROPY)
    backend.optim_step(Adam(learning_rate=1e-2)).result()


def bits(arrays: tuple[npt.NDArray[np.float32], ...]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def their_logprobs(
    folder: VisionFolder, model: object, tokens: IntArray, images: tuple[PlacedImage, ...]
) -> torch.Tensor:
    logits = model(**folder.inputs(tokens, images)).logits[0, :-1].float()  # type: ignore[operator]
    following = torch.from_numpy(np.array(tokens[1:])).long()
    return torch.log_softmax(logits, dim=-1).gather(1, following[:, None])[:, 0]


def test_every_type_is_compared_here() -> None:
    assert set(TYPES) == set(KINDS) == set(VISION_TYPES)


@pytest.mark.parametrize("mode", ["train", "frozen"])
def test_logprobs_and_gradients_equal_transformers_own(folder: VisionFolder, mode: str) -> None:
    """Over shared prompts with pictures, of every parameter; a frozen tower has no gradient."""
    lm = load_model(folder.path, vision=mode)
    backend = TorchBackend(lm)
    try:
        out = backend.forward_backward([datum(*sequence) for sequence in sequences(folder)], CROSS_ENTROPY).result()
        ours = backend.gradients().result()
    finally:
        backend.close()
    plain = folder.theirs()
    for sequence, logprobs in zip(sequences(folder), out.logprobs, strict=True):
        expected = their_logprobs(folder, plain, *sequence)
        assert np.allclose(logprobs, expected.detach().numpy(), atol=1e-5)
        (-expected.sum()).backward()
    names = text_parameters(plain)
    for name, parameter in plain.named_parameters():
        if mode == "frozen" and name not in names:
            assert name not in ours
        elif parameter.grad is None:
            assert name not in ours or not ours[name].any()
        else:
            scale = float(torch.linalg.vector_norm(parameter.grad))
            assert torch.linalg.vector_norm(ours[name] - parameter.grad) <= 1e-4 * scale + 1e-5, name
    trained = sum(parameter.grad is not None for name, parameter in plain.named_parameters() if name not in names)
    assert trained > 10  # the comparison has seen the tower


async def sample_all(engine: EmbeddedEngine, batch: list[Sequence], *, together: bool = True) -> list[Completion]:
    requests = [
        SampleRequest(prompt=tokens, images=images, params=SamplingParams(max_tokens=12, seed=index, stop_tokens=()))
        for index, (tokens, images) in enumerate(batch)
    ]
    if together:
        return list(await asyncio.gather(*[engine.sample(request) for request in requests]))
    return [await engine.sample(request) for request in requests]


def their_tail(folder: VisionFolder, model: object, sequence: Sequence, out: Completion) -> npt.NDArray[np.float32]:
    tokens, images = sequence
    whole = int_array(np.concatenate([tokens, out.tokens]))
    with torch.no_grad():
        result: npt.NDArray[np.float32] = their_logprobs(folder, model, whole, images)[len(tokens) - 1 :].numpy()
    return result


def test_the_engine_samples_with_transformers_own_logprobs_and_the_same_bits_alone(folder: VisionFolder) -> None:
    """Chunks that end inside pictures, shared prompts, several pictures, text alone; the trainer agrees too."""
    lm = load_model(folder.path, vision="frozen")
    batch = sequences(folder)

    async def play() -> tuple[list[Completion], list[Completion], int, int]:
        engine = EmbeddedEngine(lm, max_num_seqs=8, prefill_chunk_tokens=7, prefill_tokens=16)
        try:
            together = await sample_all(engine, batch)
            counters = engine.counters.shared, engine.counters.prefilled
            alone = EmbeddedEngine(lm, max_num_seqs=8)
            try:
                return together, await sample_all(alone, batch, together=False), *counters
            finally:
                alone.close()
        finally:
            engine.close()

    together, alone, shared, _ = asyncio.run(play())
    if folder.model_type != "qwen3_5":  # whose states are shared where prompts end, and nowhere else
        assert shared >= 20 + folder.image(1).num_tokens  # the second has the first one's prompt and picture
    plain = folder.theirs()
    for sequence, out, other in zip(batch, together, alone, strict=True):
        assert out.tokens.tolist() == other.tokens.tolist()
        assert out.sampler_logprobs.tobytes() == other.sampler_logprobs.tobytes()
        if folder.reader.image_token not in out.tokens.tolist():  # transformers takes each for a picture's
            assert np.allclose(out.raw_logprobs, their_tail(folder, plain, sequence, out), atol=1e-5)
    whole = [int_array(np.concatenate([tokens, out.tokens])) for (tokens, _), out in zip(batch, together, strict=True)]
    backend = TorchBackend(lm)
    data = [datum(tokens, images) for tokens, (_, images) in zip(whole, batch, strict=True)]
    trained = backend.forward(data, CROSS_ENTROPY).result().logprobs
    backend.close()
    for out, logprobs in zip(together, trained, strict=True):
        assert np.allclose(logprobs[-12:], out.sampler_logprobs, atol=1e-5)


def test_another_picture_at_the_same_place_gives_other_logprobs(folder: VisionFolder) -> None:
    """The same tokens: only the pictures say that nothing may be shared."""
    first = folder.place([text(20, 3), folder.image(1), text(5, 5)])
    second = folder.place([text(20, 3), folder.image(7), text(5, 5)])
    assert first[0].tolist() == second[0].tolist()

    async def play() -> list[Completion]:
        engine = EmbeddedEngine(load_model(folder.path, vision="frozen"), max_num_seqs=8)
        try:
            params = SamplingParams(max_tokens=4, seed=5, stop_tokens=())
            return [
                await engine.sample(SampleRequest(prompt=tokens, images=images, params=params))
                for tokens, images in (first, second)
            ]
        finally:
            engine.close()

    plain = folder.theirs()
    for sequence, out in zip((first, second), asyncio.run(play()), strict=True):
        assert np.allclose(out.raw_logprobs, their_tail(folder, plain, sequence, out), atol=1e-5)
    assert np.abs(their_tail(folder, plain, first, out) - their_tail(folder, plain, second, out)).max() > 1e-3


def test_an_image_token_outside_of_pictures_is_an_ordinary_token(folder: VisionFolder) -> None:
    """As a model may sample one: alone as transformers embeds it, and behind a picture in trainer and engine alike."""
    stray = [*text(3, 2), folder.reader.image_token, *text(2, 4)]
    lm = load_model(folder.path, vision="frozen")
    backend = TorchBackend(lm)
    tokens, images = folder.place([text(4, 1), folder.image(1), text(2, 2)])
    behind = int_array([*tokens, *stray])
    alone = backend.forward([datum(int_array(stray), ()), datum(behind, images)], CROSS_ENTROPY).result().logprobs
    backend.close()
    with torch.no_grad():
        logits = folder.theirs()(**folder.inputs(int_array(stray), ())).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(len(stray) - 1), stray[1:]].numpy()
    assert np.allclose(alone[0], expected, atol=1e-5)

    async def play() -> Completion:
        engine = EmbeddedEngine(lm, max_num_seqs=8, prefill_chunk_tokens=5)
        try:
            params = SamplingParams(max_tokens=1, seed=0, stop_tokens=())
            request = SampleRequest(prompt=behind, images=images, params=params, score_from=len(tokens))
            return await engine.sample(request)
        finally:
            engine.close()

    scored = asyncio.run(play()).prefix_logprobs
    assert scored is not None
    assert np.allclose(scored, alone[1][len(tokens) - 1 :], atol=1e-5)


def test_adapters_are_on_the_text_half_alone_and_equal_pefts(folder: VisionFolder, tmp_path: Path) -> None:
    lm = load_model(folder.path, vision="frozen")
    names = add_lora(lm.model, rank=3, alpha=5.0, targets=ALL_LINEAR, seed=1)
    half = f".{KINDS[folder.model_type].decoder}."
    assert names
    assert all(half in name for name in names)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in lora_layers(lm.model):
            layer.up.copy_(0.3 * torch.randn(layer.up.shape, generator=generator))
    save_adapter(lm.model, tmp_path, base_model="base")
    plain = PeftModel.from_pretrained(folder.theirs(), tmp_path)
    assert not any("lora" in name and half not in name for name, _ in plain.named_parameters())
    backend = TorchBackend(lm)
    batch = sequences(folder)
    out = backend.forward([datum(*sequence) for sequence in batch], CROSS_ENTROPY).result()
    backend.close()
    with torch.no_grad():
        for sequence, logprobs in zip(batch, out.logprobs, strict=True):
            expected = their_logprobs(folder, plain, *sequence).numpy()
            assert np.allclose(logprobs, expected, rtol=1e-4, atol=1e-4)
            assert np.abs(expected - their_logprobs(folder, folder.theirs(), *sequence).numpy()).max() > 0.05


def test_a_saved_state_loads_in_transformers_with_its_processor(folder: VisionFolder, tmp_path: Path) -> None:
    """After an update of text half and tower; and again here, where it goes on with the same bits."""
    data = [datum(*sequence) for sequence in sequences(folder)]
    lm = load_model(folder.path, vision="train")
    backend = TorchBackend(lm)
    train_once(backend, data)
    backend.save_state(tmp_path / "state").result()
    saved = VisionFolder(tmp_path / "state", folder.model_type, write=False)
    after = backend.forward(data, CROSS_ENTROPY).result()
    with torch.no_grad():
        for sequence, logprobs in zip(sequences(folder), after.logprobs, strict=True):
            assert np.allclose(their_logprobs(folder, saved.theirs(), *sequence).numpy(), logprobs, atol=1e-5)
    assert saved.reader.template_mark == folder.reader.template_mark
    other = TorchBackend(load_model(folder.path, vision="train"))
    other.load_state(tmp_path / "state").result()
    assert bits(other.forward(data, CROSS_ENTROPY).result().logprobs) == bits(after.logprobs)
    train_once(backend, data)
    train_once(other, data)
    assert bits(other.forward(data, CROSS_ENTROPY).result().logprobs) == bits(
        backend.forward(data, CROSS_ENTROPY).result().logprobs
    )
    backend.close()
    other.close()
