"""Names of other libraries' settings, with the keys that say the same here.

One table feeds the answers to unknown keys and the page `docs/names.md` (`docs/make_names.py` writes it).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.config.framework_names import FRAMEWORK_NAMES, NO_KEY, ForeignName
from headrace.config.refusals import refused_names


def _trl(name: str, *ours: str, note: str = "") -> ForeignName:
    return ForeignName(library="TRL", name=name, ours=ours, note=note)


def _verl(name: str, *ours: str, note: str = "") -> ForeignName:
    return ForeignName(library="verl", name=name, ours=ours, note=note)


def _axolotl(name: str, *ours: str, note: str = "") -> ForeignName:
    return ForeignName(library="Axolotl", name=name, ours=ours, note=note)


def _tinker(name: str, *ours: str, note: str = "") -> ForeignName:
    return ForeignName(library="Tinker", name=name, ours=ours, note=note)


_OPTIMIZERS = ("sft.optimizer", "dpo.optimizer", "reward_model.optimizer", "rl.optimizer")
_BATCHES = ("sft.batch_size", "dpo.batch_size", "reward_model.batch_size", "rl.groups")
_MICRO = (
    "sft.micro_batch_tokens",
    "dpo.micro_batch_tokens",
    "reward_model.micro_batch_tokens",
    "rl.micro_batch_tokens",
)
_IN_TOKENS = "memory is set in tokens computed at once; the gradient does not depend on it"


def _optimizer(key: str) -> tuple[str, ...]:
    return tuple(f"{table}.{key}" for table in _OPTIMIZERS)


FOREIGN_NAMES: tuple[ForeignName, ...] = (
    # --- TRL: every trainer
    _trl("model_name_or_path", "model.path"),
    _trl("output_dir", "run.folder", note="a run makes a folder of its own in it"),
    _trl("run_name", "run.name"),
    _trl("max_steps", "sft.steps", "dpo.steps", "reward_model.steps", "rl.steps"),
    _trl("num_train_epochs", "sft.epochs", "dpo.epochs", "reward_model.epochs", "rl.epochs"),
    _trl("per_device_train_batch_size", *_BATCHES, note="of one update, on all devices together"),
    _trl("train_batch_size", *_BATCHES, note="of one update, on all devices together"),
    _trl("gradient_accumulation_steps", *_MICRO, note=_IN_TOKENS),
    _trl("gradient_checkpointing", "model.recompute"),
    _trl("lr_scheduler_type", *_optimizer("schedule.type")),
    _trl("warmup_steps", *_optimizer("schedule.warmup_steps")),
    _trl("max_grad_norm", *_optimizer("clip_norm")),
    _trl("adam_beta1", *_optimizer("beta1")),
    _trl("adam_beta2", *_optimizer("beta2")),
    _trl("adam_epsilon", *_optimizer("eps")),
    _trl("max_length", "sft.max_tokens", "dpo.max_tokens", "reward_model.max_tokens", "rl.max_episode_tokens"),
    _trl("max_seq_length", "sft.max_tokens"),
    _trl("bf16", 'model.dtype = "bfloat16"'),
    _trl("torch_dtype", "model.dtype"),
    _trl("save_steps", "checkpoint.every"),
    _trl("save_total_limit", "checkpoint.keep_last"),
    _trl("eval_steps", "eval.every"),
    _trl("report_to", "metrics.sinks"),
    _trl("data_seed", "run.seed"),
    _trl("lora_r", "model.lora.rank"),
    _trl("r", "model.lora.rank"),
    _trl("target_modules", "model.lora.targets"),
    _trl("lora_alpha", "model.lora.alpha"),
    _trl("lora_target_modules", "model.lora.targets"),
    _trl("use_rslora", "model.lora.rslora"),
    _trl("use_peft", "model.lora"),
    _trl("chat_template_path", "model.chat_template"),
    _trl("chat_template_kwargs", "model.template_options"),
    _trl("enable_thinking", "model.template_options", note="{ enable_thinking = false }"),
    _trl("dataset_config", "sft.sources[].subset", "dpo.sources[].subset", "rl.tasks.subset"),
    _trl("dataset_train_split", "sft.sources[].split", "dpo.sources[].split", "rl.tasks.split"),
    _trl("use_vllm", 'engine.type = "vllm"'),
    _trl("train_dataset", "sft.sources", "dpo.sources", "reward_model.sources", "rl.tasks"),
    _trl("eval_dataset", "sft.held_out", "dpo.held_out", "reward_model.held_out", "eval.source"),
    _trl("dataset_name", "sft.sources[].path", "dpo.sources[].path", "reward_model.sources[].path", "rl.tasks.path"),
    _trl("packing", *_MICRO, note="sequences are always packed, up to so many tokens"),
    _trl("assistant_only_loss", "sft.sources", note="only the assistant's messages are ever trained"),
    _trl("completion_only_loss", "sft.sources", note="only the assistant's messages are ever trained"),
    _trl("warmup_ratio", *_optimizer("schedule.warmup_steps"), note="a number of steps"),
    _trl("logging_steps", "run.log_every", note="metrics.jsonl has every step all the same"),
    _trl("attn_implementation", "model.device", note="attention is chosen by it; headrace doctor says which"),
    # --- TRL: GRPO and RLOO
    _trl("num_generations", "rl.group_size"),
    _trl("generation_batch_size", "rl.groups", "rl.minibatches"),
    _trl("steps_per_generation", "rl.minibatches"),
    _trl(
        "num_iterations", "rl.minibatches", note="every episode is trained once; more updates are smaller minibatches"
    ),
    _trl("max_completion_length", "rl.sampling.max_tokens"),
    _trl("max_prompt_length", "rl.max_prompt_tokens"),
    _trl("temperature", "rl.sampling.temperature", "distill.sampling.temperature"),
    _trl("top_p", "rl.sampling.top_p"),
    _trl("top_k", "rl.sampling.top_k"),
    _trl("min_p", "rl.sampling.min_p"),
    _trl("repetition_penalty", note=NO_KEY + "samples are drawn from the model's own distribution, which is trained"),
    _trl(
        "beta", 'rl.loss = "ppo + reference_kl_k3"', "rl.loss_params", "dpo.beta", note="kl_coef is its number in [rl]"
    ),
    _trl("epsilon", "rl.loss_params", note="clip_low and clip_high"),
    _trl("epsilon_high", "rl.loss_params", note="clip_high"),
    _trl(
        "loss_type",
        "rl.weighting",
        "dpo.loss",
        note="grpo: sequence_mean, dapo and bnpo: token_mean, dr_grpo: constant",
    ),
    _trl("scale_rewards", "rl.credit", note='"dr_grpo" does not scale'),
    _trl("reward_funcs", "rl.rewards"),
    _trl("reward_weights", "rl.rewards[].weight"),
    _trl("mask_truncated_completions", 'rl.truncated_reward = "exclude"'),
    _trl("importance_sampling_level", 'rl.algorithm = "gspo"'),
    _trl("top_entropy_quantile", "rl.loss", note="write a loss of your own"),
    _trl("ref_model", "rl.reference", "dpo.reference"),
    # --- TRL: preferences and distillation
    _trl("precompute_ref_log_probs", "dpo.reference", note="the reference always scores once, before the first step"),
    _trl("simpo_gamma", "dpo.gamma"),
    _trl("teacher_model_name_or_path", "distill.teachers[].path", "rl.teacher"),
    # --- verl
    _verl("actor_rollout_ref.model.path", "model.path"),
    _verl("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
    _verl("actor_rollout_ref.model.enable_gradient_checkpointing", "model.recompute"),
    _verl("actor_rollout_ref.rollout.n", "rl.group_size"),
    _verl("actor_rollout_ref.rollout.name", "engine.type"),
    _verl("actor_rollout_ref.rollout.temperature", "rl.sampling.temperature"),
    _verl("actor_rollout_ref.rollout.top_p", "rl.sampling.top_p"),
    _verl("actor_rollout_ref.rollout.top_k", "rl.sampling.top_k"),
    _verl("actor_rollout_ref.rollout.max_num_seqs", "engine.max_num_seqs"),
    _verl("actor_rollout_ref.rollout.gpu_memory_utilization", "engine.kv_tokens"),
    _verl("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "rl.max_turns"),
    _verl("actor_rollout_ref.actor.optim.lr", "rl.optimizer.learning_rate"),
    _verl("actor_rollout_ref.actor.optim.weight_decay", "rl.optimizer.weight_decay"),
    _verl("actor_rollout_ref.actor.optim.lr_warmup_steps", "rl.optimizer.schedule.warmup_steps"),
    _verl("actor_rollout_ref.actor.grad_clip", "rl.optimizer.clip_norm"),
    _verl(
        "actor_rollout_ref.actor.ppo_mini_batch_size", "rl.minibatches", note="the number of updates, not their size"
    ),
    _verl("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "rl.micro_batch_tokens", note=_IN_TOKENS),
    _verl("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "rl.micro_batch_tokens"),
    _verl("actor_rollout_ref.actor.clip_ratio", "rl.loss_params", note="clip_low and clip_high"),
    _verl("actor_rollout_ref.actor.clip_ratio_low", "rl.loss_params", note="clip_low"),
    _verl("actor_rollout_ref.actor.clip_ratio_high", "rl.loss_params", note="clip_high"),
    _verl("actor_rollout_ref.actor.loss_agg_mode", "rl.weighting", note='"token-mean" is token_mean'),
    _verl("actor_rollout_ref.actor.use_kl_loss", 'rl.loss = "ppo + reference_kl_k3"'),
    _verl("actor_rollout_ref.actor.kl_loss_coef", "rl.loss_params", note="kl_coef"),
    _verl("actor_rollout_ref.actor.kl_loss_type", "rl.loss", note='low_var_kl is "reference_kl_k3"'),
    _verl("actor_rollout_ref.actor.entropy_coeff", 'rl.loss = "ppo + entropy_bonus"', "rl.loss_params"),
    _verl("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "rl.micro_batch_tokens", note=_IN_TOKENS),
    _verl("algorithm.adv_estimator", "rl.credit", "rl.algorithm", note="gae: token_gae, with a table [rl.critic]"),
    _verl("algorithm.gamma", "rl.critic.gamma", "rl.credit_params"),
    _verl("algorithm.lam", "rl.critic.lam"),
    _verl("algorithm.use_kl_in_reward", "rl.critic.kl_coef"),
    _verl("algorithm.kl_ctrl.kl_coef", "rl.critic.kl_coef"),
    _verl("algorithm.kl_penalty", "rl.critic.kl_estimator"),
    _verl("algorithm.filter_groups.enable", "rl.filters", note='{ fn = "reward_spread" }'),
    _verl("algorithm.norm_adv_by_std_in_grpo", "rl.credit", note='"dr_grpo" does not scale'),
    _verl("gae", 'rl.credit = "token_gae"', note="with a table [rl.critic]"),
    _verl("kl_coef", "rl.loss_params", "rl.critic.kl_coef", note='with a loss such as "ppo + reference_kl_k3"'),
    _verl("adv_estimator", "rl.credit", "rl.algorithm", note="gae: token_gae, with a table [rl.critic]"),
    _verl("critic.optim.lr", "rl.critic.optimizer.learning_rate"),
    _verl("critic.model.path", "rl.critic.path"),
    _verl("critic.cliprange_value", "rl.critic.value_clip"),
    _verl("reward_model.model.path", "rl.rewards[].path", note='of { fn = "reward_model" }'),
    _verl("reward_model.overlong_buffer.enable", 'rl.algorithm = "dapo"', note='or a reward { fn = "length" }'),
    _verl("custom_reward_function.path", "rl.rewards[].fn", note='"file.py:function"'),
    _verl("data.train_files", "rl.tasks.path", "sft.sources[].path"),
    _verl("data.val_files", "eval.source.path"),
    _verl("data.train_batch_size", "rl.groups"),
    _verl("data.max_prompt_length", "rl.max_prompt_tokens"),
    _verl("data.max_response_length", "rl.sampling.max_tokens"),
    _verl("data.prompt_key", "rl.tasks.columns"),
    _verl("trainer.total_training_steps", "rl.steps", "sft.steps"),
    _verl("trainer.total_epochs", "rl.epochs", "sft.epochs"),
    _verl("trainer.save_freq", "checkpoint.every"),
    _verl("trainer.test_freq", "eval.every"),
    _verl("trainer.logger", "metrics.sinks"),
    _verl("trainer.project_name", "metrics.wandb.project"),
    _verl("trainer.experiment_name", "run.name"),
    _verl("trainer.default_local_dir", "run.folder"),
    _verl("trainer.n_gpus_per_node", "cluster.ranks"),
    _verl("trainer.resume_mode", note="headrace train FILE --resume"),
    # --- Axolotl
    _axolotl("base_model", "model.path"),
    _axolotl("datasets", "sft.sources", "dpo.sources", "reward_model.sources"),
    _axolotl("sequence_len", "sft.max_tokens", "dpo.max_tokens", "reward_model.max_tokens", "rl.max_episode_tokens"),
    _axolotl("sample_packing", *_MICRO, note="sequences are always packed, up to so many tokens"),
    _axolotl("num_epochs", "sft.epochs", "dpo.epochs", "reward_model.epochs", "rl.epochs"),
    _axolotl("micro_batch_size", *_MICRO, note=_IN_TOKENS),
    _axolotl("val_set_size", "sft.held_out", "dpo.held_out", "reward_model.held_out", note="a source of its own"),
    _axolotl("lora_target_linear", 'model.lora.targets = "all-linear"'),
    _axolotl("wandb_project", "metrics.wandb.project", note='with metrics.sinks = ["wandb"]'),
    _axolotl("chat_template", "model.chat_template"),
    _axolotl("adapter", "model.lora", note='"lora": write the table; without it all weights are trained'),
    _axolotl("lr_scheduler", *_optimizer("schedule.type")),
    _axolotl("saves_per_epoch", "checkpoint.every", note="a number of steps"),
    _axolotl("evals_per_epoch", "eval.every", note="a number of steps"),
    _axolotl("test_datasets", "sft.held_out", "dpo.held_out", "reward_model.held_out"),
    _axolotl("roles_to_train", "sft.sources", note="the assistant's messages, each with a `weight` if you like"),
    _axolotl("flash_attention", "model.device", note="attention is chosen by it; headrace doctor says which"),
    _axolotl("auto_resume_from_checkpoints", note="headrace train FILE --resume"),
    # --- Tinker: the SDK's calls, and settings of its cookbook
    _tinker("TINKER_BASE_URL", "model.service", note="the SDK itself works unmodified at a `headrace serve`"),
    _tinker("TINKER_API_KEY", "model.service_key_env"),
    _tinker("model_name", "model.path"),
    _tinker("create_lora_training_client", "model.lora.rank", "model.lora.alpha", note="alpha is 32 unless set"),
    _tinker("lora_rank", "model.lora.rank"),
    _tinker("forward_backward", "rl.loss", note="losses of the SDK and all of docs/objectives.md"),
    _tinker("importance_sampling", 'rl.loss = "importance_sampling"'),
    _tinker("loss_fn_config", "rl.loss_params", note="clip_high is the distance from 1, not the bound"),
    _tinker("optim_step", *_optimizer("learning_rate")),
    _tinker("grad_clip_norm", *_optimizer("clip_norm")),
    _tinker("save_weights_and_get_sampling_client", "rl.sync_every", note="steps between two publishes; 1 unless set"),
    _tinker("save_state", "checkpoint.every"),
    _tinker("load_checkpoint_path", "model.path", note="or headrace train FILE --resume, to go on with a run"),
    _tinker("dataset_builder", "sft.sources", "rl.tasks"),
    _tinker("groups_per_batch", "rl.groups"),
    _tinker("num_substeps", "rl.minibatches"),
    _tinker("kl_penalty_coef", 'rl.loss = "ppo + reference_kl_k3"', "rl.loss_params", note="kl_coef is its number"),
    _tinker("remove_constant_reward_groups", "rl.filters", note='{ fn = "reward_spread" }'),
    _tinker("max_steps_off_policy", "rl.async.max_staleness"),
    _tinker("renderer_name", "model.chat_template", note="the model's own template unless set"),
    _tinker("lr_schedule", *_optimizer("schedule.type")),
    _tinker("evaluator_builders", "eval.source"),
    _tinker("eval_every", "eval.every"),
    _tinker("save_every", "checkpoint.every"),
    _tinker("log_path", "run.folder"),
    _tinker("wandb_name", "run.name"),
    *FRAMEWORK_NAMES,
)
_BY_NAME: Mapping[str, ForeignName] = {entry.name: entry for entry in reversed(FOREIGN_NAMES)}


def foreign_hint(key: str, value: Any) -> str | None:
    """Say what to write in place of an unknown key that another library has; None if none is known.

    `key` is dotted; a table is looked into, for a library whose names are dotted.

    >>> foreign_hint("rl.num_generations", 8)
    "this is TRL's name; write 'rl.group_size'"
    >>> foreign_hint("actor_rollout_ref", {"rollout": {"n": 8}})
    "'actor_rollout_ref.rollout.n' is verl's name; write 'rl.group_size'"
    """
    for dotted in dict.fromkeys((key, *_leaves(key, value))):
        parts = dotted.split(".")
        for start in range(len(parts)):
            entry = _BY_NAME.get(".".join(parts[start:]))
            if entry is not None:
                what = "this" if dotted == key else f"'{dotted}'"
                return f"{what} is {entry.library}'s name; {_instead(entry, parts[0])}"
    return None


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key


def foreign_value_hint(key: str, name: str) -> str | None:
    """Say what to write in place of an unknown name in `key`, such as a loss, that another library has; None if none.

    >>> foreign_value_hint("rl.credit", "compute_gae")
    "this is Signal's name; write 'rl.credit = \"token_gae\"' (with a table [rl.critic])"
    """
    entry = _BY_NAME.get(name)
    return None if entry is None else f"this is {entry.library}'s name; {_instead(entry, key.partition('.')[0])}"


def _instead(entry: ForeignName, table: str) -> str:
    """Name our keys: those of the table that the unknown key is in, if there are any, else all; or places in code."""
    if not entry.ours and entry.note.startswith(NO_KEY):
        return f"there is no such key here: {entry.note.removeprefix(NO_KEY)}"
    if not entry.ours and entry.places:
        note = f" ({entry.note})" if entry.note else ""
        return f"there is no such key here: see {' and '.join(_quoted(place) for place in entry.places)}{note}"
    if not entry.ours:
        return f"write  {entry.note}" if entry.note.startswith("headrace ") else f"here it is {entry.note}"
    fitting = [ours for ours in entry.ours if ours.partition(".")[0] == table] or list(entry.ours)
    note = f" ({entry.note})" if entry.note else ""
    return f"write {' or '.join(_quoted(ours) for ours in fitting)}{note}"


def _quoted(ours: str) -> str:
    return f"'{ours}'"


def names_page() -> str:
    """Return docs/names.md."""
    lines = [
        "# Names of other libraries",
        "",
        "What settings of TRL, verl, Axolotl, Tinker, AReaL, reward-kit, rollouts, retrain and Signal are called here,",
        "of the last five also classes, functions, files and endpoints. A file that has one of these names is answered",
        "with ours. Where several keys stand in a row, each is of its own stage; names that begin with `headrace.` are",
        "imported from there. A row without a key says what takes the setting's place, or why there is none. Metrics",
        "have a table of their own in [metrics.md](metrics.md). Written by `docs/make_names.py`.",
    ]
    for library in dict.fromkeys(entry.library for entry in FOREIGN_NAMES):
        lines += ["", f"## {library}", "", f"| {library} | here | |", "|---|---|---|"]
        for entry in FOREIGN_NAMES:
            if entry.library == library:
                ours = ", ".join(f"`{here}`" for here in (*entry.ours, *entry.places))
                lines.append(f"| `{entry.name}` | {ours} | {entry.note} |")
    lines += ["", "## What is not here", "", "Refused by name, with these words:", "", "| keys | |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {words} |" for names, words in refused_names()]
    return "\n".join(lines) + "\n"
