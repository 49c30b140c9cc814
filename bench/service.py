"""What the training service costs: per future, per open poll, per tenant; and what pipelining gains.

    python bench/service.py [--calls 60] [--steps 30] [--polls 2000] [--repeats 3] [--overhead]

`headrace serve` of the tiny model in a process of its own, over loopback; one thread of arithmetic.

- `overhead_ms`: from sending a request to having its result, less the same work on the same host without a service, in
  turn: differences of medians. `wire`: over HTTP with httpx; `sdk`: through the public SDK, whose own threads and event
  loop are in it. The journal's flushes are in it; the work of `optim_step` includes its save to disk, which is part of
  the promise. `nothing` is a request that fails in its turn, without work. The bar is on the largest of the verbs, over
  the wire; `low` are differences of tenth percentiles, on which other programs have less influence. A future wakes
  threads and processes ten times, so where other programs keep all cores busy it is waiting for the processor that is
  measured: `--overhead` measures this alone, in seconds, short enough for a priority above them (chrt -f 10).
- `pipelining_gain`: steps per second of a loop that queues `forward_backward` and `optim_step`, then prepares its next
  batch, over one that awaits each result first, less 1. Preparing is `client_work_ms` of waiting (a data source, a
  reward), half of what a step takes: 0.5 is all that this can win, more is the time between requests.
- `polls_mb`, `wake_p99_ms`: a client in a third process holds `--polls` long polls open, each of a request of its own
  that waits for the number before it. Memory that the server has more than before the requests came. Then the missing
  numbers come one by one; a wake-up is from the end of a request, before it is journalled, to the bytes of its answer
  at the client. `herd_p99_ms` is the same with all polls on one request: all wake at once.
- `tenants_ratio`: `bench/tenants_sampling.py`, adapters of equal rank.

The last line is JSON; `ratio` is the smallest of bar / figure (figure / bar where more is better) over overhead < 10
ms, gain > 0.2, memory < 150 MB, wake-up < 100 ms, tenants > 0.6: above 1, all bars are met.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tenants_sampling
import torch
from serving import wait_until_up

from headrace.model.load import load_model
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec
from headrace.service.http.auth import hash_key, new_key
from headrace.service.store.journal import Journal
from headrace.service.wire.proto import FLOAT32, INT64, ForwardBackwardRequest
from headrace.types import CROSS_ENTROPY, Adam, Datum, SampleRequest, SamplingParams, float_array, int_array
from headrace.wiring.build.models import fuse_cuda_layers

os.environ.setdefault("TINKER_TELEMETRY", "0")
WAKES, WARM_UP, RANK = 300, 5, 8
PROMPT = [9, 10]
BARS = {"overhead_ms": 10.0, "polls_mb": 150.0, "wake_p99_ms": 100.0}  # less is better
FLOORS = {"pipelining_gain": 0.2, "tenants_ratio": 0.6}  # more is better


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str
    pid: int
    folder: Path

    def journal(self) -> str:
        return str(self.folder / "data" / "journal.sqlite")


@contextlib.contextmanager
def served() -> Iterator[Server]:
    """`headrace serve` with a free port, and limits that no part of this reaches."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, key, folder = probe.getsockname()[1], new_key(), Path(name)
        probe.close()
        (folder / "serve.toml").write_text(
            f'[serve]\nport = {port}\nfolder = "data"\n'
            f'[[keys]]\nowner = "bench"\nsha256 = "{hash_key(key)}"\n'
            "quota = {requests_per_s = 1e6, burst = 1000000}\n"
        )
        command = [sys.executable, "-m", "headrace.cli", "serve", "serve.toml"]
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
        )
        try:
            wait_until_up(f"http://127.0.0.1:{port}", process)
            yield Server(f"http://127.0.0.1:{port}", key, process.pid, folder)
        finally:
            process.terminate()
            process.wait()


# --- overhead per future ---------------------------------------------------------------------------------------------


