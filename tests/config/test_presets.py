"""`rl.algorithm`: a short name for credit, loss, weighting and critic; what the file says itself wins or is refused."""

import typing
from pathlib import Path

import pytest
import tomli_w

from headrace.config import ALGORITHMS, Config, CriticConfig, RlConfig, check, load_config, preset_text, to_mapping
from headrace.errors import ConfigError

SHORT = ("rl.max_prompt_tokens=64", "rl.max_episode_tokens=256")
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
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.critic] == [
        "ppo",
        "enhanced_ppo",
        "conservative_ppo",
    ]


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


def test_segment_wise_ppo_is_one_switch_and_what_the_file_says_wins(tmp_path: Path) -> None:
    rl = load("rl.algorithm=segment_wise_ppo")
    lag = rl.asynchronous
    assert (rl.credit, rl.loss, rl.weighting, rl.critic) == ("grpo", "decoupled_ppo", "token_mean", None)
    assert (lag.max_staleness, lag.stale_action, lag.behaviour_weight) == (2, "mask", "one_step")
    own = load("rl.algorithm=segment_wise_ppo", "rl.async.max_staleness=4", "rl.async.stale_action=drop")
    lag = own.asynchronous
    assert (lag.max_staleness, lag.stale_action, lag.behaviour_weight) == (4, "drop", "one_step")
    assert preset_text(own).endswith("max_staleness 4, stale_action drop, behaviour_weight one_step")
    by_critic = load("rl.algorithm=segment_wise_ppo", "rl.credit=token_gae", "rl.critic={}", *SHORT)
    check(Config(rl=by_critic), file="run.toml", base=tmp_path)
    corrected = load("rl.algorithm=segment_wise_ppo", "rl.correction.cap=2.0", *SHORT)
    assert corrected.asynchronous.behaviour_weight is None
    check(Config(rl=corrected), file="run.toml", base=tmp_path)
    config = load_config(RL, file="run.toml", overrides=["rl.algorithm=segment_wise_ppo"])
    assert load_config(tomli_w.dumps(to_mapping(config)), file="config.toml") == config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["rl.algorithm=segment_wise_ppo", "rl.async.behaviour_weight=full"],
            "'rl.async.behaviour_weight' is \"full\", which is decoupled PPO with one proximal policy",
        ),
        (
            ["rl.algorithm=segment_wise_ppo", "rl.loss=ppo"],
            "'rl.async.behaviour_weight' is \"one_step\", but the ratio",
        ),
        (["rl.algorithm=drgrpo", "rl.loss=ppo"], 'add " + discriminative_term" to it'),
        (["rl.algorithm=enhanced_ppo", "rl.loss=ppo + entropy_bonus"], 'add " + reference_kl_k3" to it'),
        (["rl.algorithm=conservative_ppo", "rl.loss=ppo"], 'have "conservative_ppo" in it'),
    ],
)
def test_parts_that_make_it_another_algorithm_are_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    assert sentence in problem(load(*SHORT, *overrides), tmp_path)


def test_the_algorithms_of_other_documents(tmp_path: Path) -> None:
    drgrpo, enhanced, conservative = (
        load(f"rl.algorithm={name}", *SHORT) for name in ("drgrpo", "enhanced_ppo", "conservative_ppo")
    )
    assert (drgrpo.credit, drgrpo.loss, drgrpo.weighting) == ("grpo", "ppo + discriminative_term", "sequence_mean")
    assert (enhanced.credit, enhanced.loss) == ("token_gae", "ppo + reference_kl_k3 + entropy_bonus")
    assert enhanced.critic == conservative.critic == CriticConfig()
    assert (conservative.loss, conservative.kl_limit, conservative.kl_action) == (
        "conservative_ppo",
        0.02,
        "scale_back",
    )
    assert preset_text(conservative).endswith("a critic, KL limit 0.02 (scale_back)")
    for rl in (drgrpo, enhanced, conservative):
        check(Config(rl=rl), file="run.toml", base=tmp_path)


@pytest.mark.parametrize("name", ["dr-grpo", "DrGRPO", "Dr. GRPO", "drgppo", "dr_gpro"])
def test_a_near_miss_of_two_names_says_what_each_is(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f'rl.algorithm="{name}"')
    assert str(caught.value).endswith(
        'did you mean "drgrpo" (GRPO and a discriminative term in the loss) or "dr_grpo" (Dr. GRPO, advantages without '
        "the standard deviation)?"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [("segment-wise-ppo", "segment_wise_ppo"), ("segmentwise_ppo", "segment_wise_ppo"), ("gipo", "gigpo")],
)
def test_a_near_miss_of_one_name_is_answered_with_it(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"\\?$'):
        load(f"rl.algorithm={name}")


def test_dapo_sets_every_part_of_it() -> None:
    rl = load("rl.algorithm=dapo", "rl.sampling.max_tokens=10", "rl.max_turns=4")
    assert (rl.credit, rl.loss, rl.weighting) == ("grpo", "ppo", "token_mean")
    assert rl.loss_params == {"clip_low": 0.2, "clip_high": 0.28}
    assert [item.fn for item in rl.filters] == ["reward_spread"]
    assert [(term.fn, term.kwargs) for term in rl.rewards] == [
        ("env", {}),
        ("length", {"max_tokens": 40, "margin": 8}),
    ]
    assert preset_text(rl) == (
        "algorithm dapo = credit grpo, loss ppo, weighting token_mean, clip_low 0.2, clip_high 0.28, groups replaced "
        "by reward_spread, a penalty from 32 to 40 sampled tokens, no KL"
    )


def test_dapo_of_single_answers_counts_one_turn_and_keeps_what_the_file_says() -> None:
    tasks = 'tasks = { type = "jsonl", path = "a" }'
    text = f'[rl]\nsteps = 5\nalgorithm = "dapo"\nrewards = [{{ fn = "exact_match" }}]\n{tasks}\n'
    rl = load("rl.sampling.max_tokens=50", "rl.loss_params.clip_high=0.3", text=text)
    assert rl.loss_params == {"clip_low": 0.2, "clip_high": 0.3}
    assert [term.fn for term in rl.rewards] == ["exact_match", "length"]
    assert rl.rewards[1].kwargs == {"max_tokens": 50, "margin": 10}
    own = text.replace('"exact_match" }', '"exact_match" }, { fn = "length", kwargs = { max_tokens = 9, margin = 3 } }')
    assert [term.kwargs for term in load(text=own).rewards] == [{}, {"max_tokens": 9, "margin": 3}]
    config = load_config(text, file="run.toml")
    assert load_config(tomli_w.dumps(to_mapping(config)), file="config.toml") == config, "the penalty is added once"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.loss=ppo + reference_kl_k3", "which has no KL to a reference, but 'rl.loss' is \"ppo + reference_kl_k3\""),
        ("rl.filters=[]", "'rl.filters' keep groups without contrast"),
        ("rl.reward_source=env", 'would only measure: write "sum"'),
    ],
)
def test_what_would_not_be_dapo_is_refused(override: str, sentence: str, tmp_path: Path) -> None:
    short = ("rl.max_prompt_tokens=100", "rl.max_episode_tokens=400")
    assert sentence in problem(load("rl.algorithm=dapo", *short, override), tmp_path)
