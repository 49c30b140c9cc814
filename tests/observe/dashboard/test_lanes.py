"""Lanes and sentences from lines of activity.jsonl, worked out by hand."""

import json

import pytest

from headrace.observe.dashboard.lanes import lane_state, lane_view, parse_lines, waiting_sentence, waits_for


def line(at: float, *, step: int = 1, **parts: dict[str, float]) -> bytes:
    return json.dumps({"at": at, "s": 1.0, "stage": "rl", "step": step, "now": [], **parts}).encode()


def test_columns_have_the_shares_of_their_seconds_and_none_where_nothing_was_recorded() -> None:
    lines = parse_lines([line(1.0, busy={"reward": 1.0}), line(2.0, busy={"reward": 0.5}), line(10.0, busy={})])
    view = lane_view(lines, window_s=10.0, columns=5)
    assert view is not None
    rewards = next(lane for lane in view["lanes"] if lane["lane"] == "reward")
    assert rewards["shares"] == [0.75, None, None, None, 0.0]
    assert [lane["lane"] for lane in view["lanes"]] == ["sampling", "reward", "training", "publishing"]


def test_a_long_line_reaches_over_several_columns() -> None:
    raw = json.dumps({"at": 10.0, "s": 10.0, "busy": {"saving": 1.0}}).encode()
    view = lane_view(parse_lines([raw]), window_s=10.0, columns=4)
    assert view is not None
    assert next(lane for lane in view["lanes"] if lane["lane"] == "saving")["shares"] == [1.0] * 4


@pytest.mark.parametrize("window_s", [30.0, 120.0, 600.0, 3600.0])
def test_lanes_of_real_times_are_made_at_once(window_s: float) -> None:
    lines = parse_lines([line(1794968540.928 + 1.0007 * k, busy={"reward": 0.5}) for k in range(1800)])
    view = lane_view(lines, window_s=window_s)
    assert view is not None
    seen = [share for share in view["lanes"][1]["shares"] if share is not None]
    assert set(seen) == {0.5}


def test_who_waits_for_whom() -> None:
    (now,) = parse_lines([line(1.0, busy={"reward": 0.9}, waits={"reward": 0.9}, open={"waiting": 1, "reward": 3})])
    assert waits_for(now) == "reward"
    assert lane_state("training", now) == {"kind": "waits", "text": "waits for rewards"}
    assert lane_state("reward", now) == {"kind": "busy", "text": "scoring: 3 groups"}
    assert lane_state("sampling", now) == {"kind": "waits", "text": "waits for rewards"}
    assert lane_state("publishing", now)["kind"] == "idle"
    (later,) = parse_lines([line(2.0, busy={"training": 1.0}, open={"training": 1})])
    assert waits_for(later) is None
    assert lane_state("sampling", later) == {"kind": "waits", "text": "waits for the trainer"}


def test_the_sentence_counts_the_last_minute_only() -> None:
    old = [line(float(k), waits={"sampling": 1.0}) for k in range(1, 41)]
    new = [line(100.0 + k, waits={"reward": 0.6, "sampling": 0.1}) for k in range(10)]
    assert waiting_sentence(parse_lines(old + new)) == (
        "In the last minute the trainer waited 70 % of the time: 60 % for rewards, 10 % for sampling."
    )
    assert waiting_sentence(parse_lines([line(1.0, busy={"training": 0.8})])) == (
        "In the last minute the trainer did not wait; training took 80 % of it."
    )


def test_lines_that_are_none_are_left_out() -> None:
    raw = [b"", b"{", b"[]", b'{"at":"x"}', b'{"at":1,"s":1,"busy":3}', b'{"at":1,"s":1}', b'{"at":1,"s":1,"now":5}']
    assert len(parse_lines(raw)) == 1
    assert lane_view([], window_s=60.0) is None