def overheads_ms(server: Server, model: Any, calls: int) -> dict[str, float]:
    """Each verb through the SDK, over the wire, and on a host of this process, in turn."""
    data, plain = _batch(4, 32)
    ways = {"sdk": _sdk_verbs(model, data), "wire": _wire_verbs(server, plain), "work": _host_verbs(server, plain)}
    found = {}
    for verb in ("nothing", "forward", "forward_backward", "optim_step", "sample"):
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(calls + WARM_UP):
            for way, verbs in ways.items():
                times[way].append(_seconds(verbs[verb]))
        for name, percent in (("", 50.0), ("low_", 10.0)):
            took_ms = {way: 1000 * _quantile(each[WARM_UP:], percent) for way, each in times.items()}
            found |= {f"{name}{way}_{verb}_ms": took_ms[way] - took_ms["work"] for way in ("sdk", "wire")}
            print(name + verb, " ".join(f"{way} {value:.2f} ms" for way, value in took_ms.items()))
    for verbs in ways.values():
        verbs["close"]()
    return found


Verbs = dict[str, Callable[[], object]]


def _sdk_verbs(model: Any, data: list[Any]) -> Verbs:
    from tinker import RequestFailedError, types

    sampler = model.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=1, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)

    def nothing() -> None:
        with contextlib.suppress(RequestFailedError):
            model.optim_step(types.AdamParams(learning_rate=-1.0)).result()

    return {
        "nothing": nothing,
        "forward": lambda: model.forward(data, "cross_entropy").result(),
        "forward_backward": lambda: model.forward_backward(data, "cross_entropy").result(),
        "optim_step": lambda: model.optim_step(types.AdamParams(learning_rate=0.0)).result(),
        "sample": lambda: sampler.sample(prompt, 1, params).result(),
        "close": lambda: None,
    }


def _wire_verbs(server: Server, data: Sequence[Datum]) -> Verbs:
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": server.key}, timeout=60)
    numbers, sampling_numbers = itertools.count(1), itertools.count()

    def result(reply: httpx.Response) -> httpx.Response:
        found = http.post("/retrieve_future", json={"request_id": reply.json()["request_id"]})
        assert found.status_code == 200
        return found

    session = http.post("/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "headrace/tiny", "lora_config": {"rank": RANK}}
    model = result(http.post("/create_model", json=body)).json()["model_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "headrace/tiny"}
    sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]

    def forward(*, only: bool) -> None:
        message = ForwardBackwardRequest(
            model_id=model, seq_id=next(numbers), loss_fn="cross_entropy", forward_only=only
        )
        for datum in data:
            added = message.data.add()
            added.model_input.add().encoded_text.tokens = datum.inputs.astype("<i4").tobytes()
            targets, weights = added.loss_fn_inputs["target_tokens"], added.loss_fn_inputs["weights"]
            targets.dense, targets.dtype = datum.targets.astype("<i8").tobytes(), INT64
            weights.dense, weights.dtype = datum.arrays["weights"].astype("<f4").tobytes(), FLOAT32
            targets.shape.append(len(datum.targets))
            weights.shape.append(len(datum.targets))
        result(http.post("/forward_backward", content=message.SerializeToString()))

    def optim_step() -> None:
        body = {"model_id": model, "seq_id": next(numbers), "adam_params": {"learning_rate": 0.0}}
        result(http.post("/optim_step", json=body))

    def sample() -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        params = {"max_tokens": 1, "seed": 1, "stop": []}
        asked = {"sampling_session_id": sampler, "seq_id": next(sampling_numbers)}
        result(http.post("/asample", json={**asked, "prompt": prompt, "sampling_params": params}))

    def nothing() -> None:
        result(http.post("/optim_step", json={"model_id": model, "seq_id": next(numbers)}))

    return {
        "nothing": nothing,
        "forward": lambda: forward(only=True),
        "forward_backward": lambda: forward(only=False),
        "optim_step": optim_step,
        "sample": sample,
        "close": http.close,
    }


def _host_verbs(server: Server, data: Sequence[Datum]) -> Verbs:
    lm = load_model(str(server.folder / "data" / "tiny"))
    fuse_cuda_layers(lm)
    host = AdapterHost(lm, max_num_seqs=32, kv_tokens=32 * 512)
    host.create("m", AdapterSpec(rank=RANK, seed=0)).result()
    host.snapshot("m", "s").result()
    params = SamplingParams(max_tokens=1, seed=1, stop_tokens=())
    request = SampleRequest(prompt=int_array(PROMPT), params=params)

    def optim_step() -> None:
        host.optim_step("m", Adam(learning_rate=0.0))
        host.save("m", server.folder / "direct", optimizer=True).result()

    return {
        "nothing": lambda: None,
        "forward": lambda: host.forward("m", data, CROSS_ENTROPY).result(),
        "forward_backward": lambda: host.forward_backward("m", data, CROSS_ENTROPY).result(),
        "optim_step": optim_step,
        "sample": lambda: asyncio.run(host.sample("s", request)),
        "close": host.close,
    }


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _batch(rows: int, tokens: int) -> tuple[list[Any], list[Datum]]:
    """The same data for the SDK and for a host."""
    from tinker import types

    sequences = np.random.default_rng(0).integers(8, 40, (rows, tokens + 1))
    weights = np.ones(tokens)
    remote = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": weights.tolist()},
        )
        for row in sequences
    ]
    plain = [
        Datum(inputs=int_array(row[:-1]), targets=int_array(row[1:]), arrays={"weights": float_array(weights)})
        for row in sequences
    ]
    return remote, plain


