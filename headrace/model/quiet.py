"""transformers draws progress bars of its own on every load and save; a run shows one, ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Progress bars of transformers are off inside, and afterwards as they were."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
