import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RunFolderError
from headrace.observe.rollouts.files import RolloutFileInfo, load_trajectories, recredited, save_trajectories
from headrace.observe.rollouts.records import EpisodeRecord, iter_lines, read_lines
from headrace.types import (
    Completion,
    CreditedEpisode,
    EndReason,
    Episode,
    FailedEpisode,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    StepCredit,
    StopReason,
    Task,
    ToolCall,
    float_array,
    int_array,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
LOGPROBS = st.floats(-1024.0, 0.0, width=32)
REALS = st.floats(allow_nan=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(TOKENS)
    logprobs = float_array(draw(st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens))))
    raw = float_array(draw(st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens))))
    versions = sorted(draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))))
    return Completion(
        tokens=int_array(tokens),
        sampler_logprobs=logprobs,
        raw_logprobs=draw(st.sampled_from([raw, logprobs])),
        versions=int_array(versions),
        stop=draw(st.sampled_from(StopReason)),
        next_logprobs=draw(st.none() | st.just(float_array(np.where(np.array(versions) == 1, np.nan, raw)))),
    )


@st.composite
def messages(draw: st.DrawFn) -> Message:
    calls = st.builds(ToolCall, name=TEXT, arguments=TEXT, id=TEXT)
    return Message(
        role=draw(st.sampled_from(["system", "user", "assistant", "tool"])),
        content=draw(TEXT),
        name=draw(st.none() | TEXT),
        tool_calls=tuple(draw(st.lists(calls, max_size=2))),
        tool_call_id=draw(st.none() | TEXT),
    )


@st.composite
def scored_episodes(draw: st.DrawFn) -> ScoredEpisode:
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 3))):
        seen = [*steps[-1].prompt, *steps[-1].completion.tokens] if steps else []
        kept = draw(st.integers(0, len(seen)))  # a prompt that goes on, or one whose template dropped something
        prompt = int_array([*seen[:kept], *draw(TOKENS)])
        steps.append(
            Step(
                prompt=prompt,
                completion=draw(completions()),
                action=draw(TEXT),
                state=draw(st.none() | TEXT),
                reward=draw(REALS),
                valid=draw(st.booleans()),
            )
        )
    verdicts = st.none() | st.booleans()
    task = Task(id=draw(TEXT), messages=(draw(messages()),), data={"answer": draw(TEXT), "size": [1, 2]})
    return ScoredEpisode(
        episode=Episode(
            id=draw(TEXT),
            task=task,
            seed=draw(st.integers(0, 2**63)),
            steps=tuple(steps),
            messages=tuple(draw(st.lists(messages(), max_size=2))),
            temperature=draw(st.floats(0.1, 2.0)),
            truncated=draw(st.booleans()),
            success=draw(verdicts),
            ended=draw(st.none() | st.sampled_from(EndReason)),
            final_state=draw(st.none() | TEXT),
        ),
        reward=Reward(
            total=draw(REALS),
            parts={"exact": draw(REALS)},
            steps=draw(st.none() | st.just(tuple(0.5 for _ in steps))),
            success=draw(verdicts),
        ),
    )


