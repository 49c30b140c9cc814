"""Servers of a run: those that cannot work are refused with a sentence, and those that are lent can be reached."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace.config import Config, load_config
from headrace.errors import ConfigError
from headrace.infer.servers.launch import LaunchedServer
from headrace.infer.servers.transfer.senders import BroadcastSender, FolderSender, SharedMemorySender
from headrace.infer.servers.weight_sync import WeightSync
from headrace.model.load import LanguageModel
from headrace.wiring.build import servers

RUN = """
[model.lora]
rank = 4
[engine]
type = "vllm"
urls = ["http://127.0.0.1:1"]
[rl]
steps = 1
tasks = { type = "env", name = "key_door" }
"""


def config(*overrides: str) -> Config:
    return load_config(RUN, file="run.toml", overrides=overrides)


def model_on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device))


def test_adapters_on_a_cpu_are_refused_where_vllm_would_score_beside_other_requests() -> None:
    with pytest.raises(ConfigError, match=r"write 'rl\.sampling\.temperature = 1\.0'"):
        servers._check_adapters(config("rl.sampling.temperature=0.7"), model_on("cpu"))
    servers._check_adapters(config(), model_on("cpu"))
    servers._check_adapters(config("rl.sampling.temperature=0.7"), model_on("cuda"))


def test_weights_go_the_way_that_the_file_says() -> None:
    assert isinstance(servers._make_sender("folder", torch.device("cpu")), FolderSender)
    assert isinstance(servers._make_sender("broadcast", torch.device("cpu")), BroadcastSender)
    assert isinstance(servers._make_sender("ipc", torch.device("cuda")), SharedMemorySender)
    with pytest.raises(ConfigError, match="shares the memory of a GPU, and the model is on cpu"):
        servers._make_sender("ipc", torch.device("cpu"))


def test_a_sampler_that_differs_from_the_trainer_in_two_steps_in_a_row_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarm = servers.mismatch_alarm(config(), stage="rl", run="r")
    assert alarm is not None
    for step, value in enumerate([0.02, 0.001, 0.02]):
        alarm.log(step, {"rollout/mismatch_k3": value})
    assert caplog.text == "", "one step is no alarm"
    alarm.log(3, {"rollout/mismatch_k3": 0.011})
    assert "rollout/mismatch_k3 above 0.01 for 2 records in a row" in caplog.text


def test_a_rule_of_the_users_own_is_the_only_one() -> None:
    own = 'metrics.alerts=[{ metric = "rollout/mismatch_k3", above = 0.5 }]'
    assert servers.mismatch_alarm(config(own), stage="rl", run="r") is None
    assert servers.mismatch_alarm(config(), stage="sft", run="r") is None
    embedded = load_config(RUN.split("[engine]")[0], file="run.toml", overrides=())
    assert servers.mismatch_alarm(embedded, stage="rl", run="r") is None


@pytest.mark.parametrize("others", [False, True])
def test_servers_that_are_lent_listen_where_workers_of_other_machines_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    address = pytest.importorskip("ray").util.get_node_ip_address()
    machines = frozenset({address, "another"} if others else {address})
    monkeypatch.setattr(servers, "cluster_machines", lambda: machines)
    launched = config("engine.urls=[]", f'engine.launch={{ python = "{sys.executable}", replicas = 2 }}')
    lm = cast(LanguageModel, SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32))
    weights = cast(WeightSync, SimpleNamespace(newest=SimpleNamespace(base=None, folder=tmp_path)))
    for lends in (False, True):
        made = servers._make_servers(launched, lm, weights, tmp_path, 64, tmp_path, (), None, lends=lends)
        host = address if others and lends else "127.0.0.1"
        assert len({server.url for server in made}) == 2
        for server in made:
            assert isinstance(server, LaunchedServer)
            assert server.url.startswith(f"http://{host}:")
            command = server._command()
            assert command[command.index("--host") + 1] == host
