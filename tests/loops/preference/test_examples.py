"""Preference rows as token sequences: which tokens are trained, which rows are left out."""

import numpy as np
import pytest

from headrace.data.preferences import labelled_from_rows, pairs_from_rows
from headrace.errors import DataError
from headrace.loops.preference.examples import example_data, prepare_pairs, prepare_replies
from headrace.model.tiny import make_tokenizer
from headrace.render import Rendered, Renderer

WORDS = ("a", "b", "c", "d", "good", "bad", "fine")
RENDERER = Renderer(make_tokenizer(list(WORDS)))


def trained_words(part: Rendered) -> list[str]:
    return RENDERER.decode(part.tokens[part.trained]).split()


def test_only_the_turns_after_the_shared_beginning_are_trained() -> None:
    start = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "b"},
    ]
    [pair] = pairs_from_rows([{"prompt": start, "chosen": "good", "rejected": "bad c"}])
    [example] = prepare_pairs([pair], RENDERER, max_tokens=64).examples
    assert example.sides == (1.0, -1.0)
    assert [trained_words(part) for part in example.sequences] == [["good"], ["bad", "c"]]


def test_rows_that_are_too_long_or_alike_are_left_out_and_counted() -> None:
    rows = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {"prompt": "a", "chosen": "b " * 40, "rejected": "bad"},
        {"prompt": "a", "chosen": "splendid", "rejected": "dreadful"},  # both are the unknown word
    ]
    prepared = prepare_pairs(pairs_from_rows(rows), RENDERER, max_tokens=24)
    assert (len(prepared.examples), prepared.too_long, prepared.alike) == (1, 1, 1)
    assert prepared.longest > 40
    with pytest.raises(DataError, match=r"none of 1 pairs fits into 24 tokens .*raise dpo.max_tokens"):
        prepare_pairs(pairs_from_rows(rows[1:2]), RENDERER, max_tokens=24)
    with pytest.raises(DataError, match="the same tokens"):
        prepare_pairs(pairs_from_rows(rows[2:]), RENDERER, max_tokens=24)


def test_the_data_of_pairs_are_weighted_to_their_mean_and_carry_the_reference() -> None:
    rows = [{"prompt": p, "chosen": "good", "rejected": "bad c"} for p in "ab"]
    examples = prepare_pairs(pairs_from_rows(rows), RENDERER, max_tokens=24).examples
    scores = [[np.full(part.num_trained, -0.5 - unit) for part in e.sequences] for unit, e in enumerate(examples)]
    data = example_data(examples, scores, imitates=False)
    assert [datum.unit for datum in data] == [0, 0, 1, 1]
    for datum, side in zip(data, (1, -1, 1, -1), strict=True):
        trained = datum.arrays["weights"] != 0
        assert set(datum.arrays["weights"][trained].tolist()) == {0.5}
        assert set(datum.arrays["preferences"].tolist()) == {side}
        assert set(datum.arrays["reference_logprobs"][trained].tolist()) == {-0.5 - (datum.unit or 0)}
        assert not datum.arrays["reference_logprobs"][~trained].any()


def test_imitation_counts_every_token_of_the_chosen_side_once() -> None:
    [pair] = pairs_from_rows([{"prompt": "a", "chosen": "good", "rejected": "bad c"}])
    examples = prepare_pairs([pair], RENDERER, max_tokens=24).examples
    chosen, rejected = example_data(examples, None, imitates=True)
    assert chosen.arrays["nll_weights"].tolist() == pytest.approx([1 / chosen.num_tokens] * chosen.num_tokens)
    assert not rejected.arrays["nll_weights"].any()


def test_a_labelled_reply_has_the_reply_of_the_row_before_behind_its_prompt() -> None:
    rows = [
        {"prompt": p, "completion": c, "label": c == "good"} for p, c in (("a", "good"), ("b", "bad"), ("c", "fine"))
    ]
    prepared = prepare_replies(labelled_from_rows(rows), RENDERER, max_tokens=24)
    assert [example.sides for example in prepared.examples] == [(1.0,), (-1.0,), (-1.0,)]
    assert [trained_words(example.sequences[0]) for example in prepared.examples] == [["good"], ["bad"], ["fine"]]
    assert [trained_words(example.other[0]) for example in prepared.examples] == [["fine"], ["good"], ["bad"]]
    asked = [
        RENDERER.decode(example.other[0].tokens[~example.other[0].trained]).split() for example in prepared.examples
    ]
    assert [words[-1] for words in asked] == [
        RENDERER.decode(example.sequences[0].tokens[~example.sequences[0].trained]).split()[-1]
        for example in prepared.examples
    ]
    with pytest.raises(DataError, match="at least two rows"):
        prepare_replies(labelled_from_rows(rows[:1]), RENDERER, max_tokens=24)
