"""The data buffer: one commit a step, written last; bounded memory; replayed steps are compared with discarded ones."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import FolderLockedError, RunFolderError
from headrace.observe.buffer.commits import CommitLog, read_commits, restore_commits
from headrace.observe.buffer.data_buffer import DataBuffer
from headrace.observe.buffer.digests import numbers_digest, rollouts_digest
from headrace.observe.sinks.jsonl import JsonlSink
from headrace.pictures import PICTURE_MARK, ModelImage, Picture, PlacedImage
from headrace.types import CreditedEpisode, Message
from support import rollout_files
from support.pictures import png

VALUES = {"loss/total": 0.25, "time/step_s": 3.0}


class Run:
    """A run folder's metrics and buffer, as a stage opens them."""

    def __init__(self, folder: Path, *, records: int | None = None, **options: Any) -> None:
        self.folder = folder
        self.jsonl = JsonlSink(folder / "metrics.jsonl", stage="rl")
        if records is not None:
            self.jsonl.truncate_after(records)
        self.commits = folder / "commits.jsonl"
        log = CommitLog(self.commits, records=self.jsonl.records)
        self.buffer = DataBuffer(
            log, stage="rl", records=lambda: self.jsonl.records, spill_to=folder / "buffer", **options
        )

    def step(self, step: int, *, credited: Any = None, values: dict[str, float] | None = None) -> None:
        self.buffer.store_rollouts(step, rollout_files.groups(), credited or rollout_files.credited())
        self.log(step, values or VALUES)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.jsonl.log(step, values)
        self.buffer.log(step, values)


def test_a_step_is_one_commit_that_comes_after_its_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.buffer.cursor = lambda: {"epoch": 0, "offset": 4}
    run.buffer.store_rollouts(1, rollout_files.groups(), rollout_files.credited())
    assert read_commits(run.commits) == ()
    assert run.buffer.statistics()["open"] == 1
    run.log(1, VALUES)
    run.log(1, {"eval/pass@1": 0.5})
    step, evaluation = read_commits(run.commits)
    assert (step.step, step.records, step.cursor) == (1, 1, {"epoch": 0, "offset": 4})
    assert step.rollouts is not None
    assert step.rollouts.episodes == len(rollout_files.credited())
    assert step.rollouts.groups == tuple(group.id for group in rollout_files.groups())
    assert step.rollouts.tokens > 0
    assert (evaluation.records, evaluation.rollouts) == (2, None)
    assert run.buffer.statistics()["commits"] == 2


def test_the_commit_names_the_users_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved = tmp_path / "step_000001.jsonl"

    def save(step: int, groups: Any, episodes: Any) -> Path:
        saved.write_text("episodes\n")
        return saved

    run.buffer.recorder(save)(0, rollout_files.groups(), rollout_files.credited())
    run.log(1, VALUES)
    (commit,) = read_commits(run.commits)
    assert commit.rollouts is not None
    assert (commit.rollouts.file, commit.rollouts.file_bytes) == ("step_000001.jsonl", 9)
    assert commit.rollouts.file_digest is not None


def test_a_torn_line_and_a_foreign_one_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.step(1)
    run.buffer.close()
    with run.commits.open("ab") as file:
        file.write(b'{"nothing": 1}\n{"stage": "rl", "st')
    assert [commit.step for commit in read_commits(run.commits)] == [1]
    assert "line 2 is not a commit" in caplog.text
    again = Run(tmp_path)
    again.step(2)
    assert [commit.step for commit in read_commits(run.commits)] == [1, 2]


