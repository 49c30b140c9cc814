"""The explanation of a configuration: its numbers, worked out by hand, and its warnings."""

import pytest

from headrace.config import Config, load_config
from headrace.infer.slot_cache import default_kv_tokens
from headrace.model.memory import MemoryPlan, ModelDims, Placement, choose_placement, plan_memory
from headrace.names import min_kv_tokens
from headrace.observe.explain_text import (
    Machine,
    chosen_text,
    explain,
    max_checkpoints,
    rank_memory,
    size_text,
    support_table,
)
from headrace.wiring.build.model_sizes import memory_request

SHAPE = ModelDims(  # 388 parameters: see tests/model/test_memory.py
    model_type="llama",
    width=4,
    layers=2,
    heads=2,
    kv_heads=1,
    head_width=2,
    mlp_width=8,
    vocabulary=10,
    tied=False,
    context=16,
    norm_sizes=(4, 4),
)
CPU = choose_placement(device="auto", dtype="auto", gpus=(), mps=False)
ROOMY = Machine(memory_bytes=2**34, disk_free_bytes=2**40)
TEXT = """
[sft]
steps = 30
batch_size = 4
max_tokens = 100
micro_batch_tokens = 100
[[sft.sources]]
type = "jsonl"
path = "rows.jsonl"
[rl]
steps = 20
groups = 6
group_size = 5
minibatches = 3
max_turns = 2
max_prompt_tokens = 50
max_episode_tokens = 200
micro_batch_tokens = 300
sampling.max_tokens = 40
[rl.tasks]
type = "env"
name = "key_door"
[eval]
tasks = 7
samples = 3
[eval.source]
type = "env"
name = "key_door"
[checkpoint]
keep_last = 2
keep_every = 7
[engine]
max_num_seqs = 8
"""


def plan(config: Config, placement: Placement, *, gpu_bytes: int | None = None) -> MemoryPlan:
    return plan_memory(memory_request(config), SHAPE, placement, gpu_bytes=gpu_bytes)


def explained(*overrides: str, machine: Machine = ROOMY, placement: Placement = CPU) -> str:
    config = load_config(TEXT, file="run.toml", overrides=overrides)
    planned = plan(config, placement, gpu_bytes=machine.memory_bytes)
    return explain(config, file="run.toml", shape=SHAPE, placement=placement, planned=planned, machine=machine)