# --- pipelining ------------------------------------------------------------------------------------------------------


def pipelining(model: Any, steps: int, repeats: int) -> dict[str, float]:
    """Gains as medians over repeats in turn; the client's work is half of a step's time, measured first."""
    from tinker import types

    data, _ = _batch(16, 64)
    adam = types.AdamParams(learning_rate=0.0)

    def awaited(work_s: float) -> None:
        for _ in range(steps):
            time.sleep(work_s)
            model.forward_backward(data, "cross_entropy").result()
            model.optim_step(adam).result()

    def pipelined(work_s: float) -> None:
        before: Sequence[Any] = ()
        for _ in range(steps):
            time.sleep(work_s)
            queued = (model.forward_backward(data, "cross_entropy"), model.optim_step(adam))
            for future in before:
                future.result()
            before = queued
        for future in before:
            future.result()

    awaited(0.0)
    step_s = statistics.median(_seconds(lambda: awaited(0.0)) for _ in range(repeats)) / steps
    work_s = step_s / 2
    gains: dict[float, list[float]] = {work_s: [], 0.0: []}
    for _ in range(repeats):
        for each, ratios in gains.items():
            ratios.append(_seconds(lambda each=each: awaited(each)) / _seconds(lambda each=each: pipelined(each)))
    return {
        "step_ms": 1000 * step_s,
        "client_work_ms": 1000 * work_s,
        "pipelining_gain": statistics.median(gains[work_s]) - 1.0,
        "pipelining_gain_without_client_work": statistics.median(gains[0.0]) - 1.0,
    }


# --- open polls ------------------------------------------------------------------------------------------------------


def open_polls(server: Server, polls: int) -> dict[str, float]:
    """The client's process says what it does line by line; memory is looked at in between."""
    memory = psutil.Process(server.pid)
    before = memory.memory_info().rss
    command = [sys.executable, __file__, "--client", str(polls)]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    with client.stdin as commands, client.stdout as answers:
        print(json.dumps({"url": server.url, "key": server.key}), file=commands, flush=True)
        assert answers.readline().strip() == "open"
        polls_mb = (memory.memory_info().rss - before) / 2**20
        print("wake", file=commands, flush=True)
        told = json.loads(answers.readline())
    assert client.wait() == 0
    journal = Journal(server.journal())
    ended = dict(journal.query("SELECT id, finished FROM requests WHERE finished > 0"))
    journal.close()
    found = {"polls": float(polls), "polls_mb": polls_mb}
    for name, arrivals in told.items():
        waited_ms = [1000 * (arrived - ended[id] / 1e6) for id, arrived in arrivals]
        found |= {f"{name}_p50_ms": _quantile(waited_ms, 50), f"{name}_p99_ms": _quantile(waited_ms, 99)}
    return found


def _quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


