"""The page of rollouts as HTML: whole, without outside references, and with every text escaped."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.rollouts.records import EpisodeRecord, MessageRecord, iter_lines
from headrace.observe.viewer import page as view_page
from headrace.observe.viewer.page import conversation
from headrace.observe.viewer.query import ViewQuery, write_page
from support import rollout_files


class Page(HTMLParser):
    """Which elements and attributes a page really has, and its text by class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.tags if name in attributes.get("class", "").split()]


def made(path: Path, **asked: object) -> Page:
    out = path.with_name("page.html")
    write_page(ViewQuery(path=path, **asked), out)  # type: ignore[arg-type]
    return Page(out.read_text(encoding="utf-8"))


def test_the_page_has_every_group_episode_step_state_and_token(tmp_path: Path) -> None:
    page = made(rollout_files.save(tmp_path / "a.jsonl"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [len(page.of_class(name)) for name in ("group", "episode", "step", "anchor")] == [2, 6, 13, 4]
    assert len([tag for tag, _ in page.tags if tag == "b"]) == 13 * 4  # two tokens of prompt and two sampled ones each
    tokens = [attributes for tag, attributes in page.tags if tag == "b"]
    assert tokens[2] == {"class": "l0 a1 m1 v3", "title": "log-prob -0.05 · A +0.458 · version 3"}
    assert "the world ended" in "".join(page.words)
    text = " ".join(" ".join(page.words).split())
    assert "Training step 4" in text
    assert "on ×3 · 0.167" in text, "an edge of the graph"
    assert "credit gigpo (gamma 0.5, norm none)" in text


def test_links_within_the_page_lead_somewhere(tmp_path: Path) -> None:
    page = made(rollout_files.save(tmp_path / "a.jsonl"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert len(links) > 40
    assert [link for link in links if link[0] != "#" or link[1:] not in ids] == []


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    """In run, task, state, action, message, reward part, reason and, by way of the tokenizer, token."""
    path = tmp_path / "a.jsonl"
    rollout_files.save(path, note=rollout_files.ATTACK)
    states = [("S" + rollout_files.ATTACK, "on"), ("S" + rollout_files.ATTACK, "on")]
    extra = tmp_path / "b.jsonl"
    save_trajectories(
        extra, [rollout_files.episode(f"9/{k}{rollout_files.ATTACK}", "t", states, solved=True) for k in range(2)]
    )
    for file in (path, extra):
        page = made(file)
        tags = [tag for tag, _ in page.tags]
        assert tags.count("script") == 1
        assert "img" not in tags
        names = {name for _, attributes in page.tags for name in attributes}
        assert not {name for name in names if name.startswith("on")}
        addresses = [a.get("href", "") + a.get("src", "") for _, a in page.tags]
        assert not [address for address in addresses if address and not address.startswith("#")]
        words = "".join(page.words) + "".join(value for _, a in page.tags for value in a.values())
        assert "<script>document.title" in words, "it is there, as text"
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", words)


def test_the_policy_lets_only_the_pages_own_script_run(tmp_path: Path) -> None:
    page = made(rollout_files.save(tmp_path / "a.jsonl"))
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


def test_a_lean_file_has_a_page_without_tokens(tmp_path: Path) -> None:
    page = made(rollout_files.save(tmp_path / "a.jsonl", lean=True))
    assert not [tag for tag, _ in page.tags if tag == "b"]
    assert not page.of_class("bar"), "nothing to colour"
    assert len(page.of_class("step")) == 13


def test_episodes_without_credit_states_or_steps_have_a_page(tmp_path: Path) -> None:
    odd = [
        rollout_files.episode("1/0", "t", [(None, "on"), (None, "")], solved=True),
        rollout_files.episode("1/1", "t", [], solved=False),
    ]
    save_trajectories(tmp_path / "a.jsonl", odd)
    page = made(tmp_path / "a.jsonl")
    text = " ".join(page.words)
    assert "No step of this group names a state" in text
    assert "No state of this group was visited twice" in text
    assert "(nothing)" in text
    assert "not credited" in text


def test_a_page_of_one_task_or_of_too_many_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rollout_files.save(tmp_path / "a.jsonl")
    assert len(made(path, task="still").of_class("group")) == 1
    monkeypatch.setattr("headrace.observe.viewer.query.MAX_EPISODES", 4)
    page = made(path)
    assert len(page.of_class("group")) == 1, "whole groups only"
    assert "3 more episodes of this file are not on this page" in " ".join(page.words)


def test_a_page_says_when_tokens_are_left_out_for_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_page, "MAX_TOKENS", 13)
    page = made(rollout_files.save(tmp_path / "a.jsonl"))
    assert len([tag for tag, _ in page.tags if tag == "b"]) == 12, "the first episode has 3 steps of 4"
    assert "Some episodes are shown without their tokens" in " ".join(page.words)


def test_numbers_that_are_none_are_shown_as_such(tmp_path: Path) -> None:
    path = rollout_files.save(tmp_path / "a.jsonl")
    text = path.read_text().replace('"A":', '"A":"NaN","was":', 1).replace('"G":', '"G":"Infinity","is":', 1)
    path.write_text(text)
    assert "nan" in "".join(made(path).words)


def line_with(names: list[str], steps: int, path: Path) -> EpisodeRecord:
    """An episode of so many steps whose messages are these; the first letter is the role."""
    save_trajectories(path, [rollout_files.episode("1/0", "t", [("S", "on")] * steps, solved=True)])
    (line,) = iter_lines(path)
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return replace(line, messages=tuple(MessageRecord(role=roles[name[0]], content=name) for name in names))


@pytest.mark.parametrize(
    ("messages", "steps", "seen", "after"),
    [
        (["s", "u1", "a1", "u2", "a2", "u3"], 2, [["s", "u1"], ["u2"]], ["u3"]),
        (["u0", "a0", "u1", "a1"], 1, [["u0", "a0", "u1"]], []),  # the task brought an assistant's turn
        (["u1", "a1"], 2, [[], ["u1"]], []),  # fewer turns than steps
        (["u1"], 1, [[]], ["u1"]),
    ],
)
def test_what_each_step_has_seen(
    tmp_path: Path, messages: list[str], steps: int, seen: list[list[str]], after: list[str]
) -> None:
    turns, rest = conversation(line_with(messages, steps, tmp_path / "a.jsonl"))
    assert [[message.content for message in turn] for turn in turns] == seen
    assert [message.content for message in rest] == after
