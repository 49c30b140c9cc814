"""A wrong guess is worse than none: names are suggested for misspellings and shortenings only."""

import pytest

from headrace.algo.name_lookup import nearest_name_hint
from headrace.config import load_config
from headrace.errors import ConfigError
from headrace.names import CREDITS, ENVS, REWARDS, near_name

RL = "[rl]\nsteps = 2\n[rl.tasks]\ntype = 'env'\nname = 'add'\n"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("math", ("env", "exact_match", "format", "length", "judge", "reward_model", "valid_actions")),
        ("num_generations", ("generate_fn", "groups", "group_size", "minibatches")),
        ("preferences", ("reference_logprobs", "sampler_logprobs")),
        ("accuracy", REWARDS),
        ("gae", CREDITS),
        ("epochs", ("steps", "sources", "optimizer")),
        ("no", ("on", "of")),
    ],
)
def test_a_name_that_means_something_else_is_not_suggested(name: str, known: tuple[str, ...]) -> None:
    assert near_name(name, known) is None
    assert nearest_name_hint(name, known).startswith("known: ")


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("maths", REWARDS, "math"),
        ("exact", REWARDS, "exact_match"),
        ("multiple_choice", REWARDS, "choice"),
        ("schema", REWARDS, "json_schema"),
        ("grop", CREDITS, "grpo"),
        ("door", ENVS, "key_door"),
        ("kap", ("cap", "floor"), "cap"),
    ],
)
def test_a_misspelling_or_a_part_of_a_name_is(name: str, known: tuple[str, ...], meant: str) -> None:
    assert near_name(name, known) == meant


def test_keys_of_other_libraries_get_the_list_of_keys() -> None:
    text = RL.replace("steps", "num_generations = 8\nsteps")
    with pytest.raises(ConfigError) as caught:
        load_config(text, file="run.toml")
    assert "generate_fn'?" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "instead"),
    [
        ("[ppo]\nepochs = 1", "unknown key 'ppo'; write a table [rl] with algorithm = \"ppo\""),
        ("[grpo]\nnum_generations = 8", "unknown key 'grpo'; write a table [rl] with algorithm = \"grpo\""),
        ("[kto]\nbeta = 0.1", "unknown key 'kto'; write a table [dpo] with loss = \"kto\""),
        ("[gkd]\nbeta = 0.1", "unknown key 'gkd'; write a table [distill]"),
    ],
)
def test_a_table_named_after_a_method_is_answered_with_the_one_that_has_it(table: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(table, file="run.toml")
    assert str(caught.value) == f"run.toml: {instead}"
