"""After a kill at any moment: nothing acknowledged is lost, nothing runs twice, models are where they were."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.service.core import Service
from headrace.service.host.fake_host import FakeHost
from headrace.service.settings import Limits
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from support.killed_folder import copy_as_killed
from support.paths import TESTS
from support.tinker_sdk import DATA, loss_of, prompt, sampling, types
from support.tinker_server import BASE, KEY, served

STEP = types.AdamParams(learning_rate=0.3)


class Photographer:
    """Copies what is on disk just before every training verb: what a kill at that moment would leave."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies = folder, copies
        self.journal: Any = None
        self.begin = threading.Event()

    def __call__(self, verb: str) -> None:
        if self.journal is None:
            return
        assert self.begin.wait(100)
        self.journal.write([]).result()  # what was handed over is on disk
        copy = self.copies / f"{len(list(self.copies.iterdir())):02d}"
        copy_as_killed(self.folder, copy)


def run_all(model: Any, camera: Photographer) -> None:
    """A run whose every request is in flight at once: updates, saves, a load, a failure, a forward."""
    asked = [
        model.forward_backward(DATA[:2], "cross_entropy"),  # 1
        model.forward_backward(DATA[2:], "cross_entropy"),  # 2
        model.optim_step(STEP),  # 3
        model.save_state("one"),  # 4
        model.forward_backward(DATA, "nonsense"),  # 5 fails
        model.forward_backward(DATA, "cross_entropy"),  # 6
        model.forward(DATA, "cross_entropy"),  # 7
        model.optim_step(STEP),  # 8
        model.save_weights_for_sampler("two"),  # 9
        model.forward_backward(DATA[1:], "cross_entropy"),  # 10
        model.load_state(f"tinker://{model._guaranteed_model_id()}/weights/one"),  # 11
        model.forward_backward(DATA, "cross_entropy"),  # 12
        model.optim_step(STEP),  # 13
        model.forward_backward(DATA[:1], "cross_entropy"),  # 14: a gradient that is still waiting for its step
    ]
    id, deadline = model._guaranteed_model_id(), time.monotonic() + 100
    while len(camera.journal.requests("target = ?", (id,)).result()) < 1 + len(asked):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    camera.begin.set()  # everything is acknowledged, nothing has run
    with pytest.raises(Exception, match="unknown loss"):
        asked.pop(4).result()
    for future in asked:
        future.result()


async def finish(folder: Path, host: FakeHost) -> Service:
    """Start on what a kill left, and wait until everything in the journal has ended."""
    journal = Journal(str(folder / "journal.sqlite"))
    card = ModelCard(name="fake/bigram", context=host.context, vocabulary=host.vocabulary, aliases=(BASE,))
    service = Service(host, card, journal, folder, limits=Limits(poll_s=5.0))
    async with service.running():
        for pending in service.requests.open_requests():
            assert await service.requests.wait(pending, 20) is not None
        for model in service.registry.models:  # a model that nobody asks for is brought back when it is needed
            queue = service.trainer._queues[model]
            while not queue.is_idle:
                if not queue.resident and not queue.restoring:
                    queue.restoring = True
                    await service.trainer._restore(queue)
                await asyncio.sleep(0.001)
    journal.close()
    return service


@pytest.mark.parametrize(
    ("rank", "saves"),
    [(8, 4), (0, 1)],  # behind each update and the load; of a full model behind the load and every third update
)
def test_a_kill_before_any_verb_changes_nothing(tmp_path: Path, rank: int, saves: int) -> None:
    folder, copies = tmp_path / "data", tmp_path / "copies"
    copies.mkdir()
    camera = Photographer(folder, copies)
    limits = Limits(poll_s=5.0, full_save_steps=3)
    with served(folder, host=FakeHost(hold=camera), full=True, limits=limits) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=rank)
        id = model._guaranteed_model_id()
        camera.journal = running.service._journal
        run_all(model, camera)
        camera.journal = None
        truth = running.host._models[id]
        rows = {row.id: row for row in running.service._journal.requests("target = ?", (id,)).result()}
    kills = sorted(copies.iterdir())
    assert len(kills) == 13 + saves  # requests that run, and saves of the state
    for killed in kills:
        acknowledged = Journal(str(killed / "journal.sqlite"))
        known = {row.id: row for row in acknowledged.requests("target = ?", (id,)).result()}
        acknowledged.close()
        host = FakeHost()
        asyncio.run(finish(killed, host))
        audit = Journal(str(killed / "journal.sqlite"))
        after = {row.id: row for row in audit.requests("target = ?", (id,)).result()}
        audit.close()
        host.close()
        assert set(after) == set(known)  # nothing is lost, nothing is invented
        told = {name for name, row in known.items() if row.state != "queued"}
        assert all(after[name].result == known[name].result for name in told)  # what was told stays told
        for name, row in after.items():
            assert row.state == rows[name].state
            if row.kind in ("optim_step", "save_weights", "load_weights"):
                assert row.result == rows[name].result  # norms and counts as in the run that was not disturbed
        assert len(after) == len(rows) == 15
        assert (host._models[id].table == truth.table).all()
        assert host._models[id].gradient == pytest.approx(truth.gradient, abs=1e-12)
        assert host._models[id].num_updates == truth.num_updates == 1  # since the load, which leaves moments behind


