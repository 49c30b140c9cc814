"""The data buffer read while a run lasts: by other threads of its process, and by other processes from its files."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RunFolderError
from headrace.observe.buffer.commits import CommitLog, read_commits
from headrace.observe.buffer.data_buffer import DataBuffer
from headrace.observe.buffer.digests import rollouts_digest
from headrace.observe.buffer.reader import BufferReader
from headrace.observe.rollouts.files import save_trajectories
from support import ray_runs, rollout_files
from support.paths import ROOT

STEPS = 6
READER = """
import json, sys, time
from pathlib import Path
from headrace.observe.buffer.reader import BufferReader

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
end_s = time.monotonic() + 120.0
print("{}", flush=True)
while not list(folder.glob("t_*/config.toml")) and time.monotonic() < end_s:
    time.sleep(0.01)
[path] = folder.glob("t_*")
run, seen = BufferReader(path), {"commits": 0, "steps": 0}
while seen["steps"] < steps and time.monotonic() < end_s:
    now = run.statistics()
    if now["steps"] > seen["steps"]:
        batch = run.prepare_batch(now["steps"])
        tokens = sum(credited.scored.episode.num_sampled for credited in batch)
        print(json.dumps({**now, "batch": len(batch), "batch_tokens": tokens}), flush=True)
    seen = now
    time.sleep(0.01)
"""


def buffer_of(folder: Path, **options: Any) -> DataBuffer:
    log = CommitLog(folder / "commits.jsonl", records=0)
    return DataBuffer(log, stage="rl", records=lambda: len(log) + 1, spill_to=folder / "buffer", **options)


@contextmanager
def watching(read: Callable[[], None]) -> Iterator["Future[None]"]:
    """Read again and again on a thread, to the end of the block; raises what the thread has raised."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.is_set():
            read()

    with ThreadPoolExecutor(max_workers=1) as pool:
        watch = pool.submit(loop)
        try:
            yield watch
        finally:
            ended.set()
        watch.result(60)


@pytest.mark.parametrize("memory_bytes", [0, 2**30])
def test_a_thread_reads_while_another_stores(tmp_path: Path, memory_bytes: int) -> None:
    buffer = buffer_of(tmp_path, memory_bytes=memory_bytes, kept_steps=3)
    wanted = [repr(episode) for episode in rollout_files.credited()]
    read = 0

    def look() -> None:
        nonlocal read
        counted = buffer.statistics()
        assert 0 <= counted["batches_in_memory"] + counted["batches_on_disk"] <= 3
        try:
            batch = buffer.prepare_batch(counted["commits"])
        except RunFolderError as exc:
            if "is not in the buffer any more" in str(exc):
                return
            raise  # a file is gone
        assert [repr(episode) for episode in batch] == wanted
        read += 1

    step = 0
    with watching(look) as watch:
        while (step < 100 or read < 20) and not watch.done():
            step += 1
            buffer.store_rollouts(step, rollout_files.groups(), rollout_files.credited())
            buffer.store_evaluation(step, {"loss/total": 0.25})
    assert buffer.statistics()["commits"] == step


def test_a_live_run_is_read_by_a_thread_and_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ray_runs.write_files(tmp_path)
    buffers, create = list[DataBuffer](), DataBuffer.__init__

    def noted(buffer: DataBuffer, *arguments: Any, **options: Any) -> None:
        create(buffer, *arguments, **options)
        buffers.append(buffer)

    monkeypatch.setattr(DataBuffer, "__init__", noted)
    seen: dict[int, str] = {}  # digests of batches, by step

    def look() -> None:
        if buffers and (step := buffers[-1].statistics()["commits"]) not in (0, *seen):
            seen[step] = rollouts_digest((), buffers[-1].prepare_batch(step))

    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "runs"), str(STEPS)],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "{}\n"  # it is there before the run begins
        with watching(look):
            done = ray_runs.run(files, tmp_path / "runs", steps=STEPS)
        told = [json.loads(line) for line in reader.communicate(timeout=120)[0].splitlines()]
    finally:
        reader.kill()
    commits = {commit.step: commit.rollouts for commit in read_commits(done / "commits.jsonl")}
    assert len(commits) == STEPS
    saved = BufferReader(done)
    assert len(seen) >= 3, "steps that the thread read while the run went on"
    assert seen == {step: rollouts_digest((), saved.prepare_batch(step)) for step in seen}
    assert len(told) >= 3, "steps that the other process read while the run went on"
    assert told[0]["steps"] < STEPS
    for line in told:
        stored = commits[line["steps"]]
        assert stored is not None
        assert (line["batch"], line["batch_tokens"]) == (stored.episodes, stored.tokens)
    assert told[-1]["tokens"] == saved.statistics()["tokens"] == sum(s.tokens for s in commits.values() if s)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no config\.toml"):
        BufferReader(tmp_path)
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "rollouts").mkdir()
    reader, buffer = BufferReader(tmp_path), buffer_of(tmp_path)
    for step, count in ((1, 0), (2, 1), (3, len(rollout_files.credited())), (4, len(rollout_files.credited()))):
        file = tmp_path / "rollouts" / f"step_{step:06d}.jsonl"
        save_trajectories(file, rollout_files.credited()[:count])
        saved = file if count else None
        buffer.store_rollouts(step, rollout_files.groups(), rollout_files.credited(), file=saved)
        buffer.store_evaluation(step, {"loss/total": 0.25})
    (tmp_path / "rollouts" / "step_000004.jsonl").write_text("{}\n")
    assert len(reader.prepare_batch(3)) == len(rollout_files.credited())
    assert reader.statistics()["steps"] == 4
    for step, sentence in ((1, "were not saved"), (2, "has 1 of the"), (4, "is not the file"), (5, "no committed")):
        with pytest.raises(RunFolderError, match=sentence):
            reader.prepare_batch(step)
