"""Pictures of saved episodes: each once beside the rollout files, bounded, and shown by the pages."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import RunFolderError
from headrace.observe.report.episodes import EpisodeComparison, sample_file
from headrace.observe.report.run_report import render
from headrace.observe.rollouts import picture_files
from headrace.observe.rollouts.files import load_trajectories, save_trajectories
from headrace.observe.rollouts.picture_files import load_picture, picture_file_name
from headrace.observe.rollouts.records import iter_lines
from headrace.observe.viewer.query import ViewQuery, write_page
from headrace.pictures import PICTURE_MARK, Picture
from headrace.types import (
    Completion,
    Episode,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)
from support.pictures import jpeg, png

RED, BLUE = Picture(data=png("red")), Picture(data=jpeg("blue"))
HOSTILE = Picture(data=b'<svg onload="alert(1)">')  # no picture that a page may hold


def played(id: str, *pictures: Picture) -> ScoredEpisode:
    asked = Message(role="user", content=f"{PICTURE_MARK * len(pictures)}what?", images=pictures)
    none = float_array([-0.5])
    completion = Completion(
        tokens=int_array([3]),
        sampler_logprobs=none,
        raw_logprobs=none,
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    episode = Episode(
        id=id,
        task=Task(id="t", messages=(asked,)),
        seed=1,
        steps=(Step(prompt=int_array([1, 2]), completion=completion, action="red"),),
        messages=(asked, Message(role="assistant", content="red")),
        temperature=1.0,
    )
    return ScoredEpisode(episode=episode, reward=Reward(total=1.0))


def saved_names(folder: Path) -> Sequence[str]:
    return sorted(file.name for file in (folder / "pictures").iterdir())


def test_pictures_are_saved_once_and_loaded_equal(tmp_path: Path) -> None:
    episodes = (played("a", RED), played("b", BLUE, RED))
    save_trajectories(tmp_path / "step_1.jsonl", episodes)
    save_trajectories(tmp_path / "step_2.jsonl", episodes, lean=True)
    assert saved_names(tmp_path) == sorted([picture_file_name(RED), picture_file_name(BLUE)])
    saved = load_trajectories(tmp_path / "step_1.jsonl")
    loaded = [scored.episode for scored in saved if isinstance(scored, ScoredEpisode)]
    assert [episode.messages for episode in loaded] == [scored.episode.messages for scored in episodes]
    assert [episode.task for episode in loaded] == [scored.episode.task for scored in episodes]
    text_only = tmp_path / "text" / "step_1.jsonl"
    save_trajectories(text_only, [played("a")])
    assert not (text_only.parent / "pictures").exists()
    assert "images" not in text_only.read_text()


def test_a_full_folder_takes_no_more_pictures_and_episodes_are_still_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(picture_files, "MAX_BYTES", len(RED.data))
    save_trajectories(tmp_path / "step_1.jsonl", [played("a", RED), played("b", BLUE)])
    assert saved_names(tmp_path) == [picture_file_name(RED)]
    assert "no more are saved" in caplog.text
    assert [line.id for line in iter_lines(tmp_path / "step_1.jsonl")] == ["a", "b"]
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_trajectories(tmp_path / "step_1.jsonl")


def test_only_our_own_names_and_unchanged_files_are_loaded(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "step_1.jsonl", [played("a", RED)])
    with pytest.raises(RunFolderError, match="that is no name of ours"):
        load_picture(tmp_path, "../step_1.jsonl")
    (tmp_path / "pictures" / picture_file_name(RED)).write_bytes(BLUE.data)
    with pytest.raises(RunFolderError, match="is not the picture it was"):
        load_picture(tmp_path, picture_file_name(RED))


def test_the_viewer_and_the_report_show_pictures_and_nothing_that_could_act(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    save_trajectories(path, [played("a", RED, HOSTILE), played("b", RED)])
    write_page(ViewQuery(path=path), tmp_path / "page.html")
    comparison = EpisodeComparison(rows=(sample_file("now", tuple(iter_lines(path))),), tally=())
    report = render(name="run", records=(), comparison=comparison, config="", facts=(), summary={}, pictures=tmp_path)
    for page in ((tmp_path / "page.html").read_text(), report):
        assert f'src="{RED.data_uri}"' in page
        assert "img-src data:;" in page
        assert "[picture][picture]what?" in page
        assert "Picture 2 is not there or too large to show." in page
        assert "image/svg" not in page
        assert "octet-stream" not in page
    save_trajectories(path, [played("a")])
    write_page(ViewQuery(path=path), tmp_path / "page.html")
    assert "img-src" not in (tmp_path / "page.html").read_text()
