"""The adapter to SGLang against bodies and replies in the form of its published types; it was not run on an engine."""

import base64
import pickle
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import SamplerError
from headrace.infer.servers.api import Finish, GenerateCall, PauseMode, StreamedTokens, TensorSpec, TransferGroup
from headrace.infer.servers.sglang import SglangApi, parse_event, sampling_body
from headrace.infer.servers.transfer.sglang_routes import SglangTensorApi
from headrace.types import SamplingParams, int_array


class RecordedHttp:
    """Takes requests and gives recorded replies."""

    url = "http://sglang"

    def __init__(self, replies: Mapping[str, Any], events: list[Any] | None = None) -> None:
        self._replies, self._events = replies, events or []
        self.sent: list[tuple[str, Any]] = []

    async def get(self, path: str, *, deadline_s: float = 60.0) -> Any:
        return await self.post(path)

    async def post(self, path: str, body: Any = None, *, deadline_s: float = 60.0) -> Any:
        self.sent.append((path, body))
        return self._replies[path]

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        self.sent.append((path, body))
        for event in self._events:
            yield event


def adapter(http: RecordedHttp) -> SglangApi:
    api = SglangApi("http://sglang")
    api._http = http  # type: ignore[assignment]
    return api


def event(tokens: list[int], logprobs: list[float], total: int, finish: Any = None, spans: Any = None) -> Any:
    return {
        "text": "",
        "output_ids": tokens,
        "meta_info": {
            "id": "a",
            "finish_reason": finish,
            "prompt_tokens": 3,
            "completion_tokens": total,
            "cached_tokens": 0,
            "weight_version": "5",
            "weight_versions": spans,
            "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, tokens, strict=True)],
        },
    }


SPANS = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]


