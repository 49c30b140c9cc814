"""The fast forward of vision towers computes what transformers' own does; here without kernels, in float32."""

from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.model.load import load_model
from headrace.model.vision.cuda_tower import attend_images, embed_patches, fuse_tower_module
from headrace.model.vision.tower import encode_images
from support.vision_models import TYPES, VisionFolder


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("ragged", [False, True])
def test_features_and_gradients_are_transformers_own(model_type: str, ragged: bool, tmp_path: Path) -> None:
    folder = VisionFolder(tmp_path, model_type)
    images = [folder.image(1), folder.image(2), *([folder.image(3, 32, 64), folder.image(4, 64, 64)] if ragged else [])]
    found = []
    for fast in (False, True):
        model = load_model(folder.path, vision="train").model
        if fast:
            before = sum("forward" in vars(module) for module in model.modules())
            for module in model.modules():
                fuse_tower_module(module)
            assert sum("forward" in vars(module) for module in model.modules()) > before
        features = encode_images(model, images, together=len(images) if fast else 1)
        total = sum((tensor.sin().sum() for one in features for tensor in one.tensors), start=torch.zeros(()))
        total.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append(([tensor.detach() for one in features for tensor in one.tensors], gradients))
    (plain, plain_gradients), (fast_features, fast_gradients) = found
    for left, right in zip(plain, fast_features, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-5)
    assert plain_gradients.keys() == fast_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("lengths", [(16, 16, 16), (16, 4, 9)])
def test_images_see_themselves_alone(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    found = attend_images(query, key, value, ends, 0.3)
    start = 0
    for length in lengths:
        q, k, v = (states[start : start + length].transpose(0, 1) for states in (query, key, value))
        exact = torch.softmax(0.3 * q @ k.transpose(1, 2), dim=-1) @ v
        torch.testing.assert_close(found[start : start + length], exact.transpose(0, 1))
        start += length


@pytest.mark.parametrize("dims", [2, 3])
def test_patches_are_embedded_as_by_the_convolution(dims: int) -> None:
    kind = nn.Conv2d if dims == 2 else nn.Conv3d
    kernel, sizes = ((4, 2), (9, 6)) if dims == 2 else ((2, 4, 3), (4, 8, 7))  # what is left over is left out
    conv = kind(3, 5, kernel_size=kernel, stride=kernel).double()
    pixels = torch.randn(2, 3, *sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(embed_patches(conv, pixels), conv(pixels))


def test_other_convolutions_stay() -> None:
    for conv in (nn.Conv2d(3, 4, 3, stride=1), nn.Conv2d(3, 4, 3, stride=3, padding=1), nn.Conv1d(3, 4, 3, stride=3)):
        fuse_tower_module(conv)
        assert "forward" not in vars(conv)
