"""Write files of a run folder: JSON lines that round-trip, and whole files that appear at once or not at all."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import RunFolderError, boundary
from headrace.storage import atomic_files


def json_line(value: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Format one line of strict JSON, newline included.

    Floats keep every bit. NaN and infinities become the strings "NaN", "Infinity" and "-Infinity", because JSON has no
    such numbers and other readers refuse them. Half of a surrogate pair, which no file can hold, becomes U+FFFD: a
    reward function may have cut a model's text anywhere.
    """
    text = json.dumps(_finite(value), sort_keys=sort_keys, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_whole(path: Path, text: str | Iterable[str], *, temporary: Path | None = None) -> None:
    """Write a file of the run folder atomically, and the folders above it (see `atomic_files.write_text`).

    Raises RunFolderError (a full disk, a folder that is not writable); an existing file is then unchanged.
    """
    with boundary(RunFolderError, f"cannot write {path}"):
        atomic_files.make_folder(path.parent)
        atomic_files.write_text(path, text, temporary=temporary)
