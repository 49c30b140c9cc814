"""Format rollouts for a terminal: tables of groups, episodes, steps and anchor states, and coloured tokens.

Returns renderables of rich; reads no file. Text of models is never taken as markup.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.observe.rollouts.records import EpisodeRecord, NoteRecord
from headrace.observe.viewer.anchors import Anchor
from headrace.observe.viewer.catalog import Catalog, EpisodeSummary, method_text
from headrace.observe.viewer.safe_text import figure, one_line, short_key, span, times
from headrace.observe.viewer.task_text import action_text, asked, expected
from headrace.observe.viewer.tokens import LEGEND, ColorBy, Token, tone
from headrace.printable import visible

MAX_TEXT = 2000  # characters of a question or an answer
_BACKGROUNDS = {  # of tones; the text is white on them, on dark and light terminals alike
    "l1": "#1f4e5f",
    "l2": "#7a5c00",
    "l3": "#a34400",
    "l4": "#b3261e",
    "a-3": "#a3271f",
    "a-2": "#7d2a25",
    "a-1": "#4f2421",
    "a1": "#173a2a",
    "a2": "#14593b",
    "a3": "#0b7a4b",
    "m1": "#0a5a6b",
    "v0": "#0a5a6b",
    "v1": "#5b3fa8",
    "v2": "#8a5a00",
    "v3": "#14593b",
    "v4": "#8a2a63",
    "v5": "#4a5560",
}
STYLES = {name: f"#ffffff on {colour}" for name, colour in _BACKGROUNDS.items()} | {"a0": "dim", "m0": "dim"}


def heading(catalog: Catalog) -> Text:
    """Describe the file in one line."""
    contents = f"{times(len(catalog.summaries), 'episode')} in {times(len(catalog.groups), 'group')}"
    parts = [contents, f"credit {method_text(catalog.method)}"]
    if catalog.training_step is not None:
        parts.insert(0, f"training step {catalog.training_step}")
    if any(summary.lean for summary in catalog.summaries):
        parts.append("lean: without tokens")
    if catalog.other_steps:
        parts.append(f"also in this file: training steps {', '.join(map(str, catalog.other_steps))} (--step)")
    return Text(f"{visible(str(catalog.path))}\n", style="bold").append(" · ".join(parts), style="not bold")


def overview(catalog: Catalog) -> Table:
    """Tabulate the groups of a file."""
    table = _table("group", "task", "episodes", "solved", "R", "steps", "A", "compared steps", right=(0, 2, 3, 5, 7))
    for group in catalog.groups:
        summaries = catalog.of_group(group)
        played = [summary for summary in summaries if summary.failed is None]
        totals = [summary.total for summary in played]
        steps = sum(summary.num_steps for summary in played)
        compared = sum(summary.num_compared for summary in played)
        ranges = [summary.advantages for summary in played if summary.advantages is not None]
        failed = len(summaries) - len(played)
        table.add_row(
            _text(group),
            _text(_task(summaries[0])),
            f"{_of_size(played)}{f' + {failed} failed' if failed else ''}",
            f"{sum(bool(summary.success) for summary in played)}",
            span(min(totals), max(totals)) if totals else "–",
            figure(steps / len(played)) if played else "–",
            _tinted(span(min(low for low, _ in ranges), max(high for _, high in ranges), sign=True)) if ranges else "–",
            f"{100 * compared / steps:.0f}%" if steps and ranges else "–",
        )
    return table


def group_table(summaries: Sequence[EpisodeSummary]) -> Group:
    """Tabulate the episodes of a group."""
    table = _table("episode", "verdict", "R", "steps", "tokens", "A_E", "A", right=(2, 3, 4, 5, 6))
    title = f"group {visible(summaries[0].group)}, task {one_line(summaries[0].task, 80)}"
    for summary in summaries:
        if summary.failed is not None:
            table.add_row(
                _text(summary.id), Text("failed", style="yellow"), _text(one_line(summary.failed, 60)), *["–"] * 4
            )
            continue
        table.add_row(
            _text(summary.id),
            _verdict(summary.success, summary.truncated),
            figure(summary.total),
            str(summary.num_steps),
            str(summary.num_sampled),
            _signed(summary.episode_advantage),
            _tinted(span(*summary.advantages, sign=True)) if summary.advantages else "–",
        )
    return Group(Text(title, style="bold"), *_asked(summaries[0].asked, summaries[0].expected), table)


def episode_table(line: EpisodeRecord, *, action_width: int = 44) -> Group:
    """Tabulate the steps of an episode: state, action, and the parts of the advantage."""
    columns = ("step", "state", "action", "reward", "V" if line.by_critic else "G", "A_E", "A_S", "A", "peers")
    table = _table(*columns, right=(0, 3, 4, 5, 6, 7, 8))
    for index, step in enumerate(line.steps):
        credit = step.credit
        table.add_row(
            str(index),
            _text(short_key(step.anchor, 24)),
            _action(line, index, action_width),
            figure(line.step_rewards[index]),
            figure(None if credit is None else credit.V if line.by_critic else credit.G),
            _signed(None if credit is None else credit.A_E),
            _signed(None if credit is None else credit.A_S),
            _signed(None if credit is None else credit.A),
            "–" if credit is None or credit.peers is None else str(credit.peers),
        )
    printed = [Text(f"printed by {visible(line.reward.printed)}", style="dim")] if line.reward.printed else []
    question = _asked(asked(line.task), expected(line.task))
    if question and len(line.steps) == 1:
        question.append(_labelled("answered", line.steps[0].action))
    notes = map(_note, line.reward.notes)
    return Group(Text(_episode_title(line), style="bold"), *question, table, *notes, *printed)


def _note(note: NoteRecord) -> Text:
    """Say what a reward function said of the episode, or of a step."""
    where = "" if note.step is None else f", step {note.step}"
    return Text(f"{one_line(note.term or 'reward', 40)}{where}: {one_line(note.text, 500)}")


def side_by_side(lines: Sequence[EpisodeRecord], *, width: int) -> list[Table]:
    """Put episodes of a group into columns and steps into rows; as many columns at a time as fit."""
    fit = max(1, (width - 6) // 30)
    tables = []
    for start in range(0, len(lines), fit):
        columns = lines[start : start + fit]
        table = Table(box=None, padding=(0, 1), expand=False, header_style="bold")
        table.add_column("step", justify="right", style="dim")
        for line in columns:
            table.add_column(Text.assemble(_text(line.id), " ", _verdict(line.verdict, line.truncated)), width=27)
        table.add_row("R", *(Text(figure(line.reward.total), style="bold") for line in columns))
        for index in range(max((len(line.steps) for line in columns), default=0)):
            table.add_row(str(index), *(_cell(line, index) for line in columns))
        tables.append(table)
    return tables


def anchor_table(anchor: Anchor, group: str) -> Group:
    """Tabulate the actions taken in a state, best mean return first."""
    table = _table("action", "times", "mean G", "mean A_S", "mean A", "returns: G by episode/step", right=(1, 2, 3, 4))
    title = (
        f"state {one_line(anchor.key, 60)} of group {visible(group)}: {times(len(anchor.visits), 'visit')} "
        f"by {times(anchor.num_episodes, 'episode')}, mean return {figure(anchor.mean_return)}"
    )
    for choice in anchor.choices:
        returns = "  ".join(
            f"{figure(step.returns)} {visible(step.episode)}:{step.index}" for step in choice.visits[:12]
        )
        more = len(choice.visits) - 12
        table.add_row(
            _text(one_line(choice.action, 40) or "(nothing)"),
            str(len(choice.visits)),
            figure(choice.mean_return),
            _signed(choice.mean_step_advantage),
            _signed(choice.mean_advantage),
            _text(returns + (f"  and {more} more" if more > 0 else "")),
        )
    return Group(Text(title, style="bold"), table)


def token_view(
    line: EpisodeRecord, steps: Sequence[Sequence[Token]], by: ColorBy, *, colour: bool
) -> list[RenderableType]:
    """Print the tokens of an episode, coloured by a figure; without colour, with the figure in brackets after each."""
    out: list[RenderableType] = [Text(_episode_title(line), style="bold")]
    if colour:
        legend = Text("tokens by " + by + ": ")
        for name, words in LEGEND[by]:
            legend.append(f" {words} ", style=STYLES.get(name, "")).append(" ")
        out.append(legend)
    else:
        out.append(Text(f"tokens with their {by} in brackets"))
    for index, tokens in enumerate(steps):
        text = Text().append(f"{index:>3}  ", style="bold")
        for token in tokens:
            piece = visible(token.text)
            if colour:
                text.append(
                    piece, style=STYLES.get(tone(token, by), "") if token.sampled or by is ColorBy.MASK else "dim"
                )
            else:
                value = token.figure(by)
                text.append(f"{piece}[{value}]" if value else piece, style="")
        out.append(text)
    return out


# --- cells -----------------------------------------------------------------------------------------------------------


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(
            name, justify="right" if place in right else "left", overflow="ellipsis", no_wrap=place in right
        )
    return table


def _text(value: str) -> Text:
    """Return text that is never taken as markup: a model may write "[red]"."""
    return Text(visible(value))


def _signed(value: float | None) -> Text:
    return _tinted(figure(value, sign=True))


def _tinted(text: str) -> Text:
    both = text.split(" … ")
    out = Text()
    for place, part in enumerate(both):
        if place:
            out.append(" … ")
        out.append(part, style="green" if part.startswith("+") else "red" if part.startswith("-") else "dim")
    return out


def _verdict(success: bool | None, truncated: bool) -> Text:
    mark = {True: ("✓ solved", "green"), False: ("✗", "red"), None: ("·", "dim")}[success]
    return Text(mark[0] + (" cut off" if truncated else ""), style=mark[1])


def _task(summary: EpisodeSummary) -> str:
    name = one_line(summary.task, 40)
    return f"{name}: {one_line(summary.asked, 60)}" if summary.asked else name


def _asked(question: str, answer: str) -> list[Text]:
    """Return the question and the expected answer of a task; nothing if its environment asks."""
    if not question:
        return []
    return [_labelled("asked", question), *([_labelled("expected", answer)] if answer else [])]


def _labelled(label: str, text: str) -> Text:
    return Text(f"{label}: ", style="dim").append(one_line(text, MAX_TEXT) or "(nothing)", style="not dim")


def _action(line: EpisodeRecord, index: int, width: int) -> Text:
    text = _text(one_line(action_text(line, index), width) or "(nothing)")
    return text if line.steps[index].valid else text.append(" invalid", style="yellow")


def _cell(line: EpisodeRecord, index: int) -> Text:
    if index >= len(line.steps):
        return Text("")
    step = line.steps[index]
    out = Text.assemble((short_key(step.anchor, 26), "dim"), "\n", _action(line, index, 18))
    if step.credit is not None:
        out.append(" ").append(_signed(step.credit.A))
    return out


def _of_size(played: Sequence[EpisodeSummary]) -> str:
    size = next((summary.group_size for summary in played if summary.group_size is not None), len(played))
    return f"{len(played)}" if size == len(played) else f"{len(played)} of {size}"


def _episode_title(line: EpisodeRecord) -> str:
    parts = [f"episode {visible(line.id)}", f"task {one_line(line.task.id, 60)}"]
    if line.failed is not None:
        return ", ".join(parts) + f": failed: {one_line(line.failed, 200)}"
    verdict = {True: "solved", False: "not solved", None: "no verdict"}[line.verdict]
    named = [f"{one_line(name, 24)} {figure(value)}" for name, value in line.reward.parts.items()]
    reward = f"R {figure(line.reward.total)}" + (f" ({', '.join(named)})" if len(named) > 1 else "")
    parts += [verdict, reward, f"log-prob {figure(sum(step.logprob for step in line.steps))}"]
    if line.ended is not None:
        parts.append(f"ended by {line.ended.value.replace('_', ' ')}")
    if line.versions is not None:
        head, tail = line.versions
        parts.append(f"version {head}" if head == tail else f"versions {head} to {tail}")
    return ", ".join(parts)
