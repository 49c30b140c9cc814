"""Compute the features of images with a model's vision tower, and lay them out for a forward pass of the text half.

On a CPU every image is computed by itself, so its features have the same bits whatever other images there are.

Shape letters: N tokens of an image, I image tokens of a forward pass, D width of the text half.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.pictures import ModelImage
from headrace.types import IntArray

KEPT_BYTES = 2**29  # of features that a `FeatureCache` keeps
PASS_BYTES = 3 * 2**27  # of pixels that a GPU computes in one pass: 65,536 patches of Qwen3-VL


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Hold what the text half reads of one image: embeddings, and what is added to the first layers' outputs."""

    embeddings_ND: Tensor
    deep: tuple[Tensor, ...] = ()  # [N, D] for each of the first layers (Qwen3-VL)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.embeddings_ND, *self.deep)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def leaves(self) -> "ImageFeatures":
        """Return the same features as leaves that collect a gradient."""
        embeddings, *deep = (tensor.detach().requires_grad_() for tensor in self.tensors)
        return ImageFeatures(embeddings, tuple(deep))


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a forward pass that stand for images, in ascending order, and their features."""

    rows_I: Tensor
    embeddings_ID: Tensor
    deep: tuple[Tensor, ...]

    def embed(self, embedded_TD: Tensor) -> Tensor:
        """Replace the embeddings of these rows."""
        return embedded_TD.index_copy(0, self.rows_I, self.embeddings_ID.to(embedded_TD.dtype))

    def deep_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments by which the text half of Qwen3-VL takes what is added to its layers.

        transformers has a mask in the place of the rows, which `add_deep_features` reads.
        """
        return {"visual_pos_masks": self.rows_I, "deepstack_visual_embeds": list(self.deep)} if self.deep else {}


def add_deep_features(hidden_1TD: Tensor, rows_I: Tensor, features_ID: Tensor) -> Tensor:
    """Add features to rows of a layer's output, in place of a method of Qwen3-VL that waits for the device."""
    return hidden_1TD.index_add(1, rows_I, features_ID.to(hidden_1TD.dtype)[None])


def encode_images(model: Any, images: Sequence[ModelImage], *, together: int | None = None) -> list[ImageFeatures]:
    """Compute the features of images; differentiable in the tower's weights where gradients are enabled.

    `together`: images of one pass; without it one, or on a GPU as many as have PASS_BYTES.
    """
    tower_weight = next(model.base_model.parameters())
    device, dtype = tower_weight.device, tower_weight.dtype
    compute = _encode_idefics if hasattr(model.base_model, "connector") else _encode_qwen
    features: list[ImageFeatures] = []
    while len(features) < len(images):
        rest = images[len(features) :]
        batch = rest[: together or (_first_pass(rest) if device.type == "cuda" else 1)]
        features += compute(model.base_model, _upload(batch, device).to(dtype), batch)
    return features


def _first_pass(images: Sequence[ModelImage]) -> int:
    """Return how many images the first pass takes, at least one."""
    total = np.cumsum([image.pixels.nbytes for image in images])
    return max(1, int(np.searchsorted(total, PASS_BYTES, side="right")))


def _upload(images: Sequence[ModelImage], device: torch.device) -> Tensor:
    """Copy the pixels of images to the device, end to end; one by one to a GPU, without a copy of all on the host."""
    if device.type != "cuda":
        return torch.from_numpy(np.concatenate([image.pixels for image in images])).to(device)
    sizes = [len(image.pixels) for image in images]
    pixels = torch.empty((sum(sizes), *images[0].pixels.shape[1:]), device=device)
    for place, image in zip(torch.split(pixels, sizes), images, strict=True):
        place.copy_(torch.from_numpy(image.pixels if image.pixels.flags.writeable else image.pixels.copy()))
    return pixels


def _encode_qwen(base: Any, pixels: Tensor, images: Sequence[ModelImage]) -> list[ImageFeatures]:
    grids = torch.tensor([image.grid for image in images], device=pixels.device)
    out = base.get_image_features(pixels, grids, return_dict=True)
    sizes = [len(embeddings) for embeddings in out.pooler_output]
    deep = [
        torch.split(layer, sizes) if isinstance(layer, Tensor) else layer  # older versions of transformers join them
        for layer in getattr(out, "deepstack_features", None) or ()
    ]
    return [
        ImageFeatures(embeddings, tuple(layer[index] for layer in deep))
        for index, embeddings in enumerate(out.pooler_output)
    ]


def _encode_idefics(base: Any, pixels: Tensor, images: Sequence[ModelImage]) -> list[ImageFeatures]:
    hidden = base.vision_model(pixel_values=pixels, return_dict=True).last_hidden_state
    crops = base.connector(hidden).split([len(image.pixels) for image in images])
    return [ImageFeatures(part.flatten(0, 1)) for part in crops]


class FeatureCache:
    """Keeps the features of the images used last, by digest, without gradients. `clear` it when weights change."""

    def __init__(self, model: Any, *, limit_bytes: int = KEPT_BYTES) -> None:
        self._model, self._limit_bytes = model, limit_bytes
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()  # the least recently used first
        self._size_bytes = 0
        self.computed = 0  # images since the start

    def get(self, images: Sequence[ModelImage]) -> dict[str, ImageFeatures]:
        """Return the features of images by digest, and compute those that are missing."""
        wanted = {image.digest: image for image in images}
        found = {digest: self._features[digest] for digest in wanted if digest in self._features}
        missing = [image for digest, image in wanted.items() if digest not in found]
        with torch.no_grad():
            computed = encode_images(self._model, missing)
        self.computed += len(missing)
        for image, features in zip(missing, computed, strict=True):
            found[image.digest] = self._features[image.digest] = features
            self._size_bytes += features.size_bytes
        for digest in wanted:
            self._features.move_to_end(digest)
        while self._size_bytes > self._limit_bytes and self._features:
            self._size_bytes -= self._features.popitem(last=False)[1].size_bytes
        return found

    def clear(self) -> None:
        self._features.clear()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._features)


@dataclass(frozen=True, slots=True)
class RowsOfImage:
    """Rows of a forward pass that stand for tokens of one image."""

    image: ModelImage
    rows: IntArray
    tokens: IntArray  # of the image, one for each row


def image_rows(
    parts: Sequence[RowsOfImage], features: Mapping[str, ImageFeatures], device: torch.device
) -> ImageRows | None:
    """Lay out the features of images for a forward pass; None if there are no rows of images.

    A row that several sequences share may be named several times.
    """
    if not parts:
        return None
    digests = list(dict.fromkeys(part.image.digest for part in parts))
    sizes = [len(features[digest].embeddings_ND) for digest in digests]
    starts = dict(zip(digests, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    rows = np.concatenate([part.rows for part in parts])
    if not len(rows):
        return None
    places = np.concatenate([part.tokens + starts[part.image.digest] for part in parts])
    rows, first = np.unique(rows, return_index=True)
    index_I = torch.from_numpy(places[first].astype(np.int64)).to(device)
    embeddings, *deep = (
        torch.cat(tensors)[index_I] for tensors in zip(*(features[digest].tensors for digest in digests), strict=True)
    )
    return ImageRows(torch.from_numpy(rows.astype(np.int64)).to(device), embeddings, tuple(deep))
