"""Name every failure that a user can meet, and turn foreign exceptions into one of them (`boundary`).

Messages are one sentence that says what to change. Our own bugs are assertions, not these errors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import TracebackException


class HeadraceError(Exception):
    """Base of all errors that are not our bug."""


class ConfigError(HeadraceError):
    """The configuration is wrong; the message names the file, the key and what to write instead."""


class DataError(HeadraceError):
    """A dataset, prompt or label is not what it should be."""


class PictureError(DataError):
    """A picture of one row is missing, cannot be decoded or is too large: the row is left out."""


class ModelError(HeadraceError):
    """A model or tokenizer cannot be loaded, or is of a kind that is not supported."""


class BackendError(HeadraceError):
    """A training request failed; the backend is still usable."""


class NoGradientError(BackendError):
    """`optim_step` was called with no gradient accumulated."""


class SamplerError(HeadraceError):
    """A sampling or scoring request failed."""


class SamplerGoneError(SamplerError):
    """The sampler was closed, or its weights were evicted to make room for newer ones."""


class EpisodeError(HeadraceError):
    """An episode failed: environment, policy or time limit."""


class RewardError(HeadraceError):
    """A reward function failed, so the reward is unknown (which is not zero)."""


class RolloutError(HeadraceError):
    """No batch can be made: too many failures or rejections in a row."""


class NoSignalError(HeadraceError):
    """All advantages were 0 for many training steps, so the run learned nothing; it has saved a checkpoint and ends."""


class CheckpointError(HeadraceError):
    """A checkpoint is missing, truncated, altered, or cannot be written."""


class DamageError(CheckpointError):
    """Files that we wrote are not as they were written: one is missing, truncated or altered."""


class StorageError(HeadraceError):
    """The machine refused to read or write a file; what is on the disk may well be sound."""


class FolderLockedError(HeadraceError):
    """Another process works in the folder, or has taken it over from this one."""


class RunFolderError(HeadraceError):
    """A file of the run folder is missing, malformed, or cannot be written."""


class NonFiniteError(HeadraceError):
    """Gradients were not finite, or exploded, too many times in a row."""


class RequestError(HeadraceError):
    """A request to the training service is wrong; the sentence goes back to the client."""


class JournalError(HeadraceError):
    """The service's journal cannot be read or written, so it cannot keep its promises."""


class Interrupted(HeadraceError):
    """The run was asked to stop (SIGTERM or Ctrl-C), has saved a checkpoint and ends."""


class RanksLostError(Interrupted):
    """A rank was killed, hangs or has no memory left: all ranks end, and the run can go on from its checkpoint."""


@contextmanager
def boundary(error: type[HeadraceError], what: str) -> Iterator[None]:
    """Turn any foreign exception into `error` with one sentence. The only `except Exception` in the code base."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as exc:
        text = str(TracebackException(type(exc), exc, None, lookup_lines=False))  # as str(exc), also where that raises
        raise error(f"{what}: {type(exc).__name__}: {text}") from exc
