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
}


def test_an_rl_step_on_one_line() -> None:
    assert step_line("rl", 12, 100, RL, 123.4) == (
        "rl  12/100  reward 0.531  success 42.2%  length 23.1  kl 1.2e-03  entropy 1.931  mismatch 3.1e-09"
        "  1.8k tok/s  eta 2m 03s"
    )


def test_an_sft_step_shows_its_loss_and_trained_tokens() -> None:
    values = {"loss/total": 1.23456, "perf/trained_tokens_per_s": 812.4, "perf/sampled_tokens_per_s": 1.0}
    assert step_line("sft", 300, 300, values, 0.0) == "sft 300/300  loss 1.2346  812 tok/s  eta 0s"


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
    stream, times = io.StringIO(), iter([100.0, 102.0, 104.0])
    shown = Progress("rl", 10, start=6, stream=stream, clock=lambda: next(times))
    shown.log(7, {"reward/mean": 0.0})
    shown.log(8, {"reward/mean": 1.0})
    shown.close()
    assert stream.getvalue() == "rl  7/10  reward 0.000  eta 6s\nrl  8/10  reward 1.000  eta 4s\n"


def test_on_a_terminal_the_lines_stand_above_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    shown = Progress("rl", 2, stream=stream)
    shown.log(1, {"reward/mean": 0.25})
    drawn = stream.getvalue()
    shown.close()
    shown.close()
    assert "rl 1/2  reward 0.250" in drawn
    assert "━" in drawn
    assert "\x1b" in drawn


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(progress).failed == 0


def test_entropy_is_shown_as_the_loss_has_it_else_as_the_samples_estimate_it() -> None:
    both = {"loss/entropy": 1.5, "rollout/entropy": 1.25}
    assert step_line("rl", 1, 2, both, None) == "rl 1/2  entropy 1.500"
    assert step_line("rl", 1, 2, {"rollout/entropy": 1.25}, None) == "rl 1/2  entropy 1.250"
