"""Play tasks without training: evaluation and demonstrations, by a local model, a service or a remote chat model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config import Config, RlConfig
from headrace.config.paths import remote_name
from headrace.data.demonstrations import EpisodeSelection, Tools, record_tools, write_demonstrations
from headrace.errors import ConfigError
from headrace.infer.openai_client import EndpointConfig, RemoteModel
from headrace.loops.evaluate import EvalResult
from headrace.loops.evaluate import evaluate as evaluate_tasks
from headrace.metrics import metric_values
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import no_progress_bars
from headrace.process.thread_pool import start_pool
from headrace.process.watchdog import Watchdog, watching_thread
from headrace.protocols import Env
from headrace.render import Renderer
from headrace.reward.terms import GroupTerm, Term
from headrace.rollout.group import RemoteGroupPlayer
from headrace.wiring.build.agent_endpoint import AgentEndpoint
from headrace.wiring.build.data import make_env_of, tasks_of
from headrace.wiring.build.episodes import Play, eval_player, make_end_pattern, make_sampling
from headrace.wiring.build.models import load_policy, make_sampler, whole
from headrace.wiring.build.rewards import close_terms, make_reward_runner, make_terms
from headrace.wiring.picture_reader import first_with_pictures, reader_of, with_vision
from headrace.wiring.runtime.service import ServiceRuntime, check_service, starting_state


def evaluate(config: Config) -> dict[str, float]:
    """Return the held-out metrics of the configured model."""
    return held_out_metrics(config, play_held_out(config))


def play_held_out(config: Config) -> EvalResult:
    """Play the tasks of [eval.source] with the configured model."""
    with no_progress_bars():
        return asyncio.run(_evaluate(config))


def held_out_metrics(config: Config, evaluation: EvalResult) -> dict[str, float]:
    """Return the metrics of an evaluation that are known of this model."""
    metrics = metric_values(evaluation.metrics)
    if remote_name(config.model.path) is not None:
        del metrics["eval/length"]  # its tokens are not known
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrated:
    """Report what `demonstrate` wrote."""

    written: int  # episodes
    played: int
    metrics: dict[str, float]


def demonstrate(
    config: Config,
    path: Path,
    *,
    tasks: int,
    samples: int,
    keep_all: bool,
    best_only: bool = False,
    min_reward: float | None = None,
) -> Demonstrated:
    """Let the configured model play the first `tasks` tasks of [rl.tasks], `samples` times each, and write its
    conversations as rows for [sft]: those that succeeded or have `min_reward`, or all; of each task maybe the best
    alone."""
    if config.rl is None:
        raise ConfigError("there are no tasks to demonstrate: add a table [rl] with tasks")
    if len(config.rl.tasks) > 1:
        raise ConfigError(
            f"'rl.tasks' has {len(config.rl.tasks)} sources, and demonstrations are made of one at a time: leave the "
            "others out, such as with --set rl.tasks='{type = ...}'"
        )
    temperature = config.rl.sampling.temperature
    eval_config = replace(config.eval, source=config.rl.tasks[0], tasks=tasks, samples=samples, temperature=temperature)
    tools: dict[str, Tools] = {}
    with no_progress_bars():
        evaluation = asyncio.run(
            _evaluate(replace(config, eval=eval_config), lambda make_env: record_tools(make_env, tools))
        )
    played = sum(len(group.episodes) for group in evaluation.groups)
    selection = EpisodeSelection(min_reward=min_reward, best_only=best_only, failures=keep_all)
    written = write_demonstrations(path, evaluation.groups, tools, selection=selection)
    return Demonstrated(written=written, played=played, metrics=metric_values(evaluation.metrics))


async def _evaluate(
    config: Config, wrap_env: Callable[[Callable[[], Env]], Callable[[], Env]] = lambda make_env: make_env
) -> EvalResult:
    """Play the tasks of [eval.source]; `wrap_env` may wrap the function that makes environments.

    Stalls are told and ended as in a run.
    """
    run = config.run
    with (
        Watchdog(tell_s=run.stall_warn_s, end_s=run.stall_end_s, load_end_s=run.load_end_s, go_on="; start it again"),
        ExitStack() as starting,
    ):
        starting.enter_context(watching_thread("the start of the evaluation", loads=True))
        await start_pool()
        return await _play(config, wrap_env, starting)


async def _play(
    config: Config, wrap_env: Callable[[Callable[[], Env]], Callable[[], Env]], starting: ExitStack
) -> EvalResult:
    source = config.eval.source
    if source is None:
        raise ConfigError("there is nothing to evaluate on: add [eval.source] to the file")
    tasks = tasks_of(source)[: config.eval.tasks]
    if remote_name(config.model.path) is None:
        shown = first_with_pictures(task.messages for task in tasks)
        config = with_vision(config, has_pictures=shown is not None)
        if config.model.vision is not None:  # else a text-only model would be loaded first
            _ = reader_of(config.model, config.model.path).loaded
    terms = make_terms(config, None)
    if not terms:
        raise ConfigError("nothing but the reward model could judge: give its folder as 'path' in 'rl.rewards'")
    if remote_name(config.model.path) is not None:
        open_player = _remote_player
    elif config.model.service is not None:
        open_player = _service_player
    else:
        open_player = _local_player
    max_turns = None if config.rl is None else config.rl.max_turns
    try:
        make_env = make_env_of(source, max_turns=max_turns)
        async with open_player(config, terms, wrap_env(make_env)) as play:
            starting.close()
            return await evaluate_tasks(tasks, play)
    finally:
        await close_terms(terms)


@asynccontextmanager
async def _local_player(
    config: Config, terms: list[Term | GroupTerm], make_env: Callable[[], Env]
) -> AsyncIterator[Play]:
    """Load the model into this process."""
    lm = load_policy(config.model, whole(config.model.path), seed=config.run.seed)
    worker = ComputeThread()
    sampler = make_sampler(config, lm, worker)
    try:
        pictures = None if lm.vision is None else reader_of(config.model, lm.source)
        renderer = Renderer(lm.tokenizer, lm.eos_tokens, config.model.template_options, pictures)
        programs = AgentEndpoint(renderer)
        try:
            yield eval_player(config, sampler, renderer, terms, programs, make_env=make_env)
        finally:
            await programs.close()
    finally:
        sampler.close()
        worker.close()


@asynccontextmanager
async def _service_player(
    config: Config, terms: list[Term | GroupTerm], make_env: Callable[[], Env]
) -> AsyncIterator[Play]:
    """Sample at the training service of [model.service]."""
    check_service(config)
    place = ServiceRuntime(config, start=starting_state(config.model), state=None, samples=True)
    programs = AgentEndpoint(place.renderer)
    try:
        assert place.sampler is not None
        yield eval_player(config, place.sampler, place.renderer, terms, programs, make_env=make_env)
    finally:
        await programs.close()
        place.close()


@asynccontextmanager
async def _remote_player(
    config: Config, terms: list[Term | GroupTerm], make_env: Callable[[], Env]
) -> AsyncIterator[Play]:
    """Ask a chat model behind OpenAI's API."""
    source, name = config.eval.source, remote_name(config.model.path)
    assert source is not None
    assert name is not None
    rl = config.rl or RlConfig(steps=1, tasks=(source,))
    c = config.remote
    endpoint = EndpointConfig(
        url=c.url, api_key_env=c.api_key_env, timeout_s=c.timeout_s, deadline_s=c.deadline_s, at_once=c.at_once
    )
    model = RemoteModel(name, endpoint, make_sampling(rl.sampling, config.eval.temperature))
    threads = ThreadPoolExecutor(max_workers=rl.env_threads, thread_name_prefix="environment")
    try:
        yield RemoteGroupPlayer(
            group_size=config.eval.samples,
            make_env=make_env,
            chat=model,
            reward_runner=make_reward_runner(terms, rl),
            temperature=config.eval.temperature,
            max_turns=rl.max_turns,
            timeout_s=rl.asynchronous.task_timeout_s,
            run_seed=config.eval.seed,
            end_tool=rl.end_tool,
            end_pattern=make_end_pattern(rl),
            threads=threads,
        )
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        await model.close()
