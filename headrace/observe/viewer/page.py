"""Write rollouts as one self-contained page: episodes side by side, steps, tokens, the state graph and the anchors.

Everything is in the HTML, escaped by the template; the script only chooses what is visible. A content security policy
allows no other script and no requests.
"""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from headrace.observe.rollouts.picture_files import ShownPictures, shown_content
from headrace.observe.rollouts.records import EpisodeRecord, MessageRecord, StepRecord
from headrace.observe.viewer.anchors import Anchor, Choice, anchors
from headrace.observe.viewer.catalog import Catalog, finite_mean, group_of, method_text
from headrace.observe.viewer.graph import Graph, advantage_tone, state_graph
from headrace.observe.viewer.safe_text import figure, one_line, short_key
from headrace.observe.viewer.task_text import action_text, asked, call_text, expected, step_calls
from headrace.observe.viewer.task_text import question as question_of_line
from headrace.observe.viewer.tokens import LEGEND, ColorBy, Pieces, Token, tokens_of, tone
from headrace.printable import visible

MAX_EPISODES = 96
MAX_TOKENS = 120_000  # of a page; beyond it steps are shown as text
MAX_CHARACTERS = 6000
STRIP = 220  # width of the line on which returns are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class PageToken:
    """A token as the template shows it."""

    text: str
    tones: str  # CSS classes, one for each way of colouring
    tip: str  # shown under the pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStep:
    slug: str
    index: int
    state: str
    key: str | None
    anchor_slug: str | None
    observation: tuple[MessageRecord, ...]  # since the turn before
    action: str
    brief: str
    valid: bool
    figures: tuple[tuple[str, str, str], ...]  # name, text, tone
    tone: str
    advantage: str
    step_tone: str  # of A_S
    step_advantage: str
    num_sampled: int
    logprob: str
    tokens: tuple[PageToken, ...] | None
    notes: tuple[tuple[str, str], ...]  # (reward, what it said of the step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEpisode:
    slug: str
    id: str
    verdict: str  # good, bad or plain
    badges: tuple[tuple[str, str], ...]
    total: str
    episode_advantage: str
    episode_tone: str
    facts: tuple[tuple[str, str], ...]
    worth: str  # V where a critic gave the advantages, else G
    steps: tuple[PageStep, ...]
    after: tuple[MessageRecord, ...]
    failed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChoice:
    action: str
    times: int
    figures: tuple[tuple[str, str], ...]  # text, tone
    dots: tuple[tuple[float, float, str, str, str], ...]  # place along the line and across it, tone, link, tip


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnchor:
    slug: str
    key: str
    visits: int
    episodes: int
    mean: str
    low: str
    high: str
    choices: tuple[PageChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    slug: str
    id: str
    task: str
    asked: str  # the task's question; "" if its environment asks
    expected: str  # "" if the task has no answer
    solved: int
    mean: str
    episodes: tuple[PageEpisode, ...]
    longest: int
    graph: Graph | None
    anchors: tuple[PageAnchor, ...]
    lonely: int  # states that were visited once
    slugs: dict[str, str]  # of anchor cards by key


def page(catalog: Catalog, lines: Sequence[EpisodeRecord], pieces: Pieces, *, ids_only: bool = False) -> str:
    """Render the page; pure but for reading the template beside this file. `ids_only`: token texts are their ids."""
    package = files("headrace.observe.viewer")
    script = (package / "view.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    environment.filters["as_call"] = call_text
    shown = ShownPictures()
    environment.filters["picture"] = lambda name: shown.uri(catalog.path.parent, name)
    environment.filters["shown_text"] = _shown_text
    played = [summary for summary in catalog.summaries if summary.failed is None]
    budget = TokenBudget(MAX_TOKENS)
    grouped: dict[str, list[EpisodeRecord]] = {}
    for line in lines:
        grouped.setdefault(group_of(line), []).append(line)
    return environment.from_string((package / "view.html").read_text(encoding="utf-8")).render(
        name=visible(catalog.run or catalog.path.name),
        step=catalog.training_step,
        facts=_facts(catalog),
        groups=[_group(number, id, members, pieces, budget) for number, (id, members) in enumerate(grouped.items())],
        left_out=len(catalog.summaries) - len(lines),
        has_tokens=any(not summary.lean for summary in played),
        without_tokens=budget.refused,
        ids_only=ids_only,
        legend=LEGEND,
        bys=list(ColorBy),
        style=Markup((package / "view.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        strip=STRIP,
        has_pictures=any(message.images for line in lines for message in line.messages),
    )


def _shown_text(message: MessageRecord) -> str:
    return shown_content(message)[:MAX_CHARACTERS]


class TokenBudget:
    """Counts the tokens that a page may still have."""

    def __init__(self, left: int) -> None:
        self.left, self.refused = left, False

    def take(self, count: int) -> bool:
        """Use up `count` tokens; returns False if there are fewer left."""
        if count > self.left:
            self.refused = True
            return False
        self.left -= count
        return True


def _facts(catalog: Catalog) -> list[tuple[str, str]]:
    played = [summary for summary in catalog.summaries if summary.failed is None]
    judged = [summary.success for summary in played if summary.success is not None]
    facts = [("episodes", str(len(catalog.summaries))), ("groups", str(len(catalog.groups)))]
    if judged:
        facts.append(("solved", f"{100 * sum(judged) / len(judged):.0f}%"))
    facts.append(("mean reward", figure(finite_mean([summary.total for summary in played]))))
    failed = len(catalog.summaries) - len(played)
    if failed:
        facts.append(("failed", str(failed)))
    return [*facts, ("credit", method_text(catalog.method))]


def _group(number: int, id: str, lines: Sequence[EpisodeRecord], pieces: Pieces, budget: TokenBudget) -> PageGroup:
    played = [line for line in lines if line.failed is None]
    states = anchors(played)
    shared = sorted((anchor for anchor in states if len(anchor.visits) > 1), key=lambda anchor: -len(anchor.visits))
    slugs = {anchor.key: f"a-{number}-{place}" for place, anchor in enumerate(shared)}
    at = {line.id: f"e-{number}-{place}" for place, line in enumerate(lines)}
    episodes = tuple(_episode(at[line.id], line, slugs, pieces, budget) for line in lines)
    task = lines[0].task
    question = asked(task) or (question_of_line(lines[0]) if expected(task) else "")
    return PageGroup(
        slug=f"g-{number}",
        id=visible(id),
        task=visible(task.id),
        asked=visible(question[:MAX_CHARACTERS]),
        expected=visible(expected(task)[:MAX_CHARACTERS]),
        solved=sum(bool(line.verdict) for line in played),
        mean=figure(finite_mean([line.reward.total for line in played])),
        episodes=episodes,
        longest=max((len(line.steps) for line in lines), default=0),
        graph=state_graph(played),
        anchors=tuple(_anchor(slugs[anchor.key], anchor, at) for anchor in shared),
        lonely=len(states) - len(shared),
        slugs=slugs,
    )


# --- an episode ------------------------------------------------------------------------------------------------------


def _episode(slug: str, line: EpisodeRecord, slugs: dict[str, str], pieces: Pieces, budget: TokenBudget) -> PageEpisode:
    turns, after = conversation(line)
    with_tokens = not line.lean and budget.take(sum(step.num_prompt + step.num_sampled for step in line.steps[-1:]))
    tokens: Sequence[Sequence[Token]] | None = tokens_of(line, pieces) if with_tokens else None
    steps = tuple(
        _step(f"{slug}-{index}", index, line, messages, slugs, None if tokens is None else tokens[index])
        for index, messages in enumerate(turns)
    )
    verdict = {True: "good", False: "bad", None: "plain"}[line.verdict]
    badges = [(verdict, {True: "solved", False: "not solved", None: "no verdict"}[line.verdict])]
    if line.truncated:
        badges.append(("warn", "cut off"))
    if line.failed is not None:
        verdict, badges = "warn", [("warn", "failed")]
    credit = line.steps[0].credit if line.steps else None
    episode_advantage = None if credit is None else credit.A_E
    return PageEpisode(
        slug=slug,
        id=visible(line.id),
        verdict=verdict,
        badges=tuple(badges),
        total=figure(line.reward.total),
        episode_advantage=figure(episode_advantage, sign=True),
        episode_tone=_tone(episode_advantage),
        facts=tuple(_episode_facts(line)),
        worth="V" if line.by_critic else "G",
        steps=steps,
        after=after,
        failed=None if line.failed is None else visible(line.failed),
    )


def conversation(line: EpisodeRecord) -> tuple[list[tuple[MessageRecord, ...]], tuple[MessageRecord, ...]]:
    """Split the messages by step: those since the turn before it, and those after the last.

    The last assistant messages are the policy's; if there are fewer than steps, the first steps get no messages.
    """
    assistant = [place for place, message in enumerate(line.messages) if message.role == "assistant"]
    turns = assistant[max(0, len(assistant) - len(line.steps)) :]
    missing = len(line.steps) - len(turns)
    starts = [0, *(place + 1 for place in turns)]
    between = [line.messages[start:end] for start, end in zip(starts, turns, strict=False)]
    return [*[()] * missing, *between], line.messages[starts[-1] :]


def _step(
    slug: str,
    index: int,
    line: EpisodeRecord,
    messages: tuple[MessageRecord, ...],
    slugs: dict[str, str],
    tokens: Sequence[Token] | None,
) -> PageStep:
    step = line.steps[index]
    credit, key = step.credit, step.anchor
    advantage, step_advantage = (None, None) if credit is None else (credit.A, credit.A_S)
    return PageStep(
        slug=slug,
        index=index,
        state=short_key(key, 28),
        key=None if key is None else visible(key),
        anchor_slug=None if key is None else slugs.get(key),
        observation=messages,
        action=visible(("\n".join(step_calls(line, index)) or step.action.strip())[:MAX_CHARACTERS]) or "(nothing)",
        brief=one_line(action_text(line, index), 60) or "(nothing)",
        valid=step.valid,
        figures=tuple(_step_figures(line, index, step)),
        tone=_tone(advantage),
        advantage=figure(advantage, sign=True),
        step_tone="" if step_advantage is None else f"s{advantage_tone(step_advantage)}",
        step_advantage=figure(step_advantage, sign=True),
        num_sampled=step.num_sampled,
        logprob=figure(step.logprob),
        tokens=None if tokens is None else tuple(map(_token, tokens)),
        notes=tuple((one_line(note.term or "reward", 30), visible(note.text)) for note in line.reward.notes_of(index)),
    )


def _step_figures(line: EpisodeRecord, index: int, step: StepRecord) -> list[tuple[str, str, str]]:
    credit = step.credit
    peers = "–" if credit is None or credit.peers is None else str(credit.peers)
    return [
        ("r", figure(line.step_rewards[index]), ""),
        ("V", figure(None if credit is None else credit.V), "")
        if line.by_critic
        else ("G", figure(None if credit is None else credit.G), ""),
        (
            "A_E",
            figure(None if credit is None else credit.A_E, sign=True),
            _tone(None if credit is None else credit.A_E),
        ),
        (
            "A_S",
            figure(None if credit is None else credit.A_S, sign=True),
            _tone(None if credit is None else credit.A_S),
        ),
        ("A", figure(None if credit is None else credit.A, sign=True), _tone(None if credit is None else credit.A)),
        ("peers", peers, ""),
    ]


def _episode_facts(line: EpisodeRecord) -> list[tuple[str, str]]:
    facts = [(one_line(name, 30), figure(value)) for name, value in line.reward.parts.items()]
    facts = facts if len(facts) > 1 else []
    facts.append(("steps", str(len(line.steps))))
    facts.append(("tokens", str(sum(step.num_sampled for step in line.steps))))
    facts.append(("log-prob", figure(sum(step.logprob for step in line.steps))))
    if line.ended is not None:
        facts.append(("ended by", line.ended.value.replace("_", " ")))
    if line.versions is not None:
        head, tail = line.versions
        facts.append(("version", str(head) if head == tail else f"{head} to {tail}"))
    facts += [
        (f"said by {one_line(note.term or 'reward', 30)}", one_line(note.text, 500))
        for note in line.reward.notes_of(None)
    ]
    if line.reward.printed:
        facts.append(("printed", one_line(line.reward.printed, 500)))
    return [*facts, ("temperature", figure(line.temperature)), ("seed", str(line.seed))]


def _token(token: Token) -> PageToken:
    if not token.sampled:
        return PageToken(text=visible(token.text), tones="m0", tip="prompt")
    tones = " ".join(filter(None, (tone(token, by) for by in ColorBy)))
    tip = f"log-prob {figure(token.logprob)} · A {figure(token.advantage, sign=True)} · version {token.version}"
    return PageToken(text=visible(token.text), tones=tones, tip=tip)


def _tone(value: float | None) -> str:
    return "" if value is None else f"a{advantage_tone(value)}"


# --- an anchor -------------------------------------------------------------------------------------------------------


def _anchor(slug: str, anchor: Anchor, at: dict[str, str]) -> PageAnchor:
    returns = [visit.returns for visit in anchor.visits if visit.returns is not None and math.isfinite(visit.returns)]
    low, high = min(returns, default=0.0), max(returns, default=0.0)
    return PageAnchor(
        slug=slug,
        key=visible(anchor.key),
        visits=len(anchor.visits),
        episodes=anchor.num_episodes,
        mean=figure(anchor.mean_return),
        low=figure(low),
        high=figure(high),
        choices=tuple(_choice(choice, at, low, high) for choice in anchor.choices[:24]),
    )


def _choice(choice: Choice, at: dict[str, str], low: float, high: float) -> PageChoice:
    dots = []
    taken: Counter[int] = Counter()  # dots near a place of the line: they are stacked
    for visit in choice.visits:
        if visit.returns is None or not math.isfinite(visit.returns):
            continue
        x = 8 + (STRIP - 16) * (0.5 if high == low else (visit.returns - low) / (high - low))
        y = 13 + (0, -7, 7)[taken[round(x / 6)] % 3]
        taken[round(x / 6)] += 1
        tip = f"episode {visible(visit.episode)}, step {visit.index}: return {figure(visit.returns)}"
        dots.append((round(x, 1), y, _tone(visit.advantage), f"{at[visit.episode]}-{visit.index}", tip))
    return PageChoice(
        action=one_line(choice.action, 120) or "(nothing)",
        times=len(choice.visits),
        figures=(
            (figure(choice.mean_return), ""),
            (figure(choice.mean_step_advantage, sign=True), _tone(choice.mean_step_advantage)),
            (figure(choice.mean_advantage, sign=True), _tone(choice.mean_advantage)),
        ),
        dots=tuple(dots),
    )
