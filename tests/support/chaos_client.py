"""A small training program over the public SDK, as a user would write it: it goes on from its last checkpoint.

    python chaos_client.py URL KEY STEPS FILE

Appends one line per finished step to FILE: losses, a sampled reply, and the path of the saved state. Started again, or
after a request that failed, it goes on behind the last line. Failures are counted in FILE.failures.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")
import tinker
from tinker import types

MAX_FAILURES = 40


def main(url: str, key: str, steps: int, file: Path) -> None:
    service = None
    for _ in range(MAX_FAILURES):
        try:
            service = service or tinker.ServiceClient(base_url=url, api_key=key)
            train(service, steps, file)
            print("done", flush=True)
            os._exit(0)  # the SDK's threads may still be trying to say goodbye
        except tinker.TinkerError as exc:
            with Path(f"{file}.failures").open("a") as failures:
                failures.write(f"{type(exc).__name__}: {exc}\n".replace("\n", " ") + "\n")
            time.sleep(0.5)
    raise SystemExit(f"{MAX_FAILURES} failures")


def train(service: Any, steps: int, file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if lines:
        model = service.create_training_client_from_state_with_optimizer(lines[-1]["path"])
    else:
        model = service.create_lora_training_client(base_model="headrace/tiny", rank=4, seed=7)
    for step in range(len(lines), steps):
        data = [datum(step, row) for row in range(4)]
        first = model.forward_backward(data[:2], "cross_entropy")
        second = model.forward_backward(data[2:], "cross_entropy")
        update = model.optim_step(types.AdamParams(learning_rate=3e-3))
        losses = [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]
        update.result()
        sampler = model.save_weights_and_get_sampling_client()
        asked = types.SamplingParams(max_tokens=6, seed=step + 1)
        (sequence,) = sampler.sample(types.ModelInput.from_ints([9, 10]), 1, asked).result().sequences
        path = model.save_state(f"{step:06d}").result().path
        line = {"losses": losses, "tokens": sequence.tokens, "logprobs": sequence.logprobs, "path": path}
        line["at_s"] = time.monotonic()  # everything in this line was known by then
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def datum(step: int, row: int) -> Any:
    tokens = [8 + (3 * step + 5 * row + 7 * position) % 32 for position in range(12)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
