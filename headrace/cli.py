"""Run the command line: read files and arguments, call `wiring`, print. Only this module configures logging.

Nothing heavy is imported until a command needs it, so that `headrace --help` answers at once.
Exit codes: 0 done, 1 failed, 2 the configuration or the command line is wrong, 75 interrupted after a checkpoint, or
another process works in the run folder (EX_TEMPFAIL: a scheduler may start the run again with --resume), 130 ended by
Ctrl-C.
"""

import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace import __version__
from headrace.errors import ConfigError, FolderLockedError, HeadraceError, Interrupted
from headrace.printable import OneLineFormatter, later_lines_indented, visible

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.service.settings import ServeConfig

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_CTRL_C = 1, 2, 75, 130

app = typer.Typer(
    name="headrace",
    help="Supervised fine-tuning and reinforcement learning of language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Argument(help="The run's TOML file; its keys are in docs/configuration.md.")]
Player = Annotated[
    str, typer.Argument(help="A checkpoint, any Hugging Face folder, or openai:NAME, a model at the file's [remote].")
]
Device = Literal["auto", "cpu", "cuda"]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as rl.steps=20; may be repeated."),
]


def main() -> None:
    """Run a command; print one red sentence and exit with a code for every failure that is not our bug."""
    try:
        app()
    except HeadraceError as exc:
        if os.environ.get("HEADRACE_DEBUG") == "1":
            raise
        typer.secho(f"headrace: {later_lines_indented(str(exc))}", fg=typer.colors.RED, err=True)
        sys.exit(exit_code(exc))
    except OSError as exc:  # of a file that nobody has named in a sentence of its own
        if os.environ.get("HEADRACE_DEBUG") == "1":
            raise
        named = f"{exc.filename}: " if exc.filename is not None else ""
        hint = "see to the disk or its permissions, or set HEADRACE_DEBUG=1 to see where this happened"
        typer.secho(f"headrace: {named}{exc.strerror or exc}: {hint}", fg=typer.colors.RED, err=True)
        sys.exit(EXIT_FAILED)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without a word while packages are imported, where an exception may be swallowed."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # signals are another's business
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_CTRL_C))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_code(exc: HeadraceError) -> int:
    match exc:
        case Interrupted() | FolderLockedError():
            return EXIT_INTERRUPTED
        case ConfigError():
            return EXIT_CONFIG
        case _:
            return EXIT_FAILED


def _version(requested: bool) -> None:
    if requested:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    debug = os.environ.get("HEADRACE_DEBUG") == "1"
    terminal = logging.StreamHandler()
    if not debug:  # messages about every group are for log.txt
        terminal.setLevel(logging.INFO)
        terminal.addFilter(lambda record: record.name != "headrace.loops.credit_log")
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    terminal.setFormatter(OneLineFormatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[terminal])
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the environment and the sampling.")] = 0,
    folder: Annotated[Path, typer.Option(help="Folder in which the run folder is made.")] = Path("runs"),
) -> None:
    """Train a small model on a text environment; no download.

    The model learns from examples, then from reward, in a few minutes on 2 cores.
    """
    from headrace import wiring

    with ending_at_once():
        run_demo = wiring.demo
    result = run_demo(seed=seed, folder=folder)
    print(result.text)
    print(json.dumps(result.figures))


