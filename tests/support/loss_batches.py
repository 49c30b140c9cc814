"""A batch with every array that a loss can ask for, and calls of losses by name on it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.algo.loss_signature import LossOut, loss_inputs
from headrace.algo.losses import LOSSES

F64 = torch.float64


LENGTHS = (3, 5, 1, 4, 2, 6)  # six sequences: three pairs, or two groups of three


SEGMENTS_T = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))


NUM = len(SEGMENTS_T)


BINARY_SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=F64)


def batch(seed: int, spread: float = 0.3) -> dict[str, Tensor]:
    """Every array a loss can ask for, for 21 tokens of six sequences; a fifth of the tokens is not trained."""
    generator = torch.Generator().manual_seed(seed)

    def randn() -> Tensor:
        return torch.randn(NUM, generator=generator, dtype=F64)

    policy_T = -1.5 + 0.5 * randn()
    weights_T = torch.where(torch.rand(NUM, generator=generator) < 0.2, 0.0, 0.5 + randn().abs())
    return {
        "policy_logprobs": policy_T,
        "predicted_values": randn(),
        "scores": randn(),
        "sampler_logprobs": policy_T + spread * randn(),
        "proximal_logprobs": policy_T + spread * randn(),
        "reference_logprobs": policy_T + spread * randn(),
        "teacher_logprobs": policy_T + spread * randn(),
        "advantages": BINARY_SIGNS[SEGMENTS_T] * (0.5 + randn().abs()),
        "behaviour_weights": randn().abs(),
        "m2_mask": (torch.rand(NUM, generator=generator) < 0.7).to(F64),
        "lags": torch.randint(0, 4, (NUM,), generator=generator).to(F64),
        "returns": randn(),
        "values": randn(),
        "units": (SEGMENTS_T // 2).to(F64),
        "preferences": BINARY_SIGNS[SEGMENTS_T],
        "weights": weights_T,
        "value_weights": torch.where(weights_T == 0, 0.0, 0.2 + randn().abs()),
        "entropy": randn().abs(),
        "nll_weights": torch.where(weights_T == 0, 0.0, 0.2 + randn().abs()),
        "baselines": randn().abs(),
        "segments": SEGMENTS_T,
    }


def call(name: str, arrays: Mapping[str, Tensor], output: Tensor | None = None, **numbers: float) -> LossOut:
    inputs = loss_inputs(LOSSES[name])
    tensors = {f"{array}_T": arrays[array] for array in inputs.required}
    first = arrays[inputs.outputs[0]] if output is None else output
    if inputs.wants_entropy:
        tensors["entropy_T"] = arrays["entropy"] - first  # entropy moves when log-probs do
    if inputs.wants_segments:
        tensors["segments_T"] = arrays["segments"]
    return LOSSES[name](first, **tensors, **numbers)


def output_of(name: str, arrays: Mapping[str, Tensor]) -> Tensor:
    return arrays[loss_inputs(LOSSES[name]).outputs[0]].clone().requires_grad_()
