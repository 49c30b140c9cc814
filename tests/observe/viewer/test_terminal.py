"""Rollouts on a terminal: what the tables say, that hostile text stays text, and what happens without colours."""

import doctest
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from headrace.errors import ConfigError, RunFolderError
from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.viewer import graph, safe_text
from headrace.observe.viewer.query import ViewQuery, view
from headrace.observe.viewer.tokens import ColorBy, Token, find_tokenizer, token_pieces, tone
from headrace.printable import visible
from support import rollout_files


def shown(path: Path, *, colour: bool = False, width: int = 150, **asked: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    for part in view(ViewQuery(path=path, **asked), width=width, colour=colour):  # type: ignore[arg-type]
        console.print(part)
    return out.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_overview_has_a_row_for_each_group(tmp_path: Path) -> None:
    text = shown(rollout_files.save(tmp_path / "a.jsonl"))
    assert "training step 4 · 6 episodes in 2 groups · credit gigpo (gamma 0.5, norm none)" in text
    # 7 has 10 steps, all in a state that another step saw; 8 has 3, all in S
    assert ["7", "corridor", "3", "2", "0", "…", "1", "3.33", "-1", "…", "+0.5", "100%"] in rows(text)
    assert ["8", "still", "2", "+", "1", "failed", "0", "0", "1.5", "0", "100%"] in rows(text)


def test_an_episode_step_by_step(tmp_path: Path) -> None:
    text = shown(rollout_files.save(tmp_path / "a.jsonl"), episode="7/2")
    assert ["step", "state", "action", "reward", "G", "A_E", "A_S", "A", "peers"] in rows(text)
    # S: mean 0.125; A: mean 1/3; A_E = -2/3
    assert ["0", "S", "on", "0", "0", "-0.667", "-0.125", "-0.792", "5"] in rows(text)
    assert ["1", "A", "back", "0", "0", "-0.667", "-0.333", "-1", "3"] in rows(text)
    assert ["2", "S", "jump", "invalid", "0", "0", "-0.667", "-0.125", "-0.792", "5"] in rows(text)
    assert "not solved, R 0, log-prob -6.15, ended by max turns, versions 3 to 4" in text


def test_a_critics_value_stands_in_place_of_the_return(tmp_path: Path) -> None:
    path = rollout_files.save(tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for step in lines[0]["steps"]:
        step["credit"] = {"A": 0.25, "V": 0.75}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = shown(path, episode="7/0")
    assert ["step", "state", "action", "reward", "V", "A_E", "A_S", "A", "peers"] in rows(text)
    assert ["2", "B", "on", "1", "0.75", "–", "–", "+0.25", "–"] in rows(text)
    assert "V" not in shown(path, episode="7/1").split()


def test_a_group_side_by_side(tmp_path: Path) -> None:
    wide = shown(rollout_files.save(tmp_path / "a.jsonl"), group=True, task="corr")
    assert ["step", "7/0", "✓", "solved", "7/1", "✓", "solved", "7/2", "✗", "cut", "off"] in rows(wide)
    assert ["on", "+0.458", "left", "+0.333", "on", "-0.792"] in rows(wide)
    narrow = shown(tmp_path / "a.jsonl", group=True, task="corr", width=70)
    assert ["step", "7/2", "✗", "cut", "off"] in rows(narrow), "columns that do not fit come below"
    assert max(map(len, narrow.splitlines())) <= 70


def test_an_anchor_lists_every_action_with_its_returns(tmp_path: Path) -> None:
    text = shown(rollout_files.save(tmp_path / "a.jsonl"), anchor="S", task="corr")
    assert "state S of group 7: 5 visits by 3 episodes, mean return 0.125" in text
    assert ["on", "3", "0.167", "+0.0417", "+0.0417", "0.25", "7/0:0", "0", "7/2:0", "0.25", "7/1:1"] in rows(text)
    assert ["left", "1", "0.125", "0", "+0.333", "0.125", "7/1:0"] in rows(text)
    both = shown(tmp_path / "a.jsonl", anchor="S")
    assert "of group 7" in both
    assert "of group 8" in both
    with pytest.raises(ConfigError, match=r"no state of .* has 'Q' in its key; some are 'S', 'A', 'B'$"):
        shown(tmp_path / "a.jsonl", anchor="Q")


def test_failed_episodes_are_shown_with_their_reasons(tmp_path: Path) -> None:
    still = rows(shown(rollout_files.save(tmp_path / "a.jsonl"), task="still"))
    assert ["8/2", "failed", "the", "world", "ended", "–", "–", "–", "–"] in still
    assert "failed: the world ended" in shown(tmp_path / "a.jsonl", episode="8/2")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"group": True},
        {"episode": "7/1"},
        {"task": "corr"},
        {"anchor": "S"},
        {"episode": "7/1", "tokens": ColorBy.LOGPROB},
    ],
)
def test_hostile_text_stays_text(tmp_path: Path, asked: dict[str, object]) -> None:
    """Neither an escape sequence nor rich markup nor a change of direction gets through."""
    path = rollout_files.save(tmp_path / "a.jsonl", note=rollout_files.ATTACK)
    text = shown(path, width=400, **asked)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]" in text, "what looks like markup is shown as it is"
    coloured = shown(path, width=400, colour=True, **asked)
    assert "\x1b[" in coloured
    assert not re.search("\x1b(?![[][0-9;]*m)|\x1b[[]5m|\x07|\u202e", coloured), "only our own escape sequences"


