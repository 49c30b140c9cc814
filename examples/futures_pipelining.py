"""What a program gains that does not wait for every answer: the same training twice, against a service.

Each step costs the program some work of its own (tokenising, rewards, logging). Once it waits for every request before
it goes on; once it sends the next step's requests first and does its work while the service computes. Both make the
same losses: requests of a model run in the order in which they were sent.

    python examples/futures_pipelining.py                        # a service of its own, with a tiny model
    python examples/futures_pipelining.py http://127.0.0.1:8765  # yours; its key in HEADRACE_API_KEY
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.service.client import ServiceClient, TrainingClient
from headrace.service.core import Service
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.http.app import make_app
from headrace.service.http.auth import Access
from headrace.service.http.server import serving
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from headrace.types import CROSS_ENTROPY, Adam, Datum, float_array, int_array

UPDATE = Adam(learning_rate=1e-2)


@contextlib.contextmanager
def own_service() -> Iterator[str]:
    """On this machine, on a free port, with a model that is made on the spot."""
    tokenizer = make_tokenizer([f"word{index}" for index in range(200)])
    model = make_model(vocab_size=len(tokenizer), width=64, layers=2, heads=4, kv_heads=2, context=128, seed=0)
    lm = prepare(model, tokenizer, source="made on the spot")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        host = stack.enter_context(contextlib.closing(AdapterHost(lm, max_num_seqs=4, kv_tokens=1024)))
        journal = stack.enter_context(contextlib.closing(Journal(str(Path(name) / "journal.sqlite"))))
        card = ModelCard(name="tiny", context=lm.context, vocabulary=lm.vocabulary)
        yield stack.enter_context(serving(make_app(Service(host, card, journal, Path(name)), Access([]))))


def batch(step: int) -> list[Datum]:
    """Sequences that count upwards, from other places at every step."""
    data = []
    for start in range(8):
        tokens = [10 + (step + 20 * start + place) % 150 for place in range(33)]
        weights = {"weights": float_array([1 / 256] * 32)}
        data.append(Datum(inputs=int_array(tokens[:-1]), targets=int_array(tokens[1:]), arrays=weights))
    return data


async def await_each_step(model: TrainingClient, steps: int, work_s: float) -> list[float]:
    losses = []
    for step in range(steps):
        accepted = await model.forward_backward(batch(step), CROSS_ENTROPY)  # it is in the service's journal
        losses.append((await accepted).loss)  # it is done
        await (await model.optim_step(UPDATE))
        await asyncio.sleep(work_s)
    return losses


async def pipelined(model: TrainingClient, steps: int, work_s: float) -> list[float]:
    losses, before = [], None
    for step in range(steps):
        now = model.forward_backward(batch(step), CROSS_ENTROPY), model.optim_step(UPDATE)  # queued, in this order
        await asyncio.sleep(work_s)
        if before is not None:
            losses.append((await before[0].finished).loss)
            await before[1].finished
        before = now
    assert before is not None
    losses.append((await before[0].finished).loss)
    await before[1].finished
    return losses


async def main(url: str, *, steps: int = 30, work_s: float = 0.02, key: str | None = None) -> tuple[float, float]:
    """Seconds of the one way and of the other."""
    with ServiceClient(url, api_key=key) as service:
        took, losses = [], []
        for way in (await_each_step, pipelined):
            model = await service.create_training(rank=8, seed=0)
            await way(model, 2, 0.0)  # the first requests of a model are slower
            began = time.perf_counter()
            losses.append(await way(model, steps, work_s))
            took.append(time.perf_counter() - began)
    assert losses[0] == losses[1], "the same requests in the same order make the same numbers"
    print(f"loss {losses[0][0]:.3f} -> {losses[0][-1]:.3f} in {steps} steps, {1000 * work_s:.0f} ms of own work each")
    print(
        f"await each step {took[0]:.2f} s, pipelined {took[1]:.2f} s: {100 * (1 - took[1] / took[0]):.0f} % less time"
    )
    return took[0], took[1]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1], key=os.environ.get("HEADRACE_API_KEY")))
    else:
        with own_service() as own:
            asyncio.run(main(own))
