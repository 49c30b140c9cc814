"""Names of other libraries: the answers to unknown keys, and the page that lists them."""

import re
import tomllib
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import typer.main
from typer import core

from headrace.cli import app
from headrace.config import check, load_config
from headrace.config.foreign_names import FOREIGN_NAMES, ForeignName, names_page
from headrace.config.introspect import keys
from headrace.errors import ConfigError
from headrace.rollout.filters import named_filter
from support.paths import DOCS, ROOT

TABLE = re.compile(r"\{[^}]*\}")  # of TOML, in a note
KNOWN = {path for path, _, _ in keys()}


def test_the_page_is_the_table() -> None:
    assert (DOCS / "names.md").read_text(encoding="utf-8") == names_page(), (
        "write it again by  python docs/make_names.py"
    )


@pytest.mark.parametrize("entry", FOREIGN_NAMES, ids=lambda entry: entry.name)
def test_every_answer_is_a_key_that_exists(entry: ForeignName) -> None:
    assert entry.ours or entry.places or entry.note
    assert {ours.partition(" = ")[0] for ours in entry.ours} <= KNOWN
    assert entry.name not in KNOWN, "a key of ours is not unknown"


def test_every_place_is_there() -> None:
    """Names are imported, commands are those of the program, files are in the repository; tests/service/http/
    test_openapi.py looks for routes."""
    commands = typer.main.get_command(app)
    assert isinstance(commands, core.TyperGroup)
    missing = []
    for place in dict.fromkeys(place for entry in FOREIGN_NAMES for place in entry.places):
        first, _, rest = place.partition(" ")
        if place.startswith("headrace."):
            module, _, name = place.rpartition(".")
            there = hasattr(import_module(module), name)
        elif first == "headrace":
            there = rest in commands.commands
        elif rest:
            there = first in ("GET", "POST")
        else:
            there = (ROOT / place).is_file()
        missing += [] if there else [place]
    assert missing == []


def test_filters_are_written_as_they_work() -> None:
    written = [table for entry in FOREIGN_NAMES if "rl.filters" in entry.ours for table in TABLE.findall(entry.note)]
    assert len(written) > 5
    for table in written:
        options = tomllib.loads(f"filter = {table}")["filter"]
        named_filter(options.pop("fn"), options)


