"""Compute log-probs of target tokens from hidden states chunk by chunk: [tokens, vocabulary] exists for one chunk only.

There are two entry points. `fused_loss` evaluates a token-wise loss per chunk and computes the gradient while the
chunk's probabilities exist (three matrix products). `logprobs` is an ordinary differentiable function for losses that
need a whole sequence at once; its backward pass computes the logits again (four products).

With p = softmax(z), z = W h / tau: d logp_y / dz = onehot(y) - p and dH / dz = -p (log p + H).
The factor dL/dlogp of a token multiplies rows, so it is applied to [C, D] hidden states and never to [C, V].
Models that scale their logits (z = s W h / tau) multiply rows too. A soft cap, z = c tanh(s W h / c) / tau, has a slope
of its own for each logit, 1 - tanh^2, which the chunk keeps for the backward pass.

Shape letters: T tokens, C tokens of a chunk, D width, V vocabulary, K alternatives per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.model import cuda
from headrace.model.cpu.packed_linear import detached, linear, linear_backward_input

HALF = (torch.bfloat16, torch.float16)
CHUNK_TOKENS = 128
UNLIKELY = -80.0  # log-prob below which float32 probabilities lose bits
CUDA_CHUNK_TOKENS = 2048  # fewer rows leave the matrix units of a large GPU waiting for work


def default_chunk(device: torch.device) -> int:
    """Return the number of tokens of a chunk on this device."""
    return CUDA_CHUNK_TOKENS if device.type == "cuda" else CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens whose log-probs are computed."""

    tokens: Tensor  # [T] or [T, K]
    temperature: Tensor | None = None  # [T], or None when it is 1 everywhere

    def chunk(self, span: slice) -> "Targets":
        return Targets(self.tokens[span], None if self.temperature is None else self.temperature[span])


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Scales the logits of a model, then caps them by c tanh(z / c), before the softmax."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits_CV: Tensor) -> Tensor:
        """Apply the rule; logits that need no gradient are overwritten."""
        if logits_CV.requires_grad:
            scaled = logits_CV * self.scale
            return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap
        if self.softcap is not None:
            return logits_CV.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        return logits_CV if self.scale == 1.0 else logits_CV.mul_(self.scale)


PLAIN = LogitRule()


@dataclass(frozen=True, slots=True)
class HeadChunk:
    """Probabilities over the vocabulary for one chunk, and the log-probs and entropies read off them."""

    probs_CV: Tensor
    logp_CV: Tensor | None  # only with the entropy
    logprobs: Tensor  # shape of the targets
    entropy_C: Tensor | None
    slope_CV: Tensor | None = None  # of the soft cap


def read_chunk(
    hidden_CD: Tensor, weight_VD: Tensor, targets: Targets, *, want_entropy: bool, rule: LogitRule = PLAIN
) -> HeadChunk:
    """Compute a chunk's probabilities and log-probs, with the softmax in float32 (float64 stays float64)."""
    logits_CV = logits(hidden_CD, weight_VD)
    if rule == PLAIN and not want_entropy and logits_CV.is_cuda and weight_VD.dtype in HALF and cuda.available():
        return _read_in_place(logits_CV, targets, weight_VD.dtype)
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    logits_CV, slope_CV = rule.apply(logits_CV), None
    if rule.softcap is not None:
        slope_CV = (logits_CV / rule.softcap).square_().neg_().add_(1.0)
    if targets.temperature is not None:
        logits_CV = logits_CV.div_(targets.temperature[:, None])
    flat = targets.tokens if targets.tokens.ndim == 2 else targets.tokens[:, None]
    if want_entropy:
        logp_CV = torch.log_softmax(logits_CV, dim=-1)
        del logits_CV
        probs_CV = logp_CV.exp()
        entropy_C = -(probs_CV * logp_CV).sum(dim=-1)
        picked = logp_CV.gather(1, flat)
        return HeadChunk(probs_CV, logp_CV, picked.view(targets.tokens.shape), entropy_C, slope_CV)
    if logits_CV.device.type == "cpu":
        probs_CV = torch.softmax(logits_CV, dim=-1, out=logits_CV)  # half the memory: more of it stays in the cache
        picked = probs_CV.gather(1, flat).log()
        if bool((unlikely_C := (picked < UNLIKELY).any(dim=1)).any()):  # their probabilities have few bits, or none
            temperature = None if targets.temperature is None else targets.temperature[unlikely_C]
            unlikely = Targets(flat[unlikely_C], temperature)
            picked[unlikely_C] = read_chunk(
                hidden_CD[unlikely_C], weight_VD, unlikely, want_entropy=True, rule=rule
            ).logprobs
    else:
        top_C1, raw_CK = logits_CV.amax(dim=-1, keepdim=True), logits_CV.gather(1, flat)
        probs_CV = torch.softmax(logits_CV, dim=-1)
        picked = picked_logprobs(raw_CK, top_C1, probs_CV)
    return HeadChunk(probs_CV, None, picked.view(targets.tokens.shape), None, slope_CV)


