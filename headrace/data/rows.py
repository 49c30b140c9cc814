"""Read rows from JSONL, Parquet, a Hugging Face dataset, reasoning-gym or a user's Python function.

A row is a dict of JSON-like columns, with its place (file and line) for error messages. `task_rows.py`,
`conversations.py` and `preferences.py` decide what the columns mean.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, assert_never

from headrace.errors import ConfigError, DataError, boundary
from headrace.storage.hub import HubName, hub_name, load_hub_dataset
from headrace.user_code import load_function

MAX_ROWS = 5_000_000  # an endless generator ends here, with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Says where rows come from; which fields count depends on the type."""

    # "dataset" is a folder of `datasets.save_to_disk`, "python" a function that returns rows; "task" and "harbor" have
    # no rows
    type: Literal["jsonl", "parquet", "hub", "dataset", "reasoning_gym", "python", "task", "harbor"]
    # jsonl, parquet, dataset: the file or folder; hub: "owner/name[@revision]"; python: "file.py:function"
    path: str | None = None
    subset: str | None = None  # hub: which configuration of the dataset; None: the only one
    split: str | None = None  # hub: which split; None: the only one
    name: str | None = None  # reasoning_gym: which dataset
    size: int = 1000  # reasoning_gym: how many rows are made
    seed: int = 0  # reasoning_gym: of the rows
    columns: Mapping[str, str] = field(default_factory=dict)  # our column names to theirs
    options: Mapping[str, Any] = field(default_factory=dict)  # passed to the reasoning-gym dataset or the function
    system: str | None = None  # put before every conversation that has no system message


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A row, and where it was read, for error messages."""

    place: str  # "tasks.jsonl, line 17"
    columns: Mapping[str, Any]
    folder: Path = Path()  # where relative paths in the row start


def read_rows(source: DataSource, *, base: Path | None = None) -> Iterator[DataRow]:
    """Read the rows of a file, folder, generator or function, in their order there; paths are relative to `base`."""
    match source.type:
        case "jsonl":
            _refuse_options(source)
            return _read_jsonl(_path(source, base))
        case "parquet":
            _refuse_options(source)
            return _read_parquet(_path(source, base))
        case "hub":
            _refuse_options(source)
            return _read_hub(source, base)
        case "dataset":
            return _read_dataset(source, _path(source, base))
        case "reasoning_gym":
            return _read_reasoning_gym(source)
        case "python":
            return _read_python(source, base)
        case "task" | "harbor":
            raise ConfigError(
                f'a source of type = "{source.type}" has something to play and no rows: use it in rl.tasks'
            )
        case _:
            assert_never(source.type)


def _path(source: DataSource, base: Path | None) -> Path:
    if source.path is None:
        raise ConfigError(f'a source of type = "{source.type}" needs a path')
    path = (base or Path()) / Path(source.path).expanduser()
    if not path.exists():
        raise DataError(f"there is no {path}: correct the path of the source")
    return path


def _refuse_options(source: DataSource, allowed: tuple[str, ...] = ()) -> None:
    for name in source.options:
        if name not in allowed:
            options = ", ".join(allowed) or "none"
            raise ConfigError(f'a source of type = "{source.type}" has no option {name} (it has: {options})')


def _files(path: Path, pattern: str) -> list[Path]:
    """Return the file itself, or the matching files of a folder in the order of their names."""
    if path.is_file():
        return [path]
    files = sorted(path.glob(pattern))
    if not files:
        raise DataError(f"the folder {path} has no {pattern} in it")
    return files


def _read_jsonl(path: Path) -> Iterator[DataRow]:
    for file in _files(path, "*.jsonl"):
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{file}, line {number}", file.parent)


def _parse_line(line: bytes, place: str, folder: Path) -> DataRow:
    try:
        columns = json.loads(line.decode("utf-8-sig"))
    except ValueError as exc:  # not UTF-8, or not JSON
        raise DataError(f"{place}: not JSON in UTF-8 ({exc})") from exc
    if not isinstance(columns, dict):
        raise DataError(f"{place}: a row must be a JSON object, this is a {type(columns).__name__}")
    return DataRow(place=place, columns=columns, folder=folder)


def _read_parquet(path: Path) -> Iterator[DataRow]:
    parquet = _optional("pyarrow.parquet", package="pyarrow", extra="parquet")
    for file in _files(path, "*.parquet"):
        number = 0
        with boundary(DataError, f"{file} cannot be read as Parquet"), parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for columns in batch.to_pylist():
                    number += 1
                    yield DataRow(place=f"{file}, row {number}", columns=_json_columns(columns), folder=file.parent)


def _read_hub(source: DataSource, base: Path | None) -> Iterator[DataRow]:
    """Read a split of a dataset of the hub; a folder of that name on this machine wins."""
    if source.path is None:
        raise ConfigError('a source of type = "hub" needs a path, "openai/gsm8k" for example')
    local = (base or Path()) / Path(source.path).expanduser()
    name = HubName(repo=str(local)) if local.exists() else hub_name(source.path, "dataset")
    if name is None:
        raise ConfigError(
            f'{source.path} is no name of a dataset of the hub: write "owner/name" or "owner/name@revision"'
        )
    place = ", ".join(part for part in (source.path, source.subset, source.split) if part)
    with boundary(DataError, f"{place} cannot be read"):
        loaded = _undecoded(load_hub_dataset(name, subset=source.subset, split=source.split))
        for number, columns in enumerate(loaded, start=1):
            yield DataRow(place=f"{place}, row {number}", columns=_json_columns(columns))


def _read_dataset(source: DataSource, path: Path) -> Iterator[DataRow]:
    _refuse_options(source, ("split",))
    datasets = _optional("datasets", package="datasets", extra="datasets")
    with boundary(DataError, f"{path} is not a folder written by datasets.save_to_disk"):
        loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        split = source.options.get("split", next(iter(loaded)) if len(loaded) == 1 else None)
        if split not in loaded:
            raise ConfigError(f"{path} has the splits {', '.join(loaded)}: set options.split to one of them")
        loaded = loaded[split]
    elif "split" in source.options:
        raise ConfigError(f"{path} holds one dataset without splits: remove options.split")
    for number, columns in enumerate(_undecoded(loaded), start=1):
        yield DataRow(place=f"{path}, row {number}", columns=_json_columns(columns), folder=path)


def _read_reasoning_gym(source: DataSource) -> Iterator[DataRow]:
    """Make the rows; `entry` stays as reasoning-gym made it (tuples and all), because its `score_answer` needs that."""
    gym = _optional("reasoning_gym", package="reasoning-gym", extra="envs")
    if source.name is None:
        raise ConfigError('a source of type = "reasoning_gym" needs a name, "chain_sum" for example')
    with boundary(DataError, f"reasoning-gym cannot make the dataset {source.name}"):
        dataset = gym.create_dataset(source.name, size=source.size, seed=source.seed, **source.options)
    for index in range(source.size):
        with boundary(DataError, f"reasoning-gym's {source.name} failed at entry {index}"):
            entry = dataset[index]
        yield DataRow(
            place=f"reasoning-gym {source.name}, entry {index}",
            columns={
                "id": f"{source.name}-{source.seed}-{index}",
                "prompt": entry["question"],
                "answer": entry["answer"],
                "dataset": source.name,
                "entry": entry,
            },
        )


def _read_python(source: DataSource, base: Path | None) -> Iterator[DataRow]:
    if source.path is None:
        raise ConfigError('a source of type = "python" needs a path, "file.py:function"')
    function = load_function(source.path, base=base)
    with boundary(DataError, f"{source.path} failed"):
        rows = function(**source.options)
        if not isinstance(rows, Iterable):
            raise DataError(f"{source.path} must return an iterable of dicts, not a {type(rows).__name__}")
    file, _, _ = source.path.rpartition(":")
    yield from rows_of(rows, source.path, folder=((base or Path()) / Path(file).expanduser()).parent)


def rows_of(
    rows: Iterable[Any], place: str, *, max_rows: int = MAX_ROWS, folder: Path | None = None
) -> Iterator[DataRow]:
    """Yield rows from any Python iterable of dicts; raises DataError if it fails or gives something else than dicts."""
    with boundary(DataError, f"{place} failed"):
        for index, columns in enumerate(rows):
            if not isinstance(columns, Mapping):
                raise DataError(f"{place}, row {index}: a row must be a dict, this is a {type(columns).__name__}")
            if index >= max_rows:
                raise DataError(f"{place} gives more than {max_rows} rows: let it end, or write the rows to a file")
            yield DataRow(place=f"{place}, row {index}", columns=_json_columns(columns), folder=folder or Path())


def _undecoded(dataset: Any) -> Any:
    """Let the image columns of a dataset give files' bytes, as Parquet has them, in place of decoded pictures."""
    features = getattr(dataset, "features", None)
    if not features:
        return dataset
    datasets = importlib.import_module("datasets")
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else None)
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
        elif isinstance(inner, datasets.Image):
            dataset = dataset.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return dataset


def _json_columns(columns: Mapping[str, Any]) -> Any:
    """Convert columns to JSON's types, but leave pictures as they are: bytes, and objects of bytes and path."""
    return {str(key): value if is_pictures(value) else json_like(value) for key, value in columns.items()}


def is_pictures(value: Any) -> bool:
    """Tell whether a value is one or several pictures for which JSON has no type."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_pictures(item) for item in value)
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) and value.keys() <= {"bytes", "path"}
    return isinstance(value, bytes) or type(value).__module__.startswith("PIL.")


def json_like(value: Any) -> Any:
    """Convert a value to JSON's types; what JSON has no type for (dates, decimals, bytes) becomes text.

    The parts of a message's content that are pictures stay as they are.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping) and value.get("type") in ("image", "image_url"):
        return dict(value)
    if isinstance(value, Mapping):
        return {str(key): json_like(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_like(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return json_like(value.tolist())
    return str(value)


def _optional(module: str, *, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(f"this source needs the package {package}: pip install 'headrace[{extra}]'") from exc