def assert_same(left: ScoredEpisode, right: ScoredEpisode) -> None:
    assert left.reward == right.reward
    ours, theirs = left.episode, right.episode
    for name in ("id", "task", "seed", "messages", "temperature", "truncated", "success", "ended", "final_state"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        for name in ("action", "state", "reward", "valid"):
            assert getattr(mine, name) == getattr(other, name), name
        assert mine.completion.stop is other.completion.stop
        arrays = [(mine.prompt, other.prompt)] + [
            (getattr(mine.completion, name), getattr(other.completion, name))
            for name in ("tokens", "sampler_logprobs", "raw_logprobs", "versions", "next_logprobs")
        ]
        for a, b in arrays:
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


@given(st.lists(scored_episodes(), max_size=3), st.booleans(), st.booleans())
def test_episodes_come_back_equal(
    tmp_path_factory: pytest.TempPathFactory, episodes: list[ScoredEpisode], credited: bool, with_parts: bool
) -> None:
    path = tmp_path_factory.mktemp("rollouts") / "step_000001.jsonl"
    if not credited:
        save_trajectories(path, episodes)
        for left, right in zip(episodes, load_trajectories(path), strict=True):
            assert isinstance(right, ScoredEpisode)
            assert_same(left, right)
        return
    saved = [
        CreditedEpisode(
            scored=scored,
            group_id=k,
            advantages=tuple(0.1 * (k + 1) for _ in scored.episode.steps),
            parts=tuple(
                StepCredit(returns=1 / 3, episode=0.7, step=-0.1 * k, peers=k, anchor=str(k))
                for _ in scored.episode.steps
            )
            if with_parts or not scored.episode.steps
            else None,
        )
        for k, scored in enumerate(episodes)
    ]
    save_trajectories(path, saved)
    for before, after in zip(saved, load_trajectories(path), strict=True):
        assert isinstance(after, CreditedEpisode)
        assert (before.group_id, before.advantages, before.parts) == (after.group_id, after.advantages, after.parts)
        assert_same(before.scored, after.scored)


def two_turns() -> ScoredEpisode:
    def step(prompt: list[int], sampled: list[int]) -> Step:
        logprobs = float_array([-0.1] * len(sampled))
        return Step(
            prompt=int_array(prompt),
            completion=Completion(
                tokens=int_array(sampled),
                sampler_logprobs=logprobs,
                raw_logprobs=logprobs,
                versions=int_array([3] * len(sampled)),
                stop=StopReason.STOP,
            ),
            action="go",
        )

    return ScoredEpisode(
        episode=Episode(
            id="e1",
            task=Task(id="t1"),
            seed=7,
            steps=(step([1, 2, 3], [4, 5]), step([1, 2, 3, 4, 5, 6], [7])),
            messages=(Message(role="assistant", content="go"),),
            temperature=1.0,
        ),
        reward=Reward(total=1.0),
    )


def test_a_line_stores_each_token_once(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a.jsonl", [two_turns()])
    line = json.loads((tmp_path / "a.jsonl").read_text())
    assert line["schema_version"] == 2
    assert line["steps"][1]["tokens"] == {
        "prompt_shared": 5,
        "prompt_rest": [6],
        "sampled": [7],
        "sampler_logprobs": [-0.1],  # not -0.10000000149011612
        "raw_logprobs": None,
        "versions": [[3, 1]],
    }


def test_values_of_a_critic_are_saved_with_each_step_and_unknown_ones_are_null(tmp_path: Path) -> None:
    completion = Completion(
        tokens=int_array([1]),
        sampler_logprobs=float_array([-1.0]),
        raw_logprobs=float_array([-1.0]),
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    steps = tuple(Step(prompt=int_array([5]), completion=completion, action="a") for _ in range(2))
    episode = Episode(id="0/0", task=Task(id="t"), seed=0, steps=steps, messages=(), temperature=1.0)
    credited = CreditedEpisode(
        scored=ScoredEpisode(episode=episode, reward=Reward(total=1.0)),
        group_id=0,
        advantages=(0.5, 1.0),
        values=(0.25, float("nan")),
    )
    save_trajectories(tmp_path / "values.jsonl", [credited])
    line = json.loads((tmp_path / "values.jsonl").read_text().splitlines()[0])
    assert [step["credit"] for step in line["steps"]] == [{"A": 0.5, "V": 0.25}, {"A": 1.0, "V": None}]
    [loaded] = load_trajectories(tmp_path / "values.jsonl")
    assert isinstance(loaded, CreditedEpisode)
    assert loaded.values is not None
    assert loaded.values[0] == 0.25
    assert np.isnan(loaded.values[1])


def test_a_lean_file_can_be_read_but_not_loaded(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a.jsonl", [two_turns()], lean=True)
    (line,) = read_lines(tmp_path / "a.jsonl")
    assert [(step.num_prompt, step.num_sampled, step.tokens) for step in line.steps] == [(3, 2, None), (6, 1, None)]
    with pytest.raises(RunFolderError, match="saved lean"):
        load_trajectories(tmp_path / "a.jsonl")


def edited(path: Path, **edit: object) -> Path:
    """A file whose second line is the first with other values; a value of None takes the key out."""
    save_trajectories(path, [two_turns()])
    good = path.read_text()
    fields = {key: value for key, value in {**json.loads(good), **edit}.items() if value is not None or key not in edit}
    path.write_text(good + json.dumps(fields) + "\n")
    return path


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({"schema_version": 1}, "line 2 has schema 1 and this headrace reads schema 2"),
        ({"schema_version": 3}, "line 2 has schema 3 and this headrace reads schema 2"),
        ({"schema_version": "x" * 500}, "line 2 has schema 'x{39} and this headrace reads schema 2"),
        ({"schema_version": None}, "line 2 has no schema version and this headrace reads schema 2"),
        ({"seed": "x"}, "line 2 .*seed"),
        ({"task": None}, "line 2 .*task"),
        ({"reward": {"total": 1.0, "steps": [1.0]}}, "line 2: 1 step rewards for 2 steps"),
    ],
)
def test_a_line_that_is_not_ours_is_refused_by_number_and_key(
    tmp_path: Path, edit: dict[str, object], why: str
) -> None:
    path = edited(tmp_path / "a.jsonl", **edit)
    for read in (load_trajectories, read_lines):
        with pytest.raises(RunFolderError, match=why):
            read(path)


def test_keys_that_others_added_are_left_alone(tmp_path: Path) -> None:
    path = edited(tmp_path / "a.jsonl", surprise={"a": [1]})
    first, second = load_trajectories(path)
    assert_same(first, second)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\n", b"[]\n", b"3\n", b"{" * 5000 + b"\n", b'{"schema_version":2\n', b"null\n"]
)
def test_junk_is_refused_with_its_line(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [two_turns()])
    path.write_bytes(path.read_bytes() + junk + path.read_bytes())
    with pytest.raises(RunFolderError, match="line 2"):
        read_lines(path)


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [two_turns(), two_turns()])
    path.write_bytes(path.read_bytes()[:-30])
    assert len(load_trajectories(path)) == 1
    assert "in the middle of line 2" in caplog.text
    path.write_bytes(path.read_bytes().splitlines()[0])  # whole, but for its newline
    assert len(load_trajectories(path)) == 1


def test_an_empty_file_has_no_episodes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    assert load_trajectories(tmp_path / "a.jsonl") == ()
    with pytest.raises(RunFolderError, match="cannot read"):
        read_lines(tmp_path / "missing.jsonl")


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    """The first episode is there before the second line, which is broken, is looked at."""
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [two_turns()])
    path.write_bytes(path.read_bytes() + b"broken\n")
    lines = iter_lines(path)
    assert next(lines).id == "e1"
    with pytest.raises(RunFolderError, match="line 2"):
        next(lines)


