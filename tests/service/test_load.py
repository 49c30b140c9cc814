"""bench/service_load.py, small: more clients than the server takes, and every accepted request is answered once."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.service.host.fake_host import FakeHost
from headrace.service.settings import Limits
from support.paths import ROOT
from support.tinker_sdk import until
from support.tinker_server import BASE, KEY, OTHER_KEY, served

CLIENTS, ROUNDS, CAPACITY = 16, 3, 32


def load_bench() -> Any:
    spec = importlib.util.spec_from_file_location("service_load", ROOT / "bench" / "service_load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_at_twice_the_capacity_nothing_is_lost_and_no_tenant_starves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = load_bench()
    tally = bench.Tally()

    def hold(verb: str) -> None:  # until the server was too full for somebody
        if verb.startswith("forward_backward"):
            until(lambda: tally.refused)

    host = FakeHost(vocabulary=32, hold=hold)
    with served(tmp_path, host=host, limits=Limits(poll_s=20.0, open_requests=CAPACITY)) as running:
        work = bench.load_over_wire(
            running.url,
            {"alice": KEY, "bob": OTHER_KEY},
            BASE,
            clients=CLIENTS,
            rounds=ROUNDS,
            together=True,
            tally=tally,
        )
        asyncio.run(work)
    assert len(tally.answered) == len(set(tally.answered)) == CLIENTS * (1 + ROUNDS * 4)  # a step and two samples
    assert (tally.lost(), tally.twice, tally.failed) == (0, 0, [])
    assert tally.refused > 0
    assert tally.refused_without_time == 0
    assert bench.unfinished(tmp_path / "journal.sqlite") == 0
    assert sum(verb.startswith("optim_step") for verb in host.log) == CLIENTS * ROUNDS
    assert bench.fairness(tally) > 0.5  # 0.95 and more is usual; a tenant that starves is near 0
