"""What a small run of all stages logs, where it goes, and that docs/metrics.md names every number of it."""

import ast
import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from headrace import wiring
from headrace.config import load_config
from headrace.config.checks.metric_sinks import metrics_problems
from headrace.config.schema import AlertConfig, MetricsConfig
from headrace.errors import ConfigError
from headrace.observe.sinks.alerts import AlertRule, alert_message
from headrace.observe.sinks.jsonl import read_metrics
from headrace.observe.sinks.tensorboard import TensorBoardSink, tensorboard_installed
from headrace.wiring.build.sinks import MetricOutputs, stage_source
from headrace.wiring.checked_config import load_checked
from support.paths import ROOT

CONFIG = """
[run]
name = "small"
tensorboard = false
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[engine]
max_num_seqs = 8
[sft]
steps = 2
batch_size = 4
max_tokens = 200
sources = [{ type = "env", name = "key_door", size = 12, seed = 1 }]
[rl]
steps = 2
groups = 2
group_size = 2
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = { type = "env", name = "key_door", size = 12, seed = 2 }
[rl.sampling]
max_tokens = 4
[eval]
tasks = 2
source = { type = "env", name = "key_door", size = 8, seed = 3, options = { split = "held_out" } }
[metrics]
sinks = ["datadog", "prometheus"]
prometheus.port = 0
[[metrics.alerts]]
metric = "train/grad_norm"
above = -1.0
for_steps = 2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    result: wiring.RunResult
    datagrams: list[str]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(CONFIG)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as agent:
        agent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        agent.bind(("127.0.0.1", 0))
        agent.setblocking(False)
        overrides = [
            f"run.folder={json.dumps(str(folder / 'runs'))}",
            f"metrics.datadog.port={agent.getsockname()[1]}",
            'metrics.datadog.tags=["team:tests"]',
        ]
        config = load_checked(folder / "run.toml", overrides, command="train")
        result = wiring.train(config, config_text_path=folder / "run.toml", resume=None)
        return Logged(result=result, datagrams=list(_received(agent)))


def _received(agent: socket.socket) -> Iterator[str]:
    """What lies in the socket's buffer, line by line."""
    while True:
        try:
            yield from agent.recv(65536).decode().splitlines()
        except BlockingIOError:
            return


def test_datadog_gets_every_number_of_every_record(logged: Logged) -> None:
    run = logged.result.folder.name
    expected = []
    for record in read_metrics(logged.result.folder / "metrics.jsonl"):
        values = {**record.values, "step": float(record.step)}
        end = f"|g|#run:{run},stage:{record.stage},team:tests"
        expected += [
            f"headrace.{re.sub('[^a-zA-Z0-9_.]', '_', name.replace('/', '.'))}:{value!r}{end}"
            for name, value in sorted(values.items())
        ]
    assert len(expected) > 100
    assert logged.datagrams == expected


def test_alerts_are_in_the_log(logged: Logged) -> None:
    log = (logged.result.folder / "log.txt").read_text(encoding="utf-8")
    assert re.findall(r"alert: (\w+), step (\d+): train/grad_norm is", log) == [("sft", "2"), ("rl", "2")]


def test_stages_share_one_scrape_endpoint(tmp_path: Path) -> None:
    config = load_config(CONFIG, file="run.toml")
    outputs = MetricOutputs(config.metrics)
    assert outputs.exporter is not None
    for stage in ("sft", "rl"):
        told = stage_source(config, tmp_path / "small_1", stage=stage, start=0)
        assert "metrics" not in told.config  # a webhook's address is for nobody else
        for sink in outputs.sinks(told):
            sink.log(2, {"loss/total": 0.5})
            sink.close()
    with urllib.request.urlopen(outputs.exporter.url, timeout=30) as answer:
        text = answer.read().decode()
    outputs.close()
    for stage in ("sft", "rl"):
        assert f'headrace_loss_total{{run="small_1",stage="{stage}"}} 0.5\n' in text


