"""Small vision-language models of every type, pictures for them, and sequences with these pictures."""

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from headrace.model.vision.reader import load_reader
from headrace.model.vision.tiny_vision import write_tiny_vision_model
from headrace.pictures import ModelImage, Picture, PictureReader, PlacedImage
from headrace.types import IntArray, int_array

WORDS = tuple(f"w{index}" for index in range(40))
TYPES = ("qwen3_vl", "smolvlm", "idefics3", "qwen2_5_vl", "qwen3_5")


def picture(seed: int, width: int = 64, height: int = 48) -> Picture:
    """Make a PNG of random colours, in blocks so that resizing keeps them."""
    colours = np.random.default_rng(seed).integers(0, 256, size=(6, 6, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return Picture(data=buffer.getvalue(), name=f"picture {seed}")


class VisionFolder:
    """A folder of a small model, and its reader."""

    def __init__(self, path: Path, model_type: str, *, write: bool = True, **settings: Any) -> None:
        self.path, self.model_type = path, model_type
        if write:
            write_tiny_vision_model(path, words=WORDS, model_type=model_type, **settings)
        self.reader: PictureReader = load_reader(str(path))

    @cache  # noqa: B019  # a handful of pictures
    def image(self, seed: int, width: int = 64, height: int = 48) -> ModelImage:
        return self.reader.read(picture(seed, width, height))

    def place(self, parts: Sequence[Sequence[int] | ModelImage]) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Lay out tokens and images in order."""
        tokens: list[int] = []
        placed: list[PlacedImage] = []
        for part in parts:
            if isinstance(part, ModelImage):
                at = np.arange(len(tokens), len(tokens) + part.num_tokens, dtype=np.int32)
                placed.append(PlacedImage(image=part, at=at))
                tokens += [self.reader.image_token] * part.num_tokens
            else:
                tokens += part
        return int_array(tokens), tuple(placed)

    def theirs(self) -> Any:
        """The model as transformers alone loads it."""
        return AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()

    def inputs(
        self, tokens: IntArray, images: Sequence[PlacedImage], dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """The arguments of transformers' own model for one sequence."""
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(np.array(tokens)).long()[None], "use_cache": False}
        if not images:
            return inputs
        pixels = torch.from_numpy(np.concatenate([placed.image.pixels for placed in images]))
        if self.model_type in ("smolvlm", "idefics3"):
            return {**inputs, "pixel_values": pixels[None]}
        kinds = torch.zeros_like(inputs["input_ids"])
        for placed in images:
            kinds[0, placed.at] = 1
        grids = torch.tensor([placed.image.grid for placed in images])
        return {**inputs, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
