"""What libraries and Python itself do at their own times, kept quiet: progress bars, the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

# Python 3.12 starts with some hundred objects frozen; a program that freezes its libraries has a hundred thousand.
FROZEN_BY_PYTHON = 10_000


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws progress bars of its own on every load and save, and a run shows one, ours: they are off
    inside, and afterwards as they were."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def settled_objects() -> Iterator[None]:
    """Python's garbage collector leaves alone, inside, what is there now: models, tokenizers, libraries. Looking at all
    of it takes a fifth of a second, every few batches, in which no rollout goes on.

    Where the program around us has frozen objects itself, that stays as it is: to unfreeze would unfreeze its own.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