def test_a_name_is_listed_once() -> None:
    assert [name for name, count in Counter(entry.name for entry in FOREIGN_NAMES).items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[rl]\nnum_generations = 8", "unknown key 'rl.num_generations'; this is TRL's name; write 'rl.group_size'"),
        (
            "[rl]\nbeta = 0.1",
            "unknown key 'rl.beta'; this is TRL's name; write 'rl.loss = \"ppo + reference_kl_k3\"' or "
            "'rl.loss_params' (kl_coef is its number in [rl])",
        ),
        ("[sft]\nper_device_train_batch_size = 4", "write 'sft.batch_size' (of one update, on all devices together)"),
        ("[dpo]\ngradient_accumulation_steps = 4", "write 'dpo.micro_batch_tokens' (memory is set in tokens"),
        ("[rl]\nmax_completion_length = 4", "write 'rl.sampling.max_tokens'"),
        ("[rl]\ntemperature = 1.0", "this is TRL's name; write 'rl.sampling.temperature'"),
        ("[model.lora]\nr = 8", "this is TRL's name; write 'model.lora.rank'"),
        ("[model]\nenable_thinking = false", "write 'model.template_options' ({ enable_thinking = false })"),
        ("[rl]\nkl_coef = 0.1", "this is verl's name; write 'rl.loss_params' or 'rl.critic.kl_coef'"),
        (
            "[actor_rollout_ref.rollout]\nn = 8",
            "unknown key 'actor_rollout_ref'; 'actor_rollout_ref.rollout.n' is verl's name; write 'rl.group_size'",
        ),
        ("[algorithm]\nadv_estimator = 'grpo'", "'algorithm.adv_estimator' is verl's name; write 'rl.credit'"),
        ("[rl]\nomega = 0.5", "this is reward-kit's name; write 'rl.credit_params' (omega is its number"),
        ("[rl]\nn_samples_per_prompt = 4", "this is rollouts's name; write 'rl.group_size'"),
        ("[rl]\ndatabuffer = 4", "this is retrain's name; there is no such key here: every step is one transaction"),
        ("[rl]\nstore_rollout_data = true", "there is no such key here: every step is one transaction of the run's"),
        ("[run]\nlogging_steps = 5", "this is TRL's name; write 'run.log_every'"),
        ("[rl]\nFutureGroup = 4", "this is Signal's name; there is no such key here: the client is the public tinker"),
        ("[rl]\nenable_futures = true", "this is Signal's name; there is no such key here: every request is a future"),
        ("[rl]\nmodal_runtime = true", "there is no such key here: it runs on your own hardware"),
        ("[rl.optimizer]\nwarmup_steps = 4", "write 'rl.optimizer.schedule.warmup_steps'"),
        (
            "[rl]\nenable_segment_wise_ppo = true",
            "unknown key 'rl.enable_segment_wise_ppo'; this is AReaL's name; write "
            "'rl.algorithm = \"segment_wise_ppo\"' (one switch for loss, lag and weights)",
        ),
        ("[rl]\nregister_capacity_modifier = 'a.py:f'", "write 'rl.async.limits' (in code: `RolloutExecutor.register"),
        ("[rl]\noutput_queue = 'a'", "this is AReaL's name; here it is `ready`, a part of `ExecutorParts`"),
        ("[rl]\ngroups_per_batch = 64", "this is Tinker's name; write 'rl.groups'"),
        ("[sft]\nlr_schedule = 'cosine'", "this is Tinker's name; write 'sft.optimizer.schedule.type'"),
        ("adapter = 'lora'", "this is Axolotl's name; write 'model.lora'"),
        ("[rl]\ngamma = 0.5", "this is reward-kit's name; write 'rl.credit_params' or 'rl.critic.gamma'"),
        ("[rl]\nloss_mask = true", "there is no such key here: see 'headrace.Datum' (its array `weights`;"),
        ("[rl]\nStepOutput = 1", "there is no such key here: see 'headrace.reward.compat.models.StepOutput'"),
        ("[rl]\nSignalFuture = 1", "there is no such key here: see 'headrace.service.client.RequestFuture' (awaited"),
        ("[rl]\nbaseline = 0.5", "write 'rl.credit = \"reinforce\"' or 'rl.credit_params' ({ baseline = 0.5 })"),
        (
            "[rl]\nrollout_queue = 1",
            "this is AReaL's name; there is no such key here: see 'headrace/rollout/executor/ready",
        ),
        ("[rl]\nbase_rewards = 1", "see 'headrace.types.Reward' (its `steps`, one for each step)"),
        ("[rl]\ncheckpoint_dir = 'a'", "write 'run.folder' (checkpoints are in the folder of the run)"),
        ("[rl]\nRLOOActor = 1", "this is retrain's name; write 'rl.algorithm = \"rloo\"' (one implementation for all"),
        (
            "[rl]\nrl_metrics = true",
            "there is no such key here: see 'docs/metrics.md' (among the metrics of an answer)",
        ),
    ],
)
def test_a_foreign_name_is_answered_with_ours(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, file="run.toml")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("loss", "'enhanced_ppo'", "did you mean 'rl.algorithm = \"enhanced_ppo\"'?"),
        ("loss", "'enhanced_ppo_loss'", "this is Signal's name; write 'rl.algorithm = \"enhanced_ppo\"'"),
        ("loss", "'grpo_loss'", "this is rollouts's name; write 'rl.algorithm = \"grpo\"'"),
        ("credit", "'gae'", "this is verl's name; write 'rl.credit = \"token_gae\"' (with a table [rl.critic])"),
        ("filters", "[{ fn = 'check_min_reward' }]", "write 'rl.filters' ({ fn = \"reward_range\", low = 0.1 })"),
    ],
)
def test_a_foreign_value_is_answered_with_ours(key: str, value: str, sentence: str) -> None:
    sizes = "steps = 2\nmax_prompt_tokens = 64\nmax_episode_tokens = 200"
    text = f"[rl]\n{sizes}\ntasks = {{ type = 'env', name = 'add' }}\n{key} = {value}"
    with pytest.raises(ConfigError) as caught:
        check(load_config(text, file="run.toml"), file="run.toml", base=Path())
    assert sentence in str(caught.value)


def test_the_founding_documents_have_a_section_each() -> None:
    libraries = {entry.library for entry in FOREIGN_NAMES}
    assert libraries == {"TRL", "verl", "Axolotl", "Tinker", "AReaL", "reward-kit", "rollouts", "retrain", "Signal"}
    page = names_page()
    for library in libraries:
        assert f"\n## {library}\n" in page
