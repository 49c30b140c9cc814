"""Run the command line: read files and arguments, call `wiring`, print. Only this module configures logging.

Nothing heavy is imported until a command needs it, so that `headrace --help` answers at once.
Exit codes: 0 done, 1 failed, 2 the configuration or the command line is wrong, 75 interrupted after a checkpoint, or
another process works in the run folder (EX_TEMPFAIL: a scheduler may start the run again with --resume), 130 ended by
Ctrl-C.
"""

import contextlib
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
from headrace.process.early_interrupt import end_at_once, raise_from_now_on

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from headrace.observe.comparison.compared import ArmComparison
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
    except SystemExit as exc:
        if exc.code == EXIT_CTRL_C:  # typer's code of a KeyboardInterrupt
            typer.echo("headrace: interrupted by Ctrl-C", err=True)
        raise
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
    """Let Ctrl-C end the process with a sentence while packages are imported, where an exception may be swallowed."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # signals are another's business
        return
    signal.signal(signal.SIGINT, end_at_once)
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
    raise_from_now_on()  # typer makes a code of it
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
    with_dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the live page of the run while it trains.")
    ] = False,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the live page.")] = 8770,
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
    with contextlib.ExitStack() as beside:
        if with_dashboard:
            from headrace.observe.dashboard.server import dashboard_beside

            root = Path(config.run.folder) if resumed is None else resumed.parent
            beside.enter_context(dashboard_beside(root, host="127.0.0.1", port=dashboard_port, key=None))
        result = run_stages(config, config_text_path=file, resume=resumed, accept_changed_files=accept_changed_files)
    print(result.text)


@app.command(name="eval")
def evaluate(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoints, Hugging Face folders, or openai:NAME, a model at the file's [remote].",
        ),
    ],
    file: File,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of episodes per task; by default the file's eval.samples.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new folder of the episodes; by default below evals in run.folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one line of JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Play the held-out tasks of [eval.source] with checkpoints.

    Keeps the episodes, prints pass@1, pass@k and maj@k with intervals, and compares further checkpoints with the first.
    """
    from headrace.wiring.checked_config import load_checked, model_override

    changes = [*(overrides or []), *([] if samples is None else [f"eval.samples={samples}"])]
    configs = [load_checked(file, [*changes, model_override(one)], command="eval") for one in checkpoints]
    with ending_at_once():
        from headrace.wiring.commands.experiments.eval_checkpoints import checkpoint_labels, evaluate_checkpoints
    labels = checkpoint_labels(checkpoints)
    result = evaluate_checkpoints(dict(zip(labels, configs, strict=True)), out=out)
    if as_json:
        print(json.dumps(result.figures))
        return
    from headrace.observe.comparison.comparison_tables import evaluation_tables

    _print_comparison(result.comparison, evaluation_tables(result.comparison))
    print(f"Episodes: headrace view {next(iter(result.files.values()))} --group\nPage: {result.page}")


