"""Unmodified recipes of the public tinker cookbook against `headrace serve` of a tiny model, offline.

The cookbook pins an older transformers than headrace needs, so `make test-cookbook` puts it beside the environment.
Their server is killed in test_recipes_killed.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.service.http.auth import HashedKey, hash_key
from headrace.service.http.server import serving
from headrace.service.settings import Listen, ServeConfig, ServedModel
from headrace.wiring.commands.serve import open_service
from support.cookbook import NAMES, cook, environment_of, needs_cookbook, write_data, write_model
from support.tinker_server import KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_cookbook]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder that recipes start in, and their environment."""
    folder = tmp_path_factory.mktemp("kitchen")
    write_model(folder)
    write_data(folder)
    config = replace(
        ServeConfig(),
        serve=Listen(folder=str(folder / "served")),
        model=ServedModel(path=str(folder / "model"), name="tiny", aliases=NAMES),
        keys=(HashedKey(owner="cook", sha256=hash_key(KEY)),),
    )
    with open_service(config) as opened, serving(opened.app) as url:
        yield folder, environment_of(folder, url, KEY)


def test_sl_loop_falls_and_resumes_exactly(kitchen: tuple[Path, dict[str, str]]) -> None:
    arguments = (f"model_name={NAMES[1]}", "batch_size=16", "max_steps=6", "save_every=3", "learning_rate=0.003")
    first = [row["train_mean_nll"] for row in cook(kitchen, "sl_loop", *arguments, log="sl")]
    assert len(first) == 6
    assert first == sorted(first, reverse=True)
    checkpoints = kitchen[0] / "sl" / "checkpoints.jsonl"
    checkpoints.write_text("".join(checkpoints.read_text().splitlines(keepends=True)[:-1]))
    again = [row["train_mean_nll"] for row in cook(kitchen, "sl_loop", *arguments, log="sl")]
    assert again == [*first, *first[3:]]


@pytest.mark.parametrize(
    "how", [("loss_fn=ppo", "num_substeps=2", "compute_post_kl=True"), ("loss_fn=cispo", "max_steps_off_policy=2")]
)
def test_math_rl_samples_with_the_trainers_logprobs(kitchen: tuple[Path, dict[str, str]], how: tuple[str, ...]) -> None:
    arguments = (
        "env=arithmetic", f"model_name={NAMES[0]}", "group_size=4", "groups_per_batch=6", "max_tokens=4",
        "max_steps=2", "behavior_if_log_dir_exists=delete",
    )  # fmt: skip
    rows = cook(kitchen, "math_rl.train", *arguments, *how, log=how[0])
    assert [abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows] == [True] * 2
    assert [row["env/all/total_episodes"] for row in rows] == [24, 24]


def test_guess_number_plays_its_turns(kitchen: tuple[Path, dict[str, str]]) -> None:
    rows = cook(
        kitchen, "multiplayer_rl.guess_number.train", f"model_name={NAMES[0]}", "max_tokens=6", "max_steps=2",
        "renderer_name=qwen3_disable_thinking", "batch_size=4", "group_size=4", "eval_every=0",
        "behavior_if_log_dir_exists=delete", log="guess",
    )  # fmt: skip
    assert len(rows) == 2
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in rows)
    assert all(row["env/all/turns_per_episode"] > 1 for row in rows)


def test_dpo_starts_at_ln_2_and_falls(kitchen: tuple[Path, dict[str, str]]) -> None:
    rows = cook(
        kitchen, "preference.dpo.train", "dataset=hhh", f"model_name={NAMES[1]}", "batch_size=8", "max_length=128",
        "max_steps=3", "learning_rate=0.01", "behavior_if_log_dir_exists=delete", log="dpo",
    )  # fmt: skip
    losses = [row["dpo_loss"] for row in rows]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert "surrogate_loss:sum" in rows[0]


def test_chat_sl_evaluates_and_keeps_rolling_checkpoints(kitchen: tuple[Path, dict[str, str]]) -> None:
    rows = cook(
        kitchen, "chat_sl.train", "dataset=no_robots", f"model_name={NAMES[1]}", "batch_size=16", "max_length=256",
        "max_steps=5", "learning_rate=0.003", "eval_every=3", "save_every=2", "rolling_save_every=1",
        "behavior_if_log_dir_exists=delete", log="chat",
    )  # fmt: skip
    losses = [row["train_mean_nll"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    tested = [row["test/nll"] for row in rows if "test/nll" in row]
    assert tested[-1] < tested[0]
