"""Record the files that a run reads in `inputs.json` of its folder, and find out at a resume which have changed.

Files are grouped by the key of the configuration that names them: data, users' code with the local modules that it
imports, task definitions with the files that they name, model folders. Names are relative to the file or folder that is
named, so a project may be moved. The folder of runs is never an input. Loads no data and runs no code.
"""

import ast
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from headrace.config import Config, map_paths, named_paths, to_mapping
from headrace.config.paths import task_sources
from headrace.errors import ConfigError, HeadraceError, RunFolderError, StorageError, boundary
from headrace.observe.json_lines import write_whole
from headrace.observe.run_folder import RunFolder
from headrace.storage.hub import HubCommit
from headrace.storage.whole_folder import sha256_of

logger = logging.getLogger(__name__)

SAMPLED_ABOVE_BYTES = 64 << 20  # larger files of a folder (weights, shards) are hashed in parts
PARTS, PART_BYTES = 64, 1 << 16
MAX_FILES = 10_000  # of one folder
MAX_MODULES = 1_000  # that one file of code imports
MAX_NAMED = 5  # changed files in a message
MAX_RUNS = 20  # earlier runs whose digests are used again
PERMISSIONS = "rl.reward_runner.readable"  # lists what functions may read, outputs of runs perhaps, and is no input
_INSTALLED = {"site-packages", "dist-packages"}
_FUNCTION_OF_MODULE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file as it was when it was read."""

    size_bytes: int
    mtime_ns: int
    sha256: str
    sampled: bool = False  # the hash is of evenly spaced parts, not of the whole file

    def same_content(self, other: "InputFile") -> bool:
        return (self.size_bytes, self.sha256, self.sampled) == (other.size_bytes, other.sha256, other.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFiles:
    """The files that one key of the configuration stands for."""

    folder: str  # that the names below are relative to
    files: dict[str, InputFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedChange:
    """Changed files with which a resume was told to go on."""

    time: str
    files: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """The contents of inputs.json."""

    run_folder: str  # where the run was started; it may have been moved since
    keys: dict[str, KeyFiles]
    accepted: list[AcceptedChange] = field(default_factory=list)
    hub: dict[str, HubCommit] = field(default_factory=dict)  # of names of the Hugging Face hub, by key
    rows: dict[str, int] = field(default_factory=dict)  # of stages whose length was given in epochs


_RECORD = TypeAdapter(InputRecord)


# --- the record ------------------------------------------------------------------------------------------------------


def read_record(folder: RunFolder) -> InputRecord | None:
    """Read inputs.json; returns None in a run folder from before there was one. Raises RunFolderError."""
    with boundary(RunFolderError, f"{folder.inputs} cannot be read; remove it to resume without comparing files"):
        if not folder.inputs.exists():
            return None
        return _RECORD.validate_json(folder.inputs.read_bytes())


def record_inputs(config: Config, folder: RunFolder, hub: Mapping[str, HubCommit] | None = None) -> None:
    """Write the digests of all files that a new run reads. Of unchanged files, those of earlier runs are used again.

    `hub` has the commits of what is read from the Hugging Face hub.
    """
    earlier = _digests_of_runs(folder.path.parent)
    keys = _find_files(config, folder, lambda key, name, path: earlier.get(str(path)))
    _write(folder, InputRecord(run_folder=str(folder.path.resolve()), keys=keys, hub=dict(hub or {})))


def record_rows(folder: RunFolder, rows: Mapping[str, int]) -> None:
    """Write how many rows stages had whose length was given in epochs."""
    record = read_record(folder)
    assert record is not None, "a new run records its inputs first"
    _write(folder, replace(record, rows=dict(rows)))


def check_inputs(
    config: Config,
    folder: RunFolder,
    *,
    reads: Callable[[str], bool],
    accept_changes: bool,
    other_files: Collection[str] = (),
    hub: Mapping[str, HubCommit] | None = None,
) -> None:
    """Raise ConfigError if files changed since the run read them, unless `accept_changes`, which records the new ones.

    `reads` tells whether the run still reads the files of a key. Unchanged size and modification time mean an unchanged
    file, so that large ones are not read. In a run folder from before inputs.json, nothing is compared.
    `other_files` are keys, or tables of keys, that name other files than before, or none: these are recorded. Other
    weights at another `model.path` are never accepted.
    """
    record = read_record(folder)
    if record is None:
        logger.info("%s has no %s: changes of data and code are not noticed", folder.path, folder.inputs.name)
        record_inputs(config, folder, hub)
        return
    before = {key: files for key, files in record.keys.items() if not key.startswith(PERMISSIONS)}
    known = {str(Path(of.folder) / name): file for of in before.values() for name, file in of.files.items()}

    def recorded(key: str, name: str, path: Path) -> InputFile | None:
        moved = before[key].files.get(name) if key in before else None
        return known.get(str(path), moved)

    now = _find_files(config, folder, recorded, reads)
    _check_model(before.get("model.path"), now.get("model.path"))
    changed = sorted(
        {
            str(Path(folder_of) / name)
            for key in {*before, *now}
            if reads(key) and not _is_within(key, other_files)
            for folder_of, name in _changed(before.get(key), now.get(key))
        }
    )
    if changed and not accept_changes:
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        names = ", ".join(changed[:MAX_NAMED])
        raise ConfigError(
            f"{folder.path} was started with other contents of {names}{more}: restore them, go on with them by "
            "--accept-changed-files, or start a new run without --resume"
        )
    accepted = list(record.accepted)
    if changed:
        logger.warning("the run goes on with changed files: %s", ", ".join(changed))
        accepted.append(AcceptedChange(time=datetime.now(UTC).isoformat(timespec="seconds"), files=changed))
    unread = {key: files for key, files in before.items() if not reads(key)}
    updated = replace(record, keys={**unread, **now}, accepted=accepted, hub={**record.hub, **(hub or {})})
    if updated != record:
        _write(folder, updated)


def _check_model(before: KeyFiles | None, now: KeyFiles | None) -> None:
    """Raise ConfigError for other weights at another place: that is another model, and no change of a file."""
    if before is None or now is None or before.folder == now.folder:
        return
    if any(name.endswith(".safetensors") for _, name in _changed(before, now)):
        raise ConfigError(
            f"'model.path' is {now.folder}, which is another model than {before.folder}, with which the run was "
            "started: write the old one, or start a new run without --resume"
        )


def _is_within(key: str, tables: Collection[str]) -> bool:
    """Tell whether a key is one of `tables`, or in one of them."""
    return any(key == table or key.startswith((f"{table}.", f"{table}[")) for table in tables)


def _changed(before: KeyFiles | None, now: KeyFiles | None) -> Iterator[tuple[str, str]]:
    """Yield folder and name of every file that one of them lacks, or that differs."""
    old, new = before.files if before else {}, now.files if now else {}
    where = now or before
    assert where is not None
    for name in {*old, *new}:
        if name not in old or name not in new or not old[name].same_content(new[name]):
            yield where.folder, name


def _write(folder: RunFolder, record: InputRecord) -> None:
    write_whole(folder.inputs, _RECORD.dump_json(record, indent=1).decode() + "\n")


def _digests_of_runs(root: Path) -> dict[str, InputFile]:
    """Collect the digests that the newest runs beside a new one recorded, by path. Unreadable records are left out."""
    digests: dict[str, InputFile] = {}
    newest = sorted(root.glob("*/inputs.json"), key=lambda path: path.parent.name.rpartition("_")[2])[-MAX_RUNS:]
    for path in newest:
        try:
            record = read_record(RunFolder(path=path.parent))
        except HeadraceError:
            continue
        for of in record.keys.values() if record is not None else ():
            digests.update({str(Path(of.folder) / name): file for name, file in of.files.items()})
    return digests


def follow_move(config: Config, base: Path) -> Config:
    """Find the paths of a run folder's config.toml that moved together with the run folder `base`.

    They are absolute; what is gone is looked up at the same place relative to the run folder as before.
    """
    file = RunFolder(path=base).inputs
    try:
        started_in = json.loads(file.read_text(encoding="utf-8"))["run_folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return config  # no run folder, or one without a record that can be read, of which the resume will speak

    def locate(key: str, path: str) -> str:
        if not os.path.isabs(path) or os.path.exists(path) or not isinstance(started_in, str):
            return path
        moved = os.path.normpath(base / os.path.relpath(path, started_in))
        return moved if os.path.exists(moved) else path

    return map_paths(config, locate)


# --- finding files ---------------------------------------------------------------------------------------------------

Known = Callable[[str, str, Path], InputFile | None]  # key, name and path -> the file as it was read before


def _find_files(
    config: Config, run: RunFolder, known: Known, reads: Callable[[str], bool] = lambda key: True
) -> dict[str, KeyFiles]:
    """Find and hash the files of every key that `reads` names; those that `known` has unchanged are not hashed."""
    found: dict[str, KeyFiles] = {}
    runs = {os.path.realpath(run.path.parent), os.path.realpath(config.run.folder)}
    named = {**_modules(to_mapping(config)), **{key: Path(path) for key, path in named_paths(config).items()}}
    sources = [*(task_sources(config.rl) if config.rl else ()), ("eval.source", config.eval.source)]
    teachers = config.distill.teachers if config.distill else ()
    sources += [(f"distill.teachers[{number}].tasks", teacher.tasks) for number, teacher in enumerate(teachers)]
    definitions = {f"{key}.path" for key, source in sources if source is not None and source.type == "task"}
    for key, path in named.items():
        with boundary(StorageError, f"the files of '{key}' cannot be read"):
            if key.startswith(PERMISSIONS) or not reads(key) or not path.is_absolute() or not path.exists():
                continue
            is_folder = path.is_dir()
            folder = path if is_folder else path.parent
            paths = _walk(path, runs) if is_folder else _files_of(path, is_definition=key in definitions)
            names = {os.path.relpath(file, folder): file for file in paths}
            digests = {
                name: _digest(file, known(key, name, file), in_folder=is_folder) for name, file in sorted(names.items())
            }
            files = {name: digest for name, digest in digests.items() if digest is not None}
            found[key] = KeyFiles(folder=str(folder), files=files)
    return found


def _modules(tree: Any, key: str = "") -> dict[str, Path]:
    """Find the files of functions that are named "package.module:function", by key, without importing them."""
    if isinstance(tree, Mapping):
        parts = [_modules(value, f"{key}.{name}" if key else name) for name, value in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [_modules(value, f"{key}[{number}]") for number, value in enumerate(tree)]
    elif isinstance(tree, str) and (match := _FUNCTION_OF_MODULE.fullmatch(tree)):
        file = _module_file(match[1])
        return {} if file is None else {key: file}
    else:
        return {}
    return {name: path for part in parts for name, path in part.items()}


def _module_file(name: str) -> Path | None:
    search, origin = None, None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return None
        search, origin = spec.submodule_search_locations, spec.origin
    return None if origin is None or not origin.endswith(".py") else Path(origin).resolve()


def _files_of(path: Path, *, is_definition: bool) -> Iterable[Path]:
    if path.suffix == ".py":
        return _with_imports(path)
    if not is_definition:
        return [path]
    from headrace.envs.task_definitions import read_definition  # environments are slow to import

    definition = read_definition(path)
    names = [definition.dataset_path, definition.tools_module_path]
    names += [str(definition.base_resource_config.get(key, "")) for key in ("schema_file", "seed_data_file")]
    beside = [path.parent / name for name in names if name and (path.parent / name).is_file()]
    return [path, *(part for file in beside for part in _files_of(file, is_definition=False))]


def _walk(folder: Path, runs: Collection[str]) -> list[Path]:
    """List the files under a folder in order, without hidden ones, what Python compiled, and the folders of `runs`."""

    def is_left_out(place: str, name: str) -> bool:
        hidden = name.startswith(".") or name == "__pycache__"
        return hidden or os.path.realpath(os.path.join(place, name)) in runs

    def files() -> Iterator[Path]:
        for place, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if not is_left_out(place, name))
            for name in sorted(names):
                if not name.startswith(".") and os.path.isfile(path := os.path.join(place, name)):
                    yield Path(path)

    listed = list(islice(files(), MAX_FILES + 1))
    if len(listed) > MAX_FILES:
        logger.warning("%s has more than %d files: a resume will not notice changes of the others", folder, MAX_FILES)
    return listed[:MAX_FILES]


def _with_imports(file: Path) -> list[Path]:
    """Return a file of Python and the local modules that it imports, directly or not; parses them only.

    Local modules are beside the file or in its package. Of an installed package, only the file itself is returned.
    """
    if _INSTALLED & set(file.parts):
        return [file]
    package = next(folder for folder in file.parents if not (folder / "__init__.py").is_file())
    seen, todo = {file}, [file]
    while todo and len(seen) < MAX_MODULES:
        importing = todo.pop()
        for path in (path for root in {file.parent, package} for path in _imported(importing, root)):
            if path not in seen and path.is_file():
                seen.add(path)
                todo.append(path)
    return sorted(seen)


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Yield the paths at which the modules that `file` imports would be, if they were under `root`; without ours."""
    try:
        statements = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # the import will say so
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield from _module_paths(root, alias.name.split("."))
        elif isinstance(statement, ast.ImportFrom):
            base = root if statement.level == 0 else file.parents[min(statement.level, len(file.parents)) - 1]
            parts = statement.module.split(".") if statement.module else []
            for alias in statement.names:
                yield from _module_paths(base, [*parts, alias.name])


