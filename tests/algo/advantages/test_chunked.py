"""Crediting some task groups at a time gives what crediting all of them at once gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.advantages import StepTable
from headrace.algo.advantages.chunked import in_chunks
from headrace.algo.advantages.credit import STEP_METHODS
from headrace.algo.advantages.step_table import NO_STATE
from headrace.metrics import metric_values


def table_of(seed: int, num_episodes: int, num_groups: int) -> StepTable:
    rng = np.random.default_rng(seed)
    length_E = rng.integers(0, 9, size=num_episodes)
    total = int(length_E.sum())
    return StepTable(
        group_E=rng.integers(0, num_groups, size=num_episodes),
        length_E=length_E,
        tokens_E=length_E * 3,
        total_E=rng.integers(0, 3, size=num_episodes).astype(np.float64),
        success_E=rng.random(num_episodes) < 0.5,
        reward_S=rng.integers(-1, 3, size=total) / 4,
        state_S=rng.integers(NO_STATE, 4, size=total),
        valid_S=rng.random(total) < 0.8,
    )


@pytest.mark.parametrize("method", sorted(STEP_METHODS))
@given(seed=st.integers(0, 2**32), episodes=st.integers(1, 40), groups=st.integers(1, 9), block=st.integers(1, 60))
def test_blocks_change_nothing(method: str, seed: int, episodes: int, groups: int, block: int) -> None:
    table = table_of(seed, episodes, groups)
    whole = STEP_METHODS[method](table, invalid_penalty=0.25)
    found = in_chunks(table, lambda part: STEP_METHODS[method](part, invalid_penalty=0.25), block_steps=block)
    np.testing.assert_array_equal(found.values, whole.values)
    assert found.parts is not None
    assert whole.parts is not None
    for name in ("returns_S", "episode_S", "step_S", "peers_S"):
        np.testing.assert_array_equal(getattr(found.parts, name), getattr(whole.parts, name), err_msg=name)
    wanted = metric_values(whole.health)
    assert metric_values(found.health) == pytest.approx(wanted, rel=1e-12, abs=1e-12, nan_ok=True)


def test_a_block_holds_whole_groups_and_no_more_than_it_must() -> None:
    table = table_of(3, 200, 50)
    seen: list[StepTable] = []

    def watch(part: StepTable):
        seen.append(part)
        return STEP_METHODS["gigpo"](part)

    in_chunks(table, watch, block_steps=100)
    groups = [set(part.group_E.tolist()) for part in seen]
    assert len(seen) > 3
    assert sum(len(each) for each in groups) == len(set().union(*groups)) == len(set(table.group_E.tolist()))
    largest = max(int(table.length_E[table.group_E == group].sum()) for group in set(table.group_E.tolist()))
    assert all(len(part.reward_S) < 100 + 2 * largest for part in seen)
