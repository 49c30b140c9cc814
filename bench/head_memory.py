"""Peak memory of forward and backward through the chunked head, against full logits and torch's own cross-entropy.

    python bench/head_memory.py [--tokens 2048] [--vocabulary 49152] [--width 256]

Each way runs in a process of its own and reports the growth of its resident memory's peak over what it held before
(weights and hidden states). Both compute the same loss and gradients, which is checked. `ratio` is plain / ours.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from headrace.model.head import Targets, fused_loss, logprobs

WAYS = ("plain", "fused", "whole")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(way: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """One forward and backward; the gradient's size goes along, so that two ways can be compared."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    small = (hidden[:8].detach() @ weight[:8].detach().T).sum()  # the library's own workspace is not counted
    assert torch.isfinite(small)
    before, start = peak_bytes(), time.perf_counter()
    if way == "plain":
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()
        gradients = (hidden.grad, weight.grad)
    elif way == "whole":
        picked, _ = logprobs(hidden, weight, Targets(targets))
        (-picked.sum()).backward()
        gradients = (hidden.grad, weight.grad)
    else:
        grad_weight = torch.zeros_like(weight)
        out = fused_loss(
            hidden,
            weight,
            Targets(targets),
            lambda span, picked, entropy: -picked.sum(),
            want_entropy=False,
            grad_weight_VD=grad_weight,
            want_gradient=True,
        )
        gradients = (out.grad_hidden_TD, grad_weight)
    seconds, grown = time.perf_counter() - start, peak_bytes() - before
    norms = [float(torch.linalg.vector_norm(gradient)) for gradient in gradients if gradient is not None]
    return {"mib": grown / 2**20, "seconds": seconds, "norm_hidden": norms[0], "norm_weight": norms[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process, and print its numbers")
    options = parser.parse_args()
    shape = (options.tokens, options.vocabulary, options.width)
    if options.way:
        print(json.dumps(measure(options.way, *shape)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way]
        command += [f"--{name}={value}" for name, value in zip(("tokens", "vocabulary", "width"), shape, strict=True)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    print(f"{shape[0]} tokens, vocabulary {shape[1]}, width {shape[2]}, float32, one thread")
    print(f"the weight's gradient alone: {shape[1] * shape[2] * 4 / 2**20:.0f} MiB")
    for way, label in zip(WAYS, ("plain, full logits", "ours, loss in chunks", "ours, log-probs"), strict=True):
        print(f"{label:<22}{found[way]['mib']:>8.0f} MiB{found[way]['seconds']:>8.2f} s")
    for name in ("norm_hidden", "norm_weight"):
        assert all(abs(found[way][name] / found["plain"][name] - 1) < 1e-4 for way in WAYS), f"{name} differs"
    print(
        json.dumps(
            {
                "bench": "head_memory",
                "peak_mib": {way: round(found[way]["mib"]) for way in WAYS},
                "seconds": {way: round(found[way]["seconds"], 2) for way in WAYS},
                "ratio_whole": round(found["plain"]["mib"] / found["whole"]["mib"], 2),
                "ratio": round(found["plain"]["mib"] / found["fused"]["mib"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
