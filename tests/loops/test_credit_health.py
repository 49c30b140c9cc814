"""Training steps without signal are counted, told and end the run; groups without contrast are measured."""

import logging
from collections.abc import Sequence

import pytest

from headrace.algo.advantages.credit import credit
from headrace.loops.credit_health import SignalWatch
from headrace.metrics import metric_values
from headrace.types import Group
from support.loop_fakes import group, scored


def note(watch: SignalWatch, *groups: Group) -> dict[str, float]:
    return metric_values(watch.check(groups, credit(groups, method="grpo").episodes))


def groups_of(*rewards: Sequence[float]) -> list[Group]:
    return [group(number, *(scored(reward) for reward in group_)) for number, group_ in enumerate(rewards)]


def test_the_share_of_dead_groups_and_the_steps_in_a_row_that_have_no_other() -> None:
    watch = SignalWatch(limit=3)
    assert note(watch, *groups_of((0, 1), (1, 1), (0, 0), (2, 2))) == {
        "credit/dead_groups": 0.75,
        "credit/steps_without_signal": 0.0,
    }
    assert note(watch, *groups_of((1, 1), (0, 0)))["credit/steps_without_signal"] == 1.0
    assert note(watch, *groups_of((1, 1), (0, 0)))["credit/steps_without_signal"] == 2.0
    assert note(watch, *groups_of((1, 0), (0, 0)))["credit/steps_without_signal"] == 0.0
    assert watch.error() is None


@pytest.mark.parametrize(
    ("groups", "cause"),
    [
        (groups_of((0.5, 0.5), (0.5, 0.5)), "all 8 episodes had the same reward, 0.5"),
        (groups_of((0, 0), (1, 1)), "within each of 4 groups all episodes had the same reward; choose tasks"),
        (groups_of((-1, -1), (-0.5, -0.5)), r"the same reward, never above 0 \(the best was -0.5\)"),
        (groups_of((0,), (1,)), "each of 4 groups had one episode"),
        ([group(0, num_failed=3)], "none of 6 episodes has a reward: the log says why"),
        ([group(0, scored(0), scored(0), num_failed=1)], "the same reward, 0; 2 more episodes failed"),
    ],
)
def test_the_error_says_why_there_was_no_signal(groups: list[Group], cause: str) -> None:
    watch = SignalWatch(limit=2)
    note(watch, *groups)
    assert watch.error() is None
    note(watch, *groups)
    error = watch.error()
    assert error is not None
    with pytest.raises(type(error), match=f"all advantages were 0 in 2 training steps in a row.*{cause}"):
        raise error


def test_the_count_goes_on_after_a_resume_and_starts_again_when_the_run_had_ended() -> None:
    watch = SignalWatch(limit=3)
    assert watch.state_dict() == {}
    note(watch, *groups_of((1, 1)))
    note(watch, *groups_of((1, 1)))
    resumed = SignalWatch(limit=3, state=watch.state_dict())
    assert note(resumed, *groups_of((1, 1)))["credit/steps_without_signal"] == 3.0
    assert "all 6 episodes had the same reward, 1;" in str(resumed.error())
    again = SignalWatch(limit=3, state=resumed.state_dict())
    assert note(again, *groups_of((1, 1)))["credit/steps_without_signal"] == 1.0
    assert again.error() is None
    never = SignalWatch(limit=0, state=resumed.state_dict())
    assert note(never, *groups_of((1, 1)))["credit/steps_without_signal"] == 4.0
    assert never.error() is None


def test_mostly_dead_groups_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = SignalWatch(limit=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            note(watch, *groups_of((0, 0), (1, 1), (0, 1)))
        note(watch, *groups_of((0, 1), (1, 1)))  # half of them are not most
        assert not caplog.records
        for _ in range(40):
            note(watch, *groups_of((0, 0), (1, 1), (0, 1)))
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("67 % of the groups in the last 10 training steps are dead")


def test_groups_that_every_episode_solves_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    watch, solved = SignalWatch(limit=0), group(0, scored(1, success=True), scored(1, success=True))
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert note(watch, solved, *groups_of((), (0, 1))[1:])["credit/dead_groups"] == 0.5
            assert note(watch, solved)["credit/dead_groups"] == 1.0
    assert not caplog.records
