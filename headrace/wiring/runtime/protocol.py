"""Define the runtime of a stage, which trains and samples its model: in this process (`local.py`), on several
ranks (`ranks.py`) or at a service (`service.py`)."""

from pathlib import Path
from typing import Protocol

from headrace.loops.checkpointer import CheckpointWriter
from headrace.loops.distill import TopTokens
from headrace.loops.step_batch import Score
from headrace.protocols import Sampler, TrainBackend
from headrace.render import Renderer
from headrace.rollout.executor.turns import Turns
from headrace.train.checkpoint import CheckpointStore


class Runtime(Protocol):
    """Owns the model of one stage and everything that computes beside it. Built complete; closed once, by its owner."""

    @property
    def backend(self) -> TrainBackend:
        """Trains the model."""

    @property
    def renderer(self) -> Renderer:
        """Renders conversations with the model's tokenizer."""

    @property
    def sampler(self) -> Sampler | None:
        """Samples from the model; None in a stage that plays no episodes."""

    @property
    def turns(self) -> Turns:
        """Hands the devices over between sampling and training."""

    def open_frozen(self, path: str | None, *, micro_batch_tokens: int) -> Score:
        """Score with a frozen model: a folder, a URL, or, without a path, the model that the stage started from."""

    def open_teacher(self, path: str, *, micro_batch_tokens: int) -> TopTokens:
        """Ask a frozen model for its likeliest tokens: that of a folder."""

    def open_critic(self, path: str, *, micro_batch_tokens: int, state: Path | None) -> TrainBackend:
        """Load a value model with a trunk of its own, and the `state` it goes on from."""

    def checkpoint_store(self, store: CheckpointStore, folder: Path) -> CheckpointWriter:
        """Return the store that saves the model's checkpoints into `folder`."""

    def check_memory(self) -> None:
        """Compute the largest micro-batch there can be: one that has no room fails before training."""

    def close(self) -> None:
        """Close the model, the sampler, and every model that was opened beside them."""