def test_the_heading_of_a_strangers_file_is_text(tmp_path: Path) -> None:
    path = rollout_files.save(tmp_path / "a\x1b[2J.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["credit"] = {"method": "gigpo\x1b[31m", "params": {"\u202e": "\x07"}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = shown(path, width=400)
    assert text == visible(text)
    assert r"credit gigpo\x1b[31m (\u202e \x07)" in text


def tokenizer_file(folder: Path) -> Path:
    words = {word: id for id, word in enumerate(["?", "go", "on", *(f"w{k}" for k in range(3, 11)), "left", "now"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (ColorBy.LOGPROB, "0 go on left[-0.05] now[-2.00]"),
        (ColorBy.ADVANTAGE, "0 go on left[+0.458] now[+0.458]"),
        (ColorBy.MASK, "0 go[0] on[0] left[1] now[1]"),
        (ColorBy.VERSION, "0 go on left[3] now[4]"),
    ],
)
def test_without_colours_figures_stand_in_brackets(tmp_path: Path, by: ColorBy, expected: str) -> None:
    tokenizer_file(tmp_path / "run" / "checkpoints" / "rl" / "step_000004")
    path = rollout_files.save(tmp_path / "run" / "rollouts" / "step_000004.jsonl")
    text = shown(path, episode="7/0", tokens=by)
    assert expected.split() in rows(text)
    assert "\x1b" not in text


def test_with_colours_there_is_a_legend_and_no_brackets(tmp_path: Path) -> None:
    path = rollout_files.save(tmp_path / "a.jsonl")
    text = shown(path, episode="7/0", tokens=ColorBy.LOGPROB, colour=True, tokenizer=tokenizer_file(tmp_path))
    assert "below -3: a surprise" in text
    assert "\x1b[38;2;255;255;255;48;2;163;68;0m now" in text, "log-prob -2 has the fourth of five colours"
    assert "[-2.00]" not in text


def test_tones_of_tokens() -> None:
    def of(logprob: float, advantage: float, version: int) -> list[str]:
        token = Token(text="x", logprob=logprob, advantage=advantage, version=version)
        return [tone(token, by) for by in ColorBy]

    assert of(-0.05, 0.2, 7) == ["l0", "a1", "m1", "v1"]
    assert of(-0.3, -0.7, 2) == ["l1", "a-2", "m1", "v2"]
    assert of(-9.0, 4.0, 0) == ["l4", "a3", "m1", "v0"]
    assert [tone(Token(text="x"), by) for by in ColorBy] == ["", "", "m0", ""]


def test_tokens_of_a_lean_file_are_said_to_be_missing(tmp_path: Path) -> None:
    path = rollout_files.save(tmp_path / "a.jsonl", lean=True)
    assert "lean: without tokens" in shown(path)
    with pytest.raises(
        RunFolderError, match=r"episode 7/0 was saved lean, without its tokens: set rl.save.lean = false"
    ):
        shown(path, tokens=ColorBy.LOGPROB)


def test_without_a_tokenizer_tokens_are_ids_and_unknown_ones_too(tmp_path: Path) -> None:
    assert ["0", "<1><2><11>[-0.05]<12>[-2.00]"] in rows(
        shown(rollout_files.save(tmp_path / "a.jsonl"), episode="7/0", tokens=ColorBy.LOGPROB)
    )
    pieces = token_pieces(tokenizer_file(tmp_path))
    assert pieces([1, 99, -3, 2]) == ["go", "<99>", "<-3>", "on"]
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json in"):
        find_tokenizer(tmp_path / "a.jsonl", tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RunFolderError, match="is not a tokenizer"):
        token_pieces(tmp_path / "tokenizer.json")


def test_episodes_without_credit_or_states_are_shown_all_the_same(tmp_path: Path) -> None:
    odd = rollout_files.episode("1/0", "t", [(None, "on"), ("", "")], solved=False)
    save_trajectories(tmp_path / "a.jsonl", [odd])
    text = shown(tmp_path / "a.jsonl", episode="1/0")
    assert ["0", "–", "on", "0", "–", "–", "–", "–", "–"] in rows(text)
    assert ["1", "(empty)", "(nothing)", "0", "–", "–", "–", "–", "–"] in rows(text)
    assert "credit not credited" in shown(tmp_path / "a.jsonl")


@pytest.mark.parametrize("module", [safe_text, graph], ids=lambda module: str(module.__name__))
def test_the_examples_in_docstrings_run(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted > 0
    assert tried.failed == 0


def test_what_rounding_left_of_an_advantage_is_shown_as_none(tmp_path: Path) -> None:
    path = rollout_files.save(tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["steps"][0]["credit"] |= {"A": 1.1e-16, "A_E": -1.1e-15, "A_S": 3.97e-17}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # S of 7/0: G = 1/4
    assert ["0", "S", "on", "0", "0.25", "0", "0", "0", "5"] in rows(shown(path, episode="7/0"))