def test_a_folder_without_commits_gets_them_from_its_next_step_on(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl", stage="rl").log(1, VALUES)
    run = Run(tmp_path)
    run.step(2)
    assert [(commit.step, commit.records) for commit in read_commits(run.commits)] == [(2, 2)]


def resumed(folder: Path, **options: Any) -> Run:
    """Three steps, then a resume from the first."""
    run = Run(folder)
    for step in (1, 2, 3):
        run.step(step)
    run.jsonl.close()
    return Run(folder, records=1, **options)


def test_a_resume_discards_what_is_newer_than_its_checkpoint_and_finds_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = resumed(tmp_path, repeatable=True)
    assert [commit.step for commit in read_commits(run.commits)] == [1]
    run.step(2, values={**VALUES, "time/step_s": 9.0})
    run.step(3)
    run.step(4)
    assert run.buffer.statistics()["replayed"] == 2
    assert run.buffer.statistics()["replayed_differently"] == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda run: run.step(2, values={"loss/total": 0.26}), "metrics"),
        (lambda run: run.step(2, credited=rollout_files.credited()[:-1]), "rollouts"),
    ],
)
def test_a_replayed_step_that_differs_is_told(
    change: Callable[[Run], None], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = resumed(tmp_path, repeatable=True)
    change(run)
    assert (
        f"step 2 of stage rl was played again after the resume and is not what it was before ({named})" in caplog.text
    )
    assert run.buffer.statistics()["replayed_differently"] == 1


def test_a_stage_that_does_not_repeat_itself_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = resumed(tmp_path, repeatable=False)
    run.step(2, values={"loss/total": 0.26})
    assert "played again after the resume and is not" not in caplog.text


def assert_same_batch(batch: Sequence[CreditedEpisode]) -> None:
    groups, credited = rollout_files.groups(), rollout_files.credited()
    assert rollouts_digest(groups, batch) == rollouts_digest(groups, credited)
    messages = [[entry.scored.episode.messages for entry in entries] for entries in (batch, credited)]
    assert messages[0] == messages[1]


def test_batches_are_bounded_and_come_back_equal_from_the_disk(tmp_path: Path) -> None:
    run = Run(tmp_path, memory_bytes=0, kept_steps=2)
    for step in (1, 2, 3):
        run.step(step)
    for step in (2, 3):
        assert_same_batch(run.buffer.prepare_batch(step))
    assert run.buffer.statistics() | {"batches_on_disk": 2, "bytes_in_memory": 0, "spilled": 3} == (
        run.buffer.statistics()
    )
    with pytest.raises(RunFolderError, match="the batch of step 1 is not in the buffer any more; kept steps: 2, 3"):
        run.buffer.prepare_batch(1)
    assert len(list((tmp_path / "buffer").iterdir())) == 2
    run.buffer.close()
    assert not (tmp_path / "buffer").exists()


def test_batches_that_fit_stay_in_memory(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1)
    assert_same_batch(run.buffer.prepare_batch(1))
    assert not (tmp_path / "buffer").exists()
    assert run.buffer.statistics()["bytes_in_memory"] > 0


def shown(credited: CreditedEpisode, image: ModelImage, picture: Picture) -> CreditedEpisode:
    """An episode that was shown a picture before its first step."""
    episode = credited.scored.episode
    asked = Message(role="user", content=PICTURE_MARK, images=(picture,))
    placed = PlacedImage(image=image, at=np.array([0], dtype=np.int32))
    steps = (replace(episode.steps[0], images=(placed,)), *episode.steps[1:])
    episode = replace(episode, messages=(asked, *episode.messages), steps=steps)
    return replace(credited, scored=replace(credited.scored, episode=episode))


def test_pictures_count_once_and_leave_the_disk_with_their_batch(tmp_path: Path) -> None:
    picture, pixels = Picture(data=png("red")), np.zeros((100, 100), dtype=np.float32)
    image = ModelImage(digest="red", pixels=pixels, grid=(1, 1, 1), num_tokens=1)
    plain = rollout_files.credited()
    seen = [shown(credited, image, picture) for credited in plain]
    run = Run(tmp_path / "memory", kept_steps=1)
    run.step(1, credited=plain)
    bytes_before = run.buffer.statistics()["bytes_in_memory"]
    run.step(2, credited=seen)
    marks = len(seen) * len(PICTURE_MARK)
    shared = pixels.nbytes + len(picture.data)
    assert run.buffer.statistics()["bytes_in_memory"] == bytes_before + shared + marks
    spilled = Run(tmp_path / "disk", kept_steps=1, memory_bytes=0)
    spilled.step(1, credited=seen)
    first, *_ = spilled.buffer.prepare_batch(1)
    assert first.scored.episode.messages[0].images == (picture,)
    spilled.step(2, credited=plain)
    assert list((tmp_path / "disk" / "buffer").rglob("*.png")) == []


def test_a_process_that_has_lost_the_folder_commits_nothing(tmp_path: Path) -> None:
    lost = False

    def check() -> None:
        if lost:
            raise FolderLockedError("taken over")

    log = CommitLog(tmp_path / "commits.jsonl", records=0, check_owner=check)
    buffer = DataBuffer(log, stage="rl", records=lambda: 1, spill_to=tmp_path / "buffer")
    lost = True
    with pytest.raises(FolderLockedError):
        buffer.store_evaluation(1, VALUES)
    assert read_commits(tmp_path / "commits.jsonl") == ()


def test_digests_change_with_every_part_of_a_batch() -> None:
    groups, credited = rollout_files.groups(), rollout_files.credited()
    first = credited[0]
    reward = replace(first.scored, reward=replace(first.scored.reward, total=0.123))
    advantages = replace(first, advantages=tuple(value + 1.0 for value in first.advantages))
    variants = [
        (groups, credited),
        (groups, credited[:-1]),
        (groups[:-1], credited),
        (groups, [replace(first, scored=reward), *credited[1:]]),
        (groups, [advantages, *credited[1:]]),
    ]
    assert len({rollouts_digest(*variant) for variant in variants}) == len(variants)
    assert rollouts_digest(groups, credited) == rollouts_digest(list(groups), list(credited))


def test_digests_of_numbers_leave_the_clock_out() -> None:
    assert numbers_digest({"a": 1.0, "time/x": 1.0, "perf/y": 2.0}) == numbers_digest({"a": 1.0, "time/x": 2.0})
    assert numbers_digest({"a": 1.0}) != numbers_digest({"a": 1.5})


def test_the_file_is_lines_of_json_with_the_documented_keys(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1)
    fields = json.loads(run.commits.read_text())
    assert sorted(fields) == ["cursor", "metrics", "records", "rollouts", "stage", "step"]


def test_commits_that_were_cut_come_back_for_a_checkpoint_that_counts_on_them(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    run.buffer.close()
    assert [commit.step for commit in read_commits(run.commits)] == [1]
    restore_commits(run.commits, 3)
    assert [commit.step for commit in read_commits(run.commits)] == [1, 2, 3]
    again = CommitLog(run.commits, records=1)
    again.forget_cut()
    again.close()
    restore_commits(run.commits, 3)
    assert [commit.step for commit in read_commits(run.commits)] == [1]
