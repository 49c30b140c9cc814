"""Load of the training service: many clients of many tenants at once, and twice as much as the server takes.

    python bench/service_load.py [--clients 256] [--requests 10000] [--tenants 16] [--processes 4] [--wire]

`headrace serve` of the tiny model in a process of its own, over loopback, one thread of arithmetic. Every client has a
model (LoRA) and a sampling session of its own; a round is a `forward_backward` and an `optim_step`, pipelined, and two
samples.

- First the clients of the public SDK, in `--processes` processes (`--wire`: plain HTTP in one process), train, then
  sample, so that two requests of each are open: 2 x clients is what the server takes (`limits.open_requests`).
  `p50_s`, `p99_s`: from the call to the result, all clients always waiting; by kind as well. `fairness`: requests that
  ended for the slowest tenant over those for the quickest, while all of them had work.
- Then the same number of clients, each with two training requests and two samples open, which is twice as much:
  `refused` are answers with 429, each of which has to say when to come again. Plain HTTP, because the SDK repeats what
  was refused and tells its caller neither how often nor which requests were accepted. `fairness` as before. `lost`
  counts accepted requests without an answer, `twice` requests that ran twice (a model's number of updates is not the
  number of its steps), `unfinished` what the journal has left over.

The last line is JSON; `ok` is true if fairness is at least 0.5 both times, some requests were refused, all of them with
a time, and nothing was lost, doubled or left over.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from serving import wait_until_up

from headrace.service.http.auth import hash_key, new_key
from headrace.service.wire.proto import FLOAT32, INT64, ForwardBackwardRequest

os.environ.setdefault("TINKER_TELEMETRY", "0")
ANSWER_S, RANK, PER_ROUND, OPEN = 600.0, 4, 4, 2
TOKENS, MAX_TOKENS = list(range(8, 24)), 8


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    latencies: list[tuple[str, str, float, float]] = field(default_factory=list)  # tenant, kind, seconds, end
    accepted: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: int = 0
    refused_without_time: int = 0
    twice: int = 0

    def add(self, other: "Tally") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def lost(self) -> int:
        return len(set(self.accepted) - set(self.answered))


# --- clients over plain HTTP -----------------------------------------------------------------------------------------


class WireClient:
    """One client with a model and a sampling session, which counts what is refused."""

    def __init__(self, http: httpx.AsyncClient, tenant: str, key: str, base: str, tally: Tally) -> None:
        self._http, self._tenant, self._base, self._tally = http, tenant, base, tally
        self._headers = {"X-API-Key": key}
        self._seq, self._samples, self._steps = itertools.count(1), itertools.count(), 0
        self.model = self.sampler = ""

    async def open(self) -> None:
        session = (await self._post("create_session", {}))["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": self._base, "lora_config": {"rank": RANK}}
        id = await self._submit("create_model", model)
        self.model = (await self._result(id)).json()["model_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": self._base}
        self.sampler = (await self._post("create_sampling_session", sampler))["sampling_session_id"]

    async def train(self) -> None:
        """Send the two requests of a step in order, then wait for both."""
        results: list[Awaitable[httpx.Response]] = []
        for kind in ("forward_backward", "optim_step"):
            began, seq = time.time(), next(self._seq)
            body = {"model_id": self.model, "seq_id": seq, "adam_params": {"learning_rate": 1e-4}}
            content = _forward_body(self.model, seq) if kind == "forward_backward" else json.dumps(body).encode()
            id = await self._submit(kind, content)
            results.append(asyncio.ensure_future(self._timed_result(kind, began, id)))
        _, updated = [await result for result in results]
        self._steps += 1
        self._tally.twice += updated.json()["metrics"]["num_updates:max"] != self._steps

    async def sample(self) -> None:
        number = next(self._samples)
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:4]}]},
            "sampling_params": {"max_tokens": MAX_TOKENS, "seed": number, "stop": []},
        }
        began = time.time()
        await self._timed_result("sample", began, await self._submit("asample", body))

    async def _timed_result(self, kind: str, began: float, id: str) -> httpx.Response:
        reply = await self._result(id)
        self._tally.latencies.append((self._tenant, kind, time.time() - began, time.time()))
        return reply

    async def _post(self, path: str, body: dict[str, Any] | bytes) -> Any:
        """Send until the server takes it, as late as it asks for."""
        options: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        while True:
            reply = await self._http.post(f"/api/v1/{path}", headers=self._headers, **options)
            if reply.status_code != 429:
                reply.raise_for_status()
                return reply.json()
            self._tally.refused += 1
            wait_ms = reply.headers.get("retry-after-ms")
            self._tally.refused_without_time += wait_ms is None or "retry-after" not in reply.headers
            await asyncio.sleep(float(wait_ms or 1000) / 1000)

    async def _submit(self, path: str, body: dict[str, Any] | bytes) -> str:
        id = str((await self._post(path, body))["request_id"])
        self._tally.accepted.append(id)
        return id

    async def _result(self, id: str) -> httpx.Response:
        while True:
            body = {"request_id": id}
            reply = await self._http.post("/api/v1/retrieve_future", headers=self._headers, json=body)
            if reply.status_code == 200:
                break
            assert reply.status_code == 408, reply.text
        self._tally.answered.append(id)
        if b'"error"' in reply.content[:10]:
            self._tally.failed.append(reply.text[:300])
        return reply


def _forward_body(model: str, seq: int) -> bytes:
    message = ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(TOKENS[:-1], "<i4").tobytes()
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = np.array(TOKENS[1:], "<i8").tobytes(), INT64
    weights.dense, weights.dtype = np.ones(len(TOKENS) - 1, "<f4").tobytes(), FLOAT32
    return bytes(message.SerializeToString())


async def load_over_wire(
    url: str,
    keys: dict[str, str],
    base: str,
    *,
    clients: int,
    rounds: int,
    together: bool,
    tally: Tally | None = None,
) -> Tally:
    """Run the clients; with `together` each has its step of training and its samples open at once."""
    tally, tenants = tally or Tally(), list(keys)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for index in range(clients):  # a pool each: the search for a connection takes longer, the more it has
            owner, pool = (
                tenants[index % len(tenants)],
                httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits),
            )
            http = await stack.enter_async_context(pool)
            opened.append(WireClient(http, owner, keys[owner], base, tally))
        await asyncio.gather(*(client.open() for client in opened))

        async def run(client: WireClient) -> None:
            for _ in range(rounds):
                if together:
                    await asyncio.gather(client.train(), client.sample(), client.sample())
                else:
                    await client.train()
                    await asyncio.gather(client.sample(), client.sample())

        await asyncio.gather(*(run(client) for client in opened))
    return tally


# --- clients of the SDK, in processes --------------------------------------------------------------------------------


async def load_by_sdk(url: str, keys: dict[str, str], base: str, *, owners: Sequence[str], rounds: int) -> Tally:
    """Run one SDK client for each of the owners; begins when a line comes in."""
    import tinker
    from tinker import types

    tally = Tally()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    prompt = types.ModelInput.from_ints(TOKENS[:4])

    async def finished(owner: str, kind: str, began: float, result: Any) -> Any:
        value = await result
        tally.latencies.append((owner, kind, time.time() - began, time.time()))
        return value

    async def train(owner: str, model: Any, number: int) -> None:
        began = time.time()
        loss = await model.forward_backward_async([datum], "cross_entropy")
        stepped = time.time()
        step = await model.optim_step_async(types.AdamParams(learning_rate=1e-4))
        await finished(owner, "forward_backward", began, loss)
        result = await finished(owner, "optim_step", stepped, step)
        tally.twice += result.metrics["num_updates:max"] != number

    async def sample(owner: str, sampler: Any, number: int) -> None:
        params = types.SamplingParams(max_tokens=MAX_TOKENS, seed=number, stop=[])
        await finished(owner, "sample", time.time(), sampler.sample_async(prompt, 1, params))

    async def run(owner: str, model: Any, sampler: Any) -> None:
        for number in range(1, rounds + 1):
            await train(owner, model, number)
            await asyncio.gather(sample(owner, sampler, 2 * number), sample(owner, sampler, 2 * number + 1))

    services = [tinker.ServiceClient(base_url=url, api_key=keys[owner]) for owner in owners]
    models = [await service.create_lora_training_client_async(base_model=base, rank=RANK) for service in services]
    samplers = [await service.create_sampling_client_async(base_model=base) for service in services]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*map(run, owners, models, samplers))
    return tally


def sdk_processes(url: str, keys: dict[str, str], base: str, *, clients: int, rounds: int, num_processes: int) -> Tally:
    """Spread SDK clients over processes, all of which begin at once."""
    tenants = list(keys)
    owners = [tenants[index % len(tenants)] for index in range(clients)]
    tasks = [
        {"url": url, "keys": keys, "base": base, "owners": owners[start::num_processes], "rounds": rounds}
        for start in range(num_processes)
    ]
    command = [sys.executable, __file__, "--worker"]
    processes = [
        subprocess.Popen([*command, json.dumps(task)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for task in tasks
    ]
    tally = Tally()
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "a client process failed"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate()
        tally.add(Tally(**json.loads(output.splitlines()[-1])))
    return tally


def worker(task: str) -> None:
    print(json.dumps(asdict(asyncio.run(load_by_sdk(**json.loads(task))))), flush=True)
    os._exit(0)  # the SDK's background threads would go on for seconds


# --- figures ---------------------------------------------------------------------------------------------------------


def fairness(tally: Tally) -> float:
    """Return the least over the most requests of a tenant, counted until the first tenant had no more work."""
    ends: dict[str, list[float]] = {}
    for tenant, _, _, end in tally.latencies:
        ends.setdefault(tenant, []).append(end)
    first = min(max(times) for times in ends.values())
    counts = [sum(end <= first for end in times) for times in ends.values()]
    return min(counts) / max(counts)


def figures(tally: Tally) -> dict[str, Any]:
    seconds = np.array([latency for _, _, latency, _ in tally.latencies])
    begin = min(end - latency for _, _, latency, end in tally.latencies)
    took_s = max(end for *_, end in tally.latencies) - begin
    by_kind: dict[str, list[float]] = {}
    for _, kind, latency, _ in tally.latencies:
        by_kind.setdefault(kind, []).append(latency)
    return {
        "requests": len(seconds),
        "requests_per_s": round(len(seconds) / took_s, 1),
        "p50_s": round(float(np.quantile(seconds, 0.5)), 3),
        "p99_s": round(float(np.quantile(seconds, 0.99)), 3),
        "p99_s_by_kind": {kind: round(float(np.quantile(each, 0.99)), 3) for kind, each in by_kind.items()},
        "fairness": round(fairness(tally), 3),
        "failed": len(tally.failed),
        "twice": tally.twice,
    }


def unfinished(journal: Path) -> int:
    """Count the requests that the journal holds without a result."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as opened:
        states = Counter(dict(opened.execute("SELECT state, COUNT(*) FROM requests GROUP BY state").fetchall()))
    return sum(states.values()) - states["done"]


