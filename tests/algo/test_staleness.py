"""The rules that hold the staleness bound."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.staleness import (
    AcceptAll,
    HeadBound,
    LiveCounts,
    SegmentWise,
    Verdict,
    capacity,
    drop_older_tokens,
    token_lags,
)
from headrace.types import (
    Completion,
    Datum,
    Episode,
    Group,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)

TASK = Task(id="t")


def episode(*steps: list[int]) -> ScoredEpisode:
    def step(versions: list[int]) -> Step:
        ones = float_array([-1.0] * len(versions))
        completion = Completion(
            tokens=int_array(versions),
            sampler_logprobs=ones,
            raw_logprobs=ones,
            versions=int_array(versions),
            stop=StopReason.STOP,
        )
        return Step(prompt=int_array([1]), completion=completion, action="")

    played = Episode(id="e", task=TASK, seed=0, steps=tuple(map(step, steps)), messages=(), temperature=1.0)
    return ScoredEpisode(episode=played, reward=Reward(total=0.0))


@pytest.mark.parametrize(
    ("counts", "eta", "running", "batch_open", "expected"),
    [
        (LiveCounts(), 0, 99, True, 4),  # ceil((0 + 1) * 4) - 0
        (LiveCounts(), 2, 99, True, 12),
        (LiveCounts(), 2, 5, True, 5),  # concurrency decides
        (LiveCounts(running=1, ready=2, training=4), 1, 99, True, 1),  # 8 - 7
        (LiveCounts(running=5), 1, 5, True, 0),
        (LiveCounts(ready=4, training=4), 0, 99, True, 0),  # more live than allowed: never negative
        (LiveCounts(), 0, 99, False, 0),  # at eta = 0 nothing starts without a batch that wants it
        (LiveCounts(ready=1), 1, 99, False, 3),  # eta * B - live
    ],
)
def test_capacity_by_hand(counts: LiveCounts, eta: int, running: int, batch_open: bool, expected: int) -> None:
    got = capacity(counts, batch_groups=4, max_staleness=eta, max_running=running, batch_open=batch_open)
    assert got == expected


def test_oversampling_widens_the_open_batch_only() -> None:
    # ceil((1 + 1.3) * 4) = ceil(9.2) = 10; without an open batch 1 * 4
    assert capacity(LiveCounts(), batch_groups=4, max_staleness=1, max_running=99, oversampling=1.3) == 10
    limits = {"batch_groups": 4, "max_staleness": 1, "max_running": 99}
    assert capacity(LiveCounts(), **limits, oversampling=1.3, batch_open=False) == 4


@given(st.integers(1, 8), st.integers(0, 4), st.lists(st.sampled_from(["start", "finish", "train"]), max_size=80))
def test_live_count_equals_areals_version_formula(batch: int, eta: int, events: list[str]) -> None:
    """With a fixed batch and no drops, (eta + V + 1) * B - accepted - running is (eta + 1) * B - live."""
    running = ready = accepted = version = 0
    for event in events:
        ours = capacity(
            LiveCounts(running=running, ready=ready), batch_groups=batch, max_staleness=eta, max_running=10**6
        )
        assert ours == (eta + version + 1) * batch - accepted - running
        if event == "start" and ours > 0:
            running += 1
        elif event == "finish" and running:
            running, ready, accepted = running - 1, ready + 1, accepted + 1
        elif event == "train" and ready >= batch:  # taken, trained and published at once
            ready, version = ready - batch, version + 1


def test_group_is_as_old_as_its_oldest_token() -> None:
    group = Group(id=0, task=TASK, episodes=(episode([5, 6]), episode([6], [4, 5])), started_version=3)
    assert group.head_version == 4
    assert HeadBound(2).verdict(group, version=6) is Verdict.KEEP
    assert HeadBound(2).verdict(group, version=7) is Verdict.DROP
    assert token_lags(group, version=6).tolist() == [1, 0, 0, 2, 1]


def test_episode_without_tokens_does_not_make_its_group_old() -> None:
    group = Group(id=0, task=TASK, episodes=(episode(), episode([9, 9]), episode([])), started_version=8)
    assert HeadBound(0).verdict(group, version=9) is Verdict.KEEP
    empty = replace(group, episodes=(episode(),))
    assert empty.head_version == 8
    assert token_lags(empty, version=9).tolist() == []
    assert [SegmentWise(1).verdict(empty, version=v) for v in (9, 10)] == [Verdict.KEEP, Verdict.DROP]


def test_token_from_the_future_is_our_bug() -> None:
    group = Group(id=0, task=TASK, episodes=(episode([3]),))
    for policy in (AcceptAll(), HeadBound(5), SegmentWise(5)):
        with pytest.raises(AssertionError, match="newer"):
            policy.verdict(group, version=2)


def test_segments_grow_old_one_after_another() -> None:
    """a b c of version 5, d e of 6, f of 7, bound 3: kept up to 8, masked at 9 and 10, dropped at 11."""
    group = Group(id=0, task=TASK, episodes=(episode([5, 5, 5, 6, 6, 7]),))
    verdicts = [SegmentWise(3).verdict(group, version=version) for version in (7, 8, 9, 10, 11)]
    assert verdicts == [Verdict.KEEP, Verdict.KEEP, Verdict.MASK, Verdict.MASK, Verdict.DROP]
    assert [HeadBound(3).verdict(group, version=version) for version in (8, 9)] == [Verdict.KEEP, Verdict.DROP]
    assert AcceptAll().verdict(group, version=99) is Verdict.KEEP


def test_version_zero_is_a_version_like_any_other() -> None:
    group = Group(id=0, task=TASK, episodes=(episode([0, 0]),))
    assert [HeadBound(1).verdict(group, version=v) for v in (0, 1, 2)] == [Verdict.KEEP, Verdict.KEEP, Verdict.DROP]
    assert [SegmentWise(1).verdict(group, version=v) for v in (1, 2)] == [Verdict.KEEP, Verdict.DROP]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5).map(sorted), min_size=1, max_size=4),
    st.integers(9, 14),
    st.integers(0, 6),
)
def test_a_verdict_says_whether_all_some_or_none_is_young_enough(
    versions: list[list[int]], version: int, eta: int
) -> None:
    group = Group(id=0, task=TASK, episodes=tuple(episode(one) for one in versions))
    young = [version - v <= eta for one in versions for v in one]
    expected = Verdict.KEEP if all(young) else Verdict.MASK if any(young) else Verdict.DROP
    assert SegmentWise(eta).verdict(group, version=version) is expected
    assert (HeadBound(eta).verdict(group, version=version) is Verdict.KEEP) == all(young)
    assert [v >= SegmentWise(eta).oldest(version) for one in versions for v in one] == young


def test_older_tokens_lose_their_weight_and_no_other() -> None:
    arrays = {
        "weights": float_array([0.0, 0.5, 0.25, -1.0]),
        "versions": float_array([-1, 4, 5, 6]),
        "critic": float_array([0.0, 1.0, 1.0, 1.0]),
        "advantages": float_array([0.0, 1.0, 2.0, 3.0]),
    }
    datum = Datum(inputs=int_array([1, 2, 3, 4]), targets=int_array([2, 3, 4, 5]), arrays=arrays)
    [masked] = drop_older_tokens([datum], oldest=5)
    assert masked.arrays["weights"].tolist() == [0.0, 0.0, 0.25, -1.0]
    assert masked.arrays["critic"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert masked.arrays["advantages"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert drop_older_tokens([datum], oldest=4) == (datum,)
