"""Names of TRL's and verl's settings, with the keys that say the same here.

One table feeds the answers to unknown keys and the page `docs/names.md` (`docs/make_names.py` writes it).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignName:
    """A setting of another library, and what to write here."""

    library: str
    name: str  # dotted where the library's is
    ours: tuple[str, ...]  # keys, some with a value: 'rl.algorithm = "dapo"'
    note: str = ""


def _trl(name: str, *ours: str, note: str = "") -> ForeignName:
    return ForeignName(library="TRL", name=name, ours=ours, note=note)


def _verl(name: str, *ours: str, note: str = "") -> ForeignName:
    return ForeignName(library="verl", name=name, ours=ours, note=note)


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
    _trl("lora_alpha", "model.lora.alpha"),
    _trl("lora_target_modules", "model.lora.targets"),
    _trl("use_peft", "model.lora"),
    _trl("use_vllm", 'engine.type = "vllm"'),
    _trl("train_dataset", "sft.sources", "dpo.sources", "reward_model.sources", "rl.tasks"),
    _trl("eval_dataset", "sft.held_out", "dpo.held_out", "reward_model.held_out", "eval.source"),
    _trl("dataset_name", "sft.sources[].path", "dpo.sources[].path", "reward_model.sources[].path", "rl.tasks.path"),
    _trl("packing", *_MICRO, note="sequences are always packed, up to so many tokens"),
    # --- TRL: GRPO and RLOO
    _trl("num_generations", "rl.group_size"),
    _trl("generation_batch_size", "rl.groups", "rl.minibatches"),
    _trl("steps_per_generation", "rl.minibatches"),
    _trl(
        "num_iterations", "rl.minibatches", note="every episode is trained once; more updates are smaller minibatches"
    ),
    _trl("max_completion_length", "rl.sampling.max_tokens"),
    _trl("max_prompt_length", "rl.max_prompt_tokens"),
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
    _verl("trainer.save_freq", "checkpoint.every"),
    _verl("trainer.test_freq", "eval.every"),
    _verl("trainer.logger", "metrics.sinks"),
    _verl("trainer.project_name", "metrics.wandb.project"),
    _verl("trainer.experiment_name", "run.name"),
    _verl("trainer.default_local_dir", "run.folder"),
    _verl("trainer.n_gpus_per_node", "cluster.ranks"),
    _verl("trainer.resume_mode", note="headrace train FILE --resume"),
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
    for dotted in _leaves(key, value):
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


def _instead(entry: ForeignName, table: str) -> str:
    """Name our keys: those of the table that the unknown key is in, if there are any, else all."""
    if not entry.ours:
        return f"write  {entry.note}"
    fitting = [ours for ours in entry.ours if ours.partition(".")[0] == table] or list(entry.ours)
    note = f" ({entry.note})" if entry.note else ""
    return f"write {' or '.join(_quoted(ours) for ours in fitting)}{note}"


def _quoted(ours: str) -> str:
    return f"'{ours}'"


def names_page() -> str:
    """Return docs/names.md."""
    lines = [
        "# Names of TRL and verl",
        "",
        "What their settings are called here. A file that has one of these names is answered with ours. Where several",
        "keys stand in a row, each is of its own stage. Written by `docs/make_names.py`.",
    ]
    for library in dict.fromkeys(entry.library for entry in FOREIGN_NAMES):
        lines += ["", f"## {library}", "", f"| {library} | here | |", "|---|---|---|"]
        for entry in FOREIGN_NAMES:
            if entry.library == library:
                ours = ", ".join(f"`{key}`" for key in entry.ours)
                lines.append(f"| `{entry.name}` | {ours} | {entry.note} |")
    return "\n".join(lines) + "\n"
