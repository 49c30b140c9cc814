"""The command line as a user meets it: exit codes, one sentence on standard error, a quick --help."""

import errno
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli_w

from headrace.cli import exit_code, main, waiting
from headrace.config import load_config, to_mapping
from headrace.envs import ENVIRONMENTS
from headrace.errors import ConfigError, HeadraceError, Interrupted, ModelError
from headrace.model.tiny import make_tokenizer
from headrace.observe.machine import OPTIONAL, REQUIRED, machine_facts
from headrace.observe.run_folder import RunFolder
from headrace.wiring.build.model_sizes import model_shape
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.doctor import SamplingCheck, checking_aside, describe_machine
from headrace.wiring.resume import run_to_resume

RUN = """
[rl]
steps = 4
max_prompt_tokens = 64
max_episode_tokens = 256
[rl.tasks]
type = "env"
name = "key_door"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def headrace(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_help_needs_neither_torch_nor_the_configuration() -> None:
    code = (
        "import sys; from headrace.cli import app; sys.argv = ['headrace', '--help']\n"
        "try: app()\n"
        "except SystemExit: print(*sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)), 'end')"
    )
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "end"
    for command in (
        "demo",
        "train",
        "eval",
        "compare",
        "sweep",
        "demonstrate",
        "explain",
        "doctor",
        "verify",
        "report",
    ):
        assert f"  {command} " in done.stdout
    assert "[sft], [distill], [dpo]" in done.stdout


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read at its beginning")
def test_a_file_that_the_machine_cannot_read_is_one_sentence(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "model").mkdir()
    (file.parent / "model" / "config.json").symlink_to("/proc/self/mem")  # reading it is an input/output error
    assert headrace(monkeypatch, "train", file, "--set", "model.path=model") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Input/output error: see to the disk or its permissions" in line


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("x"), 2), (Interrupted("x"), 75), (ModelError("x"), 1), (HeadraceError("x"), 1)]
)
def test_exit_codes(error: HeadraceError, code: int) -> None:
    assert exit_code(error) == code


def test_a_wrong_key_is_one_sentence_and_exit_code_2(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(RUN.replace("steps", "stesp"))
    assert headrace(monkeypatch, "train", file) == 2
    captured = capsys.readouterr()
    assert captured.err == f"headrace: {file}: unknown key 'rl.stesp'; did you mean 'rl.steps'?\n"
    assert captured.out == ""


def test_debug_shows_the_traceback(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["headrace", "train", "nowhere.toml"])
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.toml"):
        main()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["train", "nowhere.toml"], 2, "there is no file nowhere.toml"),
        (["train", "run.toml", "runs/x"], 2, "a run folder (runs/x) is only given with --resume"),
        (["train", "run.toml", "--resume"], 2, "there is no run named 'run' in runs: start it without --resume"),
        (["train", "run.toml", "--resume", "runs/x"], 1, "runs/x is not a run folder"),
        (["train", "run.toml", "--set", "rl.minibatches=3"], 2, "does not divide into 3 minibatches"),
        (["train", "run.toml", "--set", "rl.credit=grop"], 2, 'did you mean "grpo"?'),
        (["train", "run.toml", "--set", "rl.tasks.name=door"], 2, 'did you mean "key_door"?'),
        (
            ["train", "run.toml", "--set", "rl.loss_params.clip_lo=0.2"],
            2,
            "run.toml: 'rl.loss_params': loss 'ppo' takes no parameter 'clip_lo': did you mean 'clip_low'?",
        ),
        (["eval", "nowhere", "run.toml"], 2, "there is no folder nowhere: give a checkpoint"),
        (["eval", "tiny", "run.toml"], 2, "tiny is made anew for every run: give a checkpoint"),
        (["eval", ".", "run.toml"], 2, "there is nothing to evaluate on: add a table [eval.source]"),
        (["eval", ".", "nowhere", "run.toml"], 2, "there is nothing to evaluate on"),
        (["compare", "."], 2, "compare needs two run folders or more"),
        (["compare", ".", "nowhere"], 1, ". is not a run folder"),
        (["explain"], 2, "explain needs a TOML file"),
        (["explain", "run.toml", "--set", "model.device=cuda"], 2, "model.device is 'cuda' but torch sees no CUDA"),
        (["report", "."], 1, "is not a run folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert headrace(monkeypatch, *arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("headrace: ")
    assert sentence in error
    assert "Traceback" not in error


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_checked(file, [], command="train")


def test_paths_come_back_absolute(file: Path) -> None:
    (file.parent / "rows.jsonl").write_text("{}\n")
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    overrides = ["model.path=.", "rl.tasks.type=jsonl", "rl.tasks.path=rows.jsonl", 'rl.rewards=[{fn="exact_match"}]']
    config = load_checked(Path("run.toml"), overrides, command="train")
    assert config.rl is not None
    assert config.rl.tasks[0].path == str(file.parent / "rows.jsonl")


@pytest.mark.parametrize("model", ["tiny", "folder"])
def test_lengths_that_a_file_leaves_out_fit_the_model(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    source = '{ type = "env", name = "key_door", size = 9 }'
    written = f"""
    [sft]
    steps = 1
    sources = [{source}]
    [reward_model]
    steps = 1
    max_tokens = 100
    sources = [{source}]
    [rl]
    steps = 1
    tasks = {source}
    """
    (tmp_path / "run.toml").write_text(written)
    overrides = []
    if model == "folder":
        described = {"model_type": "llama", "max_position_embeddings": 512}
        (tmp_path / "config.json").write_text(json.dumps(described))
        overrides = ["model.path=."]
    config = load_checked(tmp_path / "run.toml", overrides, command="train")
    assert config.sft is not None
    assert config.reward_model is not None
    assert config.rl is not None
    assert (config.sft.max_tokens, config.reward_model.max_tokens) == (512, 100)
    assert (config.rl.max_episode_tokens, config.rl.max_prompt_tokens) == (512, 256)
    shorter = "sft.max_tokens = 512, rl.max_episode_tokens = 512, rl.max_prompt_tokens = 256"
    assert f"shorter than by default, to fit the model: {shorter}" in caplog.text
    recorded = tomli_w.dumps(to_mapping(config))
    assert load_config(recorded, file="config.toml") == config
    with pytest.raises(ConfigError, match=r"'rl\.max_episode_tokens' is 1024, but the model's context is 512 tokens"):
        load_checked(tmp_path / "run.toml", [*overrides, "rl.max_episode_tokens=1024"], command="train")
    shortened = load_checked(tmp_path / "run.toml", [*overrides, "rl.max_episode_tokens=200"], command="train").rl
    assert shortened is not None
    assert (shortened.max_episode_tokens, shortened.max_prompt_tokens) == (200, 100)
    roomy = load_checked(
        tmp_path / "run.toml", ["model.tiny.context=4096", "rl.max_episode_tokens=600"], command="train"
    )
    assert roomy.rl is not None
    assert roomy.rl.max_prompt_tokens == 512, "as it always was where that fits"


def test_a_kind_of_model_that_is_not_supported_is_refused_by_name(file: Path) -> None:
    (file.parent / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match="'mamba' are not supported: it is recurrent"):
        load_checked(file, ["model.path=."], command="train")


def test_the_newest_run_of_that_name_is_resumed(file: Path) -> None:
    config = load_checked(file, [], command="train")
    for day in (1, 3, 2):
        folder = RunFolder.create(Path("runs"), "run", datetime(2026, 1, day, tzinfo=UTC))
        folder.write_config("")
    assert run_to_resume(config, None) == Path("runs/run_2026-01-03T00-00-00Z_2"), "started last, by a clock set back"
    first = Path("runs/run_2026-01-01T00-00-00Z")
    assert run_to_resume(config, first) == first


def test_the_run_before_one_that_never_began_is_resumed_and_both_are_named(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    config = load_checked(file, [], command="train")
    begun, never = (RunFolder.create(Path("runs"), "run", datetime(2026, 1, day, tzinfo=UTC)) for day in (1, 2))
    for folder in (begun, never):
        folder.write_config("[rl]\nsteps = 9\n")
    begun.metrics.write_text("{}\n")
    assert run_to_resume(config, None) == begun.path
    assert f"{never.path} has neither a checkpoint nor a metric, so {begun.path} is resumed" in caplog.text


def test_changed_files_are_accepted_at_a_resume_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert headrace(monkeypatch, "train", file, "--accept-changed-files") == 2


def test_an_error_of_the_machine_is_one_sentence(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "runs/x")

    monkeypatch.setattr("headrace.observe.run_folder.RunFolder.open", refuse)
    assert headrace(monkeypatch, "report", "runs/x") == 1
    assert capsys.readouterr().err.startswith("headrace: runs/x: Input/output error: see to the disk")


def test_the_size_of_a_model_is_read_from_where_the_model_is(file: Path) -> None:
    described = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 7,
        "max_position_embeddings": 512,
    }
    (file.parent / "config.json").write_text(json.dumps(described))
    shape = model_shape(load_checked(file, ["model.path=."], command="train"))
    assert (shape.width, shape.vocabulary, shape.kv_heads) == (32, 7, 2)
    tiny = model_shape(load_checked(file, ["model.tiny.layers=5"], command="train"))
    words = make_tokenizer(ENVIRONMENTS["key_door"].vocabulary())
    assert (tiny.layers, tiny.vocabulary) == (5, len(words))


def test_explain_prints_the_plan(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert headrace(monkeypatch, "explain", "run.toml", "--set", "rl.groups=3") == 0
    text = capsys.readouterr().out
    assert text.startswith("# run.toml with every default filled in\n[run]\n")
    assert "3 groups x 8 episodes = 24 episodes, at most 6,144 tokens" in text
    assert "cpu in float32" in text


@pytest.mark.parametrize(
    "packages", [REQUIRED, pytest.param((*REQUIRED, *OPTIONAL), marks=pytest.mark.slow)], ids=["required", "all"]
)
def test_doctor_looks_at_the_machine_and_checks_it(
    packages: tuple[str, ...], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if packages == REQUIRED:
        monkeypatch.setattr("headrace.observe.machine.machine_facts", partial(machine_facts, REQUIRED))
    code = headrace(monkeypatch, "doctor")
    text = capsys.readouterr().out
    assert [name for name in packages if not re.search(rf"^ *{name} ", text, flags=re.MULTILINE)] == []
    assert re.search(rf"^torch +{re.escape(version('torch'))}$", text, flags=re.MULTILINE)
    assert "cpu in float32, because torch sees no GPU" in text
    assert "\n  llama  " in text
    assert "decoded in CUDA graphs: llama, mistral, " in text
    assert "; other types step by step" in text
    assert "reproducible sampling: yes, " in text
    assert code == 0


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """What doctor finds, without importing anything."""
    found: dict[str, dict[str, object]] = {name: {"ok": True, "version": "1"} for name in ("torch", "transformers")}
    facts = {
        "cpu": {"model": "Mill", "architecture": "x86_64", "cores": 2, "threads": 2, "usable_threads": 2},
        "memory": {"total_bytes": 1, "available_bytes": 1},
        "disk": {"free_bytes": 1},
        "python": {"version": "3.11.2", "platform": "Linux", "executable": "python"},
        "gpus": [],
        "torch": {},
        "packages": found,
    }
    monkeypatch.setattr("headrace.observe.machine.machine_facts", lambda tell: facts)
    return found


def describe(checking: "Future[SamplingCheck]", limit_s: float = 60.0) -> None:
    for text in describe_machine(checking, waiting, limit_s=limit_s):
        print(text)


@pytest.mark.usefixtures("packages")
def test_doctor_fails_where_sampling_is_not_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    checked: Future[SamplingCheck] = Future()
    checked.set_result((False, "2 of 6 requests changed bits with the batch", ("llama",)))
    with pytest.raises(HeadraceError, match="depend on what else is in the batch"):
        describe(checked)
    assert "reproducible sampling: NO, 2 of 6" in capsys.readouterr().out


@pytest.mark.usefixtures("packages")
def test_doctor_says_what_it_found_before_a_check_that_died(capsys: pytest.CaptureFixture[str]) -> None:
    checked: Future[SamplingCheck] = Future()
    checked.set_exception(BrokenProcessPool("a child process terminated abruptly"))
    with pytest.raises(HeadraceError, match="sampling cannot be checked: BrokenProcessPool"):
        describe(checked)
    assert "cpu           Mill" in capsys.readouterr().out


@pytest.mark.usefixtures("packages")
def test_doctor_ends_a_check_that_hangs_and_its_process() -> None:
    before = set(multiprocessing.active_children())
    with checking_aside(partial(time.sleep, 600)) as checking:  # type: ignore[arg-type]
        [process] = set(multiprocessing.active_children()) - before
        with pytest.raises(
            HeadraceError, match=r"has not ended after 0\.2 s, .* CUDA_VISIBLE_DEVICES= headrace doctor"
        ):
            describe(checking, limit_s=0.2)
    process.join(60)
    assert not process.is_alive()


def test_doctor_does_not_wait_for_a_check_that_cannot_be_made(
    packages: dict[str, dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    packages["torch"] = {"ok": False, "reason": "not usable: OSError: no such library"}
    with pytest.raises(HeadraceError, match="torch cannot be imported, so nothing can run"):
        describe(Future())  # never ends
    assert "not usable: OSError: no such library" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_waited_for_is_said_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with waiting("looking at this machine") as tell:
        tell("importing torch")
    assert ("importing torch" in screen.getvalue()) == terminal


def test_version_and_keys(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("headrace ")
    assert headrace(monkeypatch, "explain", "--keys") == 0
    assert "| `rl.group_size` | a whole number above 0 | `8` | episodes of one task |" in capsys.readouterr().out
