"""Convert protobuf bytes of the wire to values and back. Knows the message layout; `loss_conversion` knows the losses.

Token arrays are little-endian int32, tensors float32 or int64, dense or in compressed sparse rows. T positions, K
alternatives per position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from google.protobuf.message import DecodeError

from headrace.errors import RequestError
from headrace.metrics import EffectiveSampleShare, ExplainedVariance, Max, Mean, Metrics, Min, StdDev, Sum
from headrace.pictures import PlacedImage
from headrace.render import PlacedTokens
from headrace.service.host.model_host import TopLogprobs
from headrace.service.wire import proto
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks, join_chunks
from headrace.types import Completion, FloatArray, ForwardOut, IntArray, StopReason, int_array

PROTOBUF = "application/x-protobuf"
MAX_ELEMENTS = 2**27  # of one tensor: what compressed rows may unfold to
_DTYPES: Mapping[int, npt.DTypeLike] = {proto.FLOAT32: "<f4", proto.INT64: "<i8", proto.INT32: "<i4"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireDatum:
    """A sequence as received: its tokens, and tensors by name."""

    inputs: IntArray
    tensors: Mapping[str, Array]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WireForward:
    """A forward_backward request as received."""

    loss: str
    config: Mapping[str, float | str]
    forward_only: bool
    data: tuple[WireDatum, ...]


# --- requests --------------------------------------------------------------------------------------------------------


def decompress(body: bytes, encoding: str | None, *, limit: int) -> bytes:
    """Undo a body's Content-Encoding; raises RequestError when it is broken or unfolds to more than `limit`."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"Content-Encoding {encoding!r} is not served: send zstd or nothing")
    parts, total = [], 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            while part := reader.read(2**20):
                total += len(part)
                if total > limit:
                    raise RequestError(f"the body unfolds to more than {limit} bytes: send fewer data at once")
                parts.append(part)
    except zstandard.ZstdError as exc:
        raise RequestError(f"the body is not zstd: {exc}") from exc
    return b"".join(parts)


def parse_forward(body: bytes) -> Any:
    """Parse the message of a forward_backward body; raises RequestError when it is not one."""
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {exc}") from exc
    return message


def read_forward(message: Any, images: ImageChunks = TEXT_ONLY) -> WireForward:
    """Convert a parsed message; raises RequestError that names the datum and the tensor."""
    chosen = message.loss_fn_config_v2
    config: dict[str, float | str] = {
        name: value.text if value.WhichOneof("kind") == "text" else value.number for name, value in chosen.items()
    }
    return WireForward(
        loss=message.loss_fn,
        config=config or dict(message.loss_fn_config),
        forward_only=message.forward_only,
        data=tuple(_read_datum(index, datum, images) for index, datum in enumerate(message.data)),
    )


def _read_datum(index: int, datum: Any, images: ImageChunks) -> WireDatum:
    parts = [_read_chunk(chunk, f"datum {index}", images) for chunk in datum.model_input]
    tensors = {name: read_tensor(tensor, f"datum {index}: {name}") for name, tensor in datum.loss_fn_inputs.items()}
    joined = join_chunks(parts)
    return WireDatum(inputs=joined.tokens, tensors=tensors, images=joined.images)


def _read_chunk(chunk: Any, what: str, images: ImageChunks) -> PlacedTokens:
    kind = chunk.WhichOneof("kind")
    if kind == "encoded_text":
        return PlacedTokens(tokens=int_array(_from_bytes(chunk.encoded_text.tokens, "<i4", f"{what}: tokens")))
    if kind != "image":
        raise RequestError(f"{what}: only text and images are served, not {kind or 'an empty chunk'}")
    image = chunk.image
    if image.HasField("override_dimensions"):
        raise RequestError(
            f"{what}: override_dimensions of an image are not served: send it in the size it should have"
        )
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return images.read(image.data, image.format, expected, what)


def read_tensor(tensor: Any, what: str) -> Array:
    """Read a dense or sparse tensor as a dense array; raises RequestError."""
    if tensor.dtype not in _DTYPES:
        raise RequestError(f"{what} has a data type that is not served: send float32 or int64")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("kind") == "sparse_csr":
        rows = tensor.sparse_csr
        return unfold(
            _from_bytes(rows.values, dtype, what),
            _from_bytes(rows.crow_indices, "<i8", what),
            _from_bytes(rows.col_indices, "<i8", what),
            shape,
            what,
        )
    return shaped(_from_bytes(tensor.dense, dtype, what), shape, what)


def shaped(flat: Array, shape: Sequence[int], what: str) -> Array:
    """Reshape a flat array; without a shape it stays flat."""
    if not shape:
        return flat
    if not _is_reasonable(shape) or math.prod(shape) != len(flat):
        raise RequestError(f"{what} has {len(flat)} numbers, which is not its shape {list(shape)}")
    return flat.reshape(tuple(shape))


