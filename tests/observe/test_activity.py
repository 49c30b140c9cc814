"""The recorder adds up who was busy and what the trainer waited for, by a clock that the test moves."""

import gc
import json
import threading
import tracemalloc
from pathlib import Path

import pytest

from headrace.errors import FolderLockedError
from headrace.observe.activity import ActivityRecorder, ActivitySink, lane_of
from headrace.process.watchdog import SAMPLER_REQUEST, noting, watching


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def recorder(path: Path, clock: Clock, **options: int) -> ActivityRecorder:
    return ActivityRecorder(path, every_s=3600.0, clock=clock, **options)


def test_activities_of_training_belong_to_lanes() -> None:
    assert lane_of("the trainer: forward_backward") == "training"
    assert lane_of("the trainer: export_weights") == "publishing"
    assert lane_of("the rewards of group 7") == "reward"
    assert lane_of("the event loop") is None


def test_the_shares_of_a_step_are_those_of_the_clock(tmp_path: Path) -> None:
    # 10 s: 2 s of sampling while the trainer waits, 5 s of rewards while it waits, then 3 s of training
    clock = Clock()
    with recorder(tmp_path / "activity.jsonl", clock) as recorded:
        with watching("a batch of groups"):
            with watching("the sampler: a step"):
                clock.now += 2.0
            with watching("the rewards of group 1"), watching("the rewards of group 2"):
                clock.now += 5.0
        with watching("the trainer: forward_backward"):
            clock.now += 3.0
        values = recorded.lap_step()
    assert values == pytest.approx(
        {
            "perf/busy_sampling": 0.2,
            "perf/busy_reward": 0.5,
            "perf/busy_training": 0.3,
            "perf/wait_sampling": 0.2,
            "perf/wait_reward": 0.5,
            "perf/wait_environment": 0.0,
            "perf/wait_other": 0.0,
        }
    )


def test_requests_count_as_sampling_only_where_the_engine_is_elsewhere(tmp_path: Path) -> None:
    clock = Clock()
    with recorder(tmp_path / "a.jsonl", clock) as recorded:
        with noting(SAMPLER_REQUEST):
            clock.now += 1.0
        assert recorded.lap_step()["perf/busy_sampling"] == pytest.approx(1.0)
        with watching("the sampler: a step"):
            clock.now += 1.0
        with noting(SAMPLER_REQUEST):
            clock.now += 1.0  # the request waits for this process's own engine
        assert recorded.lap_step()["perf/busy_sampling"] == pytest.approx(0.5)


def test_the_file_stays_bounded_and_a_second_process_goes_on_with_it(tmp_path: Path) -> None:
    path, clock = tmp_path / "activity.jsonl", Clock()
    path.write_text('{"at":1,"s":1.0,"step":41}\nnot a line\n{"at":2,"s":1.')  # torn by a kill
    with recorder(path, clock, kept_lines=5) as recorded:
        for step in range(30):
            recorded.at("rl", step)
            clock.now += 1.0
            assert recorded._write()
            assert len(path.read_text().splitlines()) <= 10
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines][-1] == 29
    assert all(set(line) == {"at", "s", "stage", "step", "busy", "waits", "open", "now"} for line in lines)


def test_the_lines_are_kept_in_the_file_and_not_in_memory(tmp_path: Path) -> None:
    with recorder(tmp_path / "activity.jsonl", Clock(), kept_lines=2000) as recorded:

        def traced_after(lines: int) -> int:
            for _ in range(lines):
                assert recorded._write()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = traced_after(50)
            assert traced_after(1000) - before < 50_000, "a line is about 150 bytes"
        finally:
            tracemalloc.stop()


def test_the_first_lines_of_a_second_process_follow_those_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "activity.jsonl"
    path.write_text('{"at":1,"s":1.0,"step":41}\n{"at":2,"s":1.')
    with recorder(path, Clock()) as recorded:
        assert recorded._write()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [41, 0]


def test_nothing_is_written_into_a_folder_that_is_anothers(tmp_path: Path) -> None:
    def refuse() -> None:
        raise FolderLockedError("another process has taken it")

    path = tmp_path / "activity.jsonl"
    with ActivityRecorder(path, check_owner=refuse, every_s=3600.0):
        pass
    assert not path.exists()


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "activity.jsonl"
    with ActivityRecorder(path, every_s=0.01) as recorded:
        recorded._thread.join(timeout=10)
        assert not recorded._thread.is_alive()
        with watching("the trainer: forward"):
            pass
    assert len([text for text in caplog.messages if "cannot be written" in text]) == 1


def test_a_record_of_a_training_step_gets_the_shares_and_an_evaluation_none(tmp_path: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.records: list[dict[str, float]] = []

        def log(self, step: int, values: dict[str, float]) -> None:
            self.records.append(dict(values))

        def close(self) -> None:
            pass

    clock, kept = Clock(), Kept()
    with recorder(tmp_path / "a.jsonl", clock) as recorded:
        sink = ActivitySink(kept, recorded, stage="rl", step=0)
        with watching("the trainer: forward_backward"):
            clock.now += 4.0
        sink.log(1, {"eval/pass@1": 0.5})
        sink.log(1, {"time/step_s": 4.0})
        assert recorded.line()["step"] == 1
    assert kept.records == [{"eval/pass@1": 0.5}, {"time/step_s": 4.0, "perf/busy_training": 1.0}]


def test_work_of_several_threads_is_counted(tmp_path: Path) -> None:
    with ActivityRecorder(tmp_path / "a.jsonl", every_s=3600.0) as recorded:
        gate = threading.Barrier(5)

        def work() -> None:
            with watching("a call of Maze"):
                gate.wait(10)
                gate.wait(10)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        gate.wait(10)
        assert recorded.line()["open"] == {"environment": 4}
        gate.wait(10)
        for thread in threads:
            thread.join()
        assert recorded.line()["open"] == {}
