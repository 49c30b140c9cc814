"""Files and folders are flushed in the order that their promises rest on."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.storage import atomic_files


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flushes and renames under tmp_path, in their order."""
    told: list[str] = []
    opened: dict[int, Path] = {}
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("open", "fsync", "replace")}

    def record_open(path: Any, *args: Any, **kwargs: Any) -> int:
        descriptor: int = real["open"](path, *args, **kwargs)
        opened[descriptor] = Path(path)
        return descriptor

    def record_fsync(descriptor: int) -> None:
        real["fsync"](descriptor)
        path = opened.get(descriptor)
        told.append("flush contents" if path is None else f"flush {path.relative_to(tmp_path)}")

    def record_replace(source: Path, target: Path) -> None:
        real["replace"](source, target)
        told.append(f"rename to {target.relative_to(tmp_path)}")

    monkeypatch.setattr(os, "open", record_open)
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return told


@pytest.mark.parametrize(
    "write",
    [lambda path: atomic_files.write_text(path, ["a", "b"]), lambda path: atomic_files.write_bytes(path, b"ab")],
)
def test_a_file_is_flushed_then_renamed_then_its_name_is_flushed(
    tmp_path: Path, events: list[str], write: Callable[[Path], None]
) -> None:
    write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"ab"
    assert events == ["flush file.tmp", "rename to file", "flush ."]


def test_the_name_of_every_new_folder_is_flushed(tmp_path: Path, events: list[str]) -> None:
    atomic_files.make_folder(tmp_path / "a" / "b")
    atomic_files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert events == ["flush .", "flush a"]


@pytest.mark.parametrize(("code", "is_fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_flushes_no_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_fatal: bool
) -> None:
    (tmp_path / "file").touch()

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    if is_fatal:
        with pytest.raises(OSError, match="Input/output"):
            atomic_files.fsync(tmp_path)
    else:
        atomic_files.fsync(tmp_path)
    with pytest.raises(OSError, match=r"Input/output|Invalid"):
        atomic_files.fsync(tmp_path / "file")
