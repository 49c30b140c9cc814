"""Score sequences with the reference model once for a whole stage, and keep the log-probs in a file of the run folder.

The sequences have an order in which training needs them first, so a run with more steps only adds to the file. A
checkpoint holds a digest of the log-probs, with which a resumed stage compares what it finds or computes again.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from headrace.data.shuffle import fingerprint
from headrace.errors import CheckpointError, HeadraceError, StorageError, boundary
from headrace.loops.preference.examples import sequence_data
from headrace.loops.step_batch import Score
from headrace.render import Rendered
from headrace.storage import atomic_files
from headrace.types import FloatArray, float_array

logger = logging.getLogger(__name__)
CHUNK = 64  # sequences that are scored in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores:
    """The reference's log-probs of the trained tokens of sequences, in their order."""

    logprobs: tuple[FloatArray, ...]

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the scores."""
        return {"sequences": len(self.logprobs), "sha256": self.digest(len(self.logprobs))}

    def digest(self, count: int) -> str:
        """Hash the log-probs of the first `count` sequences."""
        digest = hashlib.sha256()
        for values in self.logprobs[:count]:
            digest.update(len(values).to_bytes(8, "little") + values.tobytes())
        return digest.hexdigest()


async def score_once(
    file: Path,
    sequences: Sequence[Rendered],
    open_reference: Callable[[], Score],
    *,
    saved: Mapping[str, Any] | None,
    check_owner: Callable[[], None] = lambda: None,
) -> ReferenceScores:
    """Return the log-probs of all sequences: those in `file`, and the others from the reference, which are added to it.

    `saved` is the record of the checkpoint that the stage goes on from. Raises CheckpointError if the log-probs are not
    those that it was trained with. The reference is loaded only if it is needed.
    """
    known = _read(file, sequences)
    scores = list(known)
    if len(scores) < len(sequences):
        score = open_reference()
        for begin in range(len(scores), len(sequences), CHUNK):
            data = sequence_data(sequences[begin : begin + CHUNK])
            for datum, values in zip(data, await score(data), strict=True):
                scores.append(float_array(values[datum.arrays["weights"] != 0]))
            if begin // CHUNK % 100 == 0 and len(sequences) > 100 * CHUNK:
                logger.info("the reference has scored %d of %d sequences", len(scores), len(sequences))
        check_owner()
        _write(file, sequences, scores)
        logger.info("the reference has scored %d sequences, which are kept in %s", len(sequences), file.name)
    result = ReferenceScores(logprobs=tuple(scores))
    if saved is not None and result.digest(int(saved["sequences"])) != saved["sha256"]:
        raise CheckpointError(
            f"the reference's log-probs in {file} are not those that this run was trained with: restore the file, or "
            "start a new run without --resume"
        )
    return result


def _write(file: Path, sequences: Sequence[Rendered], scores: Sequence[FloatArray]) -> None:
    lengths = np.array([len(values) for values in scores], dtype=np.int64)
    flat = np.concatenate([*scores, np.zeros(0, dtype=np.float32)]).astype(np.float32)
    content = save({"logprobs": flat, "lengths": lengths, "data": _digest_of(sequences)})
    with boundary(StorageError, f"the reference's log-probs cannot be written to {file}"):
        atomic_files.write_bytes(file, content)


def _read(file: Path, sequences: Sequence[Rendered]) -> tuple[FloatArray, ...]:
    """Read the scores of the first sequences; none if there is no file, or it is damaged or of other sequences."""
    if not file.exists():
        return ()
    try:
        with boundary(StorageError, f"{file} cannot be read"):
            saved = load(file.read_bytes())
            lengths, flat, data = saved["lengths"], saved["logprobs"], saved["data"]
            whole = int(lengths.sum()) == len(flat) and bool(np.isfinite(flat).all())
    except HeadraceError as exc:
        logger.warning("%s; its sequences are scored again", exc)
        return ()
    count = len(lengths)
    if not whole or count > len(sequences) or not np.array_equal(data, _digest_of(sequences[:count])):
        logger.warning("%s is not of these data; they are scored again", file)
        return ()
    if count == 0:
        return ()
    return tuple(float_array(part) for part in np.split(flat, np.cumsum(lengths)[:-1]))


def _digest_of(sequences: Sequence[Rendered]) -> Any:
    return np.frombuffer(bytes.fromhex(fingerprint([(part.tokens, part.trained) for part in sequences])), np.uint8)
