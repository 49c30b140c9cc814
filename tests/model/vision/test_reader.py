"""Pictures are read as transformers' own processors read them, and what is no picture is refused with its name."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer, BatchFeature
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from headrace.errors import ModelError, PictureError
from headrace.model.tiny import save_tiny
from headrace.model.vision.kinds import KINDS
from headrace.model.vision.reader import PROCESSORS, load_reader
from headrace.pictures import PICTURE_MARK, Picture, image_marks
from support.vision_models import VisionFolder, picture


@pytest.fixture(scope="module", params=["qwen3_vl", "smolvlm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionFolder:
    return VisionFolder(tmp_path_factory.mktemp(request.param), request.param, layers=1, tower_layers=1)


def test_a_tokenizer_makes_as_many_image_tokens_as_the_image_has(folder: VisionFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder.path)
    image = folder.image(1, 50, 90)
    tokens = tokenizer(folder.reader.text(image), add_special_tokens=False)["input_ids"]
    assert tokens.count(folder.reader.image_token) == image.num_tokens
    content = folder.reader.template_content(f"w1 {PICTURE_MARK} w2", 1)
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text.count(folder.reader.template_mark) == 1
    assert text.index("w1") < text.index(folder.reader.template_mark) < text.index("w2")
    assert folder.reader.template_content("w1", 0) == "w1"


def test_crops_are_written_as_the_processor_of_transformers_writes_them(tmp_path: Path) -> None:
    folder = VisionFolder(tmp_path, "idefics3", layers=1, tower_layers=1)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {"do_image_splitting": True, "size": {"longest_edge": 192}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    reader: Any = load_reader(str(tmp_path))
    image = reader.read(picture(1, 90, 60))
    assert image.grid == (1, 2, 3)
    assert image.pixels.shape == (7, 3, 64, 64)
    theirs = Idefics3Processor(reader._processor, AutoTokenizer.from_pretrained(tmp_path), image_seq_len=16)
    counts = BatchFeature({"rows": [[2]], "cols": [[3]]})
    assert reader.text(image) == theirs.replace_image_token(counts, 0)
    assert image.num_tokens == 7 * 16
    assert image.digest != folder.image(1, 90, 60).digest  # other settings, other pixels


def test_the_digest_is_of_the_picture_and_pixels_are_the_processors(folder: VisionFolder) -> None:
    reader: Any = folder.reader
    one, other = picture(1), picture(2)
    assert reader.read(one).digest == reader.read(Picture(data=one.data, name="elsewhere")).digest
    assert reader.read(one).digest != reader.read(other).digest
    direct = reader._processor(images=[Image.open(io.BytesIO(one.data)).convert("RGB")], return_tensors="np")
    assert np.array_equal(
        reader.read(one).pixels, np.asarray(direct["pixel_values"]).reshape(reader.read(one).pixels.shape)
    )


def test_what_is_no_picture_is_refused_with_its_name(folder: VisionFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = picture(1)
    for data, reason in ((b"no picture", "is no picture"), (whole.data[: len(whole.data) // 2], "cannot be decoded")):
        with pytest.raises(PictureError, match=f"tasks.jsonl, row 3.*{reason}"):
            folder.reader.read(Picture(data=data, name="tasks.jsonl, row 3"))
    monkeypatch.setattr("headrace.model.vision.reader.MOST_PIXELS", 1000)
    with pytest.raises(PictureError, match="picture 1 has 64 x 48 pixels"):
        folder.reader.read(whole)


def test_models_without_tower_or_processor_are_refused_before_weights_are_read(
    folder: VisionFolder, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "text", words=["a"], width=32, layers=1)
    with pytest.raises(ModelError, match="no vision tower"):
        load_reader(str(tmp_path / "text"))
    shutil.copytree(folder.path, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors", "prep*"))
    with pytest.raises(ModelError, match=r"no image processor: put there the preprocessor_config\.json"):
        load_reader(str(tmp_path / "bare"))
    config = json.loads((folder.path / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    with pytest.raises(ModelError, match="'gemma3' lets the tokens of an image see later ones"):
        load_reader(str(tmp_path / "bare"))
    assert PROCESSORS.keys() == KINDS.keys()


def test_marks_differ_where_pictures_do(folder: VisionFolder) -> None:
    first, second, third = (folder.place([[9, 9], folder.image(seed), [9]]) for seed in (1, 1, 2))
    marks = [image_marks(*sequence) for sequence in (first, second, third)]
    assert np.array_equal(marks[0], marks[1])
    assert (marks[0] != marks[2]).tolist() == [False, False, *[True] * folder.image(1).num_tokens, False]
    assert marks[0][2:-1].max() < 0
    assert image_marks(first[0], ()) is first[0]