def logits(hidden_CD: Tensor, weight_VD: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute hidden @ weight.T.

    On CUDA the logits of half-precision factors are float32: logits of 16 and more would be rounded to multiples of
    0.125.
    """
    if hidden_CD.is_cuda and hidden_CD.dtype in HALF:
        return torch.mm(hidden_CD, weight_VD.T, out_dtype=torch.float32, out=out)
    return linear(hidden_CD, weight_VD) if out is None else torch.mm(hidden_CD, weight_VD.T, out=out)


def _read_in_place(logits_CV: Tensor, targets: Targets, dtype: torch.dtype) -> HeadChunk:
    """Overwrite the logits with half-precision probabilities, on CUDA; sums are still in float32."""
    from headrace.model.cuda.softmax import softmax_  # needs Triton

    flat = targets.tokens if targets.tokens.ndim == 2 else targets.tokens[:, None]
    picked = logits_CV.gather(1, flat)
    if targets.temperature is not None:
        picked = picked / targets.temperature[:, None]
    probs_CV, lse_C = softmax_(logits_CV, targets.temperature, dtype)
    return HeadChunk(probs_CV, None, (picked - lse_C[:, None]).view(targets.tokens.shape), None)


def picked_logprobs(logits_CK: Tensor, top_C1: Tensor, probs_CV: Tensor) -> Tensor:
    """Compute log p of some tokens of each row from their logits, the row's largest logit and its probabilities.

    log p_y = (z_y - z_max) + log p_max: the largest probability is at least 1 / V, so nothing underflows.
    """
    return logits_CK - top_C1 + probs_CV.amax(dim=-1, keepdim=True).log()


def backward_chunk(
    chunk: HeadChunk,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets: Targets,
    grad_logprobs: Tensor,
    grad_entropy_C: Tensor | None,
    grad_weight_VD: Tensor | None,
    rule: LogitRule = PLAIN,
) -> Tensor:
    """Return the gradient of the hidden states and add the weight's to `grad_weight_VD`. Overwrites the chunk.

    A `grad_weight_VD` of fewer columns than the weight is that of its last ones: only these are trained.
    """
    flat = targets.tokens if targets.tokens.ndim == 2 else targets.tokens[:, None]
    grad_CK = grad_logprobs.reshape(flat.shape)
    scale_C = grad_CK.sum(dim=1)
    if grad_entropy_C is not None:
        assert chunk.entropy_C is not None
        assert chunk.logp_CV is not None
        # rows of dL/dz without the one-hot part: -p (g + g_H (log p + H))
        inner_CV = chunk.logp_CV.add_(chunk.entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(scale_C[:, None])
        probs_CV = chunk.probs_CV.mul_(inner_CV)
        scale_C = torch.ones_like(scale_C)
    else:
        probs_CV = chunk.probs_CV
    if targets.temperature is not None:
        scale_C = scale_C / targets.temperature
        grad_CK = grad_CK / targets.temperature[:, None]
    if chunk.slope_CV is not None:
        probs_CV = probs_CV.mul_(chunk.slope_CV)
        grad_CK = grad_CK * chunk.slope_CV.gather(1, flat)
    if rule.scale != 1.0:
        scale_C, grad_CK = scale_C * rule.scale, grad_CK * rule.scale
    probs_CV = probs_CV.to(weight_VD.dtype)
    grad_hidden_CD = linear_backward_input(probs_CV, weight_VD).mul_(-scale_C[:, None].to(weight_VD.dtype))
    for k in range(flat.shape[1]):
        grad_hidden_CD += grad_CK[:, k, None].to(weight_VD.dtype) * weight_VD[flat[:, k]]
    if grad_weight_VD is not None:
        hidden_CD = hidden_CD[:, hidden_CD.shape[1] - grad_weight_VD.shape[1] :]
        scaled_CD = hidden_CD * -scale_C[:, None].to(hidden_CD.dtype)
        if grad_weight_VD.dtype == probs_CV.dtype:
            grad_weight_VD.addmm_(probs_CV.T, scaled_CD)
        elif probs_CV.is_cuda:  # half-precision factors, added up in the matrix units
            torch.addmm(grad_weight_VD, probs_CV.T, scaled_CD, out_dtype=grad_weight_VD.dtype, out=grad_weight_VD)
        else:
            grad_weight_VD += probs_CV.T @ scaled_CD
        for k in range(flat.shape[1]):
            grad_weight_VD.index_add_(0, flat[:, k], (grad_CK[:, k, None] * hidden_CD).to(grad_weight_VD.dtype))
    return grad_hidden_CD


def zero_gradient(weight_VD: Tensor) -> Tensor:
    """Make the buffer in which chunks add up a weight's gradient: float32 for half-precision weights."""
    half = weight_VD.dtype in (torch.bfloat16, torch.float16)
    return torch.zeros_like(weight_VD, dtype=torch.float32 if half else weight_VD.dtype)


@dataclass(frozen=True, slots=True)
class FusedOut:
    """The log-probs of all chunks, and the gradient of the loss."""

    logprobs: Tensor
    entropy_T: Tensor | None
    grad_hidden_TD: Tensor | None  # None without want_gradient


def fused_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets: Targets,
    loss: Callable[[slice, Tensor, Tensor | None], Tensor],
    *,
    want_entropy: bool,
    grad_weight_VD: Tensor | None,
    want_gradient: bool,
    chunk_tokens: int = CHUNK_TOKENS,
    rule: LogitRule = PLAIN,
) -> FusedOut:
    """Evaluate `loss(span, logprobs, entropy) -> scalar` chunk by chunk; the loss is a sum over tokens.

    `grad_weight_VD`: see `backward_chunk`.
    """
    hidden_TD, weight_VD = hidden_TD.detach(), detached(weight_VD)
    gradient = torch.empty_like(hidden_TD) if want_gradient else None
    logprobs, entropies = [], []
    for start in range(0, hidden_TD.shape[0], chunk_tokens):
        span = slice(start, start + chunk_tokens)
        part = targets.chunk(span)
        with torch.no_grad():
            chunk = read_chunk(hidden_TD[span], weight_VD, part, want_entropy=want_entropy, rule=rule)
        picked = chunk.logprobs.detach().requires_grad_(want_gradient)
        entropy = None if chunk.entropy_C is None else chunk.entropy_C.detach().requires_grad_(want_gradient)
        value = loss(span, picked, entropy)
        logprobs.append(picked.detach())
        if entropy is not None:
            entropies.append(entropy.detach())
        if gradient is None:
            continue
        leaves = [picked] if entropy is None else [picked, entropy]
        grads = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else (None,) * len(leaves)
        grad_entropy = grads[1] if entropy is not None else None
        with torch.no_grad():
            gradient[span] = backward_chunk(
                chunk,
                hidden_TD[span],
                weight_VD,
                part,
                torch.zeros_like(picked) if grads[0] is None else grads[0],
                grad_entropy,
                grad_weight_VD,
                rule,
            )
    return FusedOut(torch.cat(logprobs), torch.cat(entropies) if entropies else None, gradient)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets: Targets,
        want_entropy: bool,
        chunk_tokens: int,
        rule: LogitRule,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            span = slice(start, start + chunk_tokens)
            chunk = read_chunk(hidden_TD[span], weight_VD, targets.chunk(span), want_entropy=want_entropy, rule=rule)
            logprobs.append(chunk.logprobs)
            entropies.append(torch.zeros_like(chunk.probs_CV[:, 0]) if chunk.entropy_C is None else chunk.entropy_C)
        ctx.save_for_backward(hidden_TD, weight_VD)
        ctx.targets, ctx.want_entropy, ctx.chunk_tokens, ctx.rule = targets, want_entropy, chunk_tokens, rule
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy_T: Tensor) -> Any:
        hidden_TD, weight_VD = ctx.saved_tensors
        grad_weight = zero_gradient(weight_VD) if ctx.needs_input_grad[1] else None
        grad_hidden = torch.empty_like(hidden_TD)
        for start in range(0, hidden_TD.shape[0], ctx.chunk_tokens):
            span = slice(start, start + ctx.chunk_tokens)
            part = ctx.targets.chunk(span)
            chunk = read_chunk(hidden_TD[span], weight_VD, part, want_entropy=ctx.want_entropy, rule=ctx.rule)
            grad_hidden[span] = backward_chunk(
                chunk,
                hidden_TD[span],
                weight_VD,
                part,
                grad_logprobs[span],
                grad_entropy_T[span] if ctx.want_entropy else None,
                grad_weight,
                ctx.rule,
            )
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype), None, None, None, None


def logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets: Targets,
    *,
    want_entropy: bool = False,
    chunk_tokens: int | None = None,
    rule: LogitRule = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """Compute differentiable log-probs (shape of the targets) and, with `want_entropy`, entropies [T]."""
    chunk = chunk_tokens or default_chunk(hidden_TD.device)
    picked, entropy = _Logprobs.apply(hidden_TD, weight_VD, targets, want_entropy, chunk, rule)  # type: ignore[no-untyped-call]
    return picked, entropy if want_entropy else None
