"""Servers that all tests of this folder share. They need an environment with vLLM; `make test-vllm` makes one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.infer.servers.launch import LaunchedServer
from headrace.infer.servers.weight_sync import write_model
from support.real_vllm import PYTHON, launched, servable_model


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LaunchedServer]]:
    """Two servers of the same model, with other weights than the trainers of the tests have; the second has adapters.

    vLLM on CPU ends when one with adapters scores beside other requests.
    """
    if not Path(PYTHON).is_file():
        pytest.skip("HEADRACE_VLLM_PYTHON names no interpreter of an environment with vLLM: call make test-vllm")
    folder = tmp_path_factory.mktemp("served")
    write_model(servable_model(seed=5), folder)
    with launched(folder, tmp_path_factory.mktemp("logs"), lora_ranks=(0, 8)) as running:
        yield running
