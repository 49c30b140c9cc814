"""A checkpoint is whole or absent, altered ones are refused by name, and a full disk overwrites nothing."""

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError, FolderLockedError, StorageError
from headrace.storage import atomic_files
from headrace.testing import FakeBackend
from headrace.train.checkpoint import (
    CheckpointStore,
    best_checkpoint,
    has_checkpoints,
    latest_checkpoint,
    read_checkpoint,
    retained,
    verify,
)


def writes(text: str = "weights") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "adam.bin").write_bytes(bytes(range(256)))

    return write


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def pointer(folder: Path, name: str) -> str:
    return (folder / name).read_text().strip()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2)


@pytest.fixture
def two(store: CheckpointStore, tmp_path: Path) -> Path:
    """A folder with steps 10 and 20."""
    store.save(10, writes("ten"), {"cursor": 10}, 0.5)
    store.save(20, writes("twenty"), {"cursor": 20}, 0.25)
    return tmp_path / "checkpoints"


# --- round trip ------------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back(store: CheckpointStore) -> None:
    state = {"cursor": {"epoch": 2, "order": [3, 1, 2]}, "metrics_bytes": 1234, "ema": 0.1 + 0.2, "note": None}
    saved = store.save(7, writes("w"), state, 0.75)
    loaded = store.load_latest()
    assert (loaded.step, loaded.folder, loaded.state, loaded.score) == (7, saved, state, 0.75)
    assert (saved / "model.safetensors").read_text() == "w"
    assert (saved / "optimizer" / "adam.bin").read_bytes() == bytes(range(256))


def test_a_backend_goes_through_a_checkpoint(store: CheckpointStore) -> None:
    store.save(1, lambda folder: FakeBackend(logprob=-0.125).save_state(folder).result(), {})
    restored = FakeBackend()
    restored.load_state(store.load_latest().folder).result()
    assert restored.logprob == -0.125


def test_pointers_name_the_latest_and_the_best(two: Path) -> None:
    assert pointer(two, "latest") == "step_000020"
    assert pointer(two, "best") == "step_000010"
    record = json.loads((two / "step_000020" / "state.json").read_text())
    assert record["best"] == {"step": 10, "score": 0.5}
    assert best_checkpoint(two).step == 10
    assert latest_checkpoint(two).step == 20