async def client(polls: int) -> None:
    """The third process. Numbers 2, 4, 6, ... wait for 1, 3, 5, ...; requests that fail in their turn need no work."""
    asked = json.loads(sys.stdin.readline())
    wire = Wire(asked["url"], asked["key"])
    session = (await wire.post("create_session", {}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "headrace/tiny", "lora_config": {"rank": RANK}}
    model = (await wire.post("create_model", body))["model_id"]
    await wire.post("retrieve_future", {"request_id": f"{model}:0"})

    async def send(number: int) -> None:
        await wire.post("optim_step", {"model_id": model, "seq_id": number})

    async def arrives(number: int) -> tuple[str, float]:
        """Ask until it has ended, each time on a connection of its own."""
        id = f"{model}:{number}"
        while (await wire.post("retrieve_future", {"request_id": id}, fresh=True)).get("type") == "try_again":
            pass
        return id, time.time()

    for number in range(2, 2 * polls + 1, 2):
        await send(number)
    waiting = [asyncio.create_task(arrives(number)) for number in range(2, 2 * polls + 1, 2)]
    await wire.until_open(polls)
    await _go_on("open")
    woken = []
    for index in range(min(WAKES, polls)):
        await send(2 * index + 1)
        woken.append(await waiting[index])
    for task in waiting[len(woken) :]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    print(json.dumps({"wake": woken, "herd": await _herd(wire, session, polls)}), flush=True)


async def _herd(wire: "Wire", session: str, polls: int) -> list[tuple[str, float]]:
    """All polls on the second request of another model, whose first comes last."""
    body = {"session_id": session, "model_seq_id": 1, "base_model": "headrace/tiny", "lora_config": {"rank": RANK}}
    model = (await wire.post("create_model", body))["model_id"]
    await wire.post("retrieve_future", {"request_id": f"{model}:0"})
    await wire.post("optim_step", {"model_id": model, "seq_id": 2})

    async def arrives() -> tuple[str, float]:
        while (await wire.post("retrieve_future", {"request_id": f"{model}:2"}, fresh=True)).get("type") == "try_again":
            pass
        return f"{model}:2", time.time()

    waiting = [asyncio.create_task(arrives()) for _ in range(polls)]
    await wire.until_open(polls)
    await wire.post("optim_step", {"model_id": model, "seq_id": 1})
    return await asyncio.gather(*waiting)


async def _go_on(said: str) -> None:
    print(said, flush=True)
    assert (await asyncio.to_thread(sys.stdin.readline)).strip() == "wake"


class Wire:
    """HTTP/1.1 by hand: a client that costs next to nothing, so that what is measured is the server."""

    def __init__(self, url: str, key: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port, self._key = host, int(port), key
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, verb: str, body: object, *, fresh: bool = False) -> dict[str, Any]:
        """Over the one connection that is kept, or a new one."""
        if fresh:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        else:
            self._kept = self._kept or await asyncio.open_connection(self._host, self._port)
            reader, writer = self._kept
        try:
            return json.loads(
                await self._exchange(reader, writer, "POST", f"/api/v1/{verb}", json.dumps(body).encode())
            )
        finally:
            if fresh:
                writer.close()

    async def until_open(self, polls: int) -> None:
        """Until the server says that so many polls wait."""
        while True:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            text = (await self._exchange(reader, writer, "GET", "/metrics", b"")).decode()
            writer.close()
            if f"headrace_open_polls {polls}\n" in text:
                return
            await asyncio.sleep(0.1)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, verb: str, path: str, body: bytes
    ) -> bytes:
        head = f"{verb} {path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {self._key}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        return await reader.readexactly(int(answered.split("content-length: ")[1].split("\r\n")[0]))


# --- tenants ---------------------------------------------------------------------------------------------------------


def tenants(repeats: int) -> dict[str, float]:
    lm = tenants_sampling.make(argparse.Namespace(model=None, width=256, layers=6, vocabulary=8192))
    rows = tenants_sampling.ROWS
    host = AdapterHost(lm, max_num_seqs=rows, kv_tokens=2 * rows * 128)
    found = tenants_sampling.compare(host, "equal", tenants_sampling.EQUAL, lm.vocabulary, repeats)
    host.close()
    return {f"tenants_{name}": value for name, value in found.items()}


def main() -> None:
    tenants_sampling.begin_as_serve_does()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--polls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--overhead", action="store_true", help="nothing but the overhead per future")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        asyncio.run(client(options.client))
        return
    import tinker

    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with served() as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        model = service.create_lora_training_client(base_model="headrace/tiny", rank=RANK, seed=0)
        overheads = overheads_ms(server, model, options.calls)
        figures |= overheads
        for name, begins in (("overhead_ms", "wire"), ("low_overhead_ms", "low_wire"), ("sdk_overhead_ms", "sdk")):
            figures[name] = max(value for each, value in overheads.items() if each.startswith(begins))
        if not options.overhead:
            figures |= pipelining(model, options.steps, options.repeats)
        service.close("success").result(30)
        if not options.overhead:
            figures |= open_polls(server, options.polls)
    if not options.overhead:
        figures |= tenants(options.repeats)
    met = [bar / max(figures[name], 1e-9) for name, bar in BARS.items() if name in figures]
    met += [figures[name] / floor for name, floor in FLOORS.items() if name in figures]
    print(json.dumps({"ratio": round(min(met), 2), **{name: round(value, 3) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
