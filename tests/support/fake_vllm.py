"""A server that answers as vLLM 0.32 does, in the shapes that were recorded from one, with the failures that were seen.

Its model is a table: the logits of the next token are a row of `embed @ head`. A folder of weights holds the two, an
adapter folder a third that is added. Prompts of a cache block or more have their last rows cached. From a folder of
transformers it loads that model instead.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.model.compute_thread import MODEL_CONSTRUCTION
from headrace.service.http.server import serving
from headrace.types import FloatArray, IntArray, float_array

VOCABULARY, WIDTH, BLOCK = 32, 8, 128
CONTEXT = 256
LONG, HALFWAY, HALT_S = 200, 100, 2.0  # tokens, tokens, and for how long a long request halts on its way
MEET = timedelta(seconds=120)


@dataclass
class Faults:
    """Failures to show; all were seen at a real server."""

    ignores_adapters: bool = False  # requests that name an adapter are answered by the base
    keeps_head: bool = False  # a reload replaces the embedding and not the head
    keeps_prefixes: bool = False  # /reset_prefix_cache drops nothing, and says that it did
    hides_head: bool = False  # /weight_checker hashes nothing of the head, as vLLM on CPU of linear layers
    without_extension: bool = False  # started without our worker extension
    fails_in_update: bool = False  # a worker fails while it receives tensors
    aborts_nothing: bool = False  # /pause?mode=abort answers, and requests go on
    splits_prompts: bool = False  # started with chunked prefill, which ends vLLM on a CPU
    raw_logprobs: bool = False  # started without --logprobs-mode processed_logprobs
    dies_after: int | None = None  # tokens; then every connection is closed
    dead: bool = False
    never_sleeps: bool = False  # /sleep answers, and nothing happens


class TrainerTable:
    """The trainer's side: the weights, a writer of folders, and scores."""

    def __init__(self, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        self.embed = numbers.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
        self.head = numbers.normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
        self.adapter = np.zeros((VOCABULARY, VOCABULARY), dtype=np.float32)
        self.num_updates = 0

    def update(self) -> None:
        """Train for a step."""
        numbers = np.random.default_rng(1000 + self.num_updates)
        self.num_updates += 1
        self.embed = self.embed + 0.3 * numbers.normal(size=self.embed.shape).astype(np.float32)
        self.head = self.head + 0.3 * numbers.normal(size=self.head.shape).astype(np.float32)

    def update_adapter(self) -> None:
        self.num_updates += 1
        numbers = np.random.default_rng(1000 + self.num_updates)
        self.adapter = self.adapter + 0.3 * numbers.normal(size=self.adapter.shape).astype(np.float32)

    @property
    def fingerprint(self) -> str:
        return f"table-{self.num_updates}"

    async def copy(self) -> tuple[dict[str, torch.Tensor], str]:
        return {"embed": torch.tensor(self.embed), "head": torch.tensor(self.head)}, self.fingerprint

    async def write(self, folder: Path) -> str:
        save_file({"embed": self.embed, "head": self.head}, folder / "model.safetensors")
        return self.fingerprint

    async def write_adapter(self, folder: Path) -> str:
        save_file({"adapter": self.adapter}, folder / "adapter_model.safetensors")
        return self.fingerprint

    async def score(self, sequences: Sequence[IntArray], temperature: float) -> Sequence[FloatArray]:
        logits = (self.embed @ self.head + self.adapter) / (temperature or 1.0)
        table = log_softmax(logits)
        return [float_array(table[sequence[:-1], sequence[1:]]) for sequence in sequences]


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass
class FakeVllm:
    """The state of one server."""

    embed: Any
    head: Any
    faults: Faults = field(default_factory=Faults)
    adapters: dict[str, Any] = field(default_factory=dict)
    version: str = "default"
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    pauses: int = 0
    aborts: int = 0  # counts aborts; a request that began before the last one ends
    prefixes: dict[bytes, Any] = field(default_factory=dict)  # logits after a cached prompt
    log: list[str] = field(default_factory=list)  # routes that were called
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies of generate
    running: int = 0
    asleep: set[str] = field(default_factory=set)  # parts of the memory that are free
    misuses: list[str] = field(default_factory=list)  # what was asked of it without that memory
    network: Any = None  # in place of the table, once a folder of transformers was loaded
    group: Any = None  # the process group with the trainer
    received: dict[str, Any] | None = None  # tensors of an update that has begun
    num_updates: int = 0  # requests that brought tensors

    def __post_init__(self) -> None:
        self.resumed.set()

    def logits(self, name: str, tokens: Sequence[int]) -> Any:
        """The logits after each of the tokens."""
        if self.asleep:
            self.misuses.append(f"computing without {self.asleep}")
        if self.network is not None:
            network = self.adapters.get(name, self.network)
            with torch.inference_mode():
                return network(torch.tensor([list(tokens)])).logits[0].float().numpy()
        table = self.embed @ self.head
        if name in self.adapters and not self.faults.ignores_adapters:
            table = table + self.adapters[name]
        return table[list(tokens)]

    async def _wait_for_pause(self, seen: int) -> None:
        """Halt a long request until more pauses than `seen` came, so that a test can interrupt it before its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HALT_S):
                while self.pauses == seen and not self.faults.dead:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)

    def sleep(self, level: int) -> None:
        self.resumed.clear()
        self.pauses += 1
        self.aborts += 1
        self.prefixes.clear()
        self.asleep = {"weights", "kv_cache"}
        if level == 2:  # the weights are lost
            self.embed, self.head, self.network = np.zeros_like(self.embed), np.zeros_like(self.head), None

    def reload(self, folder: Path) -> None:
        if "weights" in self.asleep:
            self.misuses.append("loading weights without memory for them")
        if (folder / "config.json").is_file():  # a model of transformers
            with MODEL_CONSTRUCTION:  # several servers, and the run itself, may be in this process
                self.network = AutoModelForCausalLM.from_pretrained(folder)
            return
        self.take(load_file(folder / "model.safetensors"))

    def take(self, weights: dict[str, Any]) -> None:
        """Replace the weights, as far as the faults allow."""
        self.embed = weights["embed"]
        if not self.faults.keeps_head:
            self.head = weights["head"]

    def load_adapter(self, name: str, folder: Path) -> None:
        if self.network is not None:
            self.adapters[name] = PeftModel.from_pretrained(copy.deepcopy(self.network), folder)
        else:
            self.adapters[name] = load_file(folder / "adapter_model.safetensors")["adapter"]

    def join(self, info: dict[str, Any]) -> None:
        store = dist.TCPStore(info["host"], info["port"], info["num_ranks"], False, MEET, wait_for_workers=False)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore(info["name"], store), 1, info["num_ranks"], MEET)

    def receive(self, info: dict[str, Any]) -> None:
        assert self.received is not None
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            if self.faults.fails_in_update:
                raise ConnectionError("the worker failed")
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
            self.received[name] = tensor.numpy()
        self.num_updates += 1

    def checksums(self) -> dict[str, str]:
        if self.network is not None:
            return {}
        held = {"embed": self.embed.tobytes(), "head": b"" if self.faults.hides_head else self.head.tobytes()}
        return {f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(data).hexdigest() for name, data in held.items()}

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield one choice for each token, as a stream does."""
        params, tokens, name = body["sampling_params"], list(body["token_ids"]), body["model"]
        began, pauses, spans = self.aborts, self.pauses, list[dict[str, Any]]()
        numbers = np.random.default_rng(params["seed"])
        temperature, key = params["temperature"], np.array(tokens, dtype=np.int32).tobytes() + name.encode()
        self.running += 1
        try:
            for number in range(params["max_tokens"]):
                if number == HALFWAY and params["max_tokens"] >= LONG:
                    await self._wait_for_pause(pauses)
                while not self.resumed.is_set():
                    await asyncio.sleep(0.002)
                    if self.aborts > began:
                        break
                if self.aborts > began or self.faults.dead:
                    break
                row = self.logits(name, tokens)[-1]
                if number == 0 and len(tokens) >= BLOCK:
                    row = self.prefixes.setdefault(key, row)
                logprobs = log_softmax(row / temperature) if temperature else log_softmax(row)
                drawn = numbers.uniform()
                token = int(np.searchsorted(np.cumsum(np.exp(logprobs.astype(np.float64))), drawn * (1 - 1e-9)))
                if temperature == 0:
                    token = int(row.argmax())
                token = min(token, len(row) - 1)
                told = log_softmax(row) if self.faults.raw_logprobs else logprobs
                tokens.append(token)
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": number, "end": number})
                spans[-1]["end"] = number + 1
                stopped = token in params["stop_token_ids"]
                finish = "stop" if stopped else "length" if number + 1 == params["max_tokens"] else None
                if self.faults.dies_after is not None and number >= self.faults.dies_after:
                    self.faults.dead = True
                    break
                yield _choice([token], [float(told[token])], finish, spans if finish else None)
                if finish:
                    return
                await asyncio.sleep(0)
            yield _choice([], [], "abort", spans)
        finally:
            self.running -= 1


def _choice(
    tokens: list[int], logprobs: list[float], finish: str | None, spans: list[dict[str, Any]] | None
) -> dict[str, Any]:
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


def make_fake_app(state: FakeVllm) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def record(request: Request, call_next: Any) -> Any:
        state.log.append(request.url.path + (f"?{request.url.query}" if request.url.query else ""))
        if state.faults.dead:
            return JSONResponse({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500)
        return await call_next(request)

    @app.get("/health")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("")

    @app.get("/server_info")
    async def server_info(config_format: str = "text") -> Any:
        scheduler = {"enable_chunked_prefill": state.faults.splits_prompts, "max_num_batched_tokens": 2048}
        options = {"scheduler_config": scheduler, "device_config": {"device": "cpu"}}
        return {"vllm_config": options if config_format == "json" else str(options), "vllm_env": {}, "system_env": {}}

    @app.get("/v1/models")
    async def models() -> Any:
        base = {"id": "m", "object": "model", "parent": None, "max_model_len": CONTEXT}
        more = [{"id": name, "parent": "m", "max_model_len": None} for name in state.adapters]
        return {"object": "list", "data": [base, *more]}

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Any:
        body = await request.json()
        state.requests.append(body)
        if body["model"] != "m" and body["model"] not in state.adapters:
            return JSONResponse({"error": {"message": f"The model '{body['model']}' does not exist"}}, 404)
        if len(body["token_ids"]) > CONTEXT:
            return JSONResponse({"error": {"message": f"The decoder prompt (length {len(body['token_ids'])})"}}, 400)
        if not body.get("stream"):
            while not state.resumed.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            tokens = body["token_ids"]
            rows_before = state.logits(body["model"], tokens)
            rows = log_softmax(rows_before)
            if len(tokens) >= BLOCK:  # what was computed is cached; what is cached is not read
                state.prefixes[np.array(tokens, dtype=np.int32).tobytes() + body["model"].encode()] = rows_before[-1]
            scored = [
                {str(token): {"logprob": float(row[token]), "rank": 1, "decoded_token": None}}
                for row, token in zip(rows, tokens[1:], strict=False)
            ]
            return {"request_id": "x", "model": "m", "choices": [_choice([0], [0.0], "length", None)],
                    "prompt_logprobs": [None, *scored]}  # fmt: skip

        async def events() -> AsyncIterator[str]:
            async for choice in state.generate(body):
                if state.faults.dead:
                    raise ConnectionError("killed")  # the connection breaks in the middle of a chunk
                yield f"data: {json.dumps({'request_id': body.get('request_id'), 'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/pause")
    async def pause(mode: str = "abort") -> Any:
        state.resumed.clear()
        state.pauses += 1
        if mode == "abort" and not state.faults.aborts_nothing:
            state.aborts += 1
        return {"status": "paused"}

    @app.post("/sleep")
    async def sleep(level: int = 1, mode: str = "abort") -> Any:
        if not state.faults.never_sleeps:
            state.sleep(level)
        return {"status": "sleeping", "level": level}

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Any:
        tags = request.query_params.getlist("tags")
        state.asleep -= set(tags or ["weights", "kv_cache"])
        if not state.asleep:
            state.resumed.set()
        return {"status": "sleeping" if state.asleep else "awake", "tags": tags or None}

    @app.get("/is_sleeping")
    async def is_sleeping() -> Any:
        return {"is_sleeping": bool(state.asleep) or not state.resumed.is_set()}

    @app.post("/resume")
    async def resume() -> Any:
        if state.asleep:
            state.misuses.append("resuming while asleep")
        state.resumed.set()
        return {"status": "resumed"}

    @app.post("/collective_rpc")
    async def collective_rpc(request: Request) -> Any:
        body = await request.json()
        assert body["method"] == "reload_weights"
        state.reload(Path(body["kwargs"]["weights_path"]))
        return {"results": [None]}

    @app.post("/update_weight_version")
    async def update_weight_version(request: Request) -> Any:
        state.version = (await request.json())["new_version"]
        return {"success": True, "new_version": state.version}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Any:
        if not state.faults.keeps_prefixes:
            state.prefixes.clear()
        return {"success": True}

    @app.post("/reset_mm_cache")
    @app.post("/reset_encoder_cache")
    async def reset_other() -> Any:
        return PlainTextResponse("")

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Any:
        body = await request.json()
        if body["lora_name"] in state.adapters:
            return JSONResponse({"error": {"message": "has already been loaded."}}, 400)
        state.load_adapter(body["lora_name"], Path(body["lora_path"]))
        return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Any:
        name = (await request.json())["lora_name"]
        if name not in state.adapters:
            return JSONResponse({"error": {"message": f"The lora adapter '{name}' cannot be found."}}, 404)
        del state.adapters[name]
        return PlainTextResponse("Success")

    @app.post("/weight_checker")
    async def weight_checker() -> Any:
        return {"checksums": state.checksums()}

    @app.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> Any:
        return {"world_size": 1}

    @app.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(request: Request) -> Any:
        if state.faults.without_extension:
            text = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            return JSONResponse({"error": {"message": text, "code": 500}}, 500)
        await asyncio.to_thread(state.join, (await request.json())["init_info"])
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start_weight_update() -> Any:
        state.received = {}
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update_weights(request: Request) -> Any:
        try:
            await asyncio.to_thread(state.receive, (await request.json())["update_info"])
        except (ConnectionError, RuntimeError) as exc:
            return JSONResponse({"error": {"message": str(exc), "code": 500}}, 500)
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish_weight_update(request: Request) -> Any:
        assert state.received is not None
        state.take(state.received)
        state.received = None
        state.version = (await request.json())["weight_version"]
        return {"message": "Weight update finished"}

    @app.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> Any:
        state.group = None
        return {"message": "Weight transfer shut down"}

    return app


@contextlib.contextmanager
def fake_vllm(seed: int = 99, faults: Faults | None = None) -> Iterator[tuple[str, FakeVllm]]:
    """Serve a fake whose weights are others than the trainer's, and yield its URL and state."""
    table = TrainerTable(seed)
    state = FakeVllm(embed=table.embed, head=table.head, faults=faults or Faults())
    with serving(make_fake_app(state)) as url:
        yield url, state
