"""Draws the reward of every training step and the held-out score of a run.

python docs/reward_curve.py RUN/metrics.jsonl docs/smollm2-reasoning.svg
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 52, 24, 40
TRAINED, FAINT, HELD_OUT = "#1f6fb4", "#d7e2ef", "#c23b22"
WINDOW = 5  # training steps averaged in the darker line


def values(records: Sequence[dict[str, float]], name: str) -> list[tuple[float, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each point as the mean of the last `WINDOW`."""
    found = []
    for index, (step, _) in enumerate(points):
        last = [value for _, value in points[max(0, index + 1 - WINDOW) : index + 1]]
        found.append((step, sum(last) / len(last)))
    return found


def picture(rewards: Sequence[tuple[float, float]], scores: Sequence[tuple[float, float]]) -> str:
    steps = max(step for step, _ in (*rewards, *scores))
    top = max(0.1, -(-max(value for _, value in (*rewards, *scores)) * 10 // 1) / 10)

    def x(step: float) -> float:
        return LEFT + step / steps * (WIDTH - LEFT - 16)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    def line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
        places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    ticks = [index / 10 for index in range(round(top * 10) + 1)]
    font = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" y1="{y(tick):.1f}" x2="{WIDTH - 16}" y2="{y(tick):.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for step in range(0, int(steps) + 1, 20):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">training step</text>')
    parts.append(line(rewards, FAINT, 1.0))
    parts.append(line(means(rewards), TRAINED, 1.8))
    parts.append(line(scores, HELD_OUT, 1.8))
    parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="4" fill="{HELD_OUT}"/>' for step, value in scores]
    parts.append(
        f'<text x="{LEFT + 10}" y="{TOP - 6}" fill="{TRAINED}">reward in training, mean of {WINDOW} steps</text>'
    )
    parts.append(f'<text x="{LEFT + 270}" y="{TOP - 6}" fill="{HELD_OUT}">held-out tasks solved</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_text(picture(values(records, "reward/mean"), values(records, "eval/pass@1")), encoding="utf-8")


if __name__ == "__main__":
    main()