def _module_paths(base: Path, parts: list[str]) -> Iterator[Path]:
    for length in range(1, len(parts) + 1 if parts[0] != "headrace" else 0):
        place = base.joinpath(*parts[:length])
        yield place.with_name(place.name + ".py")
        yield place / "__init__.py"


def _digest(path: Path, known: InputFile | None, *, in_folder: bool) -> InputFile | None:
    """Hash a file unless it is `known` and looks unchanged; None for one of a folder that this user may not read."""
    status = path.stat()
    sampled = in_folder and status.st_size > SAMPLED_ABOVE_BYTES
    unchanged = (status.st_size, status.st_mtime_ns, sampled)
    if known is not None and (known.size_bytes, known.mtime_ns, known.sampled) == unchanged:
        return known
    try:
        sha256 = _sampled_sha256(path, status.st_size) if sampled else sha256_of(path)
    except PermissionError:
        if not in_folder:
            raise
        return None
    return InputFile(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=sha256, sampled=sampled)


def _sampled_sha256(path: Path, size_bytes: int) -> str:
    """Hash evenly spaced parts of a large file, the first and the last among them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(PARTS):
            file.seek((size_bytes - PART_BYTES) * number // (PARTS - 1))
            digest.update(file.read(PART_BYTES))
    return digest.hexdigest()