def unfold(values: Array, crow: Array, cols: Array, shape: Sequence[int], what: str) -> Array:
    """Unfold compressed sparse rows into a dense array; what is not stored is 0."""
    if len(shape) != 2 or not _is_reasonable(shape):
        raise RequestError(f"{what} in compressed rows needs two dimensions of a reasonable size, not {list(shape)}")
    rows, width = shape
    counts = np.diff(crow)
    sound = (
        len(crow) == rows + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(cols)
        and (counts >= 0).all()
        and (len(cols) == 0 or (cols.min() >= 0 and cols.max() < width))
    )
    if not sound:
        raise RequestError(f"{what} has compressed rows that do not fit its shape {list(shape)}")
    dense = np.zeros((rows, width), dtype=values.dtype)
    dense[np.repeat(np.arange(rows), counts), cols] = values
    return dense


def _is_reasonable(shape: Sequence[int]) -> bool:
    """Check a shape's size, also where a dimension is 0: numpy refuses large dimensions beside it."""
    return min(shape) >= 0 and math.prod(max(size, 1) for size in shape) <= MAX_ELEMENTS


def _from_bytes(data: bytes, dtype: npt.DTypeLike, what: str) -> Array:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise RequestError(f"{what} has {len(data)} bytes, which is no whole number of {size}-byte numbers")
    return np.frombuffer(data, dtype=dtype)


# --- replies ---------------------------------------------------------------------------------------------------------


def metric_names(metrics: Metrics) -> dict[str, float]:
    """Name metrics as the client merges them over chunks: every name ends in its reduction."""
    named: dict[str, float] = {}
    for name, metric in metrics.items():
        match metric:
            case Sum():
                reduction = "sum"
            case Max():
                reduction = "max"
            case Min():
                reduction = "min"
            case Mean() | StdDev() | EffectiveSampleShare() | ExplainedVariance():
                reduction = "mean"
        value = metric.value()
        if np.isfinite(value):
            named[f"{name.replace(':', '_')}:{reduction}"] = value
    return named


def write_forward(out: ForwardOut, *, clock: int) -> bytes:
    """Write a ForwardBackwardOutput: one record per run of data whose log-probs have the same trailing shape."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, arrays in groupby(out.logprobs, key=lambda array: array.shape[1:]):
        group = list(arrays)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        field = record.fields["logprobs"]
        field.data = b"".join(array.astype("<f4").tobytes() for array in group)
        field.offsets = np.cumsum([0, *(array.size * 4 for array in group)]).astype("<i8").tobytes()
        field.dtype = proto.FLOAT32
        field.trailing_shape.extend(trailing)
    metrics = {"loss:sum": out.loss, "clock_cycle:unique": float(clock), **metric_names(out.metrics)}
    for name, value in metrics.items():
        message.metrics[name] = value
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSamples:
    """The results of a sampling request; None: not asked for."""

    completions: tuple[Completion, ...]
    tempered: bool = False  # report the log-probs of the tempered distribution instead of the raw ones
    tops: tuple[TopLogprobs, ...] | None = None  # of the sampled tokens
    prompt_logprobs: FloatArray | None = None
    prompt_tops: TopLogprobs | None = None
    prompt_targets: FloatArray | None = None
    target_rows: tuple[Array, Array] | None = None  # crow and column indices, where the request had compressed rows


def write_sample(sampled: WireSamples) -> bytes:
    message = proto.SampleResponse()
    for index, completion in enumerate(sampled.completions):
        assert completion.stop is not StopReason.INTERRUPTED
        logprobs = completion.sampler_logprobs if sampled.tempered else completion.raw_logprobs
        sequence = message.sequences.add(stop_reason=0 if completion.stop is StopReason.STOP else 1)
        sequence.tokens = completion.tokens.astype("<i4").tobytes()
        sequence.logprobs = logprobs.astype("<f4").tobytes()
        if sampled.tops is not None:
            _write_top(sequence.topk_sampled_logprobs, sampled.tops[index], empty_first=False)
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = sampled.prompt_logprobs.astype("<f4").tobytes()
    if sampled.prompt_tops is not None:
        _write_top(message.topk_prompt_logprobs, sampled.prompt_tops, empty_first=True)
    if sampled.prompt_targets is not None:
        _write_targets(message.target_prompt_logprobs, sampled.prompt_targets, sampled.target_rows)
    return bytes(message.SerializeToString())


def _write_top(message: Any, top: TopLogprobs, *, empty_first: bool) -> None:
    tokens, logprobs = top.tokens.astype("<i4").copy(), top.logprobs.astype("<f4").copy()
    if empty_first:  # an empty cell is token 0 with this log-prob
        tokens[0], logprobs[0] = 0, -99999.0
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.length, message.k = top.tokens.shape


def _write_targets(message: Any, values: FloatArray, rows: tuple[Array, Array] | None) -> None:
    message.dtype = proto.FLOAT32
    message.shape.extend(values.shape)
    if rows is None:
        message.dense = values.astype("<f4").tobytes()
        return
    crow, cols = rows
    stored = values[np.repeat(np.arange(len(values)), np.diff(crow)), cols]
    message.sparse_csr.values = stored.astype("<f4").tobytes()
    message.sparse_csr.crow_indices = crow.astype("<i8").tobytes()
    message.sparse_csr.col_indices = cols.astype("<i8").tobytes()
