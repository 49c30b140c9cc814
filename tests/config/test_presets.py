"""`rl.algorithm`: a short name for credit, loss, weighting and critic; what the file says itself wins or is refused."""

import typing
from pathlib import Path

import pytest
import tomli_w

from headrace.config import ALGORITHMS, Config, CriticConfig, RlConfig, check, load_config, to_mapping
from headrace.errors import ConfigError

RL = '[rl]\nsteps = 5\n[rl.tasks]\ntype = "env"\nname = "key_door"\n'


def load(*overrides: str, text: str = RL) -> RlConfig:
    loaded = load_config(text, file="run.toml", overrides=overrides).rl
    assert loaded is not None
    return loaded


def problem(rl: RlConfig, base: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check(Config(rl=rl), file="run.toml", base=base)
    return str(caught.value).removeprefix("run.toml: ")


def test_the_key_takes_every_name_of_the_table() -> None:
    annotation = typing.get_type_hints(RlConfig)["algorithm"]
    words = {word for part in typing.get_args(annotation) for word in typing.get_args(part)}
    assert words == set(ALGORITHMS)
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.critic] == ["ppo"]


def test_ppo_is_gae_with_the_clipped_loss_and_a_critic() -> None:
    rl = load("rl.algorithm=ppo")
    assert (rl.credit, rl.loss, rl.weighting, rl.critic) == ("token_gae", "ppo", "token_mean", CriticConfig())
    assert load("rl.algorithm=dr_grpo").weighting == "constant"
    assert load().algorithm is None


def test_what_the_file_says_itself_wins(tmp_path: Path) -> None:
    rl = load("rl.algorithm=ppo", "rl.credit=turn_gae", "rl.loss=conservative_ppo + entropy_bonus", "rl.critic.lam=0.9")
    assert (rl.credit, rl.loss, rl.critic) == ("turn_gae", "conservative_ppo + entropy_bonus", CriticConfig(lam=0.9))
    assert load("rl.algorithm=grpo", "rl.weighting=token_sum").weighting == "token_sum"


def test_a_resolved_configuration_stays_what_it_is() -> None:
    config = load_config(RL, file="run.toml", overrides=["rl.algorithm=ppo", "rl.credit=turn_gae"])
    assert load_config(tomli_w.dumps(to_mapping(config)), file="config.toml") == config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["rl.algorithm=ppo", "rl.credit=grpo"],
            '\'rl.algorithm\' is "ppo", but \'rl.credit\' is "grpo": write "token_gae" or "turn_gae", '
            "or leave one of them out",
        ),
        (
            ["rl.algorithm=cispo", "rl.loss=gspo + entropy_bonus"],
            '\'rl.algorithm\' is "cispo", but \'rl.loss\' is "gspo + entropy_bonus": have "cispo" in it, '
            "or leave one of them out",
        ),
        (
            ["rl.algorithm=grpo", "rl.critic.lam=0.5"],
            "'rl.algorithm' is \"grpo\", which has no critic, but there is a table [rl.critic]: leave one of them out",
        ),
    ],
)
def test_another_algorithm_than_the_one_named_is_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    assert problem(load("rl.max_prompt_tokens=64", "rl.max_episode_tokens=256", *overrides), tmp_path) == sentence


def test_a_tree_made_in_code_must_say_everything(tmp_path: Path) -> None:
    rl = load("rl.algorithm=ppo", "rl.max_prompt_tokens=64", "rl.max_episode_tokens=256")
    bare = RlConfig(steps=1, tasks=rl.tasks, algorithm="ppo", max_prompt_tokens=64, max_episode_tokens=256)
    assert problem(bare, tmp_path).startswith("'rl.algorithm' is \"ppo\", but 'rl.credit' is \"grpo\"")


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'rl.algorithm' must be one of \"grpo\".*, but it is \"pp0\""):
        load("rl.algorithm=pp0")
