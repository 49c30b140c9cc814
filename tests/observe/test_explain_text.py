"""The explanation of a configuration: its numbers, worked out by hand, and its warnings."""

from dataclasses import replace

import pytest

from headrace.config import Config, load_config
from headrace.infer.slot_cache import default_kv_tokens
from headrace.model.memory import MemoryPlan, MixtureDims, ModelDims, Placement, choose_placement, plan_memory
from headrace.names import min_kv_tokens
from headrace.observe.explain_text import (
    CARDS,
    Machine,
    chosen_text,
    explain,
    fits,
    max_checkpoints,
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


def plan(config: Config, placement: Placement, *, gpu_bytes: int | None = None, ranks: int = 1) -> MemoryPlan:
    return plan_memory(memory_request(config), SHAPE, placement, gpu_bytes=gpu_bytes, ranks=ranks)


def explained(*overrides: str, machine: Machine = ROOMY, placement: Placement = CPU) -> str:
    config = load_config(TEXT, file="run.toml", overrides=overrides)
    plans = {
        count: plan(config, placement, gpu_bytes=machine.memory_bytes, ranks=count)
        for count in sorted({*CARDS, config.cluster.ranks})
    }
    return explain(config, file="run.toml", shape=SHAPE, placement=placement, plans=plans, machine=machine)


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


def test_a_mixture_is_told_with_its_active_parameters() -> None:
    config = load_config(TEXT, file="run.toml")
    shape = replace(SHAPE, mixture=MixtureDims(experts=8, per_token=2, width=3))
    plans = {count: plan_memory(memory_request(config), shape, CPU, ranks=count) for count in CARDS}
    text = explain(config, file="run.toml", shape=shape, placement=CPU, plans=plans, machine=ROOMY)
    # 388 - 2 x 96 of plain MLPs + 2 x (3 x 4 x 3 for each of 2 experts + 8 x 4 of the router) = 404
    assert "a mixture of 8 experts, of which a token chooses 2: 404 of its parameters are active for a token" in text
    # ... and all 8 experts: 388 - 192 + 2 x (8 x 36 + 32) = 836
    assert "836 parameters, all of them trained" in text


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


CUDA = choose_placement(device="auto", dtype="auto", gpus=("a card",), mps=False)


def test_cards_share_the_state_of_training() -> None:
    """4 cards, bfloat16, 388 parameters, 100 tokens a micro-batch; nothing samples."""
    config = load_config(
        TEXT.partition("[rl]")[0] + "[cluster]\nranks = 4\n", file="run.toml", overrides=["model.recompute=false"]
    )
    planned = plan(config, CUDA, ranks=4)
    memory = planned.memory
    # a quarter each: gradients and masters 388 x 4, moments 388 x 8; trained weights are the masters
    assert (memory.weights, memory.gradients, memory.masters, memory.moments) == (0, 388, 388, 776)
    # embedding and head 2 x 40 and a norm of 4 are whole, and two layers of 152; gradients of a layer and of the 84 are
    # there in bfloat16 and in float32
    assert memory.gathered == (84 + 2 * 152) * 2 + (152 + 84) * (2 + 4) == 2192
    # 240 bytes a token (tests/model/test_memory.py), and logits of 100 x 10 in float32
    assert (memory.activations, memory.head) == (100 * 240, 4000)
    assert memory.copy == 388 * 2
    assert planned.other_rank == 388 + 388 + 776 + 2192 + 24000 + 4000 == 31744
    assert memory.total == 31744 + 776 == 32520


def test_the_table_of_cards() -> None:
    """What one card needs: 388 x (2 + 4 + 4 + 8) = 6984 of state, 28,000 of activations and head: 34,984 bytes.
    Of N cards the first needs 776 + 2192 + 28,000 = 30,968, and 388 x 16 / N = 6208 / N."""
    text = TEXT.partition("[rl]")[0]

    def table(ranks: int, room: int) -> str:
        config = load_config(text, file="run.toml", overrides=["model.recompute=false", f"cluster.ranks={ranks}"])
        plans = {count: plan(config, CUDA, gpu_bytes=room, ranks=count) for count in sorted({*CARDS, ranks})}
        machine = Machine(memory_bytes=room, disk_free_bytes=2**40)
        shown = explain(config, file="run.toml", shape=SHAPE, placement=CUDA, plans=plans, machine=machine)
        return shown.partition("\nCards\n")[2].partition("\nCheckpoints")[0]

    def verdicts(shown: str) -> dict[int, bool]:
        rows = [line.split() for line in shown.splitlines() if "fit" in line and line.split()[0].isdigit()]
        return {int(row[0]): "not" not in row for row in rows}

    # 92 % of 34,000 are 31,280: 30,968 and 312 more, which 6208 / N is from N = 20 on
    shown = table(1, 34_000)
    assert verdicts(shown) == {1: False, 2: False, 4: False, 8: False, 16: False, 32: True, 64: True}
    assert "it would fit on 32 (cluster.ranks = 32)" in shown
    assert "where it ends: 29.5 KiB on each" in shown  # 2192 + 28,000 = 30,192
    assert "and 776 B more on the first" in shown
    assert "no tensor or context parallelism" in shown
    assert verdicts(table(24, 34_000))[24]
    # 92 % of 33,660 are 30,967: the first has no room for the layers that are whole
    shown = table(1, 33_660)
    assert not any(verdicts(shown).values())
    assert "it fits on none of them: lower 'micro_batch_tokens'" in shown


def test_the_memory_of_several_ranks_is_that_of_the_first() -> None:
    text = explained("cluster.ranks=4", placement=CUDA)
    assert "on the first of 4 ranks, over which training is sharded:" in text
    assert "on every other rank:" in text
    assert "ranks" not in explained().partition("Memory")[2].partition("Cards")[0]


def test_ranks_on_a_cpu_share_its_memory() -> None:
    config = load_config(TEXT, file="run.toml")
    two = plan(config, CPU, ranks=2)
    tight = Machine(memory_bytes=two.memory.total + two.other_rank - 1, disk_free_bytes=2**40)
    assert not fits(two, CPU, tight.memory_bytes)
    assert fits(two, CPU, tight.memory_bytes + 1)
    assert fits(two, CUDA, int(two.memory.total / 0.92) + 1)


def test_a_critic_is_sharded_and_a_reference_is_whole_on_the_first() -> None:
    plain = load_config(TEXT, file="run.toml")
    both = load_config(TEXT, file="run.toml", overrides=["rl.algorithm=ppo", "rl.reference='model'"])
    ranks = [plan(config, CUDA, ranks=4) for config in (plain, both)]
    # float32 masters, gradients and moments of 388 parameters, a quarter each
    critic = 388 * 16 // 4
    assert ranks[1].other_rank - ranks[0].other_rank == critic
    assert ranks[1].memory.beside - ranks[0].memory.beside == critic + 388 * 2


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


GPU = choose_placement(device="cuda", dtype="auto", gpus=("H200",), mps=False)
TURNS = ("engine.type=vllm", 'engine.urls=["http://localhost:1"]', "engine.max_num_seqs=32", "cluster.colocate=true")


def test_turns_on_a_gpu_are_told_with_their_peaks() -> None:
    text = explained(*TURNS, placement=GPU)
    # 388 parameters in bfloat16; 0.92 of 16 GiB less 1 GiB for the process are the server's: 13.72 GiB
    assert "sampling: trainer's weights and other models 776 B, server's weights 776 B, keys and values" in text
    assert "13.7 GiB; peak 13.7 GiB" in text
    # 388 x (2 + 4 + 8 + 4) bytes are 6.8 KiB, 70.3 KiB activations, 11.7 KiB head
    assert "gradients and activations 88.9 KiB, server's weights 0 B, no keys and values; peak 88.9 KiB" in text
    # 388 x (4 + 8) bytes of masters and moments
    assert "masters and moments 4.5 KiB while servers sample; at most 4.5 KiB" in text
    assert "the larger turn, 13.7 GiB, fits into the 16.0 GiB of the device" in text
    assert "headrace serve trains and samples on one device" in text


def test_turns_of_several_ranks_are_those_of_the_first_ones_gpu() -> None:
    text = explained(*TURNS, "cluster.ranks=4", placement=GPU)
    # a quarter of 388 float32 masters, which are the stored weights, and the whole bfloat16 copy: 388 + 776 bytes
    assert "sampling: trainer's weights and other models 1.1 KiB, server's weights 776 B, keys and values" in text
    # a quarter of 388 x 8 bytes of moments
    assert "in host memory: moments 776 B while servers sample; at most 776 B" in text


def test_weights_that_a_sleeping_server_keeps_are_counted() -> None:
    # 388 x 2 bytes more: vLLM moves them to host memory, SGLang keeps them on the GPU
    assert "at most 5.3 KiB" in explained(*TURNS, "rl.sync_every=2", placement=GPU)
    text = explained(*TURNS, "rl.sync_every=2", "engine.type=sglang", placement=GPU)
    assert "server's weights 776 B, no keys and values; peak 89.6 KiB" in text
    assert "at most 4.5 KiB" in text


def test_turns_that_do_not_fit_are_told() -> None:
    small = Machine(memory_bytes=2**20, disk_free_bytes=2**40)
    text = explained(*TURNS, placement=GPU, machine=small)
    assert "sampling does not fit" in text
    assert "does not fit into the 1.0 MiB of the device" in text
    assert "only pauses, and frees nothing" in explained(*TURNS)


def test_engine_replicas_are_sized() -> None:
    text = explained("cluster.engine_replicas=3")
    # 388 x 4 bytes; twice 8 sequences of 200 tokens, each 2 x 2 layers x 1 head x 2 wide x 4 bytes
    assert (
        "3 engine replicas, each beside the trainer: weights 1.5 KiB, keys and values of 3,200 tokens 100.0 KiB" in text
    )
    assert "on a GPU of its own" in explained("cluster.engine_replicas=3", placement=GPU)
    assert "headrace serve" not in explained()
