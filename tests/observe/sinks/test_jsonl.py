import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FolderLockedError, RunFolderError
from headrace.observe.sinks.jsonl import (
    JsonlSink,
    MetricRecord,
    read_metrics,
    readable_metrics,
    repair_metrics,
    reproducible_bytes,
    restore_cut,
)

NAMES = st.from_regex(r"[a-z]{1,4}/[a-z@1]{1,4}", fullmatch=True)


def test_a_record_is_one_sorted_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "deep" / "metrics.jsonl", stage="rl")
    sink.log(3, {"reward/mean": 0.1, "loss/total": math.nan, "a/count": 2})
    sink.close()
    expected = b'{"a/count":2.0,"loss/total":"NaN","reward/mean":0.1,"stage":"rl","step":3}\n'
    assert (tmp_path / "deep" / "metrics.jsonl").read_bytes() == expected


@given(st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=4), max_size=5))
def test_floats_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]) -> None:
    path = tmp_path_factory.mktemp("sink") / "metrics.jsonl"
    sink = JsonlSink(path, stage="sft")
    for step, values in enumerate(rows):
        sink.log(step, values)
    sink.close()
    assert read_metrics(path) == tuple(
        MetricRecord(step=step, stage="sft", values=values) for step, values in enumerate(rows)
    )


def test_a_resumed_file_equals_that_of_an_uninterrupted_run_but_for_the_clock(tmp_path: Path) -> None:
    def record(sink: JsonlSink, steps: range, seconds: float) -> None:
        for step in steps:
            sink.log(step, {"loss/total": 1 / (step + 3), "time/train_s": seconds, "perf/tokens_per_s": 1 / seconds})

    whole = JsonlSink(tmp_path / "whole", stage="rl")
    record(whole, range(1, 7), seconds=0.5)
    whole.close()

    killed = JsonlSink(tmp_path / "killed", stage="rl")
    record(killed, range(1, 4), seconds=0.25)
    killed.sync()
    kept = killed.records
    record(killed, range(4, 6), seconds=0.25)
    killed.close()
    with (tmp_path / "killed").open("ab") as file:
        file.write(b'{"loss/total":0.1')  # the kill came in the middle of a write

    resumed = JsonlSink(tmp_path / "killed", stage="rl")
    assert resumed.records == 5
    resumed.truncate_after(kept)
    assert resumed.records == kept == 3
    record(resumed, range(4, 7), seconds=0.75)
    resumed.close()

    assert [item.step for item in read_metrics(tmp_path / "killed")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "killed").read_bytes() != (tmp_path / "whole").read_bytes()
    assert reproducible_bytes(tmp_path / "killed") == reproducible_bytes(tmp_path / "whole")


def test_stages_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for stage in ("sft", "rl"):
        sink = JsonlSink(path, stage=stage)
        sink.log(1, {"a/b": 1.0})
        sink.close()
    assert [(item.stage, item.step) for item in read_metrics(path)] == [("sft", 1), ("rl", 1)]


def test_a_torn_last_line_is_left_out_and_cut_before_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a/b":1.0,"stage":"rl","step":1}\n{"a/b":2.0,"sta')
    assert [item.step for item in read_metrics(path)] == [1]
    sink = JsonlSink(path, stage="rl")
    sink.log(2, {"a/b": 2.0})
    sink.close()
    assert [item.step for item in read_metrics(path)] == [1, 2]


def test_a_line_in_the_middle_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"stage":"rl","step":1}\ngarbage\n{"stage":"rl","step":2}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        read_metrics(path)


def test_more_records_than_there_are_cannot_be_kept(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", stage="rl")
    sink.log(1, {"a/b": 1.0})
    with pytest.raises(RunFolderError, match="it has 1 records, not 2"):
        sink.truncate_after(2)
    sink.log(2, {"a/b": 2.0})
    sink.close()
    assert [item.step for item in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def written(path: Path, steps: range) -> JsonlSink:
    sink = JsonlSink(path, stage="rl")
    for step in steps:
        sink.log(step, {"a/b": float(step)})
    return sink


def test_what_a_resume_cut_off_comes_back_until_something_newer_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 9)).close()
    whole = path.read_bytes()
    first = JsonlSink(path, stage="rl")
    first.truncate_after(3)  # from an older checkpoint than the newest, which could not be used
    first.log(4, {"a/b": 4.0})
    first.close()
    second = JsonlSink(path, stage="rl")
    second.truncate_after(2)
    second.close()
    restore_cut(path, 1)
    assert [item.step for item in read_metrics(path)] == [1, 2], "what a checkpoint does not need stays cut"
    restore_cut(path, 8)
    assert path.read_bytes() == whole
    third = JsonlSink(path, stage="rl")
    third.truncate_after(3)
    third.forget_cut()
    third.close()
    restore_cut(path, 8)
    assert [item.step for item in read_metrics(path)] == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_sink_whose_folder_was_taken_over_writes_and_cuts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 4)).close()
    before = path.read_bytes()

    def check() -> None:
        raise FolderLockedError("lost")

    sink = JsonlSink(path, stage="rl", check_owner=check)
    with pytest.raises(FolderLockedError):
        sink.log(4, {"a/b": 1.0})
    with pytest.raises(FolderLockedError):
        sink.truncate_after(1)
    sink.close()
    assert path.read_bytes() == before


def test_lines_that_are_no_records_are_numbered_and_the_others_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"stage":"rl","step":1,"loss":0.5}\n'
    bad = [b"\x00\xff\n", b"[]\n", b'{"stage":"rl"}\n', b'{"stage":"rl","step":1,"x":"y"}\n']
    path.write_bytes(good + bad[0] + good + b"".join(bad[1:]) + b"tor")
    repair_metrics(path)
    assert path.read_bytes().endswith(b'"y"}\n'), "the torn line is cut"
    records, refused = readable_metrics(path)
    assert len(records) == 2
    assert [sentence.partition(", line ")[2][:1] for sentence in refused] == ["2", "4", "5", "6"]
    assert "ends in the middle of line 7" in caplog.text
    assert "line 2 is not a metrics record" in caplog.text
    with pytest.raises(RunFolderError, match="line 2 is not a metrics record"):
        read_metrics(path)
    repair_metrics(tmp_path / "none")  # nothing to repair
