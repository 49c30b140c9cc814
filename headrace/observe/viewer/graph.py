"""Lay out the states of a group as a graph: nodes are anchor states, edges the actions between them. Pure.

Layers go from left to right by the fewest actions that lead to a state; within a layer, states are placed near those
they are reached from. The same episodes give the same picture.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.observe.rollouts.records import EpisodeRecord
from headrace.observe.viewer.anchors import AnchorVisit, visit
from headrace.observe.viewer.catalog import finite_mean
from headrace.observe.viewer.safe_text import figure, is_dust, one_line, short_key, times

SOLVED, ENDED = "\x00solved", "\x00ended"  # where an episode's last action leads
MAX_NODES = 40
WIDTH, HEIGHT = 132, 44  # of a node
STRIDE_X, STRIDE_Y, MARGIN_X, MARGIN_Y = 262, 108, 14, 62  # a loop above a node has a label of two lines
LABEL, LABEL_WIDTH = 14, 124
SWEEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A state, or an end of episodes."""

    key: str
    kind: str  # state, start, solved or ended
    title: str
    note: str
    visits: int
    tone: int  # 0 to 4 by mean return; -1 if it is not known
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The actions that led from one state to another."""

    source: str
    target: str
    path: str
    thickness: float
    tone: int  # -3 to 3 by mean advantage
    labels: tuple[str, ...]
    label_x: float
    label_y: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A layout, in pixels."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float
    left_out: int  # states that are not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The visits that led from one state to another."""

    source: str
    target: str
    visits: tuple[AnchorVisit, ...]


def state_graph(lines: Sequence[EpisodeRecord], *, max_nodes: int = MAX_NODES) -> Graph | None:
    """Lay out the graph of a group's episodes; returns None if no step has an anchor key."""
    moves = transitions(lines)
    visited = Counter(step.anchor for line in lines for step in line.steps if step.anchor is not None)
    if not visited:
        return None
    starts = dict.fromkeys(line.steps[0].anchor for line in lines if line.steps and line.steps[0].anchor is not None)
    drawn = set(starts) | {key for key, _ in visited.most_common(max_nodes)}
    moves = [
        move for move in moves if move.source in drawn and (move.target in drawn or move.target in (SOLVED, ENDED))
    ]
    layers = _ordered(_layers(list(starts), [key for key in visited if key in drawn], moves), moves)
    places = _places(layers)
    returns: dict[str, list[float]] = defaultdict(list)
    for move in transitions(lines):
        returns[move.source] += [step.returns for step in move.visits if step.returns is not None]
    nodes = tuple(
        _node(key, places[key], visited, returns, starts, moves) for layer in layers for key in layer if key in places
    )
    edges = _spread([_edge(move, places) for move in moves])
    low = max((edge.label_y + LABEL * len(edge.labels) for edge in edges), default=0.0)
    return Graph(
        nodes=nodes,
        edges=edges,
        width=max(x for x, _ in places.values()) + WIDTH + MARGIN_X + 6,
        height=max(*(y + HEIGHT + MARGIN_Y for _, y in places.values()), low + 8),
        left_out=len(visited) - sum(node.kind in ("state", "start") for node in nodes),
    )


def transitions(lines: Sequence[EpisodeRecord]) -> list[Transition]:
    """Collect the steps from each state to each next state, in the order they first occur.

    A step is left out if its key or its successor's is missing; the last step leads to the end of its episode.
    """
    steps: dict[tuple[str, str], list[AnchorVisit]] = defaultdict(list)
    for line in lines:
        for index, step in enumerate(line.steps):
            last = index + 1 == len(line.steps)
            target = (SOLVED if line.verdict else ENDED) if last else line.steps[index + 1].anchor
            if step.anchor is not None and target is not None:
                steps[step.anchor, target].append(visit(line, index))
    return [Transition(source=a, target=b, visits=tuple(visits)) for (a, b), visits in steps.items()]


# --- layout ----------------------------------------------------------------------------------------------------------