def test_the_newest_is_best_when_nothing_was_scored(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(1, writes(), {})
    store.save(2, writes(), {})
    assert best_checkpoint(tmp_path / "checkpoints").step == 2
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_a_score_that_is_not_finite_is_not_counted(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(1, writes(), {}, 0.1)
    store.save(2, writes(), {}, float("nan"))
    assert pointer(tmp_path / "checkpoints", "best") == "step_000001"
    assert store.load_latest().score is None


def test_two_saves_of_the_same_content_are_byte_equal(tmp_path: Path) -> None:
    first, second = (CheckpointStore(tmp_path / name, keep_last=1) for name in ("a", "b"))
    one, other = (store.save(3, writes(), {"cursor": 1}, 1) for store in (first, second))
    assert verify(one) == verify(other)
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


def test_saving_a_step_again_replaces_it(two: Path, store: CheckpointStore) -> None:
    store.save(20, writes("twenty again"), {"cursor": 21}, 0.9)
    loaded = store.load_latest()
    assert loaded.state == {"cursor": 21}
    assert (loaded.folder / "model.safetensors").read_text() == "twenty again"
    assert pointer(two, "best") == "step_000020"
    assert names(two) == {"step_000010", "step_000020", "latest", "best"}


def test_an_older_step_is_not_put_beside_a_newer_one(two: Path, store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="already holds step 20"):
        store.save(15, writes(), {})
    assert names(two) == {"step_000010", "step_000020", "latest", "best"}


# --- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path, index: int = 0, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[index % len(content)] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/adam.bin", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip_bit, Path.unlink])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_is_used(
    two: Path, store: CheckpointStore, file: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(two / "step_000020" / file)
    with pytest.raises(CheckpointError, match=f"step_000020.*{file}"):
        verify(two / "step_000020")
    with caplog.at_level(logging.WARNING):
        loaded = store.load_latest()
    assert (loaded.step, loaded.state) == (10, {"cursor": 10})
    assert any("step_000020" in message and file in message for message in caplog.messages)
    assert pointer(two, "latest") == "step_000010"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    file=st.sampled_from(["model.safetensors", "optimizer/adam.bin", "state.json", "manifest.json"]),
    index=st.integers(0, 5000),
    bit=st.integers(0, 7),
)
def test_any_flipped_bit_is_noticed(tmp_path: Path, file: str, index: int, bit: int) -> None:
    folder = tmp_path / "flips"
    if not folder.exists():
        CheckpointStore(folder, keep_last=1).save(1, writes(), {"cursor": 1}, 1.25e-7)
    flip_bit(folder / "step_000001" / file, index, bit)
    with pytest.raises(CheckpointError, match="step_000001"):
        verify(folder / "step_000001")
    flip_bit(folder / "step_000001" / file, index, bit)
    verify(folder / "step_000001")


def test_the_manifest_of_another_step_is_refused(two: Path) -> None:
    shutil.rmtree(two / "step_000020")
    shutil.copytree(two / "step_000010", two / "step_000020")
    with pytest.raises(CheckpointError, match="that of step 10"):
        verify(two / "step_000020")


def test_a_checkpoint_copied_under_a_name_of_its_own_is_fine(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "step_000010", tmp_path / "my-model")
    assert read_checkpoint(tmp_path / "my-model").step == 10


def test_when_none_is_valid_every_reason_is_listed(two: Path, store: CheckpointStore) -> None:
    truncate(two / "step_000010" / "model.safetensors")
    (two / "step_000020" / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.load_latest()
    assert "step_000010 is truncated or altered: model.safetensors has 2 bytes, not 3" in str(caught.value)
    assert "step_000020 is incomplete: manifest.json is missing" in str(caught.value)


def test_an_empty_or_missing_folder_holds_no_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.load_latest()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.load_latest()


@pytest.mark.parametrize("torn", [b"", b"step_0000", b"\xff\xfe", b"step_000099\n"])
def test_a_torn_latest_pointer_misleads_nobody_and_is_mended(two: Path, store: CheckpointStore, torn: bytes) -> None:
    (two / "latest").write_bytes(torn)
    assert store.load_latest().step == 20
    assert pointer(two, "latest") == "step_000020"


def test_a_resumed_run_goes_on_past_a_damaged_checkpoint(two: Path, store: CheckpointStore) -> None:
    flip_bit(two / "step_000020" / "model.safetensors")
    resumed = CheckpointStore(two, keep_last=1)
    assert resumed.load_latest().step == 10
    resumed.save(15, writes("fifteen"), {"cursor": 15})
    assert names(two) == {"step_000010", "step_000015", "refused-step_000020", "latest", "best"}  # 10 is the best
    assert resumed.load_latest().step == 15
    resumed.save(20, writes("twenty"), {"cursor": 20})
    assert names(two) == {"step_000010", "step_000020", "latest", "best"}
    assert (verify(two / "step_000020").step, resumed.load_latest().state) == (20, {"cursor": 20})


def test_a_refused_checkpoint_never_comes_back_once_the_run_was_saved_without_it(
    two: Path, store: CheckpointStore
) -> None:
    flip_bit(two / "step_000020" / "model.safetensors")
    assert store.load_latest().step == 10
    assert "step_000020" in names(two), "until something newer is saved nothing is moved"
    flip_bit(two / "step_000020" / "model.safetensors")  # it was the machine that had read it wrongly
    assert CheckpointStore(two, keep_last=2).load_latest().step == 20
    flip_bit(two / "step_000020" / "model.safetensors")
    assert store.load_latest().step == 10
    store.save(15, writes("fifteen"), {"cursor": 15})
    flip_bit(two / "refused-step_000020" / "model.safetensors")
    assert CheckpointStore(two, keep_last=2).load_latest().step == 15


def test_a_refused_checkpoint_that_the_run_has_passed_is_removed(two: Path, store: CheckpointStore) -> None:
    flip_bit(two / "step_000020" / "model.safetensors")
    assert store.load_latest().step == 10
    store.save(30, writes(), {})
    assert names(two) == {"step_000010", "step_000030", "latest", "best"}


# --- a machine that cannot read or write -----------------------------------------------------------------------------


def fails_for(monkeypatch: pytest.MonkeyPatch, name: str, fragment: str, code: int = errno.EIO) -> None:
    """Let a method of Path raise OSError for paths that contain `fragment`."""
    real = getattr(Path, name)

    def method(self: Path, *args: Any, **kwargs: Any) -> Any:
        if fragment in str(self):
            raise OSError(code, os.strerror(code))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, name, method)


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        ("open", "step_000020/model.safetensors"),
        ("stat", "step_000020/optimizer/adam.bin"),
        ("read_text", "step_000020/manifest.json"),
        ("read_bytes", "step_000020/state.json"),
    ],
)
def test_a_checkpoint_that_the_machine_cannot_read_is_not_taken_for_damaged(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str, fragment: str
) -> None:
    before = snapshot(two)
    with monkeypatch.context() as patch:
        fails_for(patch, call, fragment)
        with pytest.raises(StorageError, match=r"step_000020/.* cannot be read \(Input/output error\)"):
            store.load_latest()
    assert snapshot(two) == before
    assert store.load_latest().step == 20


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    for read in (has_checkpoints, latest_checkpoint, best_checkpoint):
        with pytest.raises(StorageError, match=r"cannot be read \(Permission denied\)"):
            read(two)
    with pytest.raises(StorageError, match=r"cannot be cleaned|cannot be read \(Permission denied\)"):
        store.load_latest()


