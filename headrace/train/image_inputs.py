"""Give the images of a micro-batch to the model: their rotary positions, and the features that replace embeddings.

A frozen vision tower computes each image once, without gradients, and keeps the features of the last images. A trained
one computes each image once more for its backward pass, after all micro-batches of the request have been, so that no
more than a few images' activations are in memory at a time.

Shape letters: T packed tokens, N tokens of a sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.algo.packing import PrefixTree
from headrace.errors import BackendError
from headrace.model.load import LanguageModel
from headrace.model.vision.kinds import trains_tower
from headrace.model.vision.positions import image_fault, rotary_positions
from headrace.model.vision.tower import (
    FeatureCache,
    ImageFeatures,
    ImageRows,
    RowsOfImage,
    encode_images,
    image_rows,
)
from headrace.pictures import ModelImage
from headrace.types import Datum, IntArray, int_array

TOGETHER = 4  # images whose activations a trained tower keeps at a time


def check_images(lm: LanguageModel, data: Sequence[Datum]) -> None:
    """Raise BackendError on data with images that the model cannot be given."""
    for index, datum in enumerate(data):
        if not datum.images:
            continue
        if lm.vision is None:
            raise BackendError(
                f"datum {index} has pictures, and this model was loaded without a vision tower: use a vision-language "
                "model, or leave the pictures out"
            )
        merge = lm.vision.merge if lm.vision.three_axes else None
        if fault := image_fault(datum.images, datum.num_tokens, merge=merge):
            raise BackendError(f"datum {index}: {fault}")


def packed_positions(lm: LanguageModel, batch: Sequence[Datum], place: IntArray, positions: IntArray) -> IntArray:
    """Return the rotary positions of packed tokens: `positions` [T], or [3, T] where images give them three axes.

    `place`: for each token of the data laid end to end, its index among the packed ones.
    """
    if lm.vision is None or not lm.vision.three_axes or not any(datum.images for datum in batch):
        return positions
    whole = [rotary_positions(datum.num_tokens, datum.images, merge=lm.vision.merge) for datum in batch]
    packed = np.empty((3, len(positions)), dtype=np.int32)
    packed[:, place] = np.concatenate(whole, axis=1)
    return int_array(packed)


def packed_image_parts(batch: Sequence[Datum], place: IntArray) -> list[RowsOfImage]:
    """List the packed tokens that stand for images; one that several data share is listed for each of them."""
    parts: list[RowsOfImage] = []
    start = 0
    for datum in batch:
        for placed in datum.images:
            parts.append(RowsOfImage(placed.image, place[start + placed.at], int_array(np.arange(len(placed.at)))))
        start += datum.num_tokens
    return parts


def packed_tokens(batch: Sequence[Datum], layout: PrefixTree) -> IntArray:
    """Return the packed tokens, of which `layout` has the marks of images instead."""
    if not any(datum.images for datum in batch):
        return layout.tokens
    tokens = np.empty(len(layout.tokens), dtype=np.int32)
    tokens[layout.place] = np.concatenate([datum.inputs for datum in batch])
    return int_array(tokens)


@dataclass(slots=True)
class _Collected:
    """An image of a request whose features collect a gradient."""

    image: ModelImage
    features: ImageFeatures


class ImageInputs:
    """Computes the features of images for one model's micro-batches."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._cache = FeatureCache(lm.model)
        self._trains = trains_tower(lm.model)
        self._collected: dict[str, _Collected] = {}

    @property
    def computed(self) -> int:
        """Images that the tower has computed, without those computed again for a gradient."""
        return self._cache.computed

    def rows(self, parts: Sequence[RowsOfImage], *, want_gradient: bool) -> ImageRows | None:
        """Return the features of a micro-batch's images in their rows."""
        if not parts:
            return None
        images = [part.image for part in parts]
        features: Mapping[str, ImageFeatures] = self._cache.get(images)
        if want_gradient and self._trains:
            for image in images:
                if image.digest not in self._collected:
                    self._collected[image.digest] = _Collected(image, features[image.digest].leaves())
            features = {digest: one.features for digest, one in self._collected.items()}
        return image_rows(parts, features, self._lm.device)

    def backward(self) -> bool:
        """Add what the features' gradients give to those of the tower's weights; return whether there were any."""
        collected, self._collected = list(self._collected.values()), {}
        for start in range(0, len(collected), TOGETHER):
            batch = collected[start : start + TOGETHER]
            tensors: list[Tensor] = []
            gradients: list[Tensor] = []
            for one, features in zip(batch, encode_images(self._lm.model, [one.image for one in batch]), strict=True):
                for tensor, leaf in zip(features.tensors, one.features.tensors, strict=True):
                    if leaf.grad is not None:
                        tensors.append(tensor)
                        gradients.append(leaf.grad)
            if tensors:
                torch.autograd.backward(tensors, gradients)
        return bool(collected)

    def drop_gradients(self) -> None:
        """Forget the gradients of a request that failed."""
        self._collected.clear()

    def weights_changed(self) -> None:
        """Forget the features of a trained tower."""
        if self._trains:
            self._cache.clear()

    def clear(self) -> None:
        """Forget all features."""
        self._cache.clear()
