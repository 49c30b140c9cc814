"""PPO with a value head against a service: the client samples and judges, the server has critic and advantages.

The task is to say the two words that come after the prompt's in the alphabet. A word earns 1, the right one 2.
Every step samples from a snapshot of the model, sends tokens, rewards and ends of episodes, and asks for GAE in
`loss_fn_config`; values, advantages, returns and the critic's metrics are the server's.

    python examples/ppo_with_gae.py                        # a service of its own, with a tiny model
    python examples/ppo_with_gae.py http://127.0.0.1:8765  # yours; its key in HEADRACE_API_KEY
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.service.client import GaeSettings, ServerInputs, ServiceClient, TrainingClient
from headrace.service.core import Service
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.http.app import make_app
from headrace.service.http.auth import Access
from headrace.service.http.server import serving
from headrace.service.store.entities import ModelCard
from headrace.service.store.journal import Journal
from headrace.types import Adam, Completion, Datum, LossSpec, SamplingParams, float_array, int_array

LETTERS = 8
FIRST = 8  # token of the first word
LOSS = LossSpec(fn="ppo + shared_value", params={"value_coef": 0.5, "value_clip": 0.0})
GAE = ServerInputs(gae=GaeSettings(gamma=1.0, lam=0.95))
UPDATE = Adam(learning_rate=0.03)


@contextlib.contextmanager
def own_service() -> Iterator[str]:
    """On this machine, on a free port, with a model that is made on the spot."""
    tokenizer = make_tokenizer([f"word{index}" for index in range(LETTERS)])
    model = make_model(vocab_size=len(tokenizer), width=32, layers=1, heads=2, kv_heads=1, context=32, seed=0)
    lm = prepare(model, tokenizer, source="made on the spot")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        host = stack.enter_context(contextlib.closing(AdapterHost(lm, max_num_seqs=32, kv_tokens=1024)))
        journal = stack.enter_context(contextlib.closing(Journal(str(Path(name) / "journal.sqlite"))))
        card = ModelCard(name="tiny", context=lm.context, vocabulary=lm.vocabulary)
        yield stack.enter_context(serving(make_app(Service(host, card, journal, Path(name)), Access([]))))


def rewards_of(letter: int, completion: Completion) -> list[float]:
    """Of each of the two words: 1 if it is a word of the alphabet, and 1 more if it is the right one."""
    wanted = [FIRST + (letter + 1) % LETTERS, FIRST + (letter + 2) % LETTERS]
    return [
        float(FIRST <= token < FIRST + LETTERS) + float(token == right)
        for token, right in zip(completion.tokens, wanted, strict=False)
    ]


def to_datum(letter: int, completion: Completion, rewards: Sequence[float]) -> Datum:
    """Every sampled token is a step of the episode, which ends with the last one."""
    tokens = int_array([FIRST + letter, *completion.tokens])
    count = len(completion.tokens)
    return Datum(
        inputs=tokens[:-1],
        targets=tokens[1:],
        arrays={
            "weights": float_array(np.ones(count)),
            "sampler_logprobs": completion.sampler_logprobs,
            "rewards": float_array(rewards),
            "dones": float_array([0.0] * (count - 1) + [1.0]),
        },
    )


def step(service: ServiceClient, model: TrainingClient, number: int, samples: int) -> tuple[float, float]:
    """One step: the mean reward of its episodes, and how far the values were from the returns."""
    sampler = service.create_sampling(snapshot=model.snapshot().result()).result()
    params = [
        SamplingParams(max_tokens=2, seed=1000 * (number * LETTERS + letter), stop_tokens=())
        for letter in range(LETTERS)
    ]
    asked = [
        sampler.sample(int_array([FIRST + letter]), each, num_samples=samples) for letter, each in enumerate(params)
    ]
    episodes = [(letter, each) for letter, pending in enumerate(asked) for each in pending.result()]
    rewards = [rewards_of(letter, completion) for letter, completion in episodes]
    data = [to_datum(*episode, reward) for episode, reward in zip(episodes, rewards, strict=True)]
    out = model.forward_backward(data, LOSS, GAE)  # values, then GAE, then loss and gradient: one request
    model.optim_step(UPDATE).result()
    return float(np.mean([sum(each) for each in rewards])), out.result().metrics["loss/value_error"].value()


def main(url: str, *, steps: int = 30, samples: int = 8, key: str | None = None) -> list[tuple[float, float]]:
    """Reward and value error of every step."""
    with ServiceClient(url, api_key=key) as service:
        model = service.create_training(rank=8, seed=0).result()
        seen = []
        for number in range(steps):
            seen.append(step(service, model, number, samples))
            if number % 5 == 0 or number == steps - 1:
                print(f"step {number:3}  reward {seen[-1][0]:.3f} of 4  value error {seen[-1][1]:.3f}")
    return seen


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], key=os.environ.get("HEADRACE_API_KEY"))
    else:
        with own_service() as own:
            main(own)
