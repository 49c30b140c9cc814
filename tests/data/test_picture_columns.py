"""Pictures of rows: every way to write them, and rows that are left out because theirs cannot be read."""

import base64
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace.data import picture_columns
from headrace.data.conversations import conversations_from_rows
from headrace.data.preferences import pairs_from_rows
from headrace.data.rows import DataSource
from headrace.data.shuffle import fingerprint
from headrace.data.task_rows import load_tasks, tasks_from_rows
from headrace.errors import DataError
from headrace.pictures import PICTURE_MARK, Picture
from headrace.types import Message, Task, wire_message
from support.pictures import jpeg, png

RED, BLUE = png("red"), jpeg("blue")
URI = "data:image/png;base64," + base64.b64encode(RED).decode()


def parts(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "what colour?"}
ASK = [{"type": "image"}, TEXT]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what colour?", "images": ["red.png"]},
        {"prompt": "what colour?", "images": [RED]},
        {"prompt": "what colour?", "images": [base64.b64encode(RED).decode()]},
        {"prompt": "what colour?", "images": [URI]},
        {"prompt": "what colour?", "images": [{"bytes": RED, "path": None}]},
        {"prompt": "what colour?", "images": [{"bytes": None, "path": "red.png"}]},
        {"prompt": "what colour?", "image": {"bytes": RED, "path": "red.png"}},
        {"prompt": "<image>what colour?", "images": ["red.png"]},
        {"messages": parts(*ASK), "images": ["red.png"]},
        {"messages": parts(*ASK), "image": "red.png"},
        {"messages": parts({"type": "image_url", "image_url": {"url": URI}}, TEXT)},
        {"messages": parts({"type": "image", "image": "red.png"}, TEXT)},
        {"conversations": [{"from": "human", "value": "<image>what colour?"}], "images": ["red.png"]},
    ],
)
def test_every_way_to_write_a_picture_gives_the_same_message(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "rows.py").write_text(f"def rows():\n    return [{row!r}]\n")
    [task] = load_tasks(DataSource(type="python", path="rows.py:rows"), base=tmp_path)
    assert task.messages == (Message(role="user", content=f"{PICTURE_MARK}what colour?", images=(Picture(data=RED),)),)
    assert not {"images", "image"} & task.data.keys()


def test_pictures_of_pillow_and_of_parquet_and_datasets_are_read(tmp_path: Path) -> None:
    import datasets

    [drawn] = tasks_from_rows([{"prompt": "what?", "images": [Image.new("RGB", (8, 8), "red")]}])
    with Image.open(io.BytesIO(drawn.messages[0].images[0].data)) as image:
        assert image.getpixel((3, 3)) == (255, 0, 0)
    rows = {
        "prompt": ["what?"],
        "images": [[{"bytes": BLUE, "path": "b.jpg"}]],
        "image": [{"bytes": RED, "path": None}],
    }
    features = datasets.Features(
        prompt=datasets.Value("string"), images=datasets.List(datasets.Image()), image=datasets.Image()
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "rows.parquet"))
    for source in (
        DataSource(type="dataset", path="saved"),
        DataSource(type="parquet", path="rows.parquet"),
    ):
        [task] = load_tasks(source, base=tmp_path)
        assert [picture.data for picture in task.messages[0].images] == [BLUE], "the file's own bytes, not decoded"
        json.dumps(task.data)  # the other column is text, as ever
    chosen = DataSource(type="parquet", path="rows.parquet", columns={"images": "image"})
    assert load_tasks(chosen, base=tmp_path)[0].messages[0].images[0].data == RED


def test_rows_with_pictures_that_cannot_be_read_are_left_out_with_file_and_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_columns, "MAX_PIXELS", 100 * 100)
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "torn.jpg").write_bytes(BLUE[: len(BLUE) // 2])  # its head is sound, and its rows are not all there
    (tmp_path / "large.png").write_bytes(png("red", (101, 100)))
    bad = {
        "torn.jpg": "line 2, picture 1: it cannot be decoded as a picture",
        "gone.png": "line 3, picture 1: ",
        "large.png": "line 4, picture 1: it has 101 x 100 pixels, and a picture may have 10,000",
        "https://x.org/a.png": "line 5, picture 1: https://x.org/a.png is not fetched",
        "data:image/png;base64,####": "line 6, picture 1: the data URI cannot be read",
        "data:image/png;base64,aGVsbG8=": "line 7, picture 1: its 5 bytes are no picture that Pillow knows",
    }
    rows: list[dict[str, Any]] = [{"prompt": "what?", "images": ["red.png"]}]
    rows += [{"prompt": "what?", "images": [name]} for name in bad]
    rows += [{"messages": parts(*ASK), "images": ["red.png", "red.png"]}, {"messages": parts(*ASK), "images": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        [task] = load_tasks(DataSource(type="jsonl", path="rows.jsonl"), base=tmp_path)
    assert task.id == "0"
    logged = caplog.text
    for sentence in [*bad.values(), "line 8: the column images has 2 pictures and the messages have 1 of them"]:
        assert f"rows.jsonl, {sentence}" in logged
    assert "line 9: the messages have more pictures than the column images, which has 0" in logged
    assert "8 of 9 rows of rows.jsonl are left out for their pictures" in logged
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match=r"all 1 rows of rows.jsonl are left out for their pictures: .*line 1"):
        load_tasks(DataSource(type="jsonl", path="rows.jsonl"), base=tmp_path)


def test_conversations_have_pictures_and_preferences_refuse_them() -> None:
    row = {"prompt": "what?", "answer": "red", "images": [RED]}
    broken = {**row, "images": [RED[:30]]}
    [conversation] = conversations_from_rows([row, broken])
    assert isinstance(conversation, tuple)
    assert [len(message.images) for message in conversation] == [1, 0]
    with pytest.raises(DataError, match="it has pictures"):
        pairs_from_rows([{"prompt": "what?", "chosen": "red", "rejected": "blue", "images": [RED]}])


def test_messages_with_pictures_are_written_as_openai_does_and_read_again() -> None:
    message = Message(
        role="user", content=f"a {PICTURE_MARK} b {PICTURE_MARK}", images=(Picture(data=RED), Picture(data=BLUE))
    )
    wired = wire_message(message)
    assert [part["type"] for part in wired["content"]] == ["text", "image_url", "text", "image_url"]
    assert wired["content"][3]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    [task] = tasks_from_rows([{"messages": [wired]}])
    assert task.messages == (message,)


def test_a_fingerprint_counts_pictures_and_not_where_they_are_from() -> None:
    def task(data: bytes, name: str = "") -> Task:
        pictures = (Picture(data=data, name=name),)
        return Task(id="1", messages=(Message(role="user", content=PICTURE_MARK, images=pictures),))

    assert fingerprint([task(RED, "a.jsonl, line 1")]) == fingerprint([task(RED, "b.jsonl, line 7")])
    assert fingerprint([task(RED)]) != fingerprint([task(BLUE)])
    # as version 0.1 made it, whose messages had no pictures
    assert fingerprint([Message(role="user", content="a")]) == "68c6b2fd8d8538c5522013cd5d87412a"