def _layers(starts: Sequence[str], keys: Sequence[str], moves: Sequence[Transition]) -> list[list[str]]:
    """Layer states breadth first from the starts; states that no drawn edge reaches go one layer after the starts."""
    after: dict[str, list[str]] = defaultdict(list)
    for move in moves:
        after[move.source].append(move.target)
    depth = dict.fromkeys(starts, 0)
    queue = list(starts)
    for key in queue:
        for target in after[key]:
            if target not in depth and target not in (SOLVED, ENDED):
                depth[target] = depth[key] + 1
                queue.append(target)
    for key in keys:
        depth.setdefault(key, 1)
    last = max(depth.values()) + 1
    for end in (SOLVED, ENDED):
        if any(move.target == end for move in moves):
            depth[end] = last
    layers: list[list[str]] = [[] for _ in range(last + 1)]
    for key, level in depth.items():
        layers[level].append(key)
    return [layer for layer in layers if layer]


def _ordered(layers: list[list[str]], moves: Sequence[Transition]) -> list[list[str]]:
    """Order each layer by sweeps to and fro, each moving a state to the mean height of its neighbours before it."""
    near: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for move in moves:
        if move.source != move.target:
            near[move.source].append((move.target, len(move.visits)))
            near[move.target].append((move.source, len(move.visits)))
    level = {key: number for number, layer in enumerate(layers) for key in layer}
    height = {key: row - (len(layer) - 1) / 2 for layer in layers for row, key in enumerate(layer)}
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        for number in range(len(layers)) if forward else reversed(range(len(layers))):
            fixed = {key for key, layer in level.items() if (layer < number) == forward and layer != number}
            wishes = {key: _pulled(near[key], fixed, height, height[key]) for key in layers[number]}
            layers[number] = sorted(layers[number], key=wishes.__getitem__)
            height |= {key: row - (len(layers[number]) - 1) / 2 for row, key in enumerate(layers[number])}
    return layers


def _pulled(near: Sequence[tuple[str, int]], fixed: set[str], height: Mapping[str, float], otherwise: float) -> float:
    pulls = [(height[other], count) for other, count in near if other in fixed]
    total = sum(count for _, count in pulls)
    return sum(at * count for at, count in pulls) / total if total else otherwise


def _places(layers: Sequence[Sequence[str]]) -> dict[str, tuple[float, float]]:
    tallest = max(len(layer) for layer in layers)
    return {
        key: (MARGIN_X + STRIDE_X * level, MARGIN_Y + STRIDE_Y * (row + (tallest - len(layer)) / 2))
        for level, layer in enumerate(layers)
        for row, key in enumerate(layer)
    }


def _node(
    key: str,
    place: tuple[float, float],
    visited: Mapping[str, int],
    returns: Mapping[str, Sequence[float]],
    starts: Mapping[str, None],
    moves: Sequence[Transition],
) -> Node:
    x, y = place
    if key in (SOLVED, ENDED):
        kind, title = ("solved", "solved") if key == SOLVED else ("ended", "not solved")
        count = sum(len(move.visits) for move in moves if move.target == key)
        return Node(key=key, kind=kind, title=title, note=times(count, "episode"), visits=count, tone=-1, x=x, y=y)
    mean = finite_mean(list(returns.get(key, ())))
    means = [value for values in returns.values() if (value := finite_mean(list(values))) is not None]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return Node(
        key=key,
        kind="start" if key in starts else "state",
        title=short_key(key, 17),
        note=times(visited[key], "visit") + ("" if mean is None else f" · G {figure(mean)}"),
        visits=visited[key],
        tone=-1 if mean is None else 0 if high == low else round(4 * (mean - low) / (high - low)),
        x=x,
        y=y,
    )


# --- edges -----------------------------------------------------------------------------------------------------------


def _edge(move: Transition, places: Mapping[str, tuple[float, float]]) -> Edge:
    (x1, y1), (x2, y2) = places[move.source], places[move.target]
    path, label_x, label_y = _curve(x1, y1, x2, y2)
    labels = _labels(move)
    if move.source == move.target:
        label_y -= LABEL * (len(labels) - 1)
    mean = finite_mean([step.advantage for step in move.visits if step.advantage is not None])
    return Edge(
        source=move.source,
        target=move.target,
        path=path,
        thickness=min(1.2 + 0.55 * len(move.visits), 6.0),
        tone=0 if mean is None else advantage_tone(mean),
        labels=labels,
        label_x=label_x,
        label_y=label_y,
        title=_edge_title(move),
    )