def test_an_alert_whose_metric_never_came_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(CONFIG, file="run.toml", overrides=["metrics.sinks=[]"])
    outputs = MetricOutputs(config.metrics)
    for stage, values in (("sft", {"loss/total": 0.5}), ("rl", {"loss/policy": 0.5})):
        for sink in outputs.sinks(stage_source(config, tmp_path / "small_1", stage=stage, start=0)):
            sink.log(1, values)
    outputs.close()
    assert caplog.messages == [
        "no record had 'train/grad_norm', so its alert could not fire: docs/metrics.md has the names"
    ]


def test_a_run_without_a_record_says_nothing_about_alerts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(CONFIG, file="run.toml", overrides=["metrics.sinks=[]"])
    outputs = MetricOutputs(config.metrics)
    outputs.sinks(stage_source(config, tmp_path / "small_1", stage="sft", start=0))
    outputs.close()
    assert caplog.messages == []


def test_a_webhook_may_be_named_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    alerts = (AlertConfig(metric="loss/total", above=1.0, webhook="env:HEADRACE_TEST_HOOK"),)
    monkeypatch.delenv("HEADRACE_TEST_HOOK", raising=False)
    with pytest.raises(ConfigError, match=r"'metrics.alerts\[0\].webhook' is env:HEADRACE_TEST_HOOK, which is not set"):
        MetricOutputs(MetricsConfig(alerts=alerts))
    monkeypatch.setenv("HEADRACE_TEST_HOOK", "ftp://nowhere")
    with pytest.raises(ConfigError, match="no http:// or https:// URL"):
        MetricOutputs(MetricsConfig(alerts=alerts))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('sinks = ["datadog", "datadog"]', "'metrics.sinks' has datadog twice"),
        ('sinks = ["graphite"]', "'metrics.sinks"),
        ('alerts = [{ metric = "a/b" }]', "'metrics.alerts[0]' has no threshold: write above = NUMBER"),
        ('alerts = [{ metric = "a/b", above = 0, below = 1 }]', "which is always: write a smaller 'below'"),
        ('alerts = [{ metric = "a/b", above = 1, webhook = "x.org" }]', "'metrics.alerts[0].webhook' is \"x.org\""),
        ('alerts = [{ metric = "a/b", above = 1, webhook = "env:" }]', "which names no environment variable"),
        ("prometheus.port = 70000", "'metrics.prometheus.port'"),
    ],
)
def test_what_cannot_work_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    before, _, _ = CONFIG.partition("[metrics]")
    (tmp_path / "run.toml").write_text(f"{before}[metrics]\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_checked(tmp_path / "run.toml", [], command="train")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "datadog"])
def test_a_sink_without_its_package_is_answered_with_the_pip_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "run.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=re.escape(f"pip install 'headrace[{name}]'")):
        load_checked(tmp_path / "run.toml", [f'metrics.sinks=["{name}"]'], command="train")


def test_a_run_may_go_on_with_other_sinks(logged: Logged) -> None:
    file = logged.result.folder / "config.toml"
    config = load_checked(file, ['metrics.sinks=["prometheus"]', "metrics.prometheus.port=0"], command="train")
    resumed = wiring.train(config, config_text_path=file, resume=logged.result.folder)
    assert resumed.figures == logged.result.figures


# --- the document ----------------------------------------------------------------------------------------------------

DOCUMENT = ROOT / "docs" / "metrics.md"
AREAS = "loss|train|data|critic|reward|credit|rollout|histogram|staleness|correction|eval|time|perf|server"
ANY_OF_AN_AREA = ("rollout/", "critic/", "server/")  # put before names that are elsewhere in the source
METRIC = re.compile(rf"(?:{AREAS})/[a-z0-9_@]+")


@cache
def documented() -> frozenset[str]:
    """The names in the first cells of the tables under "Every metric"; `<...>` is what varies."""
    _, _, text = DOCUMENT.read_text(encoding="utf-8").partition("## Every metric")
    text, _, _ = text.partition("### By the names of other systems")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return frozenset(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))


