"""A user's own loss, named in the run file."""

from pathlib import Path

import pytest
import torch

from headrace.algo.loss_signature import Unit, loss_inputs, unit_of
from headrace.algo.losses import find_loss
from headrace.config import RlConfig, SourceConfig
from headrace.errors import ConfigError
from headrace.wiring.build.loss import make_loss

MINE = """
from headrace.algo.loss_signature import LossOut, Unit, loss_unit

@loss_unit(Unit.SEQUENCE)
def right(policy_logprobs_T, advantages_T, weights_T, segments_T, *, scale=2.0):
    return LossOut(loss=-(scale * weights_T * advantages_T * policy_logprobs_T).sum(), metrics={})

def number(policy_logprobs_T, advantages_T, weights_T):
    return -(weights_T * advantages_T * policy_logprobs_T).sum()
"""
ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def rl(folder: Path, function: str) -> RlConfig:
    (folder / "mine.py").write_text(MINE)
    return RlConfig(steps=1, tasks=SourceConfig(type="env", name="add"), loss=f"{folder / 'mine.py'}:{function}")


def test_its_inputs_numbers_and_unit_are_those_of_the_function(tmp_path: Path) -> None:
    fn = find_loss(make_loss(rl(tmp_path, "right")).fn)
    assert unit_of(fn) is Unit.SEQUENCE
    assert set(loss_inputs(fn).params) == {"scale"}
    assert fn(ONE, TWO, ONE, ONE, scale=3.0).loss.item() == -12.0  # 3 x (1 x 2 x 1) for each of two tokens


def test_a_loss_that_returns_a_bare_number_is_told_what_to_return(tmp_path: Path) -> None:
    fn = find_loss(make_loss(rl(tmp_path, "number")).fn)
    with pytest.raises(ConfigError, match=r"mine\.py:number returned a Tensor: return LossOut\(loss=\.\.\., metrics="):
        fn(ONE, TWO, ONE)
