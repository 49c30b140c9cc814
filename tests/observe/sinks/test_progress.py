import doctest
import io
import math

from headrace.observe.sinks import progress
from headrace.observe.sinks.progress import Progress, remaining_s, step_line

RL = {
    "reward/mean": 0.5312,
    "rollout/success": 0.4219,
    "rollout/length_mean": 23.08,
    "loss/kl_sampler_k3": 0.00123,
    "loss/entropy": 1.9312,
    "rollout/mismatch_k3": 3.14e-9,
    "perf/sampled_tokens_per_s": 1834.0,
    "train/grad_norm": 0.7,
    "train/learning_rate": 1e-5,
    "credit/dead_groups": 0.97,
    "credit/steps_without_signal": 0.0,
    "time/step_s": 3.21,
}


def test_an_rl_step_on_one_line() -> None:
    assert step_line("rl", 12, 100, RL, 123.4) == (
        "rl  12/100  reward 0.531  dead groups 97 %  success 42.2%  length 23.1  kl 1.2e-03  entropy 1.931"
        "  mismatch 3.1e-09  lr 1.0e-05  grad norm 0.7  1.8k tok/s  3.2 s/step  eta 2m 03s"
    )


def test_steps_without_signal_and_warnings_stay_on_the_line_while_there_are_any() -> None:
    values = {"reward/mean": 0.0, "credit/dead_groups": 1.0, "credit/steps_without_signal": 7.0}
    assert step_line("rl", 1, 9, values, None, 2) == (
        "rl 1/9  reward 0.000  dead groups 100 %  steps without signal 7  warnings 2"
    )


def test_an_sft_step_shows_its_loss_and_trained_tokens() -> None:
    values = {"loss/total": 1.23456, "perf/trained_tokens_per_s": 812.4, "perf/sampled_tokens_per_s": 1.0}
    assert step_line("sft", 300, 300, values, 0.0) == "sft 300/300  loss 1.2346  812 tok/s  eta 0s"


def test_distillation_shows_the_kl_to_the_teacher_and_held_out_figures_have_names() -> None:
    assert step_line("distill", 1, 2, {"loss/kl_teacher": -1e-9}, None) == "distill 1/2  kl to teacher 0.0000"
    assert step_line("sft", 2, 2, {"eval/loss": 1.25}, None) == "sft 2/2  held-out loss 1.2500"
    values = {"loss/total": 0.5, "loss/accuracy": 0.75, "eval/accuracy": 0.5}
    assert step_line("reward_model", 1, 2, values, None) == (
        "reward_model 1/2  loss 0.5000  accuracy 75.0%  held-out accuracy 50.0%"
    )


def test_missing_values_are_left_out_and_odd_ones_shown_as_they_are() -> None:
    assert step_line("rl", 1, 9, {}, None) == "rl 1/9"
    assert step_line("rl", 1, 9, {"reward/mean": math.nan, "rollout/mismatch_k3": 0.0}, None) == (
        "rl 1/9  reward nan  mismatch 0"
    )
    assert step_line("rl", 5, 9, {"eval/pass@1": 0.78125, "eval/reward": 0.5}, None) == "rl 5/9  held-out 78.1%"
    assert step_line("rl", 5, 9, {"eval/reward": 3.5}, None) == "rl 5/9  held-out reward 3.500", "no success is known"


def test_the_rest_takes_as_long_per_step_as_what_was_done() -> None:
    assert remaining_s(done=4, total=10, elapsed_s=20.0) == 30.0  # 5 s a step, 6 to go
    assert remaining_s(done=0, total=10, elapsed_s=20.0) is None
    assert remaining_s(done=10, total=10, elapsed_s=20.0) == 0.0


def test_in_a_log_there_are_only_plain_lines_and_a_resumed_run_counts_its_own_pace() -> None:
    stream, times = io.StringIO(), iter([100.0, 110.0, 120.0])
    shown = Progress("rl", 10, start=6, stream=stream, clock=lambda: next(times))
    shown.log(7, {"reward/mean": 0.0})
    shown.log(8, {"reward/mean": 1.0})
    shown.close()
    assert stream.getvalue() == "rl  7/10  reward 0.000  eta 30s\nrl  8/10  reward 1.000  eta 20s\n"


def test_of_fast_steps_a_line_is_written_now_and_then() -> None:
    """One step a second: the first, one every ten seconds, those with an evaluation, and the last."""
    stream, times = io.StringIO(), iter(range(100))
    shown = Progress("rl", 30, stream=stream, clock=lambda: float(next(times)))
    for step in range(1, 31):
        shown.log(step, {"eval/pass@1": 0.5} if step == 15 else {"reward/mean": 1.0})
    shown.close()
    assert [int(line.split("/")[0].removeprefix("rl ")) for line in stream.getvalue().splitlines()] == [
        1,
        11,
        15,
        25,
        30,
    ]


def test_lines_by_steps_and_not_by_the_clock() -> None:
    stream, times = io.StringIO(), iter(range(0, 10_000, 60))
    shown = Progress("rl", 10, stream=stream, clock=lambda: float(next(times)), every=4)
    for step in range(1, 11):
        shown.log(step, {"eval/pass@1": 0.5} if step == 5 else {"reward/mean": 1.0})
    shown.close()
    lines = [int(line.split("/")[0].removeprefix("rl ")) for line in stream.getvalue().splitlines()]
    assert lines == [4, 5, 8, 10]


def test_on_a_terminal_the_lines_stand_above_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    shown = Progress("rl", 3, stream=stream, clock=lambda: 0.0)
    shown.log(1, {"reward/mean": 0.25})
    shown.log(2, {"reward/mean": 0.75})
    drawn = stream.getvalue()
    shown.close()
    shown.close()
    assert "rl 1/3  reward 0.250" in drawn
    assert "rl 2/3" not in drawn, "no line yet"
    assert "reward 0.750" in drawn, "behind the bar"
    assert "\x1b[1A" not in drawn, "a bar of one line: it must not erase what others write"
    assert "━" in drawn
    assert "\x1b" in drawn


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(progress).failed == 0


def test_entropy_is_shown_as_the_loss_has_it_else_as_the_samples_estimate_it() -> None:
    both = {"loss/entropy": 1.5, "rollout/entropy": 1.25}
    assert step_line("rl", 1, 2, both, None) == "rl 1/2  entropy 1.500"
    assert step_line("rl", 1, 2, {"rollout/entropy": 1.25}, None) == "rl 1/2  entropy 1.250"
