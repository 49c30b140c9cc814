"""A folder that is whole: `manifest.json` lists every file in it with size and SHA-256, and a digest of itself.

Checkpoints of runs and everything that the service saves have this form. Damage is a CheckpointError: a file is
missing, truncated or altered. A read that the machine refuses (an input/output error, no permission) is a StorageError
and says nothing about the folder. Nothing here knows what the files mean.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headrace.errors import CheckpointError, StorageError
from headrace.process.watchdog import beat
from headrace.storage import atomic_files

MANIFEST = "manifest.json"
_HASH_CHUNK_BYTES = 1 << 20
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    __pydantic_config__ = ConfigDict(extra="forbid")
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files that a folder must hold, with their sizes and hashes."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int | None  # of training; None: the folder is no checkpoint of a run
    score: float | None
    files: dict[str, FileEntry]
    digest: str = ""  # SHA-256 of this manifest with an empty digest

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


def write_manifest(
    folder: Path, *, step: int | None = None, score: float | None = None, flush: bool = True
) -> Manifest:
    """List every file in `folder` with its hash, then flush all of it, so that a rename makes a whole folder.

    Without `flush` a loss of power may leave anything. May raise OSError.
    """
    assert not (folder / MANIFEST).exists(), f"{MANIFEST} is ours to write"
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    entries = {
        name: FileEntry(size_bytes=path.stat().st_size, sha256=sha256_of(path)) for name, path in sorted(files.items())
    }
    manifest = Manifest(step=step, score=score, files=entries)
    manifest = replace(manifest, digest=_digest(manifest))
    (folder / MANIFEST).write_text(_text(manifest), encoding="utf-8")
    if flush:
        atomic_files.fsync_tree(folder)
    return manifest


def verify(folder: Path, *, besides: Collection[str] = ()) -> Manifest:
    """Check every file of a folder against its manifest.

    Of the files named in `besides`, which the caller will not read, only the size is checked. Raises CheckpointError
    naming the first file that differs, or StorageError if one cannot be read.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name, entry in manifest.files.items():
        if name not in besides and _sha256_in(folder, name) != entry.sha256:
            raise CheckpointError(f"checkpoint {folder} is altered: {name} does not match its SHA-256 in {MANIFEST}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder and check its digest. Raises CheckpointError or StorageError."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = _MANIFEST.validate_json(text)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {MANIFEST} is missing") from None
    except (*_ABSENT, UnicodeDecodeError, ValidationError) as exc:
        raise CheckpointError(
            f"checkpoint {folder} is altered: {MANIFEST} cannot be read ({type(exc).__name__})"
        ) from exc
    except OSError as exc:
        raise _unreadable(folder, MANIFEST, exc) from exc
    if manifest.digest != _digest(manifest) or text != _text(manifest):
        raise CheckpointError(f"checkpoint {folder} is altered: {MANIFEST} does not match its own digest")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there with its size. Raises CheckpointError or StorageError."""
    for name, entry in manifest.files.items():
        try:
            size_bytes = (folder / name).stat().st_size
        except _ABSENT as exc:
            raise CheckpointError(f"checkpoint {folder} is incomplete: {name} is missing") from exc
        except OSError as exc:
            raise _unreadable(folder, name, exc) from exc
        if size_bytes != entry.size_bytes:
            raise CheckpointError(
                f"checkpoint {folder} is truncated or altered: {name} has {size_bytes} bytes, not {entry.size_bytes}"
            )


def sha256_of(path: Path) -> str:
    """Hash a file. May raise OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            beat()
    return digest.hexdigest()


def _sha256_in(folder: Path, name: str) -> str:
    try:
        return sha256_of(folder / name)
    except _ABSENT as exc:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {name} is missing") from exc
    except OSError as exc:
        raise _unreadable(folder, name, exc) from exc


def _unreadable(folder: Path, name: str, exc: OSError) -> StorageError:
    return StorageError(
        f"{folder / name} cannot be read ({exc.strerror or type(exc).__name__}); this is no sign of damage: "
        "see to the disk or its permissions, and try again"
    )


def _text(manifest: Manifest) -> str:
    return _MANIFEST.dump_json(manifest, indent=1).decode() + "\n"


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(_text(replace(manifest, digest="")).encode()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
