"""Pictures on CUDA: sampler, trainer and gradients of every type against float32 and against each other."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.model import load as load_module
from headrace.model.cuda import available
from headrace.model.load import LanguageModel, load_model
from headrace.model.vision.tower import encode_images
from headrace.pictures import PlacedImage
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Completion,
    Datum,
    IntArray,
    SampleRequest,
    SamplingParams,
    float_array,
    int_array,
)
from support.vision_models import TYPES, VisionFolder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
BF16 = 2**-8
SIZES = {"width": 128, "layers": 3, "tower_width": 64, "tower_layers": 3}
DECODED_IN_GRAPHS, KV_TOKENS = ("qwen3_vl", "smolvlm", "idefics3"), 16 * 256
ROUNDING = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # of log-probs, in the mean
Placed = tuple[IntArray, tuple[PlacedImage, ...]]


@pytest.fixture(autouse=True)
def every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare types that are not listed as running on CUDA too."""
    monkeypatch.setattr(load_module, "check_device", lambda *_: None)


@pytest.fixture(scope="module", params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionFolder:
    return VisionFolder(tmp_path_factory.mktemp(request.param), request.param, **SIZES)


def load(
    folder: VisionFolder, device: str, dtype: torch.dtype, *, vision: str = "frozen", fused: bool = True
) -> LanguageModel:
    lm = load_model(folder.path, device=device, dtype=dtype, vision=vision)
    if device == "cuda" and available() and fused:
        from headrace.model.cuda.layers import fuse_layers  # needs Triton

        fuse_layers(lm.model)
    return lm


def text(length: int, first: int) -> list[int]:
    return [8 + (7 * index + first) % 40 for index in range(length)]


def sequences(folder: VisionFolder) -> list[Placed]:
    """Two share a prompt and a picture, and pictures differ in size, so that their lengths do."""
    wide, high, small = folder.image(1), folder.image(2, 48, 64), folder.image(3, 32, 48)
    prompt = text(20, 3)
    return [
        folder.place([prompt, wide, text(32, 5)]),
        folder.place([prompt, wide, text(29, 9)]),
        folder.place([text(4, 1), high, text(3, 2), small, text(28, 2)]),
        folder.place([text(35, 2)]),
    ]


def data_of(batch: Sequence[Placed]) -> list[Datum]:
    data = []
    for index, (tokens, images) in enumerate(batch):
        weights = np.random.default_rng(index).normal(size=len(tokens) - 1) / 100
        arrays = {"weights": float_array(weights)}
        data.append(Datum(inputs=tokens[:-1], targets=tokens[1:], arrays=arrays, images=images))
    return data


def log_probs(lm: LanguageModel, batch: Sequence[Placed], *, micro_batch_tokens: int = 8192) -> list[np.ndarray]:
    backend = TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)
    try:
        return list(backend.forward(data_of(batch), CROSS_ENTROPY).result().logprobs)
    finally:
        backend.close()


def gradients(lm: LanguageModel, batch: Sequence[Placed], *, micro_batch_tokens: int = 8192) -> dict[str, Tensor]:
    backend = TorchBackend(lm, micro_batch_tokens=micro_batch_tokens)
    try:
        backend.forward_backward(data_of(batch), CROSS_ENTROPY).result()
        return {name: value.double().cpu() for name, value in backend.gradients().result().items()}
    finally:
        backend.close()


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    square = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return float((square / sum(float(value.square().sum()) for value in exact.values())) ** 0.5)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_log_probs_are_the_trainers(folder: VisionFolder, dtype: torch.dtype, graphs: bool) -> None:
    """Prompts are prefilled in chunks that end inside of pictures, or whole beside graphs; the trainer packs them."""
    if graphs and folder.model_type not in DECODED_IN_GRAPHS:
        pytest.skip("decoded by its modules")
    lm, batch = load(folder, "cuda", dtype), sequences(folder) * 4
    decoder = graph_decoder(lm, max_num_seqs=16, kv_tokens=KV_TOKENS, graphs=graphs)
    assert (decoder is not None) == graphs

    async def sample() -> list[Completion]:
        engine = EmbeddedEngine(
            lm, max_num_seqs=16, kv_tokens=KV_TOKENS, prefill_chunk_tokens=17, prefill_tokens=64, decoder=decoder
        )
        try:
            params = [SamplingParams(max_tokens=20, seed=seed, stop_tokens=()) for seed in range(len(batch))]
            return list(
                await asyncio.gather(
                    *(
                        engine.sample(SampleRequest(prompt=tokens, images=images, params=one))
                        for (tokens, images), one in zip(batch, params, strict=True)
                    )
                )
            )
        finally:
            engine.close()

    completions = asyncio.run(sample())
    whole = [
        (int_array(np.concatenate([tokens, out.tokens])), images)
        for (tokens, images), out in zip(batch, completions, strict=True)
    ]
    pairs = zip(log_probs(lm, whole), completions, strict=True)
    differences = np.concatenate([np.abs(scored[-20:] - out.sampler_logprobs) for scored, out in pairs])
    print(
        f"{folder.model_type} {dtype}: mean |sampler - trainer| {differences.mean():.2e}, max {differences.max():.2e}"
    )
    assert differences.mean() <= ROUNDING[dtype]


def test_gradients_are_those_of_float32(folder: VisionFolder) -> None:
    """Of text half and tower: in float32 those of the CPU, in bfloat16 as close to them as transformers' modules."""
    batch = sequences(folder)
    exact = gradients(load(folder, "cpu", torch.float32, vision="train"), batch)
    assert distance(gradients(load(folder, "cuda", torch.float32, vision="train"), batch), exact) < 1e-4
    plain, fast = (
        distance(gradients(load(folder, "cuda", torch.bfloat16, vision="train", fused=fused), batch), exact)
        for fused in (False, True)
    )
    print(f"{folder.model_type}: gradients in bfloat16 {fast:.4f} from those in float32, of modules {plain:.4f}")
    assert fast < max(1.2 * plain, 4 * BF16)
    assert plain < 0.2  # else there is nothing to compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_give_the_numbers_of_single_ones(folder: VisionFolder, dtype: torch.dtype) -> None:
    lm, batch = load(folder, "cuda", dtype, vision="train"), sequences(folder)
    packed, alone = (np.concatenate(log_probs(lm, batch, micro_batch_tokens=size)) for size in (8192, 1))
    assert np.abs(packed - alone).mean() <= ROUNDING[dtype]
    tolerance = 1e-4 if dtype == torch.float32 else 16 * BF16  # both have rounding of their own, in tower and text
    together, single = (gradients(lm, batch, micro_batch_tokens=size) for size in (8192, 1))
    assert distance(together, single) < tolerance


def test_pictures_together_have_the_features_of_single_ones(folder: VisionFolder) -> None:
    """Of one size in one call of cuDNN, of several sizes in the variable-length kernel."""
    model = load(folder, "cuda", torch.bfloat16).model
    same = [folder.image(seed) for seed in range(5)]
    for images in (same, [*same, folder.image(7, 48, 64), folder.image(8, 32, 48)]):
        with torch.no_grad():
            together, alone = (encode_images(model, images, together=count) for count in (len(images), 1))
        for left, right in zip(together, alone, strict=True):
            for a, b in zip(left.tensors, right.tensors, strict=True):
                error = torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double())
                assert float(error) < 4 * BF16  # two kernels, over three layers