def test_a_failed_episode_has_a_line_with_its_reason_and_no_reward(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [two_turns(), FailedEpisode(id="3/1", task=Task(id="t1"), reason="the world ended")])
    assert [(line.id, line.failed) for line in iter_lines(path)] == [("e1", None), ("3/1", "the world ended")]
    assert np.isnan(list(iter_lines(path))[1].reward.total)
    assert [line.id for line in read_lines(path)] == ["e1"]
    assert len(load_trajectories(path)) == 1


def credited_line(tmp_path: Path, **about: object) -> EpisodeRecord:
    parts = (
        StepCredit(returns=0.95, episode=0.7, step=0.2, peers=3, anchor="#a1"),
        StepCredit(returns=1.0, episode=0.7, step=0.0, peers=1),
    )
    credited = CreditedEpisode(scored=two_turns(), group_id=4, advantages=(0.9, 0.7), parts=parts)
    save_trajectories(tmp_path / "a.jsonl", [credited], lean=True, about=RolloutFileInfo(**about))  # type: ignore[arg-type]
    (line,) = read_lines(tmp_path / "a.jsonl")
    return line


def test_a_credited_line_holds_all_that_a_viewer_shows(tmp_path: Path) -> None:
    line = credited_line(
        tmp_path, run="r", training_step=12, method="gigpo", params={"gamma": 0.95}, group_sizes={4: 8}
    )
    assert (line.run, line.training_step, line.group_id, line.group_size, line.versions) == ("r", 12, 4, 8, (3, 3))
    assert line.credit is not None
    assert (line.credit.method, line.credit.params) == ("gigpo", {"gamma": 0.95})
    first = line.steps[0].credit
    assert first is not None
    assert (first.A, first.G, first.A_E, first.A_S, first.peers) == (0.9, 0.95, 0.7, 0.2, 3)
    assert [step.anchor for step in line.steps] == ["#a1", None]
    assert line.step_rewards == (0.0, 1.0)
    assert line.steps[0].logprob == pytest.approx(-0.2, abs=1e-7)


def test_a_recredited_line_keeps_everything_else(tmp_path: Path) -> None:
    path = edited(tmp_path / "a.jsonl", surprise=1)
    raw = path.read_bytes().splitlines()[1]
    scored = ScoredEpisode(episode=two_turns().episode, reward=Reward(total=5.0, parts={"mine": 5.0}))
    again = CreditedEpisode(scored=scored, group_id=4, advantages=(2.0, -2.0))
    about = RolloutFileInfo(method="rloo", group_sizes={4: 1})
    before, after = json.loads(raw), json.loads(recredited(raw, again, about))
    assert after["reward"] == {"total": 5.0, "parts": {"mine": 5.0}, "steps": None, "success": None}
    assert [step["credit"] for step in after["steps"]] == [{"A": 2.0}, {"A": -2.0}]
    assert after["credit"] == {"method": "rloo", "params": {}}
    for key in ("surprise", "task", "messages", "seed"):
        assert after[key] == before[key]
    assert [step["tokens"] for step in after["steps"]] == [step["tokens"] for step in before["steps"]]

    failed = json.loads(recredited(raw, FailedEpisode(id="e1", task=Task(id="t1"), reason="no idea"), about))
    assert (failed["failed"], failed["reward"]["total"]) == ("no idea", "NaN")
    assert all("credit" not in step for step in failed["steps"])


def test_token_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [two_turns()])
    line = json.loads(path.read_text())
    line["steps"][0]["tokens"]["sampler_logprobs"].append(-0.5)
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(RunFolderError, match="do not fit together"):
        load_trajectories(path)


def test_task_data_that_is_not_json_names_the_task_and_writes_nothing(tmp_path: Path) -> None:
    scored = two_turns()
    odd = Task(id="odd task", data={"answer": object()})
    episode = Episode(id="e2", task=odd, seed=0, steps=(), messages=(), temperature=1.0)
    with pytest.raises(RunFolderError, match="odd task"):
        save_trajectories(tmp_path / "a.jsonl", [scored, ScoredEpisode(episode=episode, reward=scored.reward)])
    assert list(tmp_path.iterdir()) == []
