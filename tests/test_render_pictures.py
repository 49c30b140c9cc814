"""Where pictures stand among tokens: prompts, continuations, training sequences."""

import pickle
from typing import Any

import numpy as np
import pytest
from test_render import make_tokenizer

from headrace.algo.datum import conversation_datum
from headrace.errors import DataError, ModelError
from headrace.pictures import PICTURE_MARK, Picture
from headrace.render import PlacedTokens, Renderer
from headrace.testing import FakePictureReader
from headrace.types import Message, int_array
from support.pictures import PICTURE_TEMPLATE, counted

TWO, FIVE = counted(2), counted(5)


def make_renderer(template: str = PICTURE_TEMPLATE) -> Renderer:
    tokenizer: Any = make_tokenizer(template)
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, "<image>"]})
    [image_token] = tokenizer("<image>", add_special_tokens=False)["input_ids"]
    return Renderer(tokenizer, pictures=FakePictureReader(image_token=image_token))


def user(content: str, *images: Picture) -> Message:
    return Message(role="user", content=content.replace("*", PICTURE_MARK), images=images)


def test_pictures_stand_where_their_text_came_to_lie_and_not_where_a_text_has_the_same_tokens() -> None:
    renderer = make_renderer()
    written = renderer.placed_prompt([user("see <image> and * or <image><image> * ok", TWO, FIVE), user("<image>")])
    shown = renderer.exact_text(written.tokens)
    assert shown == (
        "<|im_start|>user\nsee <image> and "
        + "<image>" * 2
        + " or <image><image> "
        + "<image>" * 5
        + " ok<|im_end|>\n<|im_start|>user\n<image><|im_end|>\n<|im_start|>assistant\n"
    )
    image_token = written.tokens[written.images[0].at[0]]
    everywhere = np.flatnonzero(written.tokens == image_token).tolist()
    assert len(everywhere) == 1 + 2 + 2 + 5 + 1
    assert [placed.at.tolist() for placed in written.images] == [everywhere[1:3], everywhere[5:10]]
    assert [placed.image.num_tokens for placed in written.images] == [2, 5]
    assert np.array_equal(
        renderer.prompt([user("see * now", TWO)]), renderer.placed_prompt([user("see * now", TWO)]).tokens
    )
    text_only = [user("see <image> and it")]
    without = Renderer(renderer.tokenizer)
    assert np.array_equal(renderer.prompt(text_only), without.prompt(text_only)), "without pictures nothing changes"


def test_episodes_of_a_group_share_one_prepared_picture_and_the_renderer_pickles() -> None:
    renderer = make_renderer()
    one = renderer.placed_prompt([user("a *", TWO)]).images[0].image
    renderer.placed_prompt([user("b *", FIVE)])
    assert renderer.placed_prompt([user("c *", TWO)]).images[0].image is one
    copied = pickle.loads(pickle.dumps(renderer)).placed_prompt([user("a *", TWO)])
    assert copied.images[0].at.tolist() == renderer.placed_prompt([user("a *", TWO)]).images[0].at.tolist()


def test_later_turns_extend_the_tokens_exactly_and_keep_the_places_of_pictures() -> None:
    renderer = make_renderer()
    first = [user("what is *", TWO)]
    prompt = renderer.placed_prompt(first)
    reply = int_array([*renderer.encode("four"), renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")])
    so_far = PlacedTokens(tokens=int_array([*prompt.tokens, *reply]), images=prompt.images)
    before = [*first, Message(role="assistant", content="four")]
    new = [user("and *?", FIVE)]
    extended = renderer.placed_continuation(so_far, before, new)
    assert extended is not None
    assert extended.tokens[: len(so_far.tokens)].tolist() == so_far.tokens.tolist()
    whole = renderer.placed_prompt([*before, *new])
    assert extended.tokens.tolist() == whole.tokens.tolist()
    assert [placed.at.tolist() for placed in extended.images] == [placed.at.tolist() for placed in whole.images]
    # a turn that was cut off without its end has one token less, and so have the places behind it
    cut = PlacedTokens(tokens=so_far.tokens[:-1], images=prompt.images)
    again = renderer.placed_continuation(cut, before, new)
    assert again is not None
    assert again.images[1].at.tolist() == extended.images[1].at.tolist()


def test_training_sequences_have_pictures_and_masks_and_are_cut_before_a_picture_that_does_not_fit() -> None:
    renderer = make_renderer()
    talk = [
        user("what is *", TWO),
        Message(role="assistant", content="four"),
        user("and *", FIVE),
        Message(role="assistant", content="yes"),
    ]
    [rendered] = renderer.conversation(talk)
    spoken = [renderer.exact_text(rendered.tokens[start:end]) for start, end in _runs(rendered.trained)]
    assert spoken == ["four<|im_end|>", "yes<|im_end|>"]
    assert [placed.image.num_tokens for placed in rendered.images] == [2, 5]
    assert not any(rendered.trained[placed.at].any() for placed in rendered.images)
    second = rendered.images[1].at
    [cut] = renderer.conversation(talk, max_tokens=int(second[2]))
    assert len(cut.tokens) == second[0]
    assert [placed.image.num_tokens for placed in cut.images] == [2]
    [last] = renderer.conversation(talk, max_tokens=int(second[-1]) + 1)
    assert len(last.tokens) == second[0], "a picture that would end the sequence, which no input may be"
    assert last.truncated
    conversation_datum(last.tokens, last.trained, last.images)
    [fits] = renderer.conversation(talk, max_tokens=int(second[-1]) + 2)
    assert len(fits.images) == 2
    conversation_datum(fits.tokens, fits.trained, fits.images)
    with pytest.raises(DataError, match="a turn of the assistant has a picture"):
        renderer.conversation([user("a"), Message(role="assistant", content=PICTURE_MARK, images=(TWO,))])


def test_pictures_without_a_vision_model_and_templates_that_show_none_are_refused() -> None:
    renderer = make_renderer()
    with pytest.raises(ModelError, match="the model reads text alone"):
        Renderer(renderer.tokenizer).prompt([user("*", TWO)])
    with pytest.raises(DataError, match="shows 0 of 1 pictures"):
        make_renderer(PICTURE_TEMPLATE.replace("'<image>'", "''")).prompt([user("*", TWO)])


def _runs(mask: Any) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
