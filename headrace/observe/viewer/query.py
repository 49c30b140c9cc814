"""Answer a query about a rollout file: tables for a terminal, or one page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from headrace.errors import ConfigError
from headrace.observe.json_lines import write_whole
from headrace.observe.rollouts.records import EpisodeRecord
from headrace.observe.viewer.anchors import Anchor, anchors, find_anchors
from headrace.observe.viewer.catalog import (
    Catalog,
    EpisodeSummary,
    choose,
    find_file,
    group_of,
    read_catalog,
    read_episodes,
)
from headrace.observe.viewer.page import MAX_EPISODES, page
from headrace.observe.viewer.safe_text import short_key
from headrace.observe.viewer.terminal import (
    anchor_table,
    episode_table,
    group_table,
    heading,
    overview,
    side_by_side,
    token_view,
)
from headrace.observe.viewer.tokens import ColorBy, find_tokenizer, token_pieces, tokens_of

MAX_TOKEN_EPISODES = 16
MAX_FOUND = 16  # episodes that a search shows
HINT = "closer: --task ID, --episode ID, --search TEXT, --group, --anchor KEY, --tokens logprob, --html page.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewQuery:
    """The part of a rollout file to show."""

    path: Path
    step: int | None = None
    task: str | None = None
    episode: str | None = None
    search: str | None = None  # only episodes with this text: messages, actions, and what rewards said
    group: bool = False
    anchor: str | None = None
    tokens: ColorBy | None = None
    tokenizer: Path | None = None  # for the texts of tokens; None: the run's own


def view(query: ViewQuery, *, width: int, colour: bool) -> list[RenderableType]:
    """Return what a terminal of that width shows, with colours or without. Raises ConfigError and RunFolderError."""
    catalog = read_catalog(find_file(query.path, step=query.step), step=query.step, search=query.search)
    summaries = choose(catalog, task=query.task, episode=query.episode, search=query.search)
    chosen = query.task is not None or query.episode is not None or query.search is not None
    groups = list(dict.fromkeys(summary.group for summary in summaries))
    output: list[RenderableType] = [heading(catalog), ""]
    if query.anchor is not None:
        return [*output, *_anchor_tables(catalog, groups, query.anchor)]
    if query.tokens is not None:
        picked = summaries if chosen else summaries[:1]
        return [*output, *_tokens(catalog, picked, query, query.tokens, colour=colour)]
    if query.group:
        for group in groups if chosen else groups[:1]:
            lines = _lines(catalog, group)
            output += [group_table(catalog.of_group(group)), "", *side_by_side(lines, width=width), ""]
    elif query.episode is not None or query.search is not None:
        shown = summaries if query.episode is not None else summaries[:MAX_FOUND]
        lines = read_episodes(catalog.path, [summary.place for summary in shown])
        output += [episode_table(line, action_width=max(16, width - 100)) for line in lines]
        if left := len(summaries) - len(shown):
            output.append(Text(f"{left} more episodes have it: choose some with --task", style="dim"))
    elif chosen or len(groups) == 1:
        for group in groups:
            output += [group_table(catalog.of_group(group)), ""]
    else:
        output.append(overview(catalog))
    return [*output, Text(HINT, style="dim")]


def write_page(query: ViewQuery, out: Path) -> int:
    """Write one page with the chosen groups, whole, and return the number of episodes on it. Raises as `view` does."""
    catalog = read_catalog(find_file(query.path, step=query.step), step=query.step, search=query.search)
    summaries = choose(catalog, task=query.task, episode=query.episode, search=query.search)
    groups = list(dict.fromkeys(summary.group for summary in summaries))
    episodes: list[EpisodeSummary] = []
    for group in groups:
        members = catalog.of_group(group)
        if episodes and len(episodes) + len(members) > MAX_EPISODES:
            break
        episodes += members[:MAX_EPISODES]
    lines = read_episodes(catalog.path, [summary.place for summary in episodes], tokens=True)
    tokenizer = find_tokenizer(catalog.path, query.tokenizer)
    write_whole(out, page(catalog, lines, token_pieces(tokenizer), ids_only=tokenizer is None))
    return len(lines)


def _lines(catalog: Catalog, group: str) -> tuple[EpisodeRecord, ...]:
    lines = read_episodes(catalog.path, [summary.place for summary in catalog.of_group(group)])
    return tuple(line for line in lines if line.failed is None)


def _anchor_tables(catalog: Catalog, groups: Sequence[str], key: str) -> list[RenderableType]:
    places = [summary.place for summary in catalog.summaries if summary.group in groups]
    lines = [line for line in read_episodes(catalog.path, places) if line.failed is None]
    tables: list[RenderableType] = []
    states: list[Anchor] = []
    for group in groups:
        group_states = anchors([line for line in lines if group_of(line) == group])
        states += group_states
        for anchor in find_anchors(group_states, key):
            tables += [anchor_table(anchor, group), ""]
    if tables:
        return tables
    frequent = sorted(states, key=lambda anchor: -len(anchor.visits))
    keys = list(dict.fromkeys(anchor.key for anchor in frequent))[:6]
    names = ", ".join(f"'{short_key(name, 40)}'" for name in keys)
    raise ConfigError(
        f"no state of {catalog.path} has '{key}' in its key; " + (f"some are {names}" if names else "no step has a key")
    )


def _tokens(
    catalog: Catalog, summaries: Sequence[EpisodeSummary], query: ViewQuery, by: ColorBy, *, colour: bool
) -> list[RenderableType]:
    pieces = token_pieces(find_tokenizer(catalog.path, query.tokenizer))
    out: list[RenderableType] = []
    places = [summary.place for summary in summaries if summary.failed is None][:MAX_TOKEN_EPISODES]
    for line in read_episodes(catalog.path, places, tokens=True):
        out += [*token_view(line, tokens_of(line, pieces), by, colour=colour), ""]
    left = len(summaries) - len(places)
    if left > 0:
        out.append(Text(f"{left} more episodes are not shown: choose some with --episode", style="dim"))
    return out
