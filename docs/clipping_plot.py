"""Draws docs/clipping.svg: the gradient each policy loss gives a token, as a function of its ratio.

    python docs/clipping_plot.py

The curves are read off the losses themselves: -dL / d(log pi) for one token of weight 1 with advantage +1 or -1.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from headrace.algo.losses import LOSSES

PANELS: tuple[tuple[str, str, Mapping[str, float]], ...] = (
    ("importance_sampling", "importance_sampling", {}),
    ("ppo", "ppo, 0.2 / 0.28", {"clip_low": 0.2, "clip_high": 0.28}),
    ("ppo", "ppo, dual_clip 1.6", {"dual_clip": 1.6}),
    ("cispo", "cispo, ratio_high 1.5", {"ratio_high": 1.5}),
    ("mis", "mis, cap 1.5", {"cap": 1.5}),
    ("icepop", "icepop, 0.5 to 1.5", {"floor": 0.5, "cap": 1.5}),
    ("sapo", "sapo, tau 3 / 4", {"tau_pos": 3.0, "tau_neg": 4.0}),
    ("dro", "dro, beta 1", {"beta": 1.0}),
)
WIDTH, HEIGHT, GAP, TOP = 220, 150, 24, 34
LOW, HIGH, SPAN = 0.05, 2.2, 2.3  # ratios shown, and the largest |gradient| shown
COLUMNS = 4


def pushes(name: str, numbers: Mapping[str, float], advantage: float, ratio_N: torch.Tensor) -> torch.Tensor:
    sampler_N = torch.full_like(ratio_N, -1.0)
    policy_N = (sampler_N + ratio_N.log()).requires_grad_()
    ones_N = torch.ones_like(ratio_N)
    LOSSES[name](policy_N, sampler_N, advantage * ones_N, ones_N, **numbers).loss.backward()
    assert policy_N.grad is not None
    return -policy_N.grad


def panel(name: str, title: str, numbers: Mapping[str, float], left: float, top: float) -> list[str]:
    def x(ratio: float) -> float:
        return left + (ratio - LOW) / (HIGH - LOW) * WIDTH

    def y(push: float) -> float:
        return top + HEIGHT / 2 - max(-SPAN, min(SPAN, push)) / SPAN * HEIGHT / 2

    ratio_N = torch.linspace(LOW, HIGH, 431, dtype=torch.float64)
    parts = [
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<line x1="{left}" y1="{y(0):.1f}" x2="{left + WIDTH}" y2="{y(0):.1f}" stroke="#ccc"/>',
        f'<line x1="{x(1):.1f}" y1="{top}" x2="{x(1):.1f}" y2="{top + HEIGHT}" stroke="#ccc" stroke-dasharray="3 3"/>',
        f'<text x="{left + 4}" y="{top - 6}">{title}</text>',
        f'<text x="{x(1) - 14:.1f}" y="{top + HEIGHT + 13}" fill="#666">r = 1</text>',
    ]
    for advantage, colour in ((1.0, "#1f6fb4"), (-1.0, "#c23b22")):
        push_N = pushes(name, numbers, advantage, ratio_N)
        points = " ".join(f"{x(r):.1f},{y(p):.1f}" for r, p in zip(ratio_N.tolist(), push_N.tolist(), strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return parts


def main() -> None:
    rows = -(-len(PANELS) // COLUMNS)
    width = COLUMNS * (WIDTH + GAP) + GAP
    height = rows * (HEIGHT + TOP + GAP) + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{GAP}" y="20">Push on log pi of one token against its ratio r = policy / sampler: '
        '<tspan fill="#1f6fb4">advantage +1</tspan>, <tspan fill="#c23b22">advantage -1</tspan></text>',
    ]
    for index, (name, title, numbers) in enumerate(PANELS):
        row, column = divmod(index, COLUMNS)
        parts += panel(name, title, numbers, GAP + column * (WIDTH + GAP), GAP + TOP - 10 + row * (HEIGHT + TOP + GAP))
    (Path(__file__).parent / "clipping.svg").write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