def advantage_tone(value: float) -> int:
    """Rate an advantage from -3 to 3; 0 for none.

    >>> [advantage_tone(value) for value in (0.0, 1e-16, 0.01, 0.5, 1.5, -9.0)]
    [0, 0, 1, 2, 3, -3]
    """
    size = 0 if is_dust(value) or value != value else 1 if abs(value) < 0.5 else 2 if abs(value) < 1.5 else 3
    return size if value > 0 else -size


def _curve(x1: float, y1: float, x2: float, y2: float) -> tuple[str, float, float]:
    """Draw an edge and place its label: to the right forwards, below backwards, above a node for a loop."""
    mid = HEIGHT / 2
    if (x1, y1) == (x2, y2):
        left, right, top = x1 + WIDTH * 0.3, x1 + WIDTH * 0.7, y1 - 34
        path = f"M{left:g} {y1:g}C{left - 12:g} {top:g} {right + 12:g} {top:g} {right:g} {y1:g}"
        return path, x1 + WIDTH / 2, y1 - 31
    if x2 > x1:
        ax, ay, bx, by = x1 + WIDTH, y1 + mid, x2, y2 + mid
        bend = (bx - ax) * 0.45
        return f"M{ax:g} {ay:g}C{ax + bend:g} {ay:g} {bx - bend:g} {by:g} {bx:g} {by:g}", (ax + bx) / 2, (ay + by) / 2
    if x1 == x2:
        ax, ay, by = x1 + WIDTH, y1 + mid, y2 + mid
        return f"M{ax:g} {ay:g}C{ax + 46:g} {ay:g} {ax + 46:g} {by:g} {ax:g} {by:g}", ax + 62, (ay + by) / 2
    ax, bx, low = x1 + WIDTH / 2, x2 + WIDTH / 2, max(y1, y2) + HEIGHT + 34
    return (
        f"M{ax:g} {y1 + HEIGHT:g}C{ax - 20:g} {low + 14:g} {bx + 20:g} {low + 14:g} {bx:g} {y2 + HEIGHT:g}",
        (ax + bx) / 2,
        (y1 + y2) / 2 + HEIGHT + 32,
    )


def _labels(move: Transition) -> tuple[str, ...]:
    """Label an edge with the two most frequent actions, their counts, the mean return, and the number of others."""
    actions = Counter(step.brief for step in move.visits)
    ranked = sorted(actions.items(), key=lambda item: (-item[1], item[0]))
    labels = [f"{one_line(action or '(nothing)', 15)} ×{count}" for action, count in ranked[:2]]
    if len(ranked) > 2:
        labels[-1] = f"+ {len(ranked) - 1} more actions"
    mean = finite_mean([step.returns for step in move.visits if step.returns is not None])
    return tuple(labels) if mean is None else (*labels[:-1], f"{labels[-1]} · {figure(mean)}")


def _edge_title(move: Transition) -> str:
    by_action: dict[str, list[AnchorVisit]] = defaultdict(list)
    for step in move.visits:
        by_action[step.action].append(step)
    lines = []
    for action, visits in sorted(by_action.items(), key=lambda item: (-len(item[1]), item[0]))[:12]:
        mean = finite_mean([step.returns for step in visits if step.returns is not None])
        lines.append(f"{one_line(action, 60)}: {times(len(visits), 'time')}, mean return {figure(mean)}")
    return "\n".join(lines)


def _spread(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """Move labels down where they would overlap, from the top."""
    placed: list[tuple[float, float, int]] = []
    moved: dict[int, float] = {}
    for number in sorted(range(len(edges)), key=lambda k: (edges[k].label_y, edges[k].label_x, k)):
        edge, y = edges[number], edges[number].label_y
        for _ in range(60):
            end = y + LABEL * len(edge.labels)
            beside = [(top, top + LABEL * lines) for x, top, lines in placed if abs(x - edge.label_x) < LABEL_WIDTH]
            if not any(top < end and y < bottom for top, bottom in beside):
                break
            y += LABEL / 2
        placed.append((edge.label_x, y, len(edge.labels)))
        moved[number] = y
    return tuple(replace(edge, label_y=moved[number]) for number, edge in enumerate(edges))
