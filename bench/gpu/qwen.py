"""What the benches of this folder share: a random model of the shape of Qwen2.5-1.5B, and the card at its best."""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 151_936

if not torch.cuda.is_available():  # before the kernels are imported: Triton may not be here either
    raise SystemExit("this bench needs a GPU, and torch sees no CUDA device")


def shape(**changes: object) -> Qwen2Config:
    return Qwen2Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
            **changes,
        }
    )


def random_model(**changes: object) -> Qwen2ForCausalLM:
    """The same weights at every call, in bfloat16 on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return Qwen2ForCausalLM(shape(**changes)).eval()
    finally:
        torch.set_default_dtype(before)


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times


def bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source, target = (torch.empty(2**32, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    return 2 * 2**32 / statistics.median(timed(lambda: target.copy_(source), 7)[2:])


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of a large bfloat16 product on random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / statistics.median(timed(lambda: a @ b, 13)[3:])


def step_floor(rows: int, length: int) -> float:
    """Seconds of a decode step at best: weights and filled keys and values once through memory, or the arithmetic."""
    c = shape()
    width = c.hidden_size // c.num_attention_heads
    attention = c.hidden_size * width * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    weights = c.num_hidden_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size
    cached = rows * length * c.num_hidden_layers * 2 * c.num_key_value_heads * width
    return max(2 * (weights + cached) / bandwidth(), 2 * weights * rows / matrix_rate())
