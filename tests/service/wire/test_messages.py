"""Bytes of the wire: what the SDK writes is read as it is, and nothing malformed gets further than a sentence."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import zstandard
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.metrics import Max, Mean, Sum
from headrace.service.host.model_host import TopLogprobs
from headrace.service.training.operations import InvalidOp, parse_operation
from headrace.service.wire import proto
from headrace.service.wire.loss_conversion import to_loss_and_data
from headrace.service.wire.messages import (
    WireSamples,
    decompress,
    metric_names,
    parse_forward,
    read_forward,
    unfold,
    write_forward,
    write_sample,
)
from headrace.types import Completion, ForwardOut, StopReason, float_array, int_array
from support.tinker_sdk import datum, types


def sdk_body(data: list[object], **fields: object) -> bytes:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    asked = types.ForwardBackwardInput(data=data, **{"loss_fn": "cross_entropy", **fields})
    request = types.ForwardBackwardRequest(model_id="m", seq_id=7, forward_backward_input=asked)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def test_the_schema_has_the_fields_of_the_sdk() -> None:
    from tinker.proto import tinker_public_pb2

    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name
    messages = proto.ForwardBackwardRequest.DESCRIPTOR.file.message_types_by_name
    assert len(messages) > 15
    for name in set(messages) - {"TokenSpan"}:
        assert {(f.name, f.number, f.type) for f in messages[name].fields} == {
            (f.name, f.number, f.type) for f in theirs[name].fields
        }


def test_the_descriptors_are_what_the_proto_file_compiles_to(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="pip install grpcio-tools")
    compiled, source = tmp_path / "wire.binpb", proto.DESCRIPTORS.with_suffix(".proto")
    arguments = ["protoc", f"-I{source.parent}", f"--descriptor_set_out={compiled}", source.name]
    assert protoc.main(arguments) == 0
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(proto.DESCRIPTORS.read_bytes())
    assert descriptors == descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()), "run: make proto"


def test_a_body_of_the_sdk_is_read_as_it_is() -> None:
    message = parse_forward(sdk_body([datum([1, 2, 3], [0.5, -2.0])], loss_fn_config={"a": 0.25, "b": "text"}))
    asked = read_forward(message)
    assert (message.model_id, message.seq_id, asked.forward_only) == ("m", 7, False)
    assert (asked.loss, dict(asked.config)) == ("cross_entropy", {"a": 0.25, "b": "text"})
    assert asked.data[0].inputs.tolist() == [1, 2]
    assert asked.data[0].tensors["weights"].tolist() == [0.5, -2.0]
    assert asked.data[0].tensors["target_tokens"].dtype == np.int64


def test_the_legacy_numbers_serve_where_there_are_no_others() -> None:
    message = proto.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.5
    assert dict(read_forward(message).config) == {"clip_low_threshold": 0.5}


def test_pictures_for_a_text_model_and_sounds_are_refused_by_name() -> None:
    message = proto.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    chunk = message.data.add().model_input.add()
    chunk.image.data = b"png"
    with pytest.raises(RequestError, match=r"datum 0: the base model reads text alone, .* type 'image'"):
        read_forward(message)
    chunk.dmel.dmel = b"sound"
    with pytest.raises(RequestError, match="datum 0: only text and images are served, not dmel"):
        read_forward(message)


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_compressed_rows_stand_for_their_dense_array(rows: int, width: int, random: object) -> None:
    import random as standard

    assert isinstance(random, standard.Random)
    dense = np.array([[random.choice([0, 0, random.randint(1, 9)]) for _ in range(width)] for _ in range(rows)])
    crow = np.concatenate([[0], np.cumsum((dense != 0).sum(axis=1))])
    back = unfold(dense[dense != 0], crow, np.nonzero(dense)[1], (rows, width), "x")
    assert (back == dense).all()


@pytest.mark.parametrize(
    ("values", "crow", "cols", "shape"),
    [
        ([1], [0, 1], [5], (1, 2)),  # a column outside
        ([1], [0, 1], [-1], (1, 2)),
        ([1], [0, 1, 1], [0], (1, 2)),  # too many rows
        ([1, 2], [0, 2, 1], [0, 1], (2, 2)),  # rows that shrink
        ([1], [0, 1], [0], (2**40, 2**40)),  # a bomb
        ([1], [0, 1], [0], (2,)),
        ([1], [0, 1], [0], (-1, 2)),
    ],
)
def test_compressed_rows_that_do_not_fit_are_refused(
    values: list[int], crow: list[int], cols: list[int], shape: tuple[int, ...]
) -> None:
    with pytest.raises(RequestError, match="compressed rows"):
        unfold(np.array(values), np.array(crow), np.array(cols), shape, "x")


def test_zstd_is_unfolded_up_to_a_limit() -> None:
    plain = bytes(3_000_000)
    packed = zstandard.ZstdCompressor().compress(plain)
    assert decompress(packed, "zstd", limit=3_000_000) == plain
    with pytest.raises(RequestError, match="more than 2999999 bytes"):
        decompress(packed, "zstd", limit=2_999_999)
    with pytest.raises(RequestError, match="not zstd"):
        decompress(b"plain", "zstd", limit=100)
    with pytest.raises(RequestError, match="gzip"):
        decompress(plain, "gzip", limit=100)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_work_that_fails_with_a_sentence(body: bytes) -> None:
    for kind in ("forward_backward", "optim_step", "save_weights", "load_weights", "save_weights_for_sampler"):
        work = parse_operation(kind, body)
        assert isinstance(work, InvalidOp)
        assert work.message


@settings(max_examples=300)
@given(st.data())
def test_a_body_with_bytes_changed_never_escapes(data: st.DataObject) -> None:
    body = bytearray(sdk_body([datum([1, 2, 3]), datum([4, 5, 6, 7])]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RequestError):
        to_loss_and_data(read_forward(parse_forward(bytes(body))))


def test_metrics_carry_their_reduction() -> None:
    named = metric_names({"a": Sum(2.0), "b:c": Mean(6.0, 3.0), "d": Max(4.0), "e": Sum(float("nan"))})
    assert named == {"a:sum": 2.0, "b_c:mean": 2.0, "d:max": 4.0}


def test_forward_replies_are_read_by_the_sdk() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    one, two, wide = float_array([1, 2]), float_array([3]), float_array(np.arange(6).reshape(3, 2))
    out = ForwardOut(loss=4.5, logprobs=(one, two, wide), metrics={"x": Mean(1.0, 2.0)})
    read = deserialize_forward_backward_output(write_forward(out, clock=3))
    assert [found["logprobs"].to_numpy().tolist() for found in read.loss_fn_outputs] == [
        [1, 2], [3], [[0, 1], [2, 3], [4, 5]]
    ]  # fmt: skip
    assert read.metrics == {"loss:sum": 4.5, "clock_cycle:unique": 3.0, "x:mean": 0.5}


def test_samples_are_read_by_the_sdk() -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    completion = Completion(
        tokens=int_array([4, 5]),
        sampler_logprobs=float_array([-1, -2]),
        raw_logprobs=float_array([-3, -4]),
        versions=int_array([0, 0]),
        stop=StopReason.STOP,
    )
    top = TopLogprobs(tokens=int_array([[1, 2], [3, 4]]), logprobs=float_array([[-1, -2], [-3, -4]]))
    sampled = WireSamples(
        completions=(completion,), prompt_logprobs=float_array([np.nan, -0.5]), tops=(top,), prompt_tops=top
    )
    read = deserialize_sample_response(write_sample(sampled))
    (sequence,) = read.sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([4, 5], [-3.0, -4.0], "stop")
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs == [None, [(3, -3.0), (4, -4.0)]]
    assert sequence.topk_logprobs == [[(1, -1.0), (2, -2.0)], [(3, -3.0), (4, -4.0)]]
