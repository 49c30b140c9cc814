import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RunFolderError
from headrace.observe.trajectories import load_trajectories, read_lines, save_trajectories
from headrace.types import (
    Completion,
    CreditedEpisode,
    Episode,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    Stop,
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
        stop=draw(st.sampled_from(Stop)),
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
    for name in ("id", "task", "seed", "messages", "temperature", "truncated", "success"):
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


@given(st.lists(scored_episodes(), max_size=3), st.booleans())
def test_episodes_come_back_equal(
    tmp_path_factory: pytest.TempPathFactory, episodes: list[ScoredEpisode], credited: bool
) -> None:
    path = tmp_path_factory.mktemp("rollouts") / "step_000001.jsonl"
    if not credited:
        save_trajectories(path, episodes)
        for left, right in zip(episodes, load_trajectories(path), strict=True):
            assert isinstance(right, ScoredEpisode)
            assert_same(left, right)
        return
    saved = [
        CreditedEpisode(scored=scored, group_id=k, advantages=tuple(0.1 * (k + 1) for _ in scored.episode.steps))
        for k, scored in enumerate(episodes)
    ]
    save_trajectories(path, saved)
    for before, after in zip(saved, load_trajectories(path), strict=True):
        assert isinstance(after, CreditedEpisode)
        assert (before.group_id, before.advantages) == (after.group_id, after.advantages)
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
                stop=Stop.STOP,
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
    assert line["schema_version"] == 1
    assert line["steps"][1]["tokens"] == {
        "prompt_shared": 5,
        "prompt_rest": [6],
        "sampled": [7],
        "sampler_logprobs": [-0.1],  # not -0.10000000149011612
        "raw_logprobs": None,
        "versions": [[3, 1]],
    }


def test_a_lean_file_can_be_read_but_not_loaded(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a.jsonl", [two_turns()], lean=True)
    (line,) = read_lines(tmp_path / "a.jsonl")
    assert [(step.num_prompt, step.num_sampled, step.tokens) for step in line.steps] == [(3, 2, None), (6, 1, None)]
    with pytest.raises(RunFolderError, match="saved lean"):
        load_trajectories(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"surprise": 1}, "surprise"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_a_line_of_another_schema_is_refused_by_number_and_key(
    tmp_path: Path, edit: dict[str, object], why: str
) -> None:
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [two_turns()])
    good = path.read_text()
    path.write_text(good + json.dumps({**json.loads(good), **edit}) + "\n")
    with pytest.raises(RunFolderError, match=f"line 2 .*{why}"):
        load_trajectories(path)


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