# --- the server ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(tenants: int, clients: int) -> Iterator[tuple[str, dict[str, str], Path]]:
    """`headrace serve` with a key for each tenant; takes two open requests of each client."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, folder = probe.getsockname()[1], Path(name)
        probe.close()
        keys = {f"tenant-{index}": new_key() for index in range(tenants)}
        quota = f"quota = {{requests_per_s = 1e6, burst = 1000000, models = {4 * clients}}}"
        tables = [f'[[keys]]\nowner = "{owner}"\nsha256 = "{hash_key(key)}"\n{quota}\n' for owner, key in keys.items()]
        (folder / "serve.toml").write_text(
            f'[serve]\nport = {port}\nfolder = "data"\n'
            f"[limits]\nopen_requests = {OPEN * clients}\nresident_models = {3 * clients}\n{''.join(tables)}"
        )
        command = [sys.executable, "-m", "headrace.cli", "serve", "serve.toml"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_up(url, process)
            yield url, keys, folder / "data" / "journal.sqlite"
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--wire", action="store_true", help="plain HTTP in place of the SDK")
    options = parser.parse_args()
    clients, base = options.clients, "headrace/tiny"
    rounds = -(-options.requests // (PER_ROUND * clients))
    with served(options.tenants, clients) as (url, keys, journal):
        if options.wire:
            normal = asyncio.run(load_over_wire(url, keys, base, clients=clients, rounds=rounds, together=False))
        else:
            count = options.processes
            normal = sdk_processes(url, keys, base, clients=clients, rounds=rounds, num_processes=count)
        at_capacity = figures(normal)
        print("at capacity:", json.dumps(at_capacity))
        over = asyncio.run(load_over_wire(url, keys, base, clients=clients, rounds=max(1, rounds // 4), together=True))
        overload = {
            **figures(over),
            "refused": over.refused,
            "refused_without_time": over.refused_without_time,
            "lost": over.lost(),
            "unfinished": unfinished(journal),
        }
        print("at twice the capacity:", json.dumps(overload))
    bad = [over.refused_without_time, over.lost(), overload["unfinished"], normal.twice, over.twice, len(over.failed)]
    fair = min(at_capacity["fairness"], overload["fairness"]) >= 0.5
    ok = fair and over.refused > 0 and not any(bad)
    client = "wire" if options.wire else "sdk"
    print(json.dumps({"ok": ok, "clients": clients, "client": client, **at_capacity, "overload": overload}))


if __name__ == "__main__":
    main()
