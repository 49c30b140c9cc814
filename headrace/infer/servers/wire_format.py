"""The parts of requests and replies that vLLM and SGLang write alike, and the deadlines of calls to them."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headrace.errors import SamplerError, boundary
from headrace.infer.servers.api import StreamedTokens, VersionSpan
from headrace.infer.servers.json_http import JsonHttp
from headrace.types import SamplingParams

LOAD_S, CONTROL_S = 600.0, 120.0  # of a change of weights or a long computation, and of any other order
MAX_SEED = 2**63 - 1


def check_folder(folder: Path) -> None:
    """Raise SamplerError if a folder has no weights."""
    if not any(folder.glob("model*.safetensors")):
        raise SamplerError(f"{folder} holds no model*.safetensors: weights cannot be loaded from it")


def shared_params(params: SamplingParams, *, length: str, seed: str, keeps_stop: str) -> dict[str, Any]:
    """Write sampling parameters. The stop list is ours; the server's own end tokens are ignored.

    `length` and `seed` are what the server calls them; `keeps_stop` is its option to return stop strings too.
    """
    assert params.stop_tokens is not None
    body: dict[str, Any] = {
        "n": 1,
        length: params.max_tokens,
        "temperature": params.temperature,
        seed: params.seed & MAX_SEED,
        "stop_token_ids": list(params.stop_tokens),
        "ignore_eos": True,
    }
    if params.top_p < 1.0:
        body["top_p"] = params.top_p
    if params.top_k is not None:
        body["top_k"] = params.top_k
    if params.min_p > 0.0:
        body["min_p"] = params.min_p
    if params.stop_strings:
        body |= {"stop": list(params.stop_strings), keeps_stop: True, "skip_special_tokens": False}
    return body


async def stream_parts(
    http: JsonHttp, path: str, body: Mapping[str, Any], parse: Callable[[Any], StreamedTokens], *, engine: str
) -> AsyncGenerator[StreamedTokens, None]:
    """Yield the parts of a request's answer as they come. `parse` may raise anything at an event it cannot read."""
    async with aclosing(http.events(path, body)) as events:  # a caller that leaves closes the connection at once
        async for event in events:
            with boundary(SamplerError, f"{http.url} answered in another form than {engine} does"):
                part = parse(event)
            yield part


def parse_spans(spans: Any) -> tuple[VersionSpan, ...]:
    """Read the spans of weight versions."""
    return tuple(
        VersionSpan(version=str(span["version"]), start=int(span["start"]), end=int(span["end"]))
        for span in spans or ()
    )
