"""The reference scores once: what is kept, what is added, and what a resumed stage refuses."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import CheckpointError
from headrace.loops.preference.reference_scores import score_once
from headrace.loops.step_batch import Score
from headrace.render import Rendered
from headrace.types import Datum, FloatArray, float_array, int_array


def sequences(count: int) -> list[Rendered]:
    def one(index: int) -> Rendered:
        trained = np.array([False, True, index % 2 == 0, True])
        return Rendered(tokens=int_array([1, 2, 3, index % 7]), trained=trained)

    return [one(index) for index in range(count)]


class Reference:
    """Counts the sequences that it scores; the log-prob of a token is minus its number, plus a shift."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift, self.loads, self.scored = shift, 0, 0

    def open(self) -> Score:
        self.loads += 1

        async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
            self.scored += len(data)
            return [float_array(self.shift - datum.targets) for datum in data]

        return score


async def test_sequences_are_scored_once_and_more_are_added(tmp_path: Path) -> None:
    file, reference = tmp_path / "scores.safetensors", Reference()
    first = await score_once(file, sequences(70), reference.open, saved=None)
    assert (reference.loads, reference.scored) == (1, 70)
    assert [values.tolist() for values in first.logprobs[:2]] == [[-2.0, -3.0, 0.0], [-2.0, -1.0]]
    again = await score_once(file, sequences(70), reference.open, saved=first.record())
    assert (reference.loads, reference.scored) == (1, 70), "the model is not even loaded"
    assert again.record() == first.record()
    more = await score_once(file, sequences(75), reference.open, saved=first.record())
    assert (reference.scored, len(more.logprobs)) == (75, 75)


@pytest.mark.parametrize("damage", ["gone", "cut", "other data"])
async def test_a_lost_file_is_computed_again_and_compared_with_the_checkpoint(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "scores.safetensors"
    first = await score_once(file, sequences(3), Reference().open, saved=None)
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        await score_once(file, sequences(5)[2:], Reference().open, saved=None)
    same = Reference()
    assert (await score_once(file, sequences(3), same.open, saved=first.record())).record() == first.record()
    assert same.scored == 3
    file.unlink()
    with pytest.raises(CheckpointError, match="are not those that this run was trained with"):
        await score_once(file, sequences(3), Reference(shift=0.25).open, saved=first.record())


async def test_altered_log_probs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "scores.safetensors"
    first = await score_once(file, sequences(3), Reference().open, saved=None)
    content = bytearray(file.read_bytes())
    place = content.index(np.float32(-2.0).tobytes())
    content[place : place + 4] = np.float32(-1.5).tobytes()
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="restore the file"):
        await score_once(file, sequences(3), Reference().open, saved=first.record())
