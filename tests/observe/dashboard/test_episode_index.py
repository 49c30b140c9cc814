"""The index against the files that it was made from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.observe.dashboard import episode_index
from headrace.observe.dashboard.episode_index import SORTS, EpisodeFilter, EpisodeIndex

Sums = Callable[..., Path]


def indexed(run: Path, cache: Path, **options: int) -> EpisodeIndex:
    index = EpisodeIndex(run / "rollouts", cache / "index.sqlite", **options)
    for _ in range(1000):
        if not index.update(budget_s=0.001):
            return index
    raise AssertionError("indexing does not end")


def lines_of(run: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for file in sorted(run.glob("rollouts/*")) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("wanted", "accepts"),
    [
        (EpisodeFilter(), lambda line: True),
        (EpisodeFilter(reward_from=0.5), lambda line: line["reward"]["total"] >= 0.5),
        (
            EpisodeFilter(reward_to=0.5, step_from=2, step_to=3),
            lambda line: line["reward"]["total"] <= 0.5 and 2 <= line["training_step"] <= 3,
        ),
        (
            EpisodeFilter(tokens_from=40, tokens_to=45),
            lambda line: 40 <= sum(step["num_sampled"] for step in line["steps"]) <= 45,
        ),
        (EpisodeFilter(task="sum/00"), lambda line: line["task"]["id"].startswith("sum/00")),
        (EpisodeFilter(task="100%"), lambda line: False),
        (EpisodeFilter(outcome="solved"), lambda line: line["success"]),
        (
            EpisodeFilter(outcome="not solved", words="ada4"),
            lambda line: not line["success"] and line["training_step"] == 4,
        ),
        (EpisodeFilter(words="plus ada2"), lambda line: line["training_step"] == 2),
        (EpisodeFilter(words='" OR 1 --'), lambda line: False),
        (EpisodeFilter(group="9"), lambda line: line["group_id"] == 9),
        (EpisodeFilter(file="eval"), lambda line: False),
    ],
)  # fmt: skip
def test_a_filter_finds_the_lines_that_it_names(
    sums: Sums,
    tmp_path: Path,
    wanted: EpisodeFilter,
    accepts: Callable[[dict], bool],  # type: ignore[type-arg]
) -> None:
    run = sums()
    index = indexed(run, tmp_path)
    expected = [line for line in lines_of(run) if accepts(line)]
    rows = index.find(wanted, sort="oldest", limit=100)
    assert [json.loads(index.line(row["id"])[0])["id"] for row in rows] == [line["id"] for line in expected]  # type: ignore[index]
    summary = index.summarize(wanted)
    assert summary["count"] == len(expected)
    if expected:
        assert summary["reward"] == pytest.approx(sum(line["reward"]["total"] for line in expected) / len(expected))
    index.close()


def test_every_order_is_one_of_the_figures(sums: Sums, tmp_path: Path) -> None:
    index = indexed(sums(), tmp_path)
    for sort in SORTS:
        rows = index.find(EpisodeFilter(), sort=sort, limit=100)
        column = {"newest": "step", "oldest": "step", "best": "reward", "worst": "reward"}.get(sort, "tokens")
        values = [row[column] for row in rows]
        assert len(values) == 40
        assert values == sorted(values, reverse=sort in ("newest", "best", "longest"))
    index.close()


def test_new_changed_and_removed_files_are_followed(sums: Sums, tmp_path: Path) -> None:
    run = sums()
    index = indexed(run, tmp_path)
    first, last = run / "rollouts" / "step_000001.jsonl", run / "rollouts" / "step_000005.jsonl"
    raw = first.read_text().splitlines(keepends=True)
    (run / "rollouts" / "step_000006.jsonl").write_text(raw[0] + raw[1][:40])  # half written
    first.unlink()
    last.write_text("".join(raw[:2]) + "not JSON\n" + '{"schema_version":2}\n')
    index._folder_seen = None
    while index.update(budget_s=1.0):
        pass
    assert index.summarize(EpisodeFilter())["count"] == 24 + 2 + 1
    assert index.progress.refused == 2
    assert index.find(EpisodeFilter(step_to=1)) == []
    (run / "rollouts" / "step_000006.jsonl").write_text("".join(raw[:2]))
    index._folder_seen = None
    while index.update(budget_s=1.0):
        pass
    assert index.summarize(EpisodeFilter(step_from=6))["count"] == 2
    index.close()


def test_the_newest_steps_are_indexed_first_and_the_index_is_bounded(sums: Sums, tmp_path: Path) -> None:
    index = indexed(sums(steps=20), tmp_path, max_episodes=40)
    assert index.progress.is_full
    assert index.summarize(EpisodeFilter())["count"] == 40
    assert index.choices()["steps"] == [16, 20]
    index.close()


def test_an_index_goes_on_where_the_last_process_left_it_and_a_damaged_one_is_made_anew(
    sums: Sums, tmp_path: Path
) -> None:
    run = sums()
    indexed(run, tmp_path).close()
    again = EpisodeIndex(run / "rollouts", tmp_path / "index.sqlite")
    assert not again.update(budget_s=0.0)  # nothing is left to do
    assert again.progress.episodes == 40
    again.close()
    for content in (b"this is no database, and long enough to be seen as none" * 100, b""):
        for suffix in ("", "-wal", "-shm"):
            (tmp_path / f"index.sqlite{suffix}").unlink(missing_ok=True)
        (tmp_path / "index.sqlite").write_bytes(content)
        damaged = EpisodeIndex(run / "rollouts", tmp_path / "index.sqlite")
        assert damaged.find(EpisodeFilter()) == []
        damaged.close()
        made = indexed(run, tmp_path)
        assert made.summarize(EpisodeFilter())["count"] == 40
        made.close()


def test_an_episode_whose_file_changed_under_the_index_is_not_there(sums: Sums, tmp_path: Path) -> None:
    run = sums()
    index = indexed(run, tmp_path)
    (row,) = index.find(EpisodeFilter(), limit=1)
    (run / "rollouts" / row["file"]).write_text("short\n")
    assert index.line(row["id"]) is None
    (run / "rollouts" / row["file"]).unlink()
    assert index.line(row["id"]) is None
    assert index.line(10**9) is None
    index.close()


def test_a_search_that_is_cut_says_so_also_with_other_filters(
    sums: Sums, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = indexed(sums(), tmp_path)
    assert index.summarize(EpisodeFilter(words="plus"))["is_cut"] is False
    monkeypatch.setattr(episode_index, "MAX_MATCHES", 20)
    cut = index.summarize(EpisodeFilter(words="plus", outcome="solved"))
    assert cut["is_cut"] is True
    assert cut["count"] == 10
    assert index.summarize(EpisodeFilter(words="ada3"))["is_cut"] is False
    index.close()
