"""Refuse by name what other frameworks have and this one does not, and say what to write instead."""

import re
from collections.abc import Mapping
from typing import Any

_SHARDING = "write 'cluster.ranks' = the number of GPUs, which shards the model by PyTorch's FSDP2 (docs/scale.md)"
# words of a key or a value -> what they ask for, and what to write instead
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(^|_)(megatron|mbridge|mcore)(_|$)"), f"Megatron (mbridge), which is not used here: {_SHARDING}"),
    (
        re.compile(r"(^|_)(jax|flax|maxtext|torchax|tpu)(_|$)"),
        'JAX, which is not used here: models are PyTorch modules on \'model.device\' = "cuda", "mps" or "cpu"; '
        f"for several GPUs {_SHARDING}",
    ),
    (
        re.compile(r"^(torch_func|torch\.func|functorch|functional_call)(_backend|\.py)?$"),
        "torch.func, a model as a function of its weights, which is not used here: models are PyTorch modules whose "
        "optimiser is chosen by '[rl.optimizer]', and a loss of your own is 'rl.loss' = \"file.py:function\"",
    ),
    (
        re.compile(
            r"^((tensor|pipeline|context|expert|sequence)(_model)?_parallel(_size|ism)?|(tp|pp|cp|ep|sp)(_size)?)$"
        ),
        "tensor, pipeline, context or expert parallelism, which training does not have: "
        f"{_SHARDING}, and give inference servers their own option in 'engine.launch.args'",
    ),
    (re.compile(r"^(deepspeed|zero[123]?|zero_stage)$"), f"DeepSpeed, which is not used here: {_SHARDING}"),
    (
        re.compile(r"^((use_)?qlora|load_in_[48]bit|quantization(_config)?|bnb_\w+|bitsandbytes|gptq|awq)$"),
        "QLoRA: a base model in 4 or 8 bits cannot be trained here; leave it out, and train adapters over the full "
        "weights with [model.lora]",
    ),
    (
        re.compile(r"^((use_)?(dora|pissa|loftq|galore|vera|ia3)|modules_to_save|prompt_tuning|prefix_tuning)$"),
        "a way of training that is not here: [model.lora] trains LoRA adapters, and without that table all weights are "
        "trained",
    ),
    (
        re.compile(r"^((lora|attention|hidden|resid)_)?dropout$|^neftune(_noise_alpha)?$"),
        "noise in training (dropout, NEFTune), which is not used: a model is trained as it is sampled, so that both "
        "give the same log-probs; leave it out",
    ),
    (
        re.compile(r"^(train_on_inputs|train_on_prompt|train_on_source)$"),
        "a loss on prompts, which is not computed: the assistant's messages are trained, and a message with "
        '"weight": 0 is left out',
    ),
)

_EXAMPLES = (  # of keys, for the documents
    "megatron",
    "jax_backend",
    "torchax_backend",
    "torch_func",
    "tensor_parallel_size",
    "deepspeed",
    "qlora",
    "load_in_4bit",
    "use_dora",
    "modules_to_save",
    "lora_dropout",
    "neftune_noise_alpha",
    "train_on_inputs",
)


def refused_names() -> list[tuple[tuple[str, ...], str]]:
    """Return keys that are refused by name, together where the answer is the same, with what each asks for."""
    answers: dict[str, list[str]] = {}
    for name in _EXAMPLES:
        words = next(asked_for for pattern, asked_for in _REFUSED if pattern.search(name))
        answers.setdefault(words, []).append(name)
    return [(tuple(names), words) for words, names in answers.items()]


def refusal(dotted: str, name: str, value: Any) -> str | None:
    """Return the sentence that refuses the key `dotted`, whose last part is `name`, or None if it asks for nothing that
    is refused by name.

    >>> refusal("cluster.megatron", "megatron", {})[:52]
    "'cluster.megatron' asks for Megatron (mbridge), whic"
    >>> refusal("model.path", "path", "a/model") is None
    True
    """
    for pattern, asked_for in _REFUSED:
        if pattern.search(_word(name)) or _mentions(value, pattern):
            return f"'{dotted}' asks for {asked_for}"
    return None


def _mentions(value: Any, pattern: re.Pattern[str]) -> bool:
    """Tell whether a value is such a word, or a table that has one among its keys or values."""
    match value:
        case str():
            return pattern.search(_word(value)) is not None
        case Mapping():
            return any(pattern.search(_word(str(key))) or _mentions(item, pattern) for key, item in value.items())
    return False


def _word(text: str) -> str:
    return text.strip().lower().replace("-", "_")
