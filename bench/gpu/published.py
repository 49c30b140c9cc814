"""Print what others have published for training on one GPU beside what `long.py` measured here.

    python bench/gpu/long.py | tee long.txt && python bench/gpu/published.py long.txt

The figures are prime-rl's, from the baselines in its repository (benchmarks/baselines/*.json, read in August 2026): one
H100, the trainer alone, FlashAttention 3, torch.compile, activations recomputed. The matrix rate of an H100 and of an
H200 is the same, 989 TFLOP/s; shares are 6 N + attention operations a token over that.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Published:
    case: str  # of `long.py`
    work: str
    tokens_per_s: float | None  # None: only the share was published
    share: float


PRIME_RL = (
    Published("0.6b-16384", "Qwen3-0.6B, RL, sequences of 16,384", 11_896, 0.111),
    Published("0.6b-16384", "Qwen3-0.6B, SFT, sequences of 16,384", 25_486, 0.237),
    Published("0.6b-65536", "Qwen3-0.6B, RL, sequences of 65,536", None, 0.268),
    Published("4b-lora-16384", "Qwen3-4B, LoRA, RL, sequences of 16,384", 6_229, 0.217),
    Published("4b-lora-65536", "Qwen3-4B, LoRA, RL, sequences of 65,536", None, 0.374),
)


def rows(measured: dict[str, dict[str, float]]) -> list[str]:
    """Make the lines of a Markdown table."""
    lines = ["| work | prime-rl, one H100 | here | times, by share |", "|---|---|---|---|"]
    for one in PRIME_RL:
        theirs = f"{one.share:.1%}" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f} tok/s, {one.share:.1%}"
        ours, times = "", ""
        if found := measured.get(one.case):
            ours = f"{found['tokens_per_s']:,.0f} tok/s, {found['share']:.1%}, {found['peak_gib']:.0f} GiB"
            times = f"{found['share'] / one.share:.1f}"
        lines.append(f"| {one.work} | {theirs} | {ours} | {times} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", nargs="?", help="what long.py printed, whose last line is JSON")
    given = parser.parse_args()
    measured: dict[str, dict[str, float]] = {}
    if given.output:
        measured = json.loads(Path(given.output).read_text(encoding="utf-8").strip().splitlines()[-1])["cases"]
    print("\n".join(rows(measured)))


if __name__ == "__main__":
    main()
