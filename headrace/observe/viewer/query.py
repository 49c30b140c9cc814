"""`headrace view`: from what somebody asks about a rollout file to what is shown of it."""

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
HINT = "closer: --task ID, --episode ID, --group, --anchor KEY, --tokens logprob, --html page.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewQuery:
    """What to show of a file. `tokenizer`: where texts of tokens come from; unset, the run's own."""

    path: Path
    step: int | None = None
    task: str | None = None
    episode: str | None = None
    group: bool = False
    anchor: str | None = None
    tokens: ColorBy | None = None
    tokenizer: Path | None = None


def view(asked: ViewQuery, *, width: int, colour: bool) -> list[RenderableType]:
    """What a terminal of that width shows, with colours or without. Raises ConfigError and RunFolderError."""
    catalog = read_catalog(find_file(asked.path, step=asked.step), step=asked.step)
    briefs = choose(catalog, task=asked.task, episode=asked.episode)
    chosen = asked.task is not None or asked.episode is not None
    groups = list(dict.fromkeys(brief.group for brief in briefs))
    shown: list[RenderableType] = [heading(catalog), ""]
    if asked.anchor is not None:
        return [*shown, *_anchor_tables(catalog, groups, asked.anchor)]
    if asked.tokens is not None:
        picked = briefs if chosen else briefs[:1]
        return [*shown, *_tokens(catalog, picked, asked, asked.tokens, colour=colour)]
    if asked.group:
        for group in groups if chosen else groups[:1]:
            lines = _lines(catalog, group)
            shown += [group_table(catalog.of_group(group)), "", *side_by_side(lines, width=width), ""]
    elif asked.episode is not None:
        lines = read_episodes(catalog.path, [brief.place for brief in briefs])
        shown += [episode_table(line, action_width=max(16, width - 100)) for line in lines]
    elif chosen or len(groups) == 1:
        for group in groups:
            shown += [group_table(catalog.of_group(group)), ""]
    else:
        shown.append(overview(catalog))
    return [*shown, Text(HINT, style="dim")]


def write_page(asked: ViewQuery, out: Path) -> int:
    """One page with the chosen groups, whole; returns how many episodes it shows. Raises as `view` does."""
    catalog = read_catalog(find_file(asked.path, step=asked.step), step=asked.step)
    briefs = choose(catalog, task=asked.task, episode=asked.episode)
    groups = list(dict.fromkeys(brief.group for brief in briefs))
    kept: list[EpisodeSummary] = []
    for group in groups:
        members = catalog.of_group(group)
        if kept and len(kept) + len(members) > MAX_EPISODES:
            break
        kept += members[:MAX_EPISODES]
    lines = read_episodes(catalog.path, [brief.place for brief in kept], tokens=True)
    tokenizer = find_tokenizer(catalog.path, asked.tokenizer)
    write_whole(out, page(catalog, lines, token_pieces(tokenizer), ids_only=tokenizer is None))
    return len(lines)


def _lines(catalog: Catalog, group: str) -> tuple[EpisodeRecord, ...]:
    lines = read_episodes(catalog.path, [brief.place for brief in catalog.of_group(group)])
    return tuple(line for line in lines if line.failed is None)


def _anchor_tables(catalog: Catalog, groups: Sequence[str], key: str) -> list[RenderableType]:
    places = [brief.place for brief in catalog.briefs if brief.group in groups]
    lines = [line for line in read_episodes(catalog.path, places) if line.failed is None]
    tables: list[RenderableType] = []
    known: list[Anchor] = []
    for group in groups:
        found = anchors([line for line in lines if group_of(line) == group])
        known += found
        for anchor in find_anchors(found, key):
            tables += [anchor_table(anchor, group), ""]
    if tables:
        return tables
    most = sorted(known, key=lambda anchor: -len(anchor.visits))
    keys = list(dict.fromkeys(anchor.key for anchor in most))[:6]
    names = ", ".join(f"'{short_key(own, 40)}'" for own in keys)
    raise ConfigError(
        f"no state of {catalog.path} has '{key}' in its key; " + (f"some are {names}" if names else "no step has a key")
    )


def _tokens(
    catalog: Catalog, briefs: Sequence[EpisodeSummary], asked: ViewQuery, by: ColorBy, *, colour: bool
) -> list[RenderableType]:
    pieces = token_pieces(find_tokenizer(catalog.path, asked.tokenizer))
    out: list[RenderableType] = []
    places = [brief.place for brief in briefs if brief.failed is None][:MAX_TOKEN_EPISODES]
    for line in read_episodes(catalog.path, places, tokens=True):
        out += [*token_view(line, tokens_of(line, pieces), by, colour=colour), ""]
    left = len(briefs) - len(places)
    if left > 0:
        out.append(Text(f"{left} more episodes are not shown: choose some with --episode", style="dim"))
    return out