def test_an_older_checkpoint_that_cannot_be_read_stops_no_save_and_is_not_removed(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(two, keep_last=1)
    with monkeypatch.context() as patch:
        fails_for(patch, "read_text", "step_000020/manifest.json")
        store.save(30, writes(), {})
    assert {"step_000020", "step_000030"} <= names(two)
    store.save(40, writes(), {})
    assert {name for name in names(two) if name.startswith("step_")} == {"step_000010", "step_000040"}


def test_the_best_checkpoint_stays_the_best_while_it_cannot_be_read(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fails_for(patch, "read_text", "step_000010/manifest.json")
        store.save(30, writes(), {}, 0.3)
        CheckpointStore(two, keep_last=2).save(40, writes(), {}, 0.4)  # a writer that has never read it
    record = json.loads((two / "step_000030" / "state.json").read_text())
    assert record["best"] == {"step": 10, "score": 0.5}
    assert pointer(two, "best") == "step_000010"


def test_pointers_that_cannot_be_written_end_nothing(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (two / "latest").write_text("step_000010\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with caplog.at_level(logging.WARNING):
            assert store.load_latest().step == 20
    assert any("latest cannot be written" in message for message in caplog.messages)
    assert store.load_latest().step == 20
    assert pointer(two, "latest") == "step_000020"


def test_the_best_pointer_and_the_number_kept_are_mended_after_a_kill(two: Path) -> None:
    """The kill came between `latest` and `best`, so one checkpoint more than is kept stayed."""
    wide = CheckpointStore(two, keep_last=9)
    wide.save(30, writes(), {"cursor": 30}, 0.75)
    (two / "best").write_text("step_000010\n")
    store = CheckpointStore(two, keep_last=1)
    assert store.load_latest().step == 30
    assert pointer(two, "best") == "step_000030"
    store.remove_unneeded()
    assert names(two) == {"step_000030", "latest", "best"}


def test_a_checkpoint_that_a_pointer_names_is_not_removed(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(two, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        store.save(30, writes(), {"cursor": 30}, 0.75)
    assert names(two) == {"step_000010", "step_000020", "step_000030", "latest", "best"}
    store.save(40, writes(), {"cursor": 40})
    assert names(two) == {"step_000030", "step_000040", "latest", "best"}


@pytest.mark.parametrize("call", [1, 2])
def test_a_writer_that_lost_its_folder_changes_nothing(two: Path, call: int) -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) >= call:
            raise FolderLockedError("lost")

    written: list[Path] = []

    def write(folder: Path) -> None:
        writes()(folder)
        written.append(folder)
        (two / ".writing-of-the-other").mkdir()  # the process that has the folder now is writing too

    before = snapshot(two)
    store = CheckpointStore(two, keep_last=1, check_owner=check)
    with pytest.raises(FolderLockedError):
        store.save(30, write, {})
    with pytest.raises(FolderLockedError):
        store.load_latest()
    assert snapshot(two) == before
    assert bool(written) == (call == 2)
    assert (two / ".writing-of-the-other").is_dir() == (call == 2)


# --- interrupted writing ---------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Not an Exception, as Ctrl-C is not."""


@pytest.mark.parametrize("error", [RuntimeError("boom"), Crash()])
def test_a_writer_that_fails_leaves_nothing_behind(two: Path, store: CheckpointStore, error: BaseException) -> None:
    def write(folder: Path) -> NoReturn:
        (folder / "model.safetensors").write_text("half")
        raise error

    before = snapshot(two)
    with pytest.raises(Crash if isinstance(error, Crash) else CheckpointError, match=r"boom|^$"):
        store.save(30, write, {})
    assert snapshot(two) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.storage import whole_folder
from headrace.train import checkpoint
from headrace.train.checkpoint import CheckpointStore

folder, point = Path(sys.argv[1]), sys.argv[2]
kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)

def write(folder):
    (folder / "model.safetensors").write_text("thirty")
    if point == "write":
        kill()
    if point == "manifest":
        whole_folder._digest = kill
    if point == "rename":
        os.rename = kill
    if point == "pointer":
        os.replace = kill
    if point == "removal":
        checkpoint.shutil.rmtree = kill
    if point == "replacement":
        rename = os.rename
        os.rename = lambda source, target: rename(source, target) if ".replaced-" in str(target) else kill()

CheckpointStore(folder, keep_last=1).save(int(sys.argv[3]), write, {"cursor": 30}, 0.0)
"""


@pytest.mark.parametrize(
    ("point", "step", "survivor"),
    [
        ("write", 30, 20),
        ("manifest", 30, 20),
        ("rename", 30, 20),
        ("pointer", 30, 30),
        ("removal", 30, 30),
        ("replacement", 20, 20),
    ],
)
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(
    two: Path, store: CheckpointStore, point: str, step: int, survivor: int
) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED, str(two), point, str(step)], timeout=60, check=False)
    assert child.returncode == -signal.SIGKILL
    assert any(name.startswith(".") for name in names(two)), "the kill came too late to leave anything behind"
    loaded = store.load_latest()
    assert (loaded.step, loaded.state) == (survivor, {"cursor": survivor})
    assert not any(name.startswith(".") for name in names(two))
    store.save(40, writes("forty"), {"cursor": 40})
    assert store.load_latest().step == 40


def test_readers_leave_a_checkpoint_that_is_being_written_alone(two: Path, store: CheckpointStore) -> None:
    def write(folder: Path) -> None:
        writes()(folder)
        assert latest_checkpoint(two).step == 20
        assert best_checkpoint(two).step == 10

    store.save(30, write, {})
    assert latest_checkpoint(two).step == 30


# --- a full disk -----------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(("estimate", "free", "fits"), [(0, 10, False), (5000, 4999, False), (5000, 5000, True)])
def test_too_little_room_is_an_error_before_anything_is_written(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, estimate: int, free: int, fits: bool
) -> None:
    assert 10 < verify(two / "step_000020").size_bytes < 5000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free))
    before = snapshot(two)
    if fits:
        assert store.save(30, writes(), {}, estimate_bytes=estimate).name == "step_000030"
        return

    def untouched(folder: Path) -> NoReturn:
        pytest.fail("nothing may be written when there is no room")

    with pytest.raises(CheckpointError, match=f"step_000030 needs about .* has {free:,} free"):
        store.save(30, untouched, {}, estimate_bytes=estimate)
    assert snapshot(two) == before


def full_disk(*args: Any, **kwargs: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_disk_that_fills_up_while_writing_leaves_the_old_checkpoints(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def write(folder: Path) -> None:
        writes()(folder)
        if call == "write":
            full_disk()

    before = snapshot(two)
    with monkeypatch.context() as patch:
        if call != "write":
            patch.setattr(os, call, full_disk)
        with pytest.raises(CheckpointError, match=r"step_000030 cannot be written.*No space left"):
            store.save(30, write, {})
    assert snapshot(two) == before
    assert store.load_latest().step == 20


def test_a_disk_that_fills_up_at_the_pointer_loses_nothing(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        store.save(30, writes(), {"cursor": 30})
    assert pointer(two, "latest") == "step_000020"
    assert names(two) == {"step_000010", "step_000020", "step_000030", "latest", "best"}
    assert store.load_latest().state == {"cursor": 30}


def test_a_rename_that_fails_puts_the_replaced_checkpoint_back(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail_for_new(source: Path, target: Path) -> None:
        full_disk() if ".writing-" in str(source) else rename(source, target)

    before = snapshot(two)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_for_new)
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(20, writes("again"), {})
    assert snapshot(two) == before


# --- retention -------------------------------------------------------------------------------------------------------


def test_retention_by_hand() -> None:
    scores = {10: 0.1, 20: 0.9, 30: 0.9, 40: None, 50: 0.3, 60: 0.2}
    assert retained(scores, keep_last=2, keep_every=0) == {20, 50, 60}  # the earlier of the equals is the best
    assert retained(scores, keep_last=1, keep_every=30) == {20, 30, 60}
    assert retained({10: None}, keep_last=3, keep_every=0) == {10}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    scores=st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8),
    keep_last=st.integers(1, 4),
    keep_every=st.integers(0, 4),
    data=st.data(),
)
def test_retention_keeps_exactly_the_last_the_best_and_every_nth(
    tmp_path_factory: pytest.TempPathFactory,
    fast_disk: None,
    scores: list[float | None],
    keep_last: int,
    keep_every: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    saved: dict[int, float | None] = {}
    for step, score in enumerate(scores, start=1):
        reopened = CheckpointStore(folder, keep_last=keep_last, keep_every=keep_every)
        if saved and data.draw(st.booleans(), label="restart"):
            assert reopened.load_latest().step == step - 1
        reopened.save(step, writes(), {"cursor": step}, score)
        saved[step] = score
        kept = {int(name[5:]) for name in names(folder) if name.startswith("step_")}
        best = max((value, -at) for at, value in saved.items() if value is not None) if any_scored(saved) else None
        expected = set(range(max(1, step - keep_last + 1), step + 1))
        expected |= {at for at in saved if keep_every and at % keep_every == 0}
        expected |= set() if best is None else {-best[1]}
        assert kept == expected
        assert latest_checkpoint(folder).step == step
        assert not (folder / "best").exists() if best is None else best_checkpoint(folder).step == -best[1]


def any_scored(saved: dict[int, float | None]) -> bool:
    return any(value is not None for value in saved.values())


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many small checkpoints need no flush to a real disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return


def test_a_checkpoint_that_cannot_be_removed_is_no_error(
    two: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(30, writes(), {})
    rename = os.rename

    def refuse_removal(source: Path, target: Path) -> None:
        if ".removed-" in str(target):
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_removal)
    with caplog.at_level(logging.WARNING):
        store.save(40, writes(), {})
    assert store.load_latest().step == 40
    assert any("step_000020 is no longer needed but cannot be removed" in message for message in caplog.messages)


def test_every_file_and_folder_is_flushed_before_the_rename(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = atomic_files.fsync, os.rename

    def record_fsync(path: Path) -> None:
        events.append(re.sub(r"(step_000001)-\w{8}", r"\1", os.path.relpath(path, tmp_path / "checkpoints")))
        fsync(path)

    def record_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(atomic_files, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    store.save(1, writes(), {})
    writing = ".writing-step_000001"
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    files = ["model.safetensors", "optimizer/adam.bin", "state.json", "manifest.json", "optimizer"]
    assert before[0] == "..", "the folder of checkpoints itself was new"
    assert set(before[1:]) == {writing, *(f"{writing}/{name}" for name in files)}
    assert before[-1] == writing
    assert after[0] == "."