def described(name: str) -> bool:
    patterns = [".+".join(map(re.escape, re.split(r"<\w+>", known))) for known in documented()]
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Source:
    """What strings there are in the source: whole names of metrics, words, and f-strings as regular expressions."""

    names: set[str]
    words: set[str]
    patterns: set[str]

    def has(self, name: str) -> bool:
        """Whether a name can come out of the source, whole or put together from its area and the rest."""
        tail = name.partition("/")[2]
        return (
            name in self.names
            or tail in self.words
            or any(re.fullmatch(pattern, text) for pattern in self.patterns for text in (name, tail))
        )


@cache
def read_source() -> Source:
    found = Source(set(), set(), set())
    for file in (ROOT / "headrace").rglob("*.py"):
        if file.name == "testing.py":  # fakes
            continue
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in joined for part in node.values}
        for node in joined:
            texts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            literal = "".join(text for text in texts if isinstance(text, str))
            if re.fullmatch(r"[a-z0-9_@/]{4,}", literal) and literal not in ANY_OF_AN_AREA:
                found.patterns.add("".join(".*" if text is None else re.escape(str(text)) for text in texts))
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                found.words.update((node.value, node.value.partition("/")[2]))
                if METRIC.fullmatch(node.value) and not node.value.endswith("_"):
                    found.names.add(node.value)
    return found


def test_every_number_of_a_run_is_described(logged: Logged) -> None:
    names = {name for record in read_metrics(logged.result.folder / "metrics.jsonl") for name in record.values}
    assert len(names) > 60
    assert not sorted(name for name in names if not described(name))


def test_every_metric_in_the_source_is_described() -> None:
    names = read_source().names
    assert len(names) > 100
    assert not sorted(name for name in names if not described(name))


def test_every_name_that_is_described_is_measured_somewhere() -> None:
    source = read_source()
    assert not source.has("rollout/unheard_of")
    examples = {re.sub(r"<\w+>", "1", name) for name in documented()}
    assert not sorted(name for name in examples if not source.has(name))


def test_a_name_that_is_not_described_is_noticed() -> None:
    assert described("eval/pass@16")
    assert described("reward/close_enough/is_number")
    assert not described("rollout/unheard_of")
    assert not described("train/grad_norms")


def test_the_examples_of_the_document_are_right() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    before, _, _ = CONFIG.partition("[metrics]")
    metrics = load_config(before + example, file="metrics.md").metrics
    assert not list(metrics_problems(metrics))
    (alert,) = metrics.alerts
    rule = AlertRule(metric=alert.metric, above=alert.above, for_steps=alert.for_steps)
    (shown,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    message = json.loads(shown)
    expected = alert_message(
        rule, step=message["step"], value=message["value"], stage="rl", about={"run": message["run"]}
    )
    assert message == expected


def test_log_every_thins_out_sinks_and_lines_and_not_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(TensorBoardSink, "log", lambda self, step, values: sent.append(step))
    (tmp_path / "run.toml").write_text(CONFIG.partition("[rl]")[0])
    overrides = ["sft.steps=5", "run.log_every=2", "run.tensorboard=true", f'run.folder="{tmp_path / "runs"}"']
    config = load_checked(tmp_path / "run.toml", overrides, command="train")
    folder = wiring.train(config, config_text_path=tmp_path / "run.toml", resume=None).folder
    lines = re.findall(r"^sft (\d)/5", capsys.readouterr().err, re.MULTILINE)
    assert lines == ["2", "4", "5"]
    if tensorboard_installed():
        assert sent == [2, 4, 5]
    logged_steps = [record.step for record in read_metrics(folder / "metrics.jsonl") if "loss/total" in record.values]
    assert logged_steps == [1, 2, 3, 4, 5]