@app.command()
def sweep(
    file: File,
    over: Annotated[
        list[str], typer.Option(metavar="KEY=VALUES", help="A key with values a,b,c or 0..4; may be repeated.")
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder; by default run.folder/<run.name>_sweep.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the list of runs and start none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one line of JSON.")] = False,
) -> None:
    """Run a file with every combination of settings, and compare them.

    The same command again skips finished runs and resumes the others.
    """
    from headrace.wiring.commands.experiments.sweep_plan import plan_sweep

    plan = plan_sweep(file, over, overrides or [], out=out)
    from headrace.wiring.commands.experiments.sweep import describe
    from headrace.wiring.commands.experiments.sweep import sweep as run_sweep

    if dry_run:
        print("\n".join(map(visible, describe(plan))))
        return
    result = run_sweep(plan)
    if as_json:
        print(json.dumps(result.figures))
    elif result.comparison is not None:
        from headrace.observe.comparison.comparison_tables import tables

        _print_comparison(result.comparison, tables(result.comparison))
        print(f"Page: {result.page}")
    if result.failed:
        problem = f"{len(result.failed)} of {len(plan.runs)} runs are not finished: {'; '.join(result.failed)}"
        raise HeadraceError(f"{problem}; the same command tries them again")


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
    card_gib: Annotated[
        float | None, typer.Option("--card-gib", min=1.0, help="Plan for CUDA devices of so much memory.")
    ] = None,
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

    card_bytes = None if card_gib is None else int(card_gib * 2**30)
    print(visible(explain_config(config, file=str(file), card_bytes=card_bytes)), end="", flush=True)
    from headrace.wiring.commands.explain_samples import show_samples

    print(show_samples(config, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="")


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
    from headrace.wiring.commands.doctor import check_sampling, checking_aside, describe_machine

    with checking_aside(check_sampling) as checking:  # it runs while packages are listed
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
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders; each is compared with the first.")],
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
    task: Annotated[
        list[str] | None, typer.Option(help="Show the episodes of this held-out task on the page; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as one line of JSON.")] = False,
) -> None:
    """Compare runs: figures, configurations, curves, held-out tasks."""
    from headrace.observe.comparison.compare_page import write_comparison
    from headrace.observe.comparison.comparison_tables import as_json as comparison_json
    from headrace.observe.comparison.comparison_tables import tables
    from headrace.wiring.commands.experiments.compare_runs import compare_runs

    comparison = compare_runs(runs, tasks=task or ())
    page = write_comparison(html, " and ".join(arm.label for arm in comparison.arms[:3]), comparison)
    if as_json:
        print(json.dumps({"page": str(page), **comparison_json(comparison)}))
        return
    _print_comparison(comparison, tables(comparison))
    print(f"Page: {page}")


@app.command()
def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that have some; by default runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per run.")] = False,
) -> None:
    """List runs: where each stands, its last figures, how it ended."""
    from headrace.observe import run_list

    listed = [run_list.describe_run(path) for path in run_list.find_run_folders(folders or [Path("runs")])]
    if as_json:
        print(run_list.as_json(listed))
    else:
        print(run_list.table(listed) if listed else "there are no runs here")


@app.command()
def dashboard(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that have some; by default runs.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one beyond this machine needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8770,
    key: Annotated[
        str | None,
        typer.Option(
            help="Key that readers need; better in HEADRACE_DASHBOARD_KEY, where no list of processes has it."
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of the index of episodes; it can be removed at any time.")
    ] = None,
) -> None:
    """Show runs on a live page: curves, what each part does, episodes."""
    from headrace.observe.dashboard.access import KEY_VARIABLE
    from headrace.observe.dashboard.server import end_with_input, open_dashboard
    from headrace.reward.builtin.final_answer import final_answer

    key = key if key is not None else os.environ.get(KEY_VARIABLE) or None
    folders = folders or [Path("runs")]
    with open_dashboard(folders, host=host, port=port, key=key, cache=cache, final_answer=final_answer) as (
        url,
        server,
        listening,
    ):
        print(f"the dashboard is on {url}{' (with the key)' if key is not None else ''}; Ctrl-C ends it", flush=True)
        missing = [] if end_with_input(server) else [folder for folder in folders if not folder.exists()]
        for folder in missing:
            print(f"there is no folder {visible(str(folder))} yet: its runs are listed once they begin", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


@app.command()
def view(
    path: Annotated[Path, typer.Argument(help="A rollout file, a rollouts folder or a run folder.")],
    step: Annotated[int | None, typer.Option(help="The training step; by default the latest.")] = None,
    task: Annotated[str | None, typer.Option(help="Show only this task: its id, or the beginning of it.")] = None,
    episode: Annotated[str | None, typer.Option(help="Show this episode step by step.")] = None,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Show episodes with this text: messages, actions, what rewards said of them."
        ),
    ] = None,
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
        search=search,
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


def _print_comparison(comparison: "ArmComparison", tables: "list[Table]") -> None:
    from headrace.observe.comparison.comparison_tables import sentences

    console = _console()
    for table in tables:
        console.print(table)
    for sentence in sentences(comparison):
        print(visible(sentence))


def _console() -> "Console":
    """Return a console for tables, 160 columns wide where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, emoji=False, markup=False, width=160)
    return console


if __name__ == "__main__":
    main()