@pytest.mark.parametrize("cumulative", [True, False])
async def test_a_stream_is_read_whether_its_events_repeat_earlier_tokens_or_not(cumulative: bool) -> None:
    if cumulative:
        events = [
            event([7], [-0.1], 1),
            event([7, 8], [-0.1, -0.2], 2),
            event([7, 8, 9], [-0.1, -0.2, -0.3], 3, {"type": "abort", "message": ""}, SPANS),
        ]
    else:
        events = [
            event([7], [-0.1], 1),
            event([8], [-0.2], 2),
            event([9], [-0.3], 3, {"type": "abort", "message": ""}, SPANS),
        ]
    http = RecordedHttp({}, events)
    call = GenerateCall(
        id="a", tokens=int_array([3, 7, 4]), params=SamplingParams(max_tokens=8, stop_tokens=(2,), seed=7), adapter="v5"
    )
    parts: list[StreamedTokens] = [part async for part in adapter(http).generate(call)]
    assert [token for part in parts for token in part.tokens] == [7, 8, 9]
    assert [logprob for part in parts for logprob in part.logprobs] == [-0.1, -0.2, -0.3]
    assert parts[-1].finish is Finish.ABORT
    assert [(span.version, span.start, span.end) for span in parts[-1].spans] == [("4", 0, 1), ("5", 1, 3)]
    [(path, body)] = http.sent
    assert path == "/generate"
    assert body == {
        "rid": "a",
        "input_ids": [3, 7, 4],
        "sampling_params": {
            "n": 1,
            "max_new_tokens": 8,
            "temperature": 1.0,
            "sampling_seed": 7,
            "stop_token_ids": [2],
            "ignore_eos": True,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": True,
        "lora_path": "v5",  # named in every request, or the base answers
    }


def test_an_event_whose_logprobs_are_of_other_tokens_is_refused() -> None:
    wrong = event([7], [-0.1], 1)
    wrong["meta_info"]["output_token_logprobs"] = [[-0.1, 8, None]]
    with pytest.raises(SamplerError, match="not of the same tokens"):
        parse_event(wrong, seen=0)


async def test_prompts_are_scored_without_sampling() -> None:
    reply = {"meta_info": {"input_token_logprobs": [[None, 3, None], [-1.5, 7, None], [-2.5, 4, None]]}}
    http = RecordedHttp({"/generate": reply})
    scores = await adapter(http).prompt_logprobs(int_array([3, 7, 4]), adapter=None)
    np.testing.assert_allclose(scores, [-1.5, -2.5])
    [(_, body)] = http.sent
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["logprob_start_len"] == 0


async def test_an_update_that_says_it_failed_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    http = RecordedHttp({"/update_weights_from_disk": {"success": True, "message": "", "num_paused_requests": 0}})
    await adapter(http).load_folder(tmp_path, 5)
    [(_, body)] = http.sent
    assert (body["model_path"], body["weight_version"], body["flush_cache"]) == (str(tmp_path), "5", True)
    http = RecordedHttp({"/update_weights_from_disk": {"success": False, "message": "shapes differ"}})
    with pytest.raises(SamplerError, match="shapes differ"):
        await adapter(http).load_folder(tmp_path, 5)
    http = RecordedHttp({"/load_lora_adapter": {"success": False, "error_message": "rank", "loaded_adapters": {}}})
    with pytest.raises(SamplerError, match="rank"):
        await adapter(http).load_adapter("v5", tmp_path)


GROUP = TransferGroup(name="g", host="10.0.0.1", port=5, backend="nccl", num_ranks=3)
DONE = {"success": True, "message": ""}


async def test_a_broadcast_is_an_update_group_with_its_begin_and_end() -> None:
    paths = ("/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed")
    paths += ("/end_weight_update", "/update_weight_version", "/destroy_weights_update_group")
    http = RecordedHttp(dict.fromkeys(paths, DONE) | {"/server_info": {"tp_size": 2, "dp_size": 1}})
    tensors = tensor_adapter(http)
    assert await tensors.num_workers() == 2
    await tensors.join_group(GROUP)
    await tensors.begin_update()
    await tensors.receive([TensorSpec(name="a.weight", dtype="bfloat16", shape=(2, 3))], GROUP)
    await tensors.end_update(7)
    await tensors.leave_group(GROUP)
    update = {
        "names": ["a.weight"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "flush_cache": False,
        "abort_all_requests": False,
        "weight_version": None,
        "torch_empty_cache": False,
        "load_format": None,
        "selector": "all",
    }
    init = {"master_address": "10.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 3}
    assert http.sent[1:] == [
        ("/init_weights_update_group", {**init, "group_name": "g", "backend": "nccl"}),
        ("/begin_weight_update", {"selector": "all"}),
        ("/update_weights_from_distributed", update),
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
        ("/destroy_weights_update_group", {"group_name": "g"}),
    ]


async def test_an_order_of_a_broadcast_that_says_it_failed_is_a_failure() -> None:
    words = "must run between begin_weight_update() and end_weight_update()"
    http = RecordedHttp({"/update_weights_from_distributed": {"success": False, "message": words}})
    with pytest.raises(SamplerError, match="must run between"):
        await tensor_adapter(http).receive([], GROUP)
    http = RecordedHttp({"/server_info": {"tp_size": 1, "dp_size": 2}})
    with pytest.raises(SamplerError, match="data-parallel"):
        await tensor_adapter(http).num_workers()


async def test_tensors_of_a_shared_gpu_are_pickled_once_for_each_worker() -> None:
    """On CPU torch shares memory by files instead; the form of the request is the same."""
    http = RecordedHttp({"/update_weights_from_tensor": DONE, "/server_info": {"tp_size": 2}})
    await tensor_adapter(http).open_shared([("a.weight", torch.arange(3.0))])
    path, body = http.sent[-1]
    assert path == "/update_weights_from_tensor"
    assert len(body["serialized_named_tensors"]) == 2
    [(name, tensor)] = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    assert (name, tensor.tolist()) == ("a.weight", [0.0, 1.0, 2.0])


def tensor_adapter(http: RecordedHttp) -> SglangTensorApi:
    return SglangTensorApi(http)  # type: ignore[arg-type]


async def test_pauses_are_aborts_or_retractions() -> None:
    http = RecordedHttp({"/pause_generation": {"status": "ok"}, "/continue_generation": {"status": "ok"}})
    api = adapter(http)
    await api.pause(PauseMode.ABORT)
    await api.pause(PauseMode.KEEP)
    await api.resume()
    assert [body for _, body in http.sent] == [{"mode": "abort"}, {"mode": "retract"}, {"torch_empty_cache": True}]


def test_stop_strings_stay_in_the_answer() -> None:
    body = sampling_body(SamplingParams(max_tokens=2, stop_tokens=(), stop_strings=("end",)))
    assert (body["stop"], body["no_stop_trim"]) == (["end"], True)