@app.command()
def train(
    file: File,
    run: Annotated[
        Path | None, typer.Argument(help="The run folder to resume; by default the newest run of that name.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that was stopped.")] = False,
    accept_changed_files: Annotated[
        bool, typer.Option("--accept-changed-files", help="Resume although data or code have changed since the start.")
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning"],
        typer.Option(
            help="Level of log.txt; debug adds every step of every episode and how its advantage is computed."
        ),
    ] = "info",
) -> None:
    """Run the stages of a file: [sft], [distill], [dpo], [reward_model], [rl]."""
    if os.environ.get("HEADRACE_DEBUG") != "1":
        logging.getLogger("headrace").setLevel(log_level.upper())
    if run is not None and not resume:
        raise ConfigError(f"a run folder ({run}) is only given with --resume: add it, or leave the folder out")
    if accept_changed_files and not resume:
        raise ConfigError("--accept-changed-files is only given with --resume: a new run reads its files as they are")
    from headrace.wiring.checked_config import load_checked

    config = load_checked(file, overrides or [], command="train")
    if {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():  # a launcher may have started several ranks
        from headrace.wiring.runtime.ranks import serve_other_rank

        if serve_other_rank(config):
            return
    from headrace import wiring
    from headrace.wiring.resume import run_to_resume

    resumed = run_to_resume(config, run, base=file.absolute().parent) if resume else None
    with ending_at_once():
        run_stages = wiring.train
    result = run_stages(config, config_text_path=file, resume=resumed, accept_changed_files=accept_changed_files)
    print(result.text)


@app.command(name="eval")
def evaluate(
    checkpoint: Player,
    file: File,
    overrides: Overrides = None,
) -> None:
    """Play the held-out tasks of [eval.source] with a checkpoint."""
    from headrace.wiring.checked_config import load_checked, model_override

    config = load_checked(file, [*(overrides or []), model_override(checkpoint)], command="eval")
    from headrace import wiring

    with ending_at_once():
        run_evaluation = wiring.evaluate
    print(json.dumps(run_evaluation(config)))


@app.command()
def demonstrate(
    policy: Player,
    file: File,
    out: Annotated[Path, typer.Option(help='The file to write; a source of type = "jsonl" reads it.')],
    tasks: Annotated[int, typer.Option(min=1, help="Number of the file's [rl.tasks] to play.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Number of episodes per task.")] = 1,
    keep_all: Annotated[bool, typer.Option("--all", help="Write failures as well as successes.")] = False,
    best_of: Annotated[
        int | None, typer.Option(min=2, help="Play so many episodes per task and write the best one.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Write the episodes of at least this reward, in place of the successes.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Write a model's episodes of [rl.tasks] as data for [sft]."""
    if keep_all and min_reward is not None:
        raise typer.BadParameter("--all keeps every episode: leave --min-reward out")
    if best_of is not None and samples != 1:
        raise typer.BadParameter("--best-of is the number of episodes per task: leave --samples out")
    from headrace.wiring.checked_config import load_checked, model_override

    config = load_checked(file, [*(overrides or []), model_override(policy)], command="demonstrate")
    from headrace import wiring

    with ending_at_once():
        run_demonstrations = wiring.demonstrate
    done = run_demonstrations(
        config,
        out,
        tasks=tasks,
        samples=best_of or samples,
        keep_all=keep_all,
        best_only=best_of is not None,
        min_reward=min_reward,
    )
    print(f"{done.written} of {done.played} episodes are in {out}")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, such as RUN/checkpoints/rl/step_000100.")],
    merged: Annotated[bool, typer.Option("--merged", help="The whole model, with its adapter merged.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, as PEFT reads it.")] = False,
    out: Annotated[Path | None, typer.Option(help="The new folder; by default step_...-merged in this one.")] = None,
    hub: Annotated[str | None, typer.Option(help="Upload it as this model of the hub, owner/name, as well.")] = None,
) -> None:
    """Copy a checkpoint's model or adapter into a folder for other programs, or to the hub."""
    from headrace.wiring.commands.export import export_checkpoint, push

    if merged == adapter:
        raise ConfigError("say what to export: --merged, the whole model, or --adapter, the adapter alone")
    part: Literal["merged", "adapter"] = "merged" if merged else "adapter"
    folder = export_checkpoint(checkpoint, out or Path(f"{checkpoint.absolute().name}-{part}"), part=part)
    print(folder)
    if hub is not None:
        print(push(folder, hub))


@app.command()
def explain(
    file: Annotated[Path | None, typer.Argument(help="The run's TOML file.")] = None,
    overrides: Overrides = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print the table of all keys and exit.")] = False,
) -> None:
    """Explain what a run would do and its size; loads no weights."""
    if keys:
        from headrace.config.docs_table import key_table

        print(key_table(), end="")
        return
    if file is None:
        raise ConfigError("explain needs a TOML file: write  headrace explain run.toml")
    from headrace.wiring.checked_config import load_checked

    config = load_checked(file, overrides or [], command="train")
    from headrace.wiring.commands.explain import explain_config

    print(visible(explain_config(config, file=str(file))), end="")


cluster_app = typer.Typer(help="Processes of a run on this machine or others, placed by Ray.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")


@cluster_app.command("plan")
def cluster_plan(file: File, overrides: Overrides = None) -> None:
    """Say which processes a run would have and where; starts none."""
    from headrace.wiring.checked_config import load_checked

    config = load_checked(file, overrides or [], command="train")
    from headrace.wiring.commands.cluster_plan import plan_cluster

    print(visible(plan_cluster(config, file=str(file))), end="")


@app.command()
def doctor() -> None:
    """Describe this machine and what would run on it.

    Ends with a check that sampling does not depend on the other requests in the batch.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from headrace.wiring.commands.doctor import check_sampling, describe_machine

    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        checking = pool.submit(check_sampling)  # runs while packages are listed
        for text in describe_machine(checking, waiting):
            print(text)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on a terminal while something runs; the function that is yielded changes its text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update


@app.command()
def verify(
    model: Annotated[
        str | None,
        typer.Option(help="A Hugging Face folder or smollm2-135m; by default a small model made on the spot."),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto uses CUDA if it is available.")] = "auto",
) -> None:
    """Check on your machine and model that training is correct.

    Measures losses, gradients, log-probs, masks, groups and restarts; names what fails, and then exits with code 1.
    """
    from headrace.names import NAMED_MODELS

    if model is not None and model not in NAMED_MODELS and not (Path(model) / "config.json").is_file():
        from headrace.storage.hub import hub_name

        if Path(model).exists() or hub_name(model) is None:
            raise ConfigError(
                f"{model} is no model: give a Hugging Face folder (with config.json), owner/name of the hub or "
                "smollm2-135m"
            )
    from headrace import wiring
    from headrace.verify.property_result import failures, heading, rows

    print(heading())
    proofs = []
    for proof in wiring.verify(model=None if model == "tiny" else model, device=device):
        proofs.append(proof)
        print(rows(proof), flush=True)
    failed = failures(proofs)
    if failed:
        raise HeadraceError(f"{len(failed)} of {len(proofs)} properties do not hold: {'; '.join(failed)}")
    print(f"all {len(proofs)} properties hold")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Rewrite report.html of a run folder."""
    from headrace.observe.report.run_report import write_report
    from headrace.observe.run_folder import RunFolder

    print(write_report(RunFolder.open(run).path))


@app.command()
def view(
    path: Annotated[Path, typer.Argument(help="A rollout file, a rollouts folder or a run folder.")],
    step: Annotated[int | None, typer.Option(help="The training step; by default the latest.")] = None,
    task: Annotated[str | None, typer.Option(help="Show only this task: its id, or the beginning of it.")] = None,
    episode: Annotated[str | None, typer.Option(help="Show this episode step by step.")] = None,
    group: Annotated[bool, typer.Option("--group", help="Show the episodes of a group side by side.")] = False,
    anchor: Annotated[
        str | None, typer.Option(metavar="KEY", help="Show every action taken in states whose key begins with this.")
    ] = None,
    tokens: Annotated[
        Literal["logprob", "advantage", "mask", "version"] | None,
        typer.Option(help="Show tokens, coloured by this value."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer that decodes tokens; by default the run's own.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file instead of printing.")] = None,
) -> None:
    """Show the rollouts of a training step."""
    from headrace.observe.viewer.query import ViewQuery, write_page
    from headrace.observe.viewer.query import view as view_parts
    from headrace.observe.viewer.tokens import ColorBy

    query = ViewQuery(
        path=path,
        step=step,
        task=task,
        episode=episode,
        group=group,
        anchor=anchor,
        tokens=None if tokens is None else ColorBy(tokens),
        tokenizer=tokenizer,
    )
    if html is not None:
        print(f"{html}: {write_page(query, html)} episodes")
        return
    console = _console()
    colour = console.is_terminal and not console.no_color
    for part in view_parts(query, width=console.width, colour=colour):
        console.print(part, soft_wrap=False)


@app.command()
def recredit(
    path: Annotated[Path, typer.Argument(help="A rollout file, a rollouts folder or a run folder.")],
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="file.py, file.py:function, a built-in reward, or a table as in [[rl.rewards]]; several are added."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="The factor of a reward in the sum; 1 by default.")
    ] = None,
    credit: Annotated[
        str | None, typer.Option(help="The credit method; by default the one that the rollouts were credited with.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A parameter of the credit method, such as gamma=0.9.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The training step; by default the latest.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default recredited_<name> beside the old.")
    ] = None,
    inprocess: Annotated[bool, typer.Option("--inprocess", help="Run the functions without a sandbox.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept groups of which not all episodes were saved.")
    ] = False,
) -> None:
    """Score and credit saved rollouts again, without a model."""
    from headrace.observe.viewer.catalog import method_text
    from headrace.observe.viewer.recredit_tables import tables
    from headrace.wiring.commands.recredit import RecreditRequest
    from headrace.wiring.commands.recredit import recredit as recredit_file

    request = RecreditRequest(
        path=path,
        rewards=tuple(reward or ()),
        weights=_weights(weight or []),
        method=credit,
        params=_numbers(param or []),
        step=step,
        out=out,
        trusted=inprocess,
        partial=partial,
    )
    result = recredit_file(request)
    console = _console()
    for table in tables(result.comparison):
        console.print(table)
    print(f"credit {method_text(result.method)}; written to {result.out}")


@app.command()
def serve(
    file: Annotated[
        Path | None, typer.Argument(help="The service's TOML file; by default the tiny model is served.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; by default the file's, or 8765.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Make another key and print it once.")] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Only score with the file's frozen models, for remote trainers.")
    ] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Use a folder and a journal together that do not fit, as they are.")
    ] = False,
) -> None:
    """Serve training and sampling to the public tinker SDK."""
    from dataclasses import replace

    from headrace.service.http.server import listen, make_server
    from headrace.service.settings import ServeConfig, load_serve_config
    from headrace.wiring.commands.serve import open_service

    if file is not None and not file.is_file():
        raise ConfigError(f"there is no file {file}: give the path of the service's TOML file, or none")
    config = ServeConfig() if file is None else load_serve_config(file.read_text(encoding="utf-8"), file=str(file))
    if port is not None:
        config = replace(config, serve=replace(config.serve, port=port))
    if reference:
        _serve_references(config)
        return
    with (
        open_service(config, make_key=new_key, adopt=adopt) as opened,
        listen(config.serve.host, config.serve.port) as listening,
    ):
        host, bound = listening.getsockname()[:2]
        names = " = ".join((opened.card.name, *opened.card.aliases))
        print(f"headrace {__version__} serves {names} on http://{host}:{bound}")
        if opened.new_key is not None:
            address = f"TINKER_BASE_URL=http://{host}:{bound} TINKER_API_KEY={opened.new_key}"
            print(f"the key, shown this once:\n  export {address}")
        sys.stdout.flush()
        make_server(opened.app, config.limits).run(sockets=[listening])


def _serve_references(config: "ServeConfig") -> None:
    from headrace.service.http.server import listen, make_server
    from headrace.wiring.commands.serve_references import open_reference_server

    with open_reference_server(config) as (application, names), listen(config.serve.host, config.serve.port) as socket:
        host, bound = socket.getsockname()[:2]
        print(f"headrace {__version__} scores with {', '.join(names)} on http://{host}:{bound}", flush=True)
        make_server(application, config.limits).run(sockets=[socket])


@app.command()
def key(
    owner: Annotated[str, typer.Argument(help="Owner of the key; models made with the key belong to this name.")],
) -> None:
    """Make a key for a service, with the lines for its TOML file."""
    from headrace.service.http.auth import hash_key, new_key

    secret = new_key()
    print(f'the key, shown this once: {secret}\n\n[[keys]]\nowner = {json.dumps(owner)}\nsha256 = "{hash_key(secret)}"')


# --- helpers of several commands -------------------------------------------------------------------------------------


def _numbers(texts: list[str]) -> dict[str, float | str]:
    """Parse KEY=VALUE, converting values that are numbers."""
    numbers: dict[str, float | str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"--param {text} is not KEY=VALUE, such as gamma=0.9")
        try:
            numbers[key] = float(value)
        except ValueError:
            numbers[key] = value
    return numbers


def _weights(texts: list[str]) -> dict[str, float]:
    """Parse NAME=NUMBER."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            name = ""
        if not name or not math.isfinite(weights[name]):
            raise ConfigError(f"--weight {text} is not NAME=NUMBER, such as length=0.2")
    return weights


def _console() -> "Console":
    """Return a console for tables, 160 columns wide where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, emoji=False, markup=False, width=160)
    return console


if __name__ == "__main__":
    main()
