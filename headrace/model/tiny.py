"""Make a small Llama and a word-level tokenizer: no download, the same weights for the same seed."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.errors import ConfigError
from headrace.model.compute_thread import MODEL_CONSTRUCTION

PAD, BOS, END, UNKNOWN = "<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL = (PAD, BOS, END, UNKNOWN, *ROLES)  # ids 0, 1, 2, ... in every tokenizer made here
PAD_ID, BOS_ID, END_ID = 0, 1, 2

# A turn is its role, its words and <|end|>; nothing depends on later turns, so a conversation only ever grows.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word, split at white space; words not in the list become <|unknown|>.

    Raises ConfigError on a word that is empty, holds white space, or occurs twice.
    """
    vocabulary: set[str] = set(SPECIAL)
    for word in words:
        if word in vocabulary or word.split() != [word]:
            raise ConfigError(f"the word {word!r} cannot be in the vocabulary: it is taken, empty or has a space in it")
        vocabulary.add(word)
    ids = {token: index for index, token in enumerate((*SPECIAL, *words))}
    level = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=level,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    *, vocab_size: int, width: int, layers: int, heads: int, kv_heads: int, context: int, seed: int
) -> LlamaForCausalLM:
    """Make a float32 Llama with tied embeddings and random weights; torch's random state does not change.

    Weights start with standard deviation 1/sqrt(width), which keeps activations near 1 at small widths.
    """
    if width % (2 * heads) or heads % kv_heads:
        raise ConfigError(f"width {width}, heads {heads}, kv_heads {kv_heads}: each must be a multiple of the next")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=width**-0.5,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        dtype=torch.float32,
    )
    with MODEL_CONSTRUCTION, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only: fork_rng does not restore the others
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=END_ID, max_length=context
    )
    return model.eval()


def save_tiny(
    folder: Path,
    *,
    words: Sequence[str],  # the vocabulary: one token per word
    width: int = 96,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    seed: int = 0,
) -> None:
    """Write a small Llama with random weights and its tokenizer as a Hugging Face folder, to try things out with.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "tiny"
    >>> save_tiny(folder, words=["hello", "world"], width=32, layers=1)
    >>> sorted(path.name for path in folder.glob("*.safetensors"))
    ['model.safetensors']
    """
    tokenizer = make_tokenizer(words)
    model = make_model(
        vocab_size=len(tokenizer),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        context=context,
        seed=seed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
