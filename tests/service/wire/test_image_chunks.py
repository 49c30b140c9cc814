"""Image chunks as the public SDK sends them: tokens and pictures at their places, or one sentence."""

from typing import Any

import numpy as np
import pytest
from test_render_pictures import make_renderer

from headrace.errors import RequestError
from headrace.service.http import schemas
from headrace.service.sampling.sample_job import SampleJob, parse_sample_job
from headrace.service.training.operations import ForwardOp, InvalidOp, Operation, parse_operation
from headrace.service.wire.image_chunks import ImageChunks
from support.pictures import counted, jpeg, png
from support.tinker_sdk import types

RENDERER = make_renderer()
IMAGES = ImageChunks(RENDERER)
[IMAGE_TOKEN] = RENDERER.tokenizer("<image>", add_special_tokens=False)["input_ids"]


def image(data: bytes, expected: int | None = None, format: str = "png") -> Any:
    return types.ImageChunk(data=data, format=format, expected_tokens=expected)


def text(*tokens: int) -> Any:
    return types.EncodedTextChunk(tokens=list(tokens))


def trained(*chunks: Any, length: int) -> Operation:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    targets = {"target_tokens": [5] * length, "weights": [1.0] * length}
    data = [types.Datum(model_input=types.ModelInput(chunks=list(chunks)), loss_fn_inputs=targets)]
    asked = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=asked)
    body = bytes(forward_backward_request_to_proto(request).SerializeToString())
    return parse_operation("forward_backward", body, images=IMAGES)


def sampled(*chunks: Any, images: ImageChunks = IMAGES, **asked: Any) -> SampleJob:
    prompt = types.ModelInput(chunks=list(chunks)).model_dump(mode="json")
    body = schemas.Sample.model_validate(
        {"prompt": prompt, "sampling_params": {"max_tokens": 4}, "num_samples": 1, "sampling_session_id": "s"} | asked
    )
    return parse_sample_job(body, id="r", context=100, vocabulary=1000, images=images)


def test_images_of_data_and_prompts_become_tokens_and_pictures_at_their_places() -> None:
    two, five = counted(2).data, counted(5).data
    chunks = (text(7, IMAGE_TOKEN), image(two, 2), text(8), image(five), text(9))
    operation = trained(*chunks, length=11)
    assert isinstance(operation, ForwardOp), operation
    [datum] = operation.data
    job = sampled(*chunks)
    for tokens, images in ((datum.inputs, datum.images), (job.prompt, job.images)):
        assert tokens.tolist() == [7, IMAGE_TOKEN, *[IMAGE_TOKEN] * 2, 8, *[IMAGE_TOKEN] * 5, 9]
        assert [placed.at.tolist() for placed in images] == [[2, 3], [5, 6, 7, 8, 9]], "not the token of the text"
        assert np.array_equal(images[1].image.pixels, FIVE_PIXELS)


FIVE_PIXELS = make_renderer().picture_tokens(counted(5)).images[0].image.pixels


@pytest.mark.parametrize(
    ("chunk", "sentence"),
    [
        (image(counted(3).data, 4), "an image has 3 tokens here, and the chunk expects 4"),
        (image(jpeg("red")), "an image is sent as png, and its bytes are not"),
        (image(b"nothing"), "an image is sent as png, and its bytes are not"),
    ],
)
def test_images_that_are_not_what_they_say_are_refused(chunk: Any, sentence: str) -> None:
    operation = trained(text(1), chunk, length=2)
    assert isinstance(operation, InvalidOp)
    assert operation.message == f"datum 0: {sentence}"
    with pytest.raises(RequestError, match=f"the prompt: {sentence}"):
        sampled(text(1), chunk)


def test_what_needs_the_log_probs_of_a_prompt_refuses_images_and_a_text_model_all_of_them() -> None:
    for asked in ({"prompt_logprobs": True}, {"topk_prompt_logprobs": 2}, {"topk_sample_logprobs": 2}):
        with pytest.raises(RequestError, match="not served with images"):
            sampled(text(1), image(counted(2).data), **asked)
    with pytest.raises(RequestError, match="the base model reads text alone"):
        sampled(image(png("red")), images=ImageChunks(None))
    pointer = types.ImageAssetPointerChunk(format="png", location="https://x.org/a.png", expected_tokens=3)
    with pytest.raises(RequestError, match="not a chunk of type 'image_asset_pointer'"):
        sampled(pointer)
