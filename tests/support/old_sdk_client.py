"""One training loop with whichever release of the public SDK is first on the path: `old_sdk_client.py URL KEY MODEL`.

Prints as JSON what came out.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import tinker
from tinker import types


def main(url: str, key: str, base: str) -> dict[str, Any]:
    tokens = [[1, 2, 3, 4, 5], [3, 4, 5, 6]]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(each[:-1]),
            loss_fn_inputs={"target_tokens": each[1:], "weights": [1.0] * (len(each) - 1)},
        )
        for each in tokens
    ]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    names = [each.model_name for each in service.get_server_capabilities().supported_models]
    model = service.create_lora_training_client(base_model=base, rank=4, seed=0)
    losses = []
    for _ in range(3):
        forward = model.forward_backward(data, "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=0.1))
        losses.append(forward.result().metrics["loss:sum"])
        step.result()
    state = model.save_state("kept").result().path
    model.forward_backward(data, "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    moved = model.forward(data, "cross_entropy").result().metrics["loss:sum"]
    model.load_state(state).result()
    restored = model.forward(data, "cross_entropy").result().metrics["loss:sum"]
    try:
        model.forward_backward(data, "no_such_loss").result()
        refusal = ""
    except tinker.RequestFailedError as exc:
        refusal = str(exc)
    sampler = model.save_weights_and_get_sampling_client("named")
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=4, seed=1)
    sampled = sampler.sample(prompt, 2, params).result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result()
    return {
        "release": version("tinker"),
        "names": names,
        "losses": losses,
        "moved": moved,
        "restored": restored,
        "refusal": refusal,
        "sequences": [[list(each.tokens), list(each.logprobs or [])] for each in sampled.sequences],
        "scores": list(scores),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
