"""Names of AReaL, reward-kit, rollouts, retrain and Signal, with what does the same here: keys, or places in code.

A part of the table of `foreign_names`: settings first, then classes, functions, files and endpoints.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignName:
    """A name of another library, and what to use here."""

    library: str
    name: str  # dotted where the library's is
    ours: tuple[str, ...]  # keys, some with a value: 'rl.algorithm = "dapo"'
    places: tuple[str, ...] = ()  # names in code, commands, files and routes, for what is no key or not only one
    note: str = ""


Places = str | tuple[str, ...]


def _entry(library: str, name: str, ours: tuple[str, ...], at: Places, note: str) -> ForeignName:
    places = (at,) if isinstance(at, str) else at
    return ForeignName(library=library, name=name, ours=ours, places=places, note=note)


def _areal(name: str, *ours: str, at: Places = (), note: str = "") -> ForeignName:
    return _entry("AReaL", name, ours, at, note)


def _reward_kit(name: str, *ours: str, at: Places = (), note: str = "") -> ForeignName:
    return _entry("reward-kit", name, ours, at, note)


def _rollouts(name: str, *ours: str, at: Places = (), note: str = "") -> ForeignName:
    return _entry("rollouts", name, ours, at, note)


def _retrain(name: str, *ours: str, at: Places = (), note: str = "") -> ForeignName:
    return _entry("retrain", name, ours, at, note)


def _signal(name: str, *ours: str, at: Places = (), note: str = "") -> ForeignName:
    return _entry("Signal", name, ours, at, note)


NO_KEY = "no key: "  # begins the note of a setting that has no counterpart
_PART = "a part of `ExecutorParts`, which `build_executor` takes (docs/async.md)"
_STORED = (
    "no key: every step is one transaction of the run's data buffer, rollouts and numbers together "
    "(docs/run-folder.md); rl.save says which episodes are kept"
)
_CLIENT = "no key: the client is the public tinker SDK (docs/tinker.md), whose every request is a future"
_FUTURES = "no key: every request is a future, always; .result() at once is the old way"
_EXECUTOR = "headrace.rollout.executor.RolloutExecutor"
_TASKS = "headrace.data.task_source.TaskSource"
_BUFFER = "headrace.observe.buffer.data_buffer.DataBuffer"
_FORWARD_BODY = "headrace.service.http.forward_body.ForwardBackwardBody"
_ALL_DEVICES = "one implementation for all devices; auto chooses the device"

FRAMEWORK_NAMES: tuple[ForeignName, ...] = (
    # --- AReaL: segment-wise decoupled PPO
    _areal("enable_segment_wise_ppo", 'rl.algorithm = "segment_wise_ppo"', note="one switch for loss, lag and weights"),
    _areal("max_head_offpolicyness", "rl.async.max_staleness"),
    _areal("max_concurrent_rollouts", "rl.async.max_running", note="groups, not episodes"),
    _areal("register_capacity_modifier", "rl.async.limits", note="in code: `RolloutExecutor.register_limit`"),
    _areal("capacity_modifiers", "rl.async.limits", note="they can only lower capacity"),
    _areal("capacity_modifier", "rl.async.limits", note="they can only lower capacity"),
    _areal("filtered_capacity_modifier", "rl.filters", note="a rejected group gives its place back at once"),
    _areal("output_queue", note="`ready`, " + _PART),
    _areal("result_cache", "rl.async.replay_groups", note="in code `replay`, " + _PART),
    _areal("proximal_recomputer", 'rl.async.behaviour_weight = "one_step"', note="in code `scorer`, " + _PART),
    _areal("staleness_strategy", "rl.async.stale_action", note="in code `policy`, " + _PART),
    _areal("consumer_batch_size", "rl.groups"),
    _areal("gconfig.n_samples", "rl.group_size"),
    _areal("gconfig.max_new_tokens", "rl.sampling.max_tokens"),
    _areal("use_decoupled_loss", 'rl.loss = "decoupled_ppo"'),
    _areal("behav_imp_weight_cap", "rl.async.weight_cap"),
    _areal("proximal_logprobs_t", at="headrace.types.Completion", note="its `next_logprobs`"),
    _areal("ModelResponse", at="headrace.types.Completion"),
    _areal("WorkflowExecutor", at=_EXECUTOR, note="its `take_batch` is `wait()`"),
    _areal("create_workflow_executor", at="headrace.rollout.executor.build_executor"),
    _areal("AsyncTaskRunner", at="headrace.rollout.executor.task_runner.TaskRunner"),
    _areal("StalenessManager", at="headrace.algo.staleness.capacity", note="counts live groups, not totals"),
    _areal("on_rollout_submitted", at="headrace.rollout.executor.ledger.Ledger"),
    _areal("RolloutQueue", at="headrace.rollout.executor.parts.ReadyStore"),
    _areal("RolloutCache", at="headrace.rollout.executor.parts.ReplayStore"),
    _areal("ProximalRecomputer", at="headrace.rollout.next_logprobs.NextScorer"),
    _areal("StalenessControlStrategy", at="headrace.algo.staleness.StalenessPolicy"),
    _areal("FilteredSamplesCapacityModifier", "rl.filters", note="a rejected group gives its place back at once"),
    _areal("remote_inf_engine", 'engine.type = "vllm"', 'engine.type = "sglang"', "engine.urls"),
    _areal("PPOActorConfig", at="headrace.config.schema.RlConfig", note="the table [rl]"),
    _areal("InferenceEngineConfig", at="headrace.config.schema.EngineConfig", note="the table [engine]"),
    _areal("BaseExperimentConfig", at="headrace.config.schema.Config", note="the whole file"),
    _areal("load_expr_config", at="headrace.config.load_config"),
    _areal("rlvr", "rl.tasks", "rl.rewards", note="prompts with a reward that verifies the answer"),
    _areal(
        "vision_rlvr",
        "model.vision",
        "rl.tasks",
        "rl.rewards",
        at="examples/vision_rl.toml",
        note="tasks with a column `images` (docs/data.md)",
    ),
    _areal("gsm8k_grpo_segment_wise.yaml", at="examples/gsm8k_segment_wise.toml"),
    _areal("get_capacity", at="headrace.algo.staleness.capacity", note="a function of the live groups"),
    _areal("cli_args", at="headrace/config/schema.py", note="the keys: docs/configuration.md"),
    _areal("io_struct", at="headrace/types.py"),
    _areal("staleness_manager", at=("headrace/algo/staleness.py", "headrace/rollout/executor/admission.py")),
    _areal("staleness_control", at="headrace/algo/staleness.py"),
    _areal("staleness_strategies", at="headrace/algo/staleness.py"),
    _areal("workflow_executor", at="headrace/rollout/executor/executor.py"),
    _areal("workflow_factory", at="headrace/rollout/executor/build.py"),
    _areal("async_task_runner", at="headrace/rollout/executor/task_runner.py"),
    _areal("queue_api", at="headrace/rollout/executor/parts.py"),
    _areal("cache_api", at="headrace/rollout/executor/parts.py"),
    _areal("rollout_queue", at="headrace/rollout/executor/ready_buffer.py"),
    _areal("rollout_cache", at="headrace/rollout/executor/replay_buffer.py"),
    _areal("ppo_functional", at="headrace/algo/losses/decoupled.py"),
    _areal("ppo_interface", at="headrace/loops/rl.py"),
    _areal("proximal_t", at="headrace.types.Completion", note="its `next_logprobs`"),
    # --- reward-kit: rewards of steps, GiGPO
    _reward_kit(
        "state_hashing_function", "rl.anchor", note="how states are compared; file.py:function is one of the choices"
    ),
    _reward_kit(
        "omega", "rl.credit_params", note="omega is its number: the weight of the step's part of the advantage"
    ),
    _reward_kit(
        "gamma",
        "rl.credit_params",
        "rl.critic.gamma",
        note="{ gamma = 0.99 }, or the critic's; at a service: gae_gamma in loss_fn_config",
    ),
    _reward_kit("EPISODES_PER_BATCH_GROUP", "rl.group_size"),
    _reward_kit("NUM_TRAINING_ITERATIONS", "rl.steps"),
    _reward_kit("MAX_EPISODE_STEPS", "rl.max_turns"),
    _reward_kit("default_step_reward", "rl.rewards[].default_step_reward"),
    _reward_kit(
        "reward_function", "rl.rewards", note="fn = file.py:function; the decorator is not needed, and is understood"
    ),
    _reward_kit(
        "base_reward",
        "rl.rewards[].default_step_reward",
        note="base_reward of a StepOutput is read as it is; steps without one get this",
    ),
    _reward_kit(
        "step_index",
        "rl.rewards[].step_index",
        note="what the numbers of StepOutputs count; they are recognised unless it is set (docs/authoring-rewards.md)",
    ),
    _reward_kit(
        "RLRolloutWorker",
        at="headrace.rollout.group.GroupPlayer",
        note="no key: [rl] plays its tasks; cluster.rollout_workers puts that into processes",
    ),
    _reward_kit("run_episode", at="headrace.rollout.episode.run_episode"),
    _reward_kit("EvaluateResult", at="headrace.reward.compat.models.EvaluateResult", note="as reward_kit's own is"),
    _reward_kit("StepOutput", at="headrace.reward.compat.models.StepOutput", note="as reward_kit's own is"),
    _reward_kit("MetricResult", at="headrace.reward.compat.models.MetricResult", note="as reward_kit's own is"),
    _reward_kit(
        "step_outputs",
        at="headrace.reward.compat.models.EvaluateResult",
        note="become `Reward.steps`, one for each step",
    ),
    _reward_kit("final_score", at="headrace.types.Reward", note="its `total`, of one episode"),
    _reward_kit(
        "StepData", at=("headrace.types.Step", "headrace.types.CreditedEpisode"), note="before and after credit"
    ),
    _reward_kit("policy_logprobs", at="headrace.types.Completion", note="its `sampler_logprobs`"),
    _reward_kit("policy_value_estimate", at="headrace.types.CreditedEpisode", note="its `values`, with a critic"),
    _reward_kit("AgentPolicy", at="headrace.rollout.policies.Policy"),
    _reward_kit("OpenAIAgentPolicy", 'model.path = "openai:NAME"', at="headrace.rollout.policies.RemotePolicy"),
    _reward_kit("TaskDefinitionModel", "rl.tasks.path", at="headrace.envs.task_definitions.load_task_definition"),
    _reward_kit(
        "execute_user_reward_code",
        "rl.reward_runner",
        at="headrace.reward.sandbox.pool.Sandbox",
        note="docs/sandbox.md",
    ),
    _reward_kit("align_rewards_with_step_data", at="headrace.reward.alignment.make_reward"),
    _reward_kit("system_apply_gigpo_to_batch_steps", 'rl.credit = "gigpo"', at="headrace.algo.advantages.gigpo.gigpo"),
    _reward_kit("calculate_advantages", "rl.credit", at="headrace.credit"),
    _reward_kit("typed_interface", at="headrace.reward.compat.reward_kit.reward_function"),
    _reward_kit("gippo_ppo_training_example.py", at="examples/gigpo_ppo_training.py"),
    _reward_kit("authoring_rl_rewards.mdx", at="docs/authoring-rewards.md"),
    _reward_kit("view_rl_trajectory.py", at="headrace view"),
    _reward_kit("rl_scalability_plan.md", at=("docs/cluster.md", "docs/scale.md")),
    _reward_kit("base_rewards", at="headrace.types.Reward", note="its `steps`, one for each step"),
    _reward_kit("get_action", at="headrace.rollout.policies.Policy"),
    _reward_kit("sandbox_executor", "rl.reward_runner", at="headrace.reward.sandbox.pool.Sandbox"),
    _reward_kit("system_aligner", at="headrace.reward.alignment.make_reward"),
    _reward_kit("system_gippo_calculator", 'rl.credit = "gigpo"', at="headrace.algo.advantages.gigpo.gigpo"),
    _reward_kit("rl_rollout_worker", at=("headrace/rollout/group.py", "headrace/rollout/episode.py")),
    _reward_kit("rl_processing", at="headrace/reward/alignment.py"),
    _reward_kit("rl_helpers", at="headrace/algo/advantages/gigpo.py"),
    # --- rollouts: SFT and RL with pure functions
    _rollouts("baseline", 'rl.credit = "reinforce"', "rl.credit_params", note="{ baseline = 0.5 }"),
    _rollouts("over_sampling_factor", "rl.async.oversampling"),
    _rollouts("n_samples_per_prompt", "rl.group_size"),
    _rollouts("checkpoint_every", "checkpoint.every"),
    _rollouts("compute_advantages", "rl.credit", note="a name, or a function of your own: file.py:function"),
    _rollouts("log_every", "run.log_every", note="metrics.jsonl has every step all the same"),
    _rollouts("num_steps", "sft.steps", "rl.steps"),
    _rollouts("sync_every", "rl.sync_every"),
    _rollouts("reward_fn", "rl.rewards"),
    _rollouts("compute_reward", "rl.rewards"),
    _rollouts("filter_fn", "rl.filters"),
    _rollouts("check_reward_nonzero_std", "rl.filters", note='{ fn = "reward_spread" }'),
    _rollouts("check_min_reward", "rl.filters", note='{ fn = "reward_range", low = 0.1 }'),
    _rollouts("check_response_diversity", "rl.filters", note='{ fn = "diversity" }'),
    _rollouts("check_reasonable_length", "rl.filters", note='{ fn = "length", min_tokens = 4, max_tokens = 400 }'),
    _rollouts("check_quality_and_diversity", "rl.filters", note='both: { fn = "reward_spread" }, { fn = "diversity" }'),
    _rollouts("generate_fn", "rl.generate_fn", note="of the same name, in [rl]"),
    _rollouts("partial_samples", "rl.async.interrupt", note="cut sequences are always continued"),
    _rollouts("clip_range", "rl.loss_params", note="clip_low and clip_high"),
    _rollouts("grpo_loss", 'rl.algorithm = "grpo"', note='without its clip: rl.loss = "importance_sampling"'),
    _rollouts("ppo_loss", 'rl.loss = "ppo"'),
    _rollouts("inference_engines", "engine.type", "engine.urls"),
    _rollouts(
        "source_checkpoint", "model.path", note="a checkpoint folder; to go on with a run: headrace train --resume"
    ),
    _rollouts("run_sft_training", at="headrace.loops.sft.train_sft"),
    _rollouts("run_rl_training", at="headrace.loops.rl.train_rl"),
    _rollouts("run_sft", "sft", at="headrace train"),
    _rollouts("run_rl", "rl", at="headrace train", note="a file with [sft] and [rl] is the mode sft+rl"),
    _rollouts("SFTTrainingConfig", at="headrace.config.schema.SftConfig", note="the table [sft]"),
    _rollouts("RLTrainingConfig", at="headrace.config.schema.RlConfig", note="the table [rl]"),
    _rollouts("RolloutConfig", at="headrace.config.schema.RlConfig", note="the table [rl], and [rl.async]"),
    _rollouts("AsyncRolloutManager", at=_EXECUTOR),
    _rollouts("RolloutManager", at=_EXECUTOR),
    _rollouts("generate_rollout_batches", at=_EXECUTOR, note="its `take_batch`"),
    _rollouts("apply_sample_transforms", "rl.filters", "rl.rewards"),
    _rollouts("prepare_grpo_batch", at=("headrace.credit", "headrace.to_data", "headrace.reweight")),
    _rollouts("convert_to_batch", at="headrace.to_data"),
    _rollouts("Sample", at=("headrace.Episode", "headrace.types.ScoredEpisode"), note="before and after its reward"),
    _rollouts("RolloutBatch", at="headrace.Datum", note="a batch is a sequence of them"),
    _rollouts("rollout_log_probs", at="headrace.types.Completion", note="its `sampler_logprobs`"),
    _rollouts("loss_mask", at="headrace.Datum", note="its array `weights`; 0 is not trained"),
    _rollouts("compute_loss_mask", at="headrace.conversation_datum"),
    _rollouts("tokenize_conversation", at="headrace.Renderer"),
    _rollouts(
        "TrainFuture", at="headrace.service.client.RequestFuture", note="in one process concurrent.futures.Future"
    ),
    _rollouts("TrainingBackend", at="headrace.protocols.TrainBackend"),
    _rollouts("PyTorchTrainingBackend", at="headrace.TorchBackend"),
    _rollouts("create_pytorch_backend", at="headrace.TorchBackend"),
    _rollouts("FSDPTrainingBackend", "cluster.ranks", at="headrace.train.fsdp.backend.FsdpBackend"),
    _rollouts("distributed_utils", "cluster.ranks", note="torchrun works too (docs/scale.md)"),
    _rollouts("load_hf_model", "model.path", at="headrace.load_model"),
    _rollouts("create_adamw_optimizer", "sft.optimizer", "rl.optimizer", at="headrace.Adam"),
    _rollouts(
        "create_warmup_cosine_scheduler", "sft.optimizer.schedule", "rl.optimizer.schedule", note='{ type = "cosine" }'
    ),
    _rollouts("create_cross_entropy_loss", at="headrace.types.CROSS_ENTROPY"),
    _rollouts("InferenceEngine", at="headrace.protocols.Sampler"),
    _rollouts("SGLangEngine", 'engine.type = "sglang"', at="headrace.infer.servers.sglang.SglangApi"),
    _rollouts("VLLMEngine", 'engine.type = "vllm"', at="headrace.infer.servers.vllm.VllmApi"),
    _rollouts("sync_weights_to_engines", "engine.sync", at="headrace.Publisher"),
    _rollouts("update_weights_from_checkpoint", at="headrace.protocols.Sampler", note="its `load`"),
    _rollouts("get_prompts", at=_TASKS, note="their data buffer is our task source: its `next`"),
    _rollouts("MetricsLogger", "metrics.sinks", at="headrace.protocols.MetricSink"),
    _rollouts("JSONLLogger", at="headrace.observe.sinks.jsonl.JsonlSink", note="always there: metrics.jsonl"),
    _rollouts("agent_integration", "rl.program", at="headrace.rollout.agent_program.play_program"),
    _rollouts("ImmediateTrainFuture", note="a concurrent.futures.Future that is done"),
    _rollouts("RolloutDataSource", "rl.tasks", at=_TASKS),
    _rollouts("sample_offset", at=_TASKS, note="its place is in every checkpoint"),
    _rollouts("epoch_id", at=_TASKS, note="its `epoch`; its place is in every checkpoint"),
    _rollouts("generate_batch", at=_EXECUTOR, note="its `take_batch`"),
    _rollouts("extract_sample_fields", at="headrace.to_data"),
    _rollouts("build_batch_metadata", at="headrace.to_data"),
    _rollouts("compute_response_lengths", at="headrace.Episode", note="its `num_sampled`"),
    _rollouts("response_lengths", at="headrace.Episode", note="its `num_sampled`"),
    _rollouts("loss_masks", at="headrace.Datum", note="its array `weights`; 0 is not trained"),
    _rollouts("group_index", at="headrace.types.CreditedEpisode", note="its `group_id`"),
    _rollouts("collate_batch", at="headrace.algo.packing.pack", note="sequences are packed, not padded"),
    _rollouts("get_weights", at="headrace.protocols.TrainBackend", note="its `export_weights`"),
    _rollouts("load_weights", at="headrace.protocols.TrainBackend", note="its `load_state`"),
    _rollouts("save_checkpoint", "checkpoint.every", at="headrace.protocols.TrainBackend", note="its `save_state`"),
    _rollouts("checkpoint_dir", "run.folder", note="checkpoints are in the folder of the run"),
    _rollouts("latest_checkpoint", at="headrace train", note="--resume finds it"),
    _rollouts("get_model_state_dict", at="headrace/train/fsdp/checkpoints.py"),
    _rollouts("update_weights_from_disk", "engine.sync", at="headrace/infer/servers/sglang.py"),
    _rollouts("reload_weights", "engine.sync", at="headrace/infer/servers/vllm.py"),
    _rollouts("collective_rpc", "engine.sync", at="headrace/infer/servers/vllm.py"),
    _rollouts("metrics_logger", "metrics.sinks", at="headrace.protocols.MetricSink"),
    _rollouts("rollout_generation", at="headrace/rollout/group.py"),
    _rollouts("async_rollout_manager", at="headrace/rollout/executor/executor.py"),
    _rollouts("rollout_manager", at="headrace/rollout/executor/executor.py"),
    _rollouts("pytorch_factory", at="headrace/train/torch_backend.py"),
    _rollouts("weight_sync", "engine.sync", at="headrace/rollout/publisher.py"),
    _rollouts("rl_losses", at="headrace/algo/losses/surrogate.py"),
    _rollouts("sft_loop", at="headrace/loops/sft.py"),
    _rollouts("rl_loop", at="headrace/loops/rl.py"),
    _rollouts("dataset_loaders", at="headrace/data/rows.py"),
    # --- retrain: GRPO on Ray
    _retrain("databuffer", at=_BUFFER, note=_STORED),
    _retrain("DataBuffer", at=(_BUFFER, _TASKS), note="of retrain, what steps used and gave; of rollouts, the prompts"),
    _retrain("store_rollout_data", at=_BUFFER, note=_STORED),
    _retrain("store_evaluation_data", at=_BUFFER, note=_STORED),
    _retrain("get_buffer_statistics", at="headrace.observe.buffer.reader.BufferReader"),
    _retrain("prepare_training_batch", at="headrace.to_data"),
    _retrain(
        "num_gpus", "cluster.ranks", "cluster.engine_replicas", note="devices are given to roles, not to algorithms"
    ),
    _retrain("num_cpus", "cluster.rollout_workers", "cluster.reward_workers"),
    _retrain("ray_acceleration", "cluster.address", note="roles of a run on Ray (docs/cluster.md)"),
    _retrain(
        "ReTrainer", at="headrace.loops.rl.train_rl", note="the coordinator; roles may be on Ray (docs/cluster.md)"
    ),
    _retrain("backend", "model.device", note="auto finds CUDA, then Apple's GPU, then the CPU"),
    _retrain("HardwareDetector", "model.device", at="headrace doctor"),
    _retrain("MacOSGRPOActor", 'model.device = "mps"', note=_ALL_DEVICES),
    _retrain("CPUGRPOActor", 'model.device = "cpu"', note=_ALL_DEVICES),
    _retrain("CUDAGRPOActor", 'model.device = "cuda"', note=_ALL_DEVICES),
    _retrain("RayGRPOActor", "cluster.address", note="algorithms are functions, roles are on Ray (docs/cluster.md)"),
    _retrain("BaseGRPOActor", 'rl.algorithm = "grpo"', note=_ALL_DEVICES),
    _retrain("GRPOActor", 'rl.algorithm = "grpo"', note=_ALL_DEVICES),
    _retrain("PPOActor", 'rl.algorithm = "ppo"', note=_ALL_DEVICES),
    _retrain("RLOOActor", 'rl.algorithm = "rloo"', note=_ALL_DEVICES),
    _retrain("algorithm_actor", at="headrace/loops/update.py", note="algorithms are functions"),
    _retrain("TrainingConfig", at="headrace.config.schema.Config", note="the whole file"),
    _retrain("mbridge", "cluster.ranks", note="there is no Megatron: models are sharded with FSDP2"),
    _retrain("algorithm.name", "rl.algorithm"),
    _retrain("GRPO", 'rl.algorithm = "grpo"'),
    _retrain("DRGRPO", 'rl.algorithm = "drgrpo"', note="GRPO and a discriminative loss; dr_grpo is another"),
    # --- Signal: advanced features of a training service
    _signal("SIGNAL_ENABLE_FUTURES", note=_FUTURES),
    _signal("enable_futures", note=_FUTURES),
    _signal("AsyncTrainingClientV2", at="headrace.service.client.ServiceClient", note=_CLIENT + ", or ours"),
    _signal("AsyncTrainingClient", at="headrace.service.client.ServiceClient", note=_CLIENT + ", or ours"),
    _signal(
        "FutureGroup",
        at="headrace.service.client.FutureGroup",
        note=_CLIENT + "; gather several with asyncio.gather, or with our client's class of this name",
    ),
    _signal(
        "SignalFuture",
        at="headrace.service.client.RequestFuture",
        note="awaited twice: when accepted, when done (docs/service-client.md)",
    ),
    _signal("request_queue", at="headrace.service.client.ServiceClient", note="`max_open` bounds open requests"),
    _signal("request_orchestrator", at="headrace.service.training.model_queue.ModelQueue"),
    _signal("compute_gae", 'rl.credit = "token_gae"', note="with a table [rl.critic]"),
    _signal("enhanced_ppo_loss", 'rl.algorithm = "enhanced_ppo"', note="at a service a sum (docs/metrics.md)"),
    _signal("importance_sampling_loss", 'rl.loss = "importance_sampling"', note="at a service: the same name"),
    _signal("conservative_ppo_loss", 'rl.algorithm = "conservative_ppo"', note="at a service: kl_limit, kl_action"),
    _signal("reward_modeling_loss", "reward_model.sources", note='at a service: the loss "bradley_terry"'),
    _signal("loss_kwargs", "rl.loss_params", note="at a service: loss_fn_config"),
    _signal("loss_fn", "rl.loss"),
    _signal("use_gae", 'rl.algorithm = "ppo"', note="at a service: gae_gamma and gae_lambda in loss_fn_config"),
    _signal("gae_lambda", "rl.critic.lam", note="at a service: the same name in loss_fn_config"),
    _signal(
        "old_log_probs",
        note="no key: they are recorded when tokens are sampled (sampler_logprobs); at a service: the input logprobs",
    ),
    _signal("reference_model", "rl.reference", note="at a service: the same name in loss_fn_config"),
    _signal("reference_model_cache", at="docs/reference-models.md", note="[[references]] of serve.toml"),
    _signal("reference_model_service", at="headrace serve", note="with --reference (docs/reference-models.md)"),
    _signal("datadog_client", "metrics.sinks", at="docs/metrics.md", note='["datadog"]'),
    _signal("policy_evaluation", at=("POST /runs/{run}/evaluate", "POST /runs/{run}/compare"), note="docs/tinker.md"),
    _signal(
        "RequestStatusResponse",
        at=("GET /runs/{run}/requests/{id}/status", "headrace.service.http.schemas.RequestStatusResponse"),
    ),
    _signal(
        "QueueStatsResponse", at=("GET /runs/{run}/queue/stats", "headrace.service.http.schemas.QueueStatsResponse")
    ),
    _signal("EvaluateRequest", at="headrace.service.http.evaluation_schemas.Evaluate"),
    _signal("EvaluateResponse", at="headrace.service.http.evaluation_schemas.Evaluation"),
    _signal("ForwardBackwardRequest", at=_FORWARD_BODY, note="GET /openapi.json has an example for each field"),
    _signal("ForwardBackwardResponse", at="docs/tinker.md", note="its metrics: docs/metrics.md"),
    _signal("ppo_with_gae.py", at="examples/ppo_with_gae.py"),
    _signal("futures_pipelining.py", at="examples/futures_pipelining.py"),
    _signal("loss_functions", at="headrace/algo/losses/__init__.py"),
    _signal("training_session", at="headrace/service/training/training_execution.py"),
    _signal("rl_metrics", at="docs/metrics.md", note="among the metrics of an answer"),
    _signal(
        "modal_runtime",
        note="no key: it runs on your own hardware, one machine or a Ray cluster; there is no hosted provider",
    ),
)
