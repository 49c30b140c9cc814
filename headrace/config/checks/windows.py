"""Check what a run needs that Windows does not have: fork, process groups, and pipes that can be waited for."""

from collections.abc import Iterator

from headrace.config.schema import Config, SourceConfig

_OR_WSL = "or use WSL (docs/windows.md)"


def windows_problems(config: Config, platform: str) -> Iterator[str]:
    """Name what cannot run on `platform` (`sys.platform`) if that is Windows; elsewhere there are no such problems."""
    if platform != "win32":
        return
    c = config.cluster
    if c.ranks > 1 or c.address or c.engine_replicas:
        yield f"'cluster' starts processes that only Linux and macOS can run: leave it out, {_OR_WSL}"
    if config.engine.launch is not None:
        yield (
            "'engine.launch' starts a server that only Linux and macOS can run: give 'engine.urls' of one that runs "
            f"elsewhere, {_OR_WSL}"
        )
    for position, term in enumerate(() if config.rl is None else config.rl.rewards):
        if term.fn == "code":
            yield (
                f"'rl.rewards[{position}]' runs programs in the sandbox, which only Linux and macOS have: leave it "
                f"out, {_OR_WSL}"
            )
    for key, source in _sources(config):
        if source.type == "env" and source.name == "mcp" and source.options.get("command"):
            yield (
                f"'{key}.options.command' starts MCP servers, which only Linux and macOS can end with their children: "
                f"give 'url' of a server that runs already, {_OR_WSL}"
            )
        if source.type == "harbor":
            yield f"'{key}' runs tasks in containers, which needs Linux or macOS here: choose other tasks, {_OR_WSL}"


def _sources(config: Config) -> Iterator[tuple[str, SourceConfig]]:
    """Yield every source of tasks or conversations with its key."""
    for stage in ("sft", "dpo", "reward_model"):
        if (c := getattr(config, stage)) is not None:
            yield from ((f"{stage}.sources[{i}]", source) for i, source in enumerate(c.sources))
            if c.held_out is not None:
                yield f"{stage}.held_out", c.held_out
    if config.distill is not None:
        yield from (
            (f"distill.teachers[{i}].tasks", teacher.tasks) for i, teacher in enumerate(config.distill.teachers)
        )
    if config.rl is not None:
        keys = ["rl.tasks"] if len(config.rl.tasks) == 1 else [f"rl.tasks[{i}]" for i in range(len(config.rl.tasks))]
        yield from zip(keys, config.rl.tasks, strict=True)
    if config.eval.source is not None:
        yield "eval.source", config.eval.source
