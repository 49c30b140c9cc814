"""The adapter to vLLM 0.32: its routes and bodies.

The server needs `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`, `--logprobs-mode processed_logprobs`, and for LoRA
`--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`; `launch.py` starts it so.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import Finish, GenerateCall, PauseMode, ServerLostError, StreamedTokens
from headrace.infer.servers.json_http import JsonHttp
from headrace.infer.servers.transfer.vllm_routes import VllmTensorApi
from headrace.infer.servers.wire_format import (
    CONTROL_S,
    LOAD_S,
    check_folder,
    parse_spans,
    shared_params,
    stream_parts,
)
from headrace.types import FloatArray, IntArray, SamplingParams, float_array

# A digest of no bytes: on CPU vLLM packs the weights of linear layers away and then hashes nothing.
EMPTY_DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


class VllmApi:
    """Implements `EngineApi` for vLLM."""

    def __init__(self, url: str, *, model: str | None = None, silence_s: float = 600.0, on_cpu: bool = False) -> None:
        self._http = JsonHttp(url, silence_s=silence_s)
        self._on_cpu = on_cpu  # the server may be on a CPU
        self._model = model  # the served name of the base; None: the first that the server lists
        self.tensors = VllmTensorApi(self._http)

    @property
    def url(self) -> str:
        return self._http.url

    def move(self, url: str) -> None:
        self._http.url = url

    async def context(self) -> int:
        """See `EngineApi`. Raises SamplerError if the server would end while it samples."""
        if self._on_cpu:
            await self._check_prefill()
        models = await self._http.get("/v1/models")
        with boundary(SamplerError, f"{self.url}/v1/models does not list models as vLLM does"):
            base = next(model for model in models["data"] if not model.get("parent"))
            self._model = self._model or str(base["id"])
            return int(base["max_model_len"])

    async def _check_prefill(self) -> None:
        """Raise SamplerError if a server on a CPU computes prompts in parts, of which one with a seed ends it."""
        reply = await self._http.get("/server_info?config_format=json", deadline_s=CONTROL_S)
        with boundary(SamplerError, f"{self.url}/server_info does not tell its options as vLLM 0.32 does"):
            options = reply["vllm_config"]
            in_parts = bool(options["scheduler_config"]["enable_chunked_prefill"])
            ends = in_parts and options["device_config"]["device"] == "cpu"
        if ends:
            raise SamplerError(
                f"{self.url} computes prompts in parts, which ends vLLM on a CPU when they have seeds: start it with "
                "--no-enable-chunked-prefill and --max-num-batched-tokens of its context or more"
            )

    async def generate(self, call: GenerateCall) -> AsyncIterator[StreamedTokens]:
        body = {
            "request_id": call.id,
            "model": call.adapter or await self._base(),
            "token_ids": call.tokens.tolist(),
            "sampling_params": sampling_body(call.params),
            "stream": True,
        }
        route = "/inference/v1/generate"
        async with aclosing(stream_parts(self._http, route, body, self._parse, engine="vLLM 0.32")) as parts:
            async for part in parts:
                yield part

    def _parse(self, event: Mapping[str, Any]) -> StreamedTokens:
        if "error" in event:
            raise ServerLostError(f"{self.url} failed while it sampled: {event['error'].get('message', event)}")
        return parse_choice(event["choices"][0])

    async def prompt_logprobs(self, tokens: IntArray, *, adapter: str | None) -> FloatArray:
        if len(tokens) < 2:
            return float_array([])
        body = {
            "model": adapter or await self._base(),
            "token_ids": tokens.tolist(),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
        }
        reply = await self._http.post("/inference/v1/generate", body, deadline_s=LOAD_S)
        with boundary(SamplerError, f"{self.url} answered without log-probs of the prompt"):
            entries = reply["prompt_logprobs"][1:]
            pairs = zip(entries, tokens[1:].tolist(), strict=True)
            return float_array([entry[str(token)]["logprob"] for entry, token in pairs])

    async def pause(self, mode: PauseMode) -> None:
        await self._http.post(f"/pause?mode={mode.value}", deadline_s=CONTROL_S)

    async def resume(self) -> None:
        await self._http.post("/resume", deadline_s=CONTROL_S)

    async def load_folder(self, folder: Path, version: int) -> None:
        # a reload from a folder that is not there ends the server
        check_folder(folder)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._http.post("/collective_rpc", body, deadline_s=LOAD_S)
        await self._http.post("/update_weight_version", {"new_version": str(version)}, deadline_s=CONTROL_S)

    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._http.post("/v1/load_lora_adapter", body, deadline_s=CONTROL_S)

    async def unload_adapter(self, name: str) -> None:
        await self._http.post("/v1/unload_lora_adapter", {"lora_name": name}, deadline_s=CONTROL_S)

    async def flush_caches(self) -> None:
        reply = await self._http.post("/reset_prefix_cache", deadline_s=CONTROL_S)
        if isinstance(reply, Mapping) and reply.get("success") is False:
            raise SamplerError(f"{self.url} did not drop its cached prefixes, which belong to earlier weights")
        for cache in ("mm", "encoder"):
            await self._http.post(f"/reset_{cache}_cache", deadline_s=CONTROL_S)

    async def checksums(self) -> Mapping[str, str]:
        """Return the digests that are of something: on CPU those of linear layers are not."""
        reply = await self._http.post("/weight_checker", {"action": "checksum"}, deadline_s=LOAD_S)
        with boundary(SamplerError, f"{self.url} answered without checksums"):
            return {name: digest for name, digest in reply["checksums"].items() if digest != EMPTY_DIGEST}

    async def close(self) -> None:
        await self._http.close()

    async def _base(self) -> str:
        if self._model is None:
            await self.context()
        assert self._model is not None
        return self._model


def sampling_body(params: SamplingParams) -> dict[str, Any]:
    """Write the parameters as vLLM's SamplingParams."""
    body = shared_params(params, length="max_tokens", seed="seed", keeps_stop="include_stop_str_in_output")
    return body | {"logprobs": 0} | ({} if params.stop_strings else {"detokenize": False})


def parse_choice(choice: Mapping[str, Any]) -> StreamedTokens:
    """Read one choice of a reply or an event."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    tokens = tuple(int(token) for token in choice["token_ids"] or ())
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    if len(logprobs) != len(tokens):
        raise SamplerError(f"{len(tokens)} tokens came with {len(logprobs)} log-probs")
    return StreamedTokens(
        tokens=tokens,
        logprobs=logprobs,
        finish=None if choice.get("finish_reason") is None else Finish(choice["finish_reason"]),
        spans=parse_spans(choice.get("weight_versions")),
    )
