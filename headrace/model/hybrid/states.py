"""Hold the states of the engine's slots: a fixed number of numbers for each sequence, however long it is.

Keys and values of a prefix are there for every shorter prefix too; a state is that of one length only. So every slot
has two: the state after all of its tokens, and one that was kept, where its prompt ended, from which other sequences
with the same prompt start. Which lengths these are is known to `infer/kv_slots.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class RecurrentStates:
    """Tensors [B, ...] of each layer that has a state, by the layer's index, as `shapes` says."""

    def __init__(
        self, shapes: Mapping[int, Sequence[tuple[int, ...]]], *, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self._kept = (
            {
                layer: [torch.zeros((rows, *shape), dtype=dtype, device=device) for shape in of]
                for layer, of in shapes.items()
            }
            for _ in range(2)
        )

    def clear(self, row: int) -> None:
        """Give a slot the state of a sequence without tokens."""
        for live, _ in self._pairs():
            live[row].zero_()

    def keep(self, row: int) -> None:
        """Keep the state of a slot as it is now."""
        for live, kept in self._pairs():
            kept[row] = live[row]

    def start(self, row: int, donor: int, *, from_kept: bool) -> None:
        """Give slot `row` the state of slot `donor`, or the one kept there, and keep it."""
        for live, kept in self._pairs():
            live[row] = kept[donor] if from_kept else live[donor]
            kept[row] = live[row]

    def move(self, source: int, target: int) -> None:
        """Give slot `target` both states of slot `source`."""
        for live, kept in self._pairs():
            live[target], kept[target] = live[source], kept[source]

    def adopt(self, other: "RecurrentStates", rows: int) -> None:
        """Take over the first `rows` slots of another cache."""
        for mine, theirs in zip(self._pairs(), other._pairs(), strict=True):
            for new, old in zip(mine, theirs, strict=True):
                new[:rows] = old[:rows]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for layer, tensors in self.layers.items() for pair in zip(tensors, self._kept[layer], strict=True)]