def test_samplers_and_queued_samples_come_back(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        model = running.client().create_lora_training_client(base_model=BASE, rank=8)
        model.forward_backward(DATA, "cross_entropy").result()
        model.optim_step(STEP).result()
        sampler = model.save_weights_and_get_sampling_client()
        first = sampler.sample(prompt(1, 2), 2, sampling(stop=[])).result()
        scores = sampler.compute_logprobs(prompt(1, 2, 3)).result()
        id = sampler._sampling_session_id
        running.closers.clear()  # the client does not say goodbye: the server was killed
        sdk_url = running.url
    with served(tmp_path) as again:
        assert again.url != sdk_url
        http = again.http()
        body = {
            "sampling_session_id": id, "seq_id": 0, "num_samples": 2, "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []},
        }  # fmt: skip
        for seq in (0, 7):  # asked again: the first answer; asked anew: the same weights
            http.post("/api/v1/asample", json={**body, "seq_id": seq}).raise_for_status()
            reply = http.post("/api/v1/retrieve_future", json={"request_id": f"{id}:{seq}"})
            from tinker.proto.response_conv import deserialize_sample_response

            sequences = deserialize_sample_response(reply.content).sequences
            assert [sequence.tokens for sequence in sequences] == [sequence.tokens for sequence in first.sequences]
        assert [verb for verb in again.host.log if verb.startswith("open_sampler")] == [f"open_sampler {id}"]
        assert len(scores) == 3


SERVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.tinker_server import served
from headrace.service.host.fake_host import FakeHost
folder, port = Path(sys.argv[1]), int(sys.argv[2])
def hold(verb):
    while (folder / "hold").exists() and verb.startswith(("forward_backward", "optim_step")):
        time.sleep(0.01)
with served(folder, host=FakeHost(hold=hold), port=port) as running:
    print("ready", flush=True)
    time.sleep(600)
"""


def start(folder: Path, port: int) -> "subprocess.Popen[str]":
    code = SERVER.format(tests=str(TESTS))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(port)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.timeout(240)
def test_a_waiting_client_gets_its_answers_from_the_server_that_was_killed(tmp_path: Path) -> None:
    import tinker

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(tmp_path, port)
    try:
        client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
        model = client.create_lora_training_client(base_model=BASE, rank=8, seed=3)
        losses = [model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]]
        model.optim_step(STEP).result()
        losses.append(model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])  # no step yet
        (tmp_path / "hold").touch()
        pending = [model.optim_step(STEP), model.forward_backward(DATA, "cross_entropy"), model.optim_step(STEP)]
        audit = Journal(str(tmp_path / "journal.sqlite"))
        deadline = time.monotonic() + 100
        while len(audit.requests("state = 'queued'").result()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kill(process)
        (tmp_path / "hold").unlink()
        process = start(tmp_path, port)
        assert pending[0].result().metrics["num_updates:max"] == 2
        losses.append(pending[1].result().metrics["loss:sum"])
        assert pending[2].result().metrics["num_updates:max"] == 3
        losses.append(loss_of(model))
        counts = audit.query("SELECT seq, COUNT(*) FROM requests WHERE target LIKE '%train%' GROUP BY target, seq")
        assert sorted(counts) == [(seq, 1) for seq in range(8)]
        audit.close()
    finally:
        kill(process)
    undisturbed = FakeHost()
    assert losses == pytest.approx(plain_losses(undisturbed), rel=1e-12)
    undisturbed.close()


def plain_losses(host: FakeHost) -> list[float]:
    """The same run on a host without a service."""
    from headrace.service.host.model_host import AdapterSpec
    from headrace.types import CROSS_ENTROPY, Adam, Datum, float_array, int_array

    data = [
        Datum(
            inputs=int_array(datum.model_input.to_ints()),
            targets=int_array(np.asarray(datum.loss_fn_inputs["target_tokens"].to_numpy())),
            arrays={"weights": float_array(np.ones(len(datum.model_input.to_ints())))},
        )
        for datum in DATA
    ]
    host.create("m", AdapterSpec(rank=8)).result()
    losses = []
    for _ in range(3):
        losses.append(host.forward_backward("m", data, CROSS_ENTROPY).result().loss)
        host.optim_step("m", Adam(learning_rate=0.3, eps=1e-12, clip_norm=0.0)).result()
    return [*losses, host.forward("m", data, CROSS_ENTROPY).result().loss]
