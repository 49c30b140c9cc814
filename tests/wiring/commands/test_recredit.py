"""Rollouts scored and credited anew without a model: bit for bit where nothing changes, and in the sandbox."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.algo.advantages.credit import credit
from headrace.errors import ConfigError, RewardError
from headrace.observe.rollouts.files import RolloutFileInfo, load_trajectories, save_trajectories
from headrace.observe.rollouts.records import iter_lines, read_lines
from headrace.types import CreditedEpisode
from headrace.wiring.commands.recredit import RecreditRequest, recredit
from support import rollout_files

COUNT_ON = '''
def judge(messages, ground_truth=None, **kwargs):
    """How often the policy went on; it cannot tell where it turned back."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    if "back" in said:
        raise ValueError("turned back")
    return {"score": said.count("on") / 10, "steps": [0.1 * (word == "on") for word in said]}
'''
BY_TOKENS = """
def judge(episode):
    return float(sum(step.completion.tokens.sum() for step in episode.steps))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "count_on.py").write_text(COUNT_ON)
    (tmp_path / "by_tokens.py").write_text(BY_TOKENS)
    return rollout_files.save(tmp_path / "step_000004.jsonl")


def test_the_same_method_gives_the_same_file(file: Path) -> None:
    """Advantages recomputed from the file are those it was saved with, to the last bit, and nothing else changes."""
    result = recredit(RecreditRequest(path=file))
    assert result.out == file.with_name("recredited_step_000004.jsonl")
    assert [json.loads(line) for line in result.out.read_text().splitlines()] == [
        {"failed": None, **json.loads(line)} for line in file.read_text().splitlines()
    ]
    assert all(change.changed == 0 for change in result.comparison.groups)
    for before, after in zip(load_trajectories(file), load_trajectories(result.out), strict=True):
        assert isinstance(before, CreditedEpisode)
        assert isinstance(after, CreditedEpisode)
        assert (before.advantages, before.parts) == (after.advantages, after.parts)
        for old, new in zip(before.scored.episode.steps, after.scored.episode.steps, strict=True):
            np.testing.assert_array_equal(old.completion.sampler_logprobs, new.completion.sampler_logprobs)


def test_another_method_changes_advantages_only(file: Path) -> None:
    result = recredit(RecreditRequest(path=file, method="dr_grpo"))
    lines = read_lines(result.out)
    # R = 1, 1, 0: minus their mean
    assert [line.advantages for line in lines[:3]] == [
        pytest.approx((1 / 3,) * 3),
        pytest.approx((1 / 3,) * 4),
        pytest.approx((-2 / 3,) * 3),
    ]
    assert [line.reward for line in lines] == [line.reward for line in read_lines(file)]
    assert lines[0].credit is not None
    assert (lines[0].credit.method, lines[0].credit.params) == ("dr_grpo", {})


OWN_CREDIT = """
def half(rewards, groups, *, less=0.5):
    return rewards - less

def by_step(table):
    return table.reward_S
"""


def test_a_credit_method_of_the_user_is_named_on_the_command_line_and_never_by_a_file(file: Path) -> None:
    (file.parent / "mine.py").write_text(OWN_CREDIT)
    result = recredit(RecreditRequest(path=file, method="mine.py:half", params={"less": 0.25}))
    lines = read_lines(result.out)
    # R = 1, 1, 0
    assert [line.advantages for line in lines[:3]] == [(0.75,) * 3, (0.75,) * 4, (-0.25,) * 3]
    assert lines[0].credit is not None
    assert (lines[0].credit.method, lines[0].credit.params) == (f"{file.parent / 'mine.py'}:half", {"less": 0.25})
    other = file.with_name("steps.jsonl")
    steps = read_lines(recredit(RecreditRequest(path=file, method="mine.py:by_step", out=other)).out)
    assert [line.advantages for line in steps] == [line.step_rewards for line in steps]
    with pytest.raises(ConfigError, match=r"was credited by .*mine\.py:half, and code that a file names is not run"):
        recredit(RecreditRequest(path=result.out))
    again = recredit(RecreditRequest(path=result.out, method="mine.py:half", out=file.with_name("again.jsonl")))
    assert again.method.params == {"less": 0.25}, "the numbers of the same function are kept"
    with pytest.raises(ConfigError, match=r"takes no parameter 'mor'"):
        recredit(RecreditRequest(path=file, method="mine.py:half", params={"mor": 1.0}))


def test_numbers_of_the_same_method_are_kept_unless_given(file: Path) -> None:
    assert recredit(RecreditRequest(path=file)).method.params == {"gamma": 0.5, "norm": "none"}
    assert recredit(RecreditRequest(path=file, params={"gamma": 1.0})).method.params == {"gamma": 1.0, "norm": "none"}
    assert recredit(RecreditRequest(path=file, method="gigpo")).method.params == {"gamma": 0.5, "norm": "none"}
    with pytest.raises(ConfigError, match="gama"):
        recredit(RecreditRequest(path=file, params={"gama": 1.0}))


@pytest.mark.parametrize("trusted", [False, True])
def test_another_reward_is_called_and_one_that_cannot_tell_leaves_its_episode_out(file: Path, trusted: bool) -> None:
    result = recredit(RecreditRequest(path=file, rewards=("count_on.py:judge",), method="dr_grpo", trusted=trusted))
    lines = list(iter_lines(result.out))
    assert [line.reward.total for line in lines[:2]] == pytest.approx([0.3, 0.3])
    assert lines[1].reward.steps == pytest.approx((0.0, 0.1, 0.1, 0.1))
    assert lines[2].failed is not None
    assert "turned back" in lines[2].failed
    assert np.isnan(lines[2].reward.total)
    assert len(lines[2].steps) == 3, "it can still be looked at"
    assert lines[0].group_size == 2, "the others are compared without it"
    assert lines[-1].failed == "the world ended", "what had failed before stays as it was"
    change, _ = result.comparison.groups
    assert (change.failed, change.rewards) == (1, ((0.0, 1.0), (pytest.approx(0.3), pytest.approx(0.3))))


def test_the_reward_runs_in_the_sandbox_by_default(file: Path) -> None:
    (file.parent / "spy.py").write_text(
        "import pathlib\n\n\ndef judge(text, truth):\n"
        f"    pathlib.Path({str(file.parent / 'trace')!r}).write_text('here')\n    return 1.0\n"
    )
    with pytest.raises(RewardError, match=r"none of the \d episodes could be scored; most often: reward judge: "):
        recredit(RecreditRequest(path=file, rewards=("spy.py:judge",)))
    assert not (file.parent / "trace").exists()
    lines = list(iter_lines(recredit(RecreditRequest(path=file, rewards=("spy.py:judge",), trusted=True)).out))
    assert (file.parent / "trace").exists()
    assert lines[0].reward.total == 1.0


@pytest.mark.parametrize("trusted", [False, True])
def test_a_function_that_can_tell_of_no_episode_is_an_error_and_leaves_no_file(file: Path, trusted: bool) -> None:
    (file.parent / "broken.py").write_text("def judge(messages, **kwargs):\n    raise ValueError('no idea')\n")
    with pytest.raises(RewardError, match=r"none of the 5 episodes could be scored; .*ValueError: no idea"):
        recredit(RecreditRequest(path=file, rewards=("broken.py:judge",), trusted=trusted))
    assert not (file.parent / f"recredited_{file.name}").exists()


def test_a_reason_that_no_file_can_hold_as_it_is_costs_one_episode_and_not_the_file(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR", logger="headrace")  # pytest's own workers cannot send such text either
    (file.parent / "cut.py").write_text(COUNT_ON.replace('"turned back"', '"turned back " + chr(0xD83D)'))
    lines = list(iter_lines(recredit(RecreditRequest(path=file, rewards=("cut.py:judge",))).out))
    assert lines[0].failed is None
    assert lines[2].failed is not None
    assert lines[2].failed.endswith("turned back \ufffd")


def test_built_in_rewards_work_too(file: Path) -> None:
    lines = read_lines(recredit(RecreditRequest(path=file, rewards=("env", "exact_match"))).out)
    assert lines[0].reward.parts == {"env": 0.0, "exact_match": 0.0}


def test_rewards_have_weights_and_arguments(file: Path) -> None:
    """Straight on is 3 turns of 2 tokens: all 6 are beyond 8 - 4, half of the slope. Each turn is one word of "on"."""
    length = '{ fn = "length", kwargs = { max_tokens = 8, margin = 4 } }'
    form = '{ fn = "format", name = "form", weight = 2.0, kwargs = { pattern = "on", turns = "all" } }'
    for trusted in (False, True):
        asked = RecreditRequest(path=file, rewards=("env", length, form), weights={"length": 10.0}, trusted=trusted)
        lines = read_lines(recredit(asked).out)
        assert lines[0].reward.parts == {"env": 0.0, "length": -0.5, "form": 1.0}
        assert lines[0].reward.total == 10.0 * -0.5 + 2.0 * 1.0
        assert lines[1].reward.parts["form"] == 0.75, "one of its four turns went left"
    lean = rollout_files.save(file.with_name("lean.jsonl"), lean=True)
    again = read_lines(
        recredit(RecreditRequest(path=lean, rewards=("env", length, form), weights={"length": 10.0})).out
    )
    assert [line.reward for line in again] == [line.reward for line in lines], "they need no tokens"


def test_a_lean_file_is_recredited_but_has_no_tokens_for_a_reward(file: Path) -> None:
    lean = rollout_files.save(file.with_name("lean.jsonl"), lean=True)
    result = recredit(RecreditRequest(path=lean, rewards=("count_on.py:judge",), method="opo"))
    assert all(line.lean for line in read_lines(result.out))
    # opo weighs by sampled tokens, 6 and 8 of them: the rewards are equal, so all is 0
    assert read_lines(result.out)[0].advantages == (0.0, 0.0, 0.0)
    with pytest.raises(
        RewardError, match=r"by_tokens.py:judge takes episodes with their tokens, but .* was saved lean"
    ):
        recredit(RecreditRequest(path=lean, rewards=("by_tokens.py:judge",)))
    whole = read_lines(recredit(RecreditRequest(path=file, rewards=("by_tokens.py:judge",))).out)
    assert whole[0].reward.total == 3 * 23.0


def test_a_group_that_was_not_saved_whole_is_refused_unless_asked_for(file: Path) -> None:
    texts = file.read_text().splitlines(keepends=True)
    file.write_text("".join(texts[1:]))
    with pytest.raises(ConfigError, match=r"has 2 of the 3 episodes of group 7.*rl\.save\.whole_groups"):
        recredit(RecreditRequest(path=file))
    result = recredit(RecreditRequest(path=file, partial=True, method="dr_grpo"))
    assert read_lines(result.out)[0].advantages == (0.5,) * 4


def test_steps_of_several_training_steps_are_compared_apart(file: Path) -> None:
    """Whitening over the batch is over the batch of a training step, as it was."""
    first, second = (
        rollout_files.save(file.with_name("a.jsonl"), training_step=1),
        rollout_files.save(file.with_name("b.jsonl")),
    )
    mixed = file.with_name("mixed.jsonl")
    mixed.write_text(first.read_text() + second.read_text())
    alone = read_lines(recredit(RecreditRequest(path=second, method="reinforce_pp")).out)
    both = read_lines(recredit(RecreditRequest(path=mixed, method="reinforce_pp")).out)
    assert [line.advantages for line in both[5:]] == [line.advantages for line in alone]
    assert len(both) == 10
    one = read_lines(recredit(RecreditRequest(path=mixed, method="reinforce_pp", step=1)).out)
    assert {line.training_step for line in one} == {1}


def test_states_are_told_apart_as_they_were_in_the_run(file: Path) -> None:
    """The user's own anchors are in the file; their function is not needed again."""
    own = credit(
        rollout_files.groups(),
        method="gigpo",
        params=rollout_files.PARAMS,
        keys=lambda played: ["one room"] * len(played.steps),
    )
    save_trajectories(file, own.episodes, about=RolloutFileInfo(method="gigpo", params=rollout_files.PARAMS))
    result = recredit(RecreditRequest(path=file))
    assert all(change.changed == 0 for change in result.comparison.groups)
    assert {step.anchor for line in read_lines(result.out) for step in line.steps} == {"one room"}


def test_episodes_that_were_never_credited_can_be(file: Path) -> None:
    plain = file.with_name("eval_rl.jsonl")
    save_trajectories(plain, rollout_files.uncredited())
    with pytest.raises(ConfigError, match="was not credited: say how with --credit"):
        recredit(RecreditRequest(path=plain))
    lines = read_lines(recredit(RecreditRequest(path=plain, method="gigpo", params=rollout_files.PARAMS)).out)
    assert [line.advantages for line in lines] == [line.advantages for line in read_lines(file)]
    assert [line.group_id for line in lines] == [7, 7, 7, 8, 8]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"method": "gigppo"}, "unknown credit method 'gigppo': did you mean 'gigpo'"),
        ({"method": "turn_gea"}, "did you mean 'turn_gae'"),
        ({"method": "turn_gae"}, "needs the values of a critic"),
        ({"params": {"gamma": 2.0}}, "from 0 to 1"),
        ({"path": Path("partial.jsonl")}, "has 2 of the 3 episodes"),
        ({"path": Path("twice.jsonl")}, "has the episode 7/0 twice"),
        ({"path": Path("empty.jsonl")}, "empty.jsonl has no episodes to compare"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_scored(file: Path, asked: dict[str, object], why: str) -> None:
    """Scoring may take hours, and may cost money."""
    trace = file.parent / "trace"
    (file.parent / "spy.py").write_text(f"def judge(text):\n    open({str(trace)!r}, 'w').close()\n    return 1.0\n")
    file.with_name("partial.jsonl").write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    file.with_name("twice.jsonl").write_text(2 * file.read_text())
    file.with_name("empty.jsonl").write_text("")
    spied = RecreditRequest(path=file, rewards=("spy.py:judge",), trusted=True)
    with pytest.raises(ConfigError, match=why):
        recredit(replace(spied, **asked))  # type: ignore[arg-type]
    assert not trace.exists()
    recredit(spied)
    assert trace.exists(), "nothing else keeps it from being called"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"method": "turn_gae"}, "'turn_gae' needs the values of a critic, and .* does not have those of episode 7/0"),
        ({"method": "token_gae"}, "'token_gae' needs the values of a critic"),
        ({"method": "turn_gae", "params": {"lam": 2.0}}, "'lam' of 'turn_gae' is 2: write a number from 0 to 1"),
        ({"method": "turn_gae", "params": {"kl_coef": 0.1}}, "write 0: no KL is in the file"),
        ({"rewards": ("judge",)}, 'a judge is a language model: write --reward \'{ fn = "judge", kwargs = '),
        ({"rewards": ("reward_model",)}, 'a reward model is a model: write --reward \'{ fn = "reward_model", path'),
        ({"rewards": ("length",)}, 'fn = "length" needs kwargs max_tokens and margin'),
        ({"rewards": ('{ fn = "format", kwargs = { pattern = "(" } }',)}, 'fn = "format" needs kwargs pattern'),
        (
            {"rewards": ('{ fn = "length", wieght = 1 }',)},
            r"unknown key .rl.rewards\[0\].wieght.; did you mean .rl.rewards\[0\].weight",
        ),
        ({"rewards": ("{ fn = length }",)}, "--reward: this is not TOML"),
        ({"rewards": ("env", "env")}, "two rewards are called env"),
        ({"rewards": ("env",), "weights": {"evn": 2.0}}, "--weight evn: no --reward has this name; did you mean 'env'"),
        ({"rewards": ("nowhere.py:judge",)}, "there is no file nowhere.py"),
        ({"rewards": ("exact_mtach",)}, "exact_mtach is not known"),
        ({"out": Path("step_000004.jsonl")}, "is the file that is read"),
        ({"path": Path("nowhere")}, "there is no file or folder nowhere"),
    ],
)
def test_what_cannot_work_is_said(file: Path, asked: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        recredit(RecreditRequest(**{"path": file, **asked}))  # type: ignore[arg-type]
