"""Servers in [engine]: what contradicts itself is told in one sentence before anything starts."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.config import check, load_config
from headrace.errors import ConfigError

ENGINE = '[engine]\ntype = "vllm"\n[model.tiny]\ncontext = 4096\n'
RUN = ENGINE + '[rl]\nsteps = 5\n[rl.tasks]\ntype = "env"\nname = "key_door"\n'
URLS = 'engine.urls=["http://a:1", "http://b:1"]'
ADAPTERS = "model.lora.rank=8"


def run_check(folder: Path, *overrides: str) -> None:
    check(load_config(RUN, file="run.toml", overrides=overrides), file="run.toml", base=folder)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "nothing says where its servers are: add 'engine.urls', or a table [engine.launch]"),
        ([URLS, f"engine.launch.python={sys.executable}"], "both say where servers are"),
        (["engine.urls=['a:1']"], "must start with http:// or https://"),
        (["engine.urls=['http://a', 'http://a']"], "names a server twice"),
        (["engine.type=embedded", URLS], "'engine.urls' is for inference servers"),
        (["engine.launch.python=nowhere/python"], "which is no file"),
        ([f"engine.launch.python={sys.executable}", "engine.launch.gpus=['0', '1']"], "write one for each server"),
        ([URLS, "engine.kv_tokens=4096"], "'engine.kv_tokens' is of the embedded engine"),
        ([URLS, "run.deterministic=true"], "which inference servers do not promise"),
        ([URLS, "rl.sampling.top_p=0.9", "rl.allow_truncated_sampling=true"], "leave top_p, top_k and min_p out"),
        ([URLS, "rl.async.lockstep_tokens=4"], "draws other tokens after an interruption"),
        ([URLS, ADAPTERS, "model.lora.targets=['q_proj', 'lm_head']"], "has lm_head"),
        ([URLS, ADAPTERS, "model.lora.targets=['q_proj', 'router']"], "has router"),
        (["engine.type=embedded", "engine.sync=broadcast"], "'engine.sync' is for inference servers"),
        (
            [URLS, ADAPTERS, "engine.sync=broadcast"],
            "adapters of [model.lora], which are small, are loaded from folders",
        ),
        ([URLS, "engine.sync=ipc"], "works on one machine, and http://a:1 may be another"),
        (["engine.urls=['http://127.0.0.1:1']", "engine.sync=ipc", "model.device=cpu"], "shares the memory of a GPU"),
        ([URLS, ADAPTERS, "rl.async.interrupt=inflight"], "keep the adapter they began with"),
        ([URLS, "engine.type=sglang", "rl.async.interrupt=inflight"], "not supported with SGLang"),
        (
            [
                URLS,
                "rl.loss=decoupled_ppo",
                "rl.async.max_staleness=2",
                "rl.async.behaviour_weight=one_step",
                "rl.sampling.temperature=0.7",
            ],
            "scores at temperature 1 only",
        ),
        (
            [
                URLS,
                "rl.loss=decoupled_ppo",
                "rl.async.max_staleness=2",
                "rl.async.behaviour_weight=one_step",
                "rl.async.interrupt=inflight",
            ],
            "freezes the server",
        ),
    ],
)
def test_contradictions_are_told(tmp_path: Path, overrides: Sequence[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_check(tmp_path, *overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [URLS],
        [URLS, "engine.type=sglang"],
        [f"engine.launch.python={sys.executable}", "engine.launch.replicas=2"],
        [URLS, "rl.async.interrupt=inflight", "rl.async.max_staleness=1"],
        [URLS, ADAPTERS],
        [URLS, "engine.sync=broadcast"],
        [URLS, "cluster.ranks=2"],
        ["engine.urls=['http://127.0.0.1:1']", "engine.sync=ipc"],
    ],
)
def test_what_can_work_passes(tmp_path: Path, overrides: Sequence[str]) -> None:
    run_check(tmp_path, *overrides)
