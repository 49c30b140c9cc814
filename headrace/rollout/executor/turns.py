"""Turns of sampling and training on the same devices, where both together do not fit (`cluster.colocate`)."""

from typing import Protocol


class Turns(Protocol):
    """Hand devices from one to the other. A call for the side that has them does nothing."""

    async def to_sampling(self) -> None:
        """Take the trainer's state out of the way and wake the samplers."""

    async def to_training(self) -> None:
        """Let the samplers, which must be idle, free their memory and bring the trainer's state back."""

    async def finish(self) -> None:
        """Wake samplers that others may use afterwards."""


class NoTurns:
    """Implements `Turns` where trainer and samplers need not wait for each other: nothing is handed over."""

    async def to_sampling(self) -> None:
        """Do nothing."""

    async def to_training(self) -> None:
        """Do nothing."""

    async def finish(self) -> None:
        """Do nothing."""


NO_TURNS = NoTurns()
