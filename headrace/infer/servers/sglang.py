"""The adapter to SGLang 0.5.23: its routes and bodies, written after its published request and response types.

Not run against an engine: SGLang has no build for CPUs. Log-probs must be of the tempered distribution, which is its
default (without SGLANG_RETURN_ORIGINAL_LOGPROB).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import Finish, GenerateCall, PauseMode, StreamedTokens
from headrace.infer.servers.json_http import JsonHttp
from headrace.infer.servers.transfer.sglang_routes import SglangTensorApi, check_reply
from headrace.infer.servers.wire_format import (
    CONTROL_S,
    LOAD_S,
    check_folder,
    parse_spans,
    shared_params,
    stream_parts,
)
from headrace.types import FloatArray, IntArray, SamplingParams, float_array

UNBOUNDED = 2**31 - 1
# "retract" sends running requests back to the queue. "in_place" would keep their keys and values, and then the caches
# cannot be flushed.
PAUSES = {PauseMode.ABORT: "abort", PauseMode.KEEP: "retract"}


class SglangApi:
    """Implements `EngineApi` for SGLang."""

    def __init__(self, url: str, *, silence_s: float = 600.0) -> None:
        self._http = JsonHttp(url, silence_s=silence_s)
        self.tensors = SglangTensorApi(self._http)

    @property
    def url(self) -> str:
        return self._http.url

    def move(self, url: str) -> None:
        self._http.url = url

    async def context(self) -> int:
        info = await self._http.get("/server_info")
        length = info.get("context_length") if isinstance(info, Mapping) else None
        return UNBOUNDED if length is None else int(length)

    async def generate(self, call: GenerateCall) -> AsyncIterator[StreamedTokens]:
        body = {
            "rid": call.id,
            "input_ids": call.tokens.tolist(),
            "sampling_params": sampling_body(call.params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": True,
            "lora_path": call.adapter,
        }
        seen = 0

        def parse(event: Mapping[str, Any]) -> StreamedTokens:
            if "error" in event:
                raise SamplerError(f"{self.url} refused to sample: {event['error']}")
            return parse_event(event, seen=seen)

        async with aclosing(stream_parts(self._http, "/generate", body, parse, engine="SGLang 0.5.23")) as parts:
            async for part in parts:
                seen += len(part.tokens)
                yield part

    async def prompt_logprobs(self, tokens: IntArray, *, adapter: str | None) -> FloatArray:
        if len(tokens) < 2:
            return float_array([])
        body = {
            "input_ids": tokens.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
            "lora_path": adapter,
        }
        reply = await self._http.post("/generate", body, deadline_s=LOAD_S)
        with boundary(SamplerError, f"{self.url} answered without log-probs of the prompt"):
            entries = reply["meta_info"]["input_token_logprobs"][1:]
            if [entry[1] for entry in entries] != tokens[1:].tolist():
                raise SamplerError(f"{self.url} scored other tokens than it was given")
            return float_array([entry[0] for entry in entries])

    async def pause(self, mode: PauseMode) -> None:
        await self._http.post("/pause_generation", {"mode": PAUSES[mode]}, deadline_s=CONTROL_S)

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {"torch_empty_cache": True}, deadline_s=CONTROL_S)

    async def load_folder(self, folder: Path, version: int) -> None:
        check_folder(folder)
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        reply = await self._http.post("/update_weights_from_disk", body, deadline_s=LOAD_S)
        check_reply(self.url, reply)

    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder), "pinned": False}
        reply = await self._http.post("/load_lora_adapter", body, deadline_s=CONTROL_S)
        check_reply(self.url, reply, words="error_message")

    async def unload_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        reply = await self._http.post("/unload_lora_adapter", body, deadline_s=CONTROL_S)
        check_reply(self.url, reply, words="error_message")

    async def flush_caches(self) -> None:
        await self._http.post("/flush_cache?timeout=30", deadline_s=CONTROL_S)

    async def checksums(self) -> Mapping[str, str]:
        body = {"action": "checksum", "allow_quant_error": False, "skip_tensor_list": None, "selector": "all"}
        reply = await self._http.post("/weights_checker", body, deadline_s=LOAD_S)
        with boundary(SamplerError, f"{self.url} answered without checksums"):
            return {
                f"{rank}:{name}": digest
                for rank, of_rank in enumerate(reply["ranks"])
                for name, digest in of_rank["checksums"].items()
            }

    async def close(self) -> None:
        await self._http.close()


def sampling_body(params: SamplingParams) -> dict[str, Any]:
    """Write the parameters as SGLang's SamplingParams."""
    return shared_params(params, length="max_new_tokens", seed="sampling_seed", keeps_stop="no_stop_trim")


def parse_event(event: Mapping[str, Any], *, seen: int) -> StreamedTokens:
    """Read an event after `seen` tokens; events hold all tokens so far, or only new ones, as the server is set."""
    meta = event["meta_info"]
    tokens, entries, total = list(event["output_ids"]), meta["output_token_logprobs"], int(meta["completion_tokens"])
    new = total - seen
    if len(tokens) < new or len(entries) < new or new < 0:
        raise SamplerError(f"{new} new tokens came as {len(tokens)} tokens with {len(entries)} log-probs")
    tail = entries[len(entries) - new :]
    if [entry[1] for entry in tail] != tokens[len(tokens) - new :]:
        raise SamplerError("tokens and their log-probs are not of the same tokens")
    finish = meta.get("finish_reason")
    return StreamedTokens(
        tokens=tuple(int(entry[1]) for entry in tail),
        logprobs=tuple(float(entry[0]) for entry in tail),
        finish=None if finish is None else Finish(finish["type"]),
        spans=parse_spans(meta.get("weight_versions")) if finish is not None else (),
    )
