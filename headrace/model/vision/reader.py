"""Prepare pictures for a model with the image processor of its folder, by Pillow alone.

transformers' classes that end in "Pil" are taken, so that pixels are the same whether torchvision is installed or not.
"""

import importlib
import json
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np

from headrace.errors import ModelError, PictureError, boundary
from headrace.model.compute_thread import MODEL_CONSTRUCTION
from headrace.model.load import model_folder
from headrace.model.vision.kinds import check_vision_type
from headrace.pictures import PICTURE_MARK, ModelImage, Picture, PictureReader

PROCESSORS: Mapping[str, tuple[str, str]] = {  # of each type: a module of transformers.models, and its class
    "qwen2_5_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen3_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen3_5": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "idefics3": ("idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil"),
}
MOST_PIXELS = 2**26  # of a picture, before it is resized
SETTINGS = ("preprocessor_config.json", "processor_config.json")  # one of them describes the image processor


def load_reader(path: str, *, trust_remote_code: bool = False) -> PictureReader:
    """Load what prepares pictures for the model of a folder or of the hub; no weights are read.

    Raises ModelError if the model takes no pictures, its processor is missing, or Pillow is.
    """
    folder = model_folder(path, weights=False, code=trust_remote_code)
    with boundary(ModelError, f"{folder / 'config.json'} cannot be read"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = str(config.get("model_type"))
    check_vision_type(model_type, folder)
    if not any((folder / name).is_file() for name in SETTINGS):
        raise ModelError(
            f"{folder} has a vision tower and no image processor: put there the {SETTINGS[0]} that the model was "
            "published with"
        )
    try:
        importlib.import_module("PIL.Image")
    except ImportError as exc:
        raise ModelError("pictures need Pillow: pip install pillow") from exc
    module, name = PROCESSORS[model_type]
    with MODEL_CONSTRUCTION, boundary(ModelError, f"the image processor in {folder} cannot be loaded"):
        from transformers import AutoTokenizer

        processor = getattr(importlib.import_module(f"transformers.models.{module}"), name).from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        token = int(config["image_token_id"])
        mark = str(tokenizer.convert_ids_to_tokens(token))
        if name == "Qwen2VLImageProcessorPil":
            return QwenReader(processor, model_type, mark=mark, image_token=token)
        vision = config["vision_config"]
        side = int(vision["image_size"]) // int(vision["patch_size"])
        length = side**2 // int(config["scale_factor"]) ** 2
        return IdeficsReader(processor, model_type, mark=mark, image_token=token, length=length)


class ProcessorReader:
    """Decodes pictures, and calls an image processor of transformers."""

    def __init__(self, processor: Any, model_type: str, *, mark: str, image_token: int) -> None:
        self._processor = processor
        self._mark, self._image_token = mark, image_token
        settings = json.dumps([model_type, processor.to_dict()], sort_keys=True, default=str)
        self._settings = sha256(settings.encode()).hexdigest()

    @property
    def template_mark(self) -> str:
        return self._mark

    @property
    def image_token(self) -> int:
        return self._image_token

    def template_content(self, content: str, num_pictures: int) -> Any:
        """Return a message's content, with PICTURE_MARK for each picture, as the chat template takes it."""
        if not num_pictures:
            return content
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(PICTURE_MARK)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        return parts

    def _digest(self, picture: Picture) -> str:
        return sha256(f"{self._settings} {picture.digest}".encode()).hexdigest()

    def _process(self, picture: Picture, **options: Any) -> Any:
        """Decode a picture and run the image processor. Raises PictureError on bytes that are no picture."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        name = picture.name or "a picture"
        with boundary(PictureError, f"{name} cannot be decoded"):
            try:
                with Image.open(BytesIO(picture.data)) as opened:
                    if opened.width * opened.height > MOST_PIXELS:
                        raise PictureError(
                            f"{name} has {opened.width} x {opened.height} pixels, which is more than {MOST_PIXELS:,}: "
                            "make it smaller"
                        )
                    image = (ImageOps.exif_transpose(opened) or opened).convert("RGB")
            except UnidentifiedImageError as exc:
                raise PictureError(f"{name} is no picture that Pillow can decode") from exc
        with boundary(
            PictureError, f"{name} of {image.width} x {image.height} pixels cannot be prepared for the model"
        ):
            return self._processor(images=[image], return_tensors="np", **options)


class QwenReader(ProcessorReader):
    """Reads pictures as patches: as many tokens as the picture is large."""

    def read(self, picture: Picture) -> ModelImage:
        """Decode, resize and normalise. Raises PictureError on bytes that are no picture, with its name."""
        out = self._process(picture)
        frames, height, width = (int(size) for size in out["image_grid_thw"][0])
        return ModelImage(
            digest=self._digest(picture),
            pixels=np.ascontiguousarray(out["pixel_values"], dtype=np.float32),
            grid=(frames, height, width),
            num_tokens=frames * height * width // int(self._processor.merge_size) ** 2,
        )

    def text(self, image: ModelImage) -> str:
        """Return the text that takes the place of `template_mark`."""
        return self._mark * image.num_tokens


class IdeficsReader(ProcessorReader):
    """Reads pictures as square crops and the whole picture: a fixed number of tokens for each of them."""

    def __init__(self, processor: Any, model_type: str, *, mark: str, image_token: int, length: int) -> None:
        super().__init__(processor, model_type, mark=mark, image_token=image_token)
        self._length = length

    def read(self, picture: Picture) -> ModelImage:
        """Decode, resize and normalise. Raises PictureError on bytes that are no picture, with its name."""
        out = self._process(picture, return_row_col_info=True)
        pixels = np.ascontiguousarray(np.asarray(out["pixel_values"])[0], dtype=np.float32)
        return ModelImage(
            digest=self._digest(picture),
            pixels=pixels,
            grid=(1, int(out["rows"][0][0]), int(out["cols"][0][0])),
            num_tokens=len(pixels) * self._length,
        )

    def text(self, image: ModelImage) -> str:
        """Return the text that takes the place of `template_mark`: crops row by row, then the whole picture."""
        around, tokens = "<fake_token_around_image>", self._mark * self._length
        whole = f"{around}<global-img>{tokens}{around}"
        _, rows, columns = image.grid
        if not rows:
            return whole
        lines = (
            "".join(f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + whole