def test_the_numbers_of_a_run() -> None:
    config = load_config(TEXT, file="run.toml")
    planned = plan(config, CPU)
    assert (planned.parameters, planned.trainable) == (388, 388)
    assert planned.kv_tokens == 2 * 8 * 200  # twice max_num_seqs sequences of the longest episode
    assert planned.memory.activations == 300 * 2 * 80 * 4  # the larger micro-batch; 80 numbers per token and layer
    assert max_checkpoints(config) == 2 + 1 + (30 // 7) + (20 // 7)  # last two, best, and every seventh step's
    assert planned.checkpoint_bytes == 388 * 4 * 3  # weights and two moments


def test_adapters_are_what_is_trained() -> None:
    config = load_config(TEXT, file="run.toml", overrides=['model.lora={rank=2, targets=["q_proj"]}'])
    planned = plan(config, CPU)
    assert planned.trainable == 2 * (2 * (4 + 4))  # 2 layers x rank 2 x (inputs + outputs)
    assert planned.memory.weights == (388 + 32) * 4
    assert "32 in LoRA adapters of rank 2 are trained" in explained('model.lora={rank=2, targets=["q_proj"]}')


def test_the_text_says_what_will_happen() -> None:
    text = explained()
    for sentence in (
        "1. supervised fine-tuning on rows.jsonl: 30 steps, one optimiser update each",
        "each step: 4 conversations, at most 400 tokens",
        "2. reinforcement learning on key_door: 20 steps, 60 optimiser updates",
        # 6 x 5 = 30 episodes; x 200 tokens; sampled at most 2 turns x 40 tokens x 30
        "6 groups x 5 episodes = 30 episodes, at most 6,000 tokens, prompts included; at most 2,400 are sampled",
        "credit grpo; loss ppo; weighting token_mean; 3 updates a step",
        "synchronous:",
        "evaluation at the end of a stage: 7 held-out tasks x 3 episodes = 21",
        "388 parameters, all of them trained",
        "cpu in float32, because torch sees no GPU that it can use",
        "the device has 16.0 GiB",
    ):
        assert sentence in text


def test_the_resolved_configuration_in_it_loads_to_the_same() -> None:
    resolved = explained("rl.groups=9").partition("\nModel\n")[0]
    assert load_config(resolved, file="x") == load_config(TEXT, file="x", overrides=["rl.groups=9"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rl.async.max_staleness=2"], "a trained token is at most 2 versions old (eta = 2)"),
        (["rl.async={max_staleness=1, stale_action='mask'}"], "a group stays while it has younger ones"),
        (
            ["rl.async={max_staleness=2, behaviour_weight='one_step'}"],
            "scored under the version after theirs, before a second",
        ),
        (["rl.groups=8", "rl.async.oversampling=1.3"], "11 groups are started for a batch of 8; the first are kept"),
        (["rl.async={max_staleness=1, replay_groups=2}"], "2 groups of earlier batches are added to every batch"),
        (["rl.async.lockstep_tokens=4"], "sequences advance by 4 tokens together"),
        (["rl.sync_every=4"], "published to the sampler every 4 training steps"),
        (["eval.every=5"], "evaluation every 5 training steps and at the end of a stage"),
        (["checkpoint.every=5"], "written every 5 training steps and at the end of a stage"),
    ],
)
def test_options_are_put_in_words(overrides: list[str], sentence: str) -> None:
    assert sentence in explained(*overrides)
    assert sentence not in explained()


def test_an_algorithm_is_shown_with_what_it_stands_for() -> None:
    text = explained("rl.algorithm=ppo")
    assert 'credit = "token_gae"' in text
    assert "[rl.critic]" in text
    assert "algorithm ppo = credit token_gae, loss ppo, weighting token_mean, a critic" in text
    assert "algorithm" not in explained()


def test_ranks_share_the_state_of_training() -> None:
    config = load_config(TEXT, file="run.toml")
    memory = plan(config, CPU).memory
    state = memory.weights + memory.gradients + memory.masters + memory.moments
    first, each = rank_memory(memory, 4)
    assert each == state // 4 + memory.activations + memory.head
    assert first == each + memory.weights + memory.kv + memory.beside
    assert f"over 4 ranks: {size_text(each)} on each, {size_text(first)} on the first" in explained("cluster.ranks=4")
    assert "ranks" not in explained().partition("Memory")[2]
    tight = Machine(memory_bytes=rank_memory(memory, 3)[0], disk_free_bytes=2**40)
    assert memory.total > tight.memory_bytes
    assert "it would fit on 3 such devices (cluster.ranks = 3)" in explained(machine=tight)
    assert "no number of ranks makes it fit" in explained(machine=Machine(memory_bytes=2**10, disk_free_bytes=2**40))


def test_a_run_that_does_not_fit_is_told_what_to_lower() -> None:
    small = Machine(memory_bytes=2**10, disk_free_bytes=2**10)
    text = explained(machine=small)
    assert "this is more than the 1.0 KiB the device has: lower 'micro_batch_tokens'" in text
    assert "the disk is too small" in text
    assert "lower 'engine.kv_tokens' or 'engine.max_num_seqs'" in explained("engine.max_num_seqs=100000", machine=small)
    assert "too small" not in explained()


def test_room_for_keys_and_values_follows_what_is_sampled() -> None:
    def wanted(text: str, *overrides: str) -> int:
        return memory_request(load_config(text, file="x", overrides=overrides)).kv.wanted

    sft_only = TEXT[: TEXT.index("[rl]")]
    assert wanted(sft_only) == 0
    assert wanted(sft_only, "eval.source={type='env'}") == 2 * 32 * 100
    assert wanted(TEXT, "engine.kv_tokens=999") == 999


def test_sizes_are_readable() -> None:
    assert [size_text(size) for size in (999, 2_500_000, 3 * 2**30)] == ["999 B", "2.4 MiB", "3.0 GiB"]


def test_the_choice_and_the_model_types_are_listed_with_reasons() -> None:
    assert chosen_text(CPU).startswith("  cpu in float32, because torch sees no GPU")
    assert support_table({"llama": "Llama"}, {"gemma2": "caps"}) == ("  llama   Llama\nnot supported\n  gemma2  caps")


GPU = choose_placement(device="cuda", dtype="auto", gpus=("a GPU",), mps=False)


def on_gpu(memory_bytes: int, *overrides: str) -> str:
    machine = Machine(memory_bytes=memory_bytes, disk_free_bytes=2**40)
    return explained(*overrides, machine=machine, placement=GPU)


def test_what_is_recomputed_is_said_with_its_reason() -> None:
    assert "nothing is recomputed in the backward pass" in explained()
    assert "because model.recompute is true" in explained("model.recompute=true")
    # 388 x (2 + 4 + 4 + 8) bytes of state, 300 x 240 of activations, 300 x 10 x 4 of logits, 9,216 x 16 cached:
    # 6,984 + 72,000 + 12,000 + 147,456 + 576 of copied weights = 239,016 bytes
    assert "nothing is recomputed" in on_gpu(270_000)
    assert (
        "every decoder layer is computed again in the backward pass, because without it 233.4 KiB would be needed"
        in on_gpu(250_000, "engine.kv_tokens=9216")
    )
    assert "nothing is recomputed" in on_gpu(250_000, "engine.kv_tokens=9216", "model.recompute=false")


def test_the_cache_gets_what_a_gpu_has_left() -> None:
    config = load_config(TEXT, file="run.toml", overrides=["model.recompute=false", "engine.max_num_seqs=64"])
    room = plan(config, GPU, gpu_bytes=2**40)
    assert room.kv_tokens == 2 * 64 * 200
    tight = plan(config, GPU, gpu_bytes=200_000)
    assert tight.kv_tokens == (184_000 - tight.memory.training) // 16
    least = plan(config, GPU, gpu_bytes=1_000)
    assert least.kv_tokens == min_kv_tokens(200)
    assert "room for the keys and values of 2,048 tokens" in on_gpu(1_000)


def test_the_default_cache_is_the_engines() -> None:
    for rows, longest in ((8, 200), (1, 50), (32, 1024)):
        config = load_config(
            TEXT,
            file="run.toml",
            overrides=[f"engine.max_num_seqs={rows}", f"rl.max_episode_tokens={longest}", "rl.max_prompt_tokens=1"],
        )
        assert plan(config, CPU).kv_tokens == default_kv_tokens(rows, longest)


def test_other_models_are_counted() -> None:
    def beside(*overrides: str) -> int:
        return plan(load_config(TEXT, file="run.toml", overrides=overrides), GPU).memory.beside

    joined = 2 * (4 * (4 + 2 + 2) + 4 * 4 + 3 * 4 * 8) * 2  # two layers: queries, keys, values; output; the MLP
    assert beside() == joined
    assert beside("engine.cuda_graphs=false") == 0
    assert beside("rl.sync_every=2") == joined + 388 * 2  # a copy that samples
    assert beside("rl.async.max_staleness=1", 'rl.reference="x"') == joined + 2 * 388 * 2
    assert beside("rl.critic={}") == joined + 388 * (2 + 4 + 4 + 8)  # weights, masters, gradients and moments
    assert beside('rl.critic={ trunk = "shared" }') == joined  # a row of numbers on the policy's own trunk


def test_where_metrics_go_is_said_when_a_file_says_so() -> None:
    def told(*overrides: str) -> str:
        return explained(*overrides).partition("\nMetrics\n")[2]

    assert told() == ""
    alert = 'metrics.alerts=[{ metric = "train/grad_norm", above = 50, for_steps = 3, webhook = "env:HOOK" }]'
    assert told('metrics.sinks=["wandb", "prometheus", "datadog"]', 'metrics.wandb.mode="offline"', alert) == (
        "  beside metrics.jsonl: Weights & Biases, project headrace (offline); Prometheus at "
        "http://127.0.0.1:9464/metrics; the Datadog agent at 127.0.0.1:8125\n"
        "  the log and the webhook will tell of train/grad_norm above 50 for 3 records in a row, then be quiet for 100 "
        "records\n"
    )
