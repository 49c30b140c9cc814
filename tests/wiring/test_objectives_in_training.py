"""Objectives from configuration to metrics: reference, teacher and proximal policies, reward model, critic, resume."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headrace import wiring
from headrace.algo.advantages.credit import METHODS
from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses import LOSSES
from headrace.config.checks.async_rl import SAMPLER_RATIO
from headrace.envs import ENVIRONMENTS
from headrace.errors import ConfigError, ModelError
from headrace.loops.step_batch import takes_behaviour_weights
from headrace.model.tiny import save_tiny
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.rollouts.records import read_lines
from headrace.observe.sinks.jsonl import MetricRecord, read_metrics, reproducible_bytes
from headrace.wiring.build import models
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.recredit import RecreditRequest, recredit
from support.cluster_workers import use_workers_of_this_process
from support.metrics_table import promised
from support.paths import EXAMPLES

WORDS = ENVIRONMENTS["add"].vocabulary()
ADD = 'type = "env", name = "add", size = 40'
RL = f"""
[run]
name = "t"
tensorboard = false
[model]
path = "tiny"
tiny = {{ width = 16, layers = 1, heads = 2, kv_heads = 1, context = 32 }}
[engine]
max_num_seqs = 16
[checkpoint]
every = 1
keep_last = 9
[rl]
steps = 2
groups = 2
group_size = 4
minibatches = 2
max_turns = 2  # an answer ends the episode
max_prompt_tokens = 16
max_episode_tokens = 24
tasks = {{ {ADD}, options = {{ max_number = 9 }} }}
rewards = [{{ fn = "mine.py:score" }}]
reward_runner = {{ type = "inprocess" }}
sampling = {{ max_tokens = 4 }}
optimizer = {{ learning_rate = 1e-2 }}
"""
STAGES = f"""
[sft]
steps = 2
batch_size = 4
max_tokens = 24
sources = [{{ {ADD}, seed = 1, options = {{ max_number = 9 }} }}]
[reward_model]
steps = 3
batch_size = 4
max_tokens = 24
sources = [{{ {ADD}, seed = 2, options = {{ max_number = 9 }} }}]
held_out = {{ {ADD}, seed = 3, options = {{ max_number = 9 }} }}
optimizer = {{ learning_rate = 1e-2 }}
"""
CRITIC = ("rl.credit=token_gae", "rl.critic.optimizer.learning_rate=1e-2")
CONSERVATIVE = ("rl.loss=conservative_ppo", "rl.kl_limit=1e-4")
JUDGED = ('rl.rewards=[{fn = "reward_model"}, {fn = "exact_match", weight = 0.0}]',)
MINE = '''
from headrace.algo.loss_signature import LossOut
from headrace.metrics import Sum

def score(episode):
    """Another number for every answer, so that there is something to learn at once."""
    return sum(int(token) for token in episode.steps[0].completion.tokens) % 5 / 5

def pull(policy_logprobs_T, weights_T, reference_logprobs_T, *, pull_coef: float = 0.5):
    loss = pull_coef * (weights_T * (policy_logprobs_T - reference_logprobs_T)).sum()
    return LossOut(loss=loss, metrics={"loss/pull": Sum(loss.detach())})

def impossible(policy_logprobs_T, weights_T, moon_phase_T):
    raise AssertionError("it is refused before it is called")
'''


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(MINE)

    def config(self, *overrides: str, text: str = RL) -> Any:
        (self.folder / "run.toml").write_text(text)
        return load_checked(
            self.folder / "run.toml", [f'run.folder="{self.folder / "runs"}"', *overrides], command="train"
        )

    def train(self, *overrides: str, text: str = RL, resume: Path | None = None) -> wiring.RunResult:
        config = self.config(*overrides, text=text)
        return wiring.train(config, config_text_path=self.folder / "run.toml", resume=resume)

    def rl(self, *overrides: str, text: str = RL) -> list[MetricRecord]:
        return records(self.train(*overrides, text=text).folder, "rl")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def records(run: Path, stage: str) -> list[MetricRecord]:
    return [record for record in read_metrics(run / "metrics.jsonl") if record.stage == stage]


# --- losses and credit -----------------------------------------------------------------------------------------------


PAIRED = {"dpo", "ipo", "kto", "orpo", "simpo"}  # losses of preferences
NOT_OF_A_POLICY = PAIRED | {"bradley_terry", "value", "value_clipped", "shared_value"}


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - NOT_OF_A_POLICY))
def test_every_loss_of_a_policy_trains_from_the_file(bench: Bench, loss: str) -> None:
    made = bench.folder / "teacher"
    save_tiny(made, words=WORDS, width=16, layers=1, heads=2, kv_heads=1, context=32, seed=7)
    weighting = "unit_mean" if loss == "discriminative" else "token_mean"
    settings = (
        f"rl.loss={loss}",
        f"rl.weighting={weighting}",
        f'rl.teacher="{made}"',
        "rl.steps=1",
        "rl.minibatches=1",
    )
    (record,) = bench.rl(*settings)
    assert math.isfinite(record.values["loss/total"])
    assert record.values["train/skipped_updates"] == 0.0
    # the policy is still the sampler's and the reference's: only what holds it there has nothing to do
    still = loss == "sampler_kl" or loss.startswith("reference_kl")
    assert (record.values["train/grad_norm"] > 1e-5) != still


@pytest.mark.parametrize(
    ("algorithm", "measured"),
    [
        ("segment_wise_ppo", "correction/weight_mean"),
        ("drgrpo", "loss/score_gap"),
        ("enhanced_ppo", "loss/entropy_bonus"),
        ("conservative_ppo", "train/step_kl"),
    ],
)
def test_algorithms_of_one_word_train_from_the_file(bench: Bench, algorithm: str, measured: str) -> None:
    record = bench.rl(f"rl.algorithm={algorithm}")[-1]
    assert math.isfinite(record.values[measured])
    assert math.isfinite(record.values["loss/total"])


@pytest.mark.parametrize(
    ("column", "overrides"),
    [
        ("enhanced PPO", ["rl.algorithm=enhanced_ppo", "rl.critic.trunk=shared"]),
        ("`conservative_ppo`", ["rl.loss=conservative_ppo", *CRITIC]),
        ("`importance_sampling`", ["rl.loss=importance_sampling", *CRITIC]),
    ],
)
def test_a_run_logs_the_figures_of_its_loss(bench: Bench, column: str, overrides: list[str]) -> None:
    values = bench.rl(*overrides)[-1].values
    assert promised(column) <= set(values)
    assert len(promised(column)) >= 13
    assert values["loss/ratio_min"] <= values["loss/ratio_mean"] <= values["loss/ratio_max"]
    assert values["loss/advantage_min"] < values["loss/advantage_mean"] < values["loss/advantage_max"]
    assert values["loss/nll"] > 0.0


@pytest.mark.parametrize("credit", sorted(METHODS))
def test_every_credit_method_trains_from_the_file(bench: Bench, credit: str) -> None:
    record = bench.rl(f"rl.credit={credit}", "rl.steps=1")[0]
    assert math.isfinite(record.values["credit/advantage_abs"])


def test_the_reference_is_the_model_the_stage_started_from(bench: Bench) -> None:
    first, second = bench.rl("rl.loss=ppo + reference_kl_k3 + entropy_bonus", "rl.minibatches=1")
    assert first.values["loss/kl_reference_k3"] == pytest.approx(0.0, abs=1e-6)  # nothing has moved yet
    assert second.values["loss/kl_reference_k3"] > 1e-6
    assert second.values["loss/entropy"] > 0


def test_a_reference_that_does_not_fit_is_refused_with_the_way_to_quantise_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.wiring.runtime.local.free_bytes", lambda device: 2**10)
    sentence = r"the frozen model .* GiB are free: keep it in 8 bits at a server, with 'bits = 8' of \[\[references\]\]"
    with pytest.raises(ModelError, match=sentence):
        bench.train("rl.loss=ppo + reference_kl_k3")
    bench.train("rl.loss=ppo")  # has none


def test_under_adapters_the_base_is_the_reference_and_no_copy_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = models.load_model
    monkeypatch.setattr(models, "load_model", lambda path, **more: loaded.append(path) or load(path, **more))
    first, second = bench.rl("rl.loss=ppo + reference_kl_k2", "rl.minibatches=1", "model.lora.rank=4")
    assert len(loaded) == 1
    assert first.values["loss/kl_reference_k3"] == pytest.approx(0.0, abs=1e-6)
    assert second.values["loss/kl_reference_k3"] > 1e-7


def test_step_level_credit_takes_its_numbers_from_the_file(bench: Bench) -> None:
    params = 'rl.credit_params={omega = 0.5, norm = "none", mix = "convex"}'
    values = bench.rl("rl.credit=gigpo", params, "rl.weighting=constant", "rl.weighting_constant=4")[0].values
    assert values["credit/anchor_size_mean"] == 4.0  # all episodes of a task start in the same state


def test_stale_tokens_are_corrected_towards_the_policy_at_the_start_of_the_step(bench: Bench) -> None:
    stale = "rl.async.max_staleness=1"
    values = bench.rl("rl.loss=decoupled_ppo", stale, "rl.correction.bound=clamp", "rl.steps=3")[-1].values
    assert 0.5 < values["correction/weight_mean"] < 2.0
    assert values["loss/kl_proximal_k3"] >= 0.0
    folded = bench.rl("rl.loss=dro", "rl.correction.cap=2.0")[-1].values
    assert folded["correction/weight_mean"] == pytest.approx(1.0, abs=1e-3)  # fresh tokens weigh 1


def test_the_weights_of_stale_tokens_are_chosen_in_the_async_table(bench: Bench) -> None:
    stale = ("rl.loss=decoupled_ppo", "rl.async.max_staleness=2", "rl.steps=4")
    capped = bench.rl(*stale, "rl.async.weight_cap=1e-6")[0].values  # every weight is above the cap
    assert capped["correction/bounded_high"] == 1.0
    assert capped["loss/weight_mean"] == 0.0
    clamped = bench.rl(*stale, "rl.async.weight_cap=0.5", "rl.async.cap_action=clamp")[-1].values
    assert clamped["loss/weight_max"] == pytest.approx(0.5)
    plain = bench.rl(*stale, "rl.async.behaviour_weight=none")[-1].values
    assert plain["loss/weight_mean"] == plain["loss/weight_effective"] == pytest.approx(1.0)
    for behaviour in ("one_step", "loglinear"):
        values = bench.rl(*stale, f"rl.async.behaviour_weight={behaviour}")[-1].values
        assert 0.0 < values["correction/effective_share"] <= 1.0
        assert values["correction/log_weight_std"] > 0.0


def test_coupled_ppo_knows_no_behaviour_weights(bench: Bench) -> None:
    values = bench.rl("rl.loss=ppo", "rl.async.max_staleness=2", "rl.async.behaviour_weight=none", "rl.steps=4")[
        -1
    ].values
    assert not [name for name in values if name.startswith("correction/")]
    assert values["staleness/effective_share"] > 0.0


def test_every_loss_with_a_ratio_to_the_sampler_is_known_to_the_checks() -> None:
    by_signature = {
        name
        for name, fn in LOSSES.items()
        if "sampler_logprobs" in loss_inputs(fn).required and not takes_behaviour_weights(fn)
    }
    without_a_ratio = {"dro", "sampler_kl"}  # a square, and an expectation over the sampler's own tokens
    assert set(SAMPLER_RATIO) == by_signature - without_a_ratio


def test_behaviour_weights_are_refused_for_a_loss_of_ones_own_that_does_not_take_them(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"loss 'pull' takes no behaviour_weights_T: add that parameter, or leave"):
        bench.train("rl.loss=mine.py:pull", "rl.async.behaviour_weight=full")


def test_a_teacher_is_a_model_of_its_own(bench: Bench) -> None:
    teacher = bench.train("rl.steps=1").folder / "checkpoints" / "rl" / "step_000001"
    values = bench.rl("rl.loss=distillation", f'rl.teacher="{teacher}"')[0].values
    assert all(math.isfinite(value) for value in values.values())
    assert values["train/grad_norm"] > 0


def test_a_loss_of_ones_own_is_added_to_a_known_one(bench: Bench) -> None:
    _, second = bench.rl("rl.loss=ppo + mine.py:pull", "rl.loss_params={clip_low = 0.1, pull_coef = 2.0}")
    assert second.values["loss/pull"] != 0.0
    assert "loss/clip_frac_low" in second.values


def test_past_the_kl_limit_the_rest_of_a_step_is_discarded_counted_and_said(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = bench.rl("rl.kl_limit=1e-9", "rl.loss=conservative_ppo")
    assert first.values["train/discarded_minibatches"] == 1.0
    assert first.values["train/step_kl"] > 1e-9
    assert (first.values["train/sampler_kl_coef"], second.values["train/sampler_kl_coef"]) == (1.0, 2.0)
    assert "beyond rl.kl_limit = 1e-09; 1 minibatches are discarded" in caplog.text
    free = bench.rl("rl.kl_limit=1e9")[0].values
    assert (free["train/discarded_minibatches"], free["train/kl_limit_exceeded"]) == (0.0, 0.0)
    assert free["train/trained_tokens"] > first.values["train/trained_tokens"]


def test_the_short_name_ppo_trains_as_its_parts_do(bench: Bench) -> None:
    short = bench.train("rl.algorithm=ppo", "rl.steps=1").folder
    long = bench.train("rl.credit=token_gae", "rl.loss=ppo", "rl.critic.lam=0.95", "rl.steps=1").folder
    assert reproducible_bytes(short / "metrics.jsonl") == reproducible_bytes(long / "metrics.jsonl")
    assert records(short, "rl")[0].values["critic/value_error"] > 0
    again = recredit(RecreditRequest(path=short))  # from the values in its file, without the critic
    before, after = read_lines(short / "rollouts" / "step_000001.jsonl"), read_lines(again.out)
    assert [line.advantages for line in after] == [line.advantages for line in before]
    assert again.method.params == {"gamma": 1.0, "lam": 0.95, "whiten": 1.0, "bootstrap": 1.0, "kl_coef": 0.0}


def test_past_the_kl_limit_an_update_is_scaled_back_and_the_step_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = bench.rl("rl.kl_limit=1e-5", "rl.kl_action=scale_back")
    assert first.values["train/step_kl"] > 1e-5
    assert 0.0 < first.values["train/kept_share"] < 1.0
    assert first.values["train/kept_kl"] <= 1e-5
    assert "of the update is kept" in caplog.text
    free = bench.rl("rl.kl_limit=1e9")[0].values
    assert first.values["train/trained_tokens"] == free["train/trained_tokens"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rl.kl_action=scale_back"], "'rl.kl_action' is \"scale_back\", but there is no limit: add 'rl.kl_limit'"),
        (["rl.credit=gigpo", "rl.credit_params.omga=1.0"], "'gigpo' takes no parameter 'omga': did you mean 'omega'?"),
        (["rl.credit=gigpo", 'rl.credit_params.norm="stdd"'], "'norm' of 'gigpo' must be one of std, none"),
        (["rl.credit=gigpo", "rl.credit_params.gamma=1.5"], "'gamma' of 'gigpo' must be a number from 0 to 1, not 1.5"),
        (["rl.loss=ppo + entropy_bonuss"], 'did you mean "entropy_bonus"?'),
        (["rl.loss=dpo"], "which learns from pairs and not from rewards: write a table [dpo] with that loss"),
        (["rl.loss=value"], "loss 'value' reads a scalar head"),
        (["rl.loss=distillation"], "needs arrays that the data do not have: teacher_logprobs"),
        (["rl.loss=cispo + aipo", "rl.loss_params.kap=1.0"], "takes no parameter 'kap': did you mean 'cap'?"),
        (["rl.reference=nowhere"], "'rl.reference' is \"nowhere\", and no folder of that name"),
        (["rl.credit=token_gae"], "asks a critic: add a table [rl.critic]"),
        (["rl.critic.lam=0.9"], 'write "token_gae" or "turn_gae"'),
        ([*CRITIC, "rl.credit_params.gamma=0.9"], "'rl.critic.gamma' and 'rl.critic.lam' are its numbers"),
        (
            ["rl.algorithm=ppo", "rl.critic.trunk=shared", "rl.critic.path=x"],
            "'rl.critic.path' is for a trunk of its own",
        ),
        ([*CRITIC, "rl.critic.trunk=shared"], "'rl.optimizer' trains a shared one: leave it out"),
        (["rl.loss=ppo + shared_value"], "reads a scalar head: a critic has its own table, [rl.critic]"),
        ([*CRITIC, "rl.critic.path=reward_model"], "but this file trains none: add a table [reward_model]"),
        (['rl.rewards=[{fn = "reward_model"}]'], "needs a reward model: add a table [reward_model]"),
        (['rl.rewards=[{fn = "mine.py:score", path = "x"}]'], 'is for fn = "reward_model"'),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(bench: Bench, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.config(*overrides)
    assert sentence in str(caught.value)


def test_a_loss_of_ones_own_that_needs_the_impossible_is_refused_before_a_step(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="loss 'impossible' needs arrays that the data do not have: moon_phase"):
        bench.train("rl.loss=mine.py:impossible")
    assert not list((bench.folder / "runs").glob("*")), "a start that failed leaves no run folder"


# --- reward model and critic -----------------------------------------------------------------------------------------


def test_three_stages_leave_a_policy_a_judge_and_a_critic(bench: Bench) -> None:
    result = bench.train(*CRITIC, *JUDGED, "rl.critic.path=reward_model", text=RL + STAGES)
    assert 0.0 <= result.figures["accuracy_reward_model"] <= 1.0
    judged = records(result.folder, "reward_model")
    assert promised("`bradley_terry`") <= set(judged[0].values)
    assert judged[0].values["loss/pairs"] == 4.0
    assert judged[0].values["loss/total"] == pytest.approx(math.log(2.0), abs=1e-4)
    assert "eval/accuracy" in judged[-1].values
    trained = records(result.folder, "rl")
    assert trained[0].values["critic/value_mean"] != 0.0  # a head of its own would start from zeros
    for name in ("critic/value", "critic/grad_norm", "critic/return_mean", "reward/reward_model", "reward/exact_match"):
        assert name in trained[0].values, name
    last = result.folder / "checkpoints" / "rl" / "step_000002"
    AutoModelForCausalLM.from_pretrained(last)
    AutoModelForSequenceClassification.from_pretrained(last / "critic")
    AutoModelForSequenceClassification.from_pretrained(result.folder / "checkpoints" / "reward_model" / "step_000003")
    (episode, *_) = load_trajectories(result.folder / "rollouts" / "step_000001.jsonl")
    assert episode.advantages != (0.0,)


def test_a_reward_model_on_a_reward_worker_judges_as_in_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_workers_of_this_process(monkeypatch)
    weights = []
    for cluster in ('{ address = "auto", rollout_workers = 0, reward_workers = 1 }', "{}"):
        result = bench.train(*JUDGED, f"cluster={cluster}", text=RL + STAGES)
        last = result.folder / "checkpoints" / "rl" / "step_000002"
        weights.append((last / "model.safetensors").read_bytes())
    assert made == ["RewardWorker"]
    assert weights[0] == weights[1]
    assert records(result.folder, "rl")[0].values["train/grad_norm"] > 0.0


def test_a_saved_reward_model_judges_another_run_and_its_critic_may_start_from_it(bench: Bench) -> None:
    saved = bench.train(text=RL + STAGES).folder / "checkpoints" / "reward_model" / "step_000003"
    values = bench.rl(f'rl.rewards=[{{fn = "reward_model", path = "{saved}"}}]', *CRITIC, f'rl.critic.path="{saved}"')
    assert values[0].values["critic/value_mean"] != 0.0  # a critic of its own would start from zeros
    start = bench.train("rl.steps=1").folder / "start"
    with pytest.raises(ModelError, match="is not a reward model"):
        bench.train(f'rl.rewards=[{{fn = "reward_model", path = "{start}"}}]')


def contents(run: Path) -> dict[str, bytes]:
    files = [path for place in ("checkpoints", "rollouts") for path in sorted((run / place).rglob("*"))]
    found = {str(path.relative_to(run)): path.read_bytes() for path in files if path.is_file()}
    return found | {"metrics.jsonl": reproducible_bytes(run / "metrics.jsonl")}


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ((), ("rl/step_000003", "rl/step_000002")),
        ((), ("rl", "reward_model/step_000003", "reward_model/step_000002")),
        (
            ("model.lora.rank=2", "rl.credit=turn_gae", "rl.critic.kl_coef=0.1", *CONSERVATIVE),
            ("rl/step_000003", "rl/step_000002"),
        ),
    ],
    ids=["rl", "reward_model", "lora"],
)
def test_critic_and_reward_model_resume_to_the_same_bytes(
    bench: Bench, more: tuple[str, ...], lost: tuple[str, ...]
) -> None:
    settings = (*CRITIC, *JUDGED, *more, "rl.steps=3")
    run = bench.train(*settings, text=RL + STAGES).folder
    whole = contents(run)
    for name in lost:
        shutil.rmtree(run / "checkpoints" / name)
    bench.train(*settings, text=RL + STAGES, resume=run)
    again = contents(run)
    assert sorted(again) == sorted(whole)
    assert [name for name in whole if again[name] != whole[name]] == []
    assert records(run, "rl")[0].values["critic/grad_norm"] > 0


SHARED = ("rl.algorithm=ppo", "rl.critic.trunk=shared", "rl.loss=ppo + entropy_bonus")


def test_a_value_head_on_the_policys_trunk_learns_in_the_same_updates(bench: Bench) -> None:
    settings = (*SHARED, "rl.minibatches=1", "rl.critic.value_clip=0.0", "rl.critic.bootstrap=false")
    trained = bench.rl(*settings, "rl.steps=12", "rl.optimizer.learning_rate=3e-2")
    for name in ("loss/policy", "loss/value", "loss/entropy_bonus", "critic/return_mean"):
        assert name in trained[0].values, name
    assert trained[0].values["loss/value_mean"] == 0.0 != trained[1].values["loss/value_mean"]  # it starts from zeros
    terms = ("policy", "value", "entropy_bonus")
    first = trained[0].values
    assert first["loss/total"] == pytest.approx(sum(first[f"loss/{term}"] for term in terms), abs=1e-6)
    last = sorted((bench.folder / "runs").glob("*/checkpoints/rl/step_000012"))[0]
    assert not (last / "critic").exists()
    assert (last / "value_head.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(last)


@pytest.mark.parametrize("more", [(), ("model.lora.rank=2", "rl.credit=turn_gae", "rl.critic.kl_coef=0.1")])
def test_a_shared_trunk_resumes_to_the_same_bytes(bench: Bench, more: tuple[str, ...]) -> None:
    settings = (*SHARED, *more, "rl.steps=3", "checkpoint.every=1", "checkpoint.keep_last=3")
    run = bench.train(*settings).folder
    whole = contents(run)
    for name in ("step_000003", "step_000002"):
        shutil.rmtree(run / "checkpoints" / "rl" / name)
    bench.train(*settings, resume=run)
    again = contents(run)
    assert sorted(again) == sorted(whole)
    assert [name for name in whole if again[name] != whole[name]] == []


# --- the example -----------------------------------------------------------------------------------------------------

EXAMPLE = EXAMPLES / "sft_rm_ppo.toml"
FEW = (
    "sft.steps=3",
    "sft.batch_size=4",
    "sft.optimizer.schedule.warmup_steps=1",
    "sft.sources.0.size=16",
    "reward_model.steps=3",
    "reward_model.batch_size=4",
    "reward_model.optimizer.schedule.warmup_steps=1",
    "reward_model.sources.0.size=16",
    "reward_model.held_out.size=8",
    "rl.steps=2",
    "rl.groups=4",
    "rl.tasks.size=16",
    "eval.tasks=4",
    "eval.source.size=4",
)


def run_example(folder: Path, *overrides: str) -> wiring.RunResult:
    config = load_checked(EXAMPLE, [f'run.folder="{folder}"', "run.tensorboard=false", *overrides], command="train")
    return wiring.train(config, config_text_path=EXAMPLE, resume=None)


def test_the_example_runs_all_three_stages(tmp_path: Path) -> None:
    result = run_example(tmp_path, *FEW)
    stages = [record.stage for record in read_metrics(result.folder / "metrics.jsonl")]
    assert list(dict.fromkeys(stages)) == ["sft", "reward_model", "rl"]
    assert {"success_sft", "accuracy_reward_model", "success_rl"} <= result.figures.keys()
    values = records(result.folder, "rl")[0].values
    assert values["reward/mean"] == pytest.approx(values["reward/reward_model"])  # the world's reward weighs nothing
    assert "reward/env" in values


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_the_example_the_judges_reward_rises_and_so_does_success(tmp_path: Path) -> None:
    result = run_example(tmp_path)
    rewards = [r.values["reward/mean"] for r in records(result.folder, "rl") if "reward/mean" in r.values]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
    assert result.figures["accuracy_reward_model"] > 0.85
    assert result.figures["success_rl"] > result.figures["success_sft"] + 0.05
