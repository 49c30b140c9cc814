"""How graph decoding cuts up its work: buckets of rows, splits and blocks of prompts; no GPU is needed."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.infer.cuda.tiling import MOST_SPLITS, PROMPT_ROWS, bucket_for, prompt_blocks, splits_for
from headrace.model.attention import PromptChunk


@given(st.integers(1, 2000))
def test_a_bucket_holds_its_rows_and_is_its_own(rows: int) -> None:
    bucket = bucket_for(rows)
    assert rows <= bucket < rows + 64
    assert bucket % 8 == 0
    assert bucket_for(bucket) == bucket


@given(st.integers(1, 512), st.integers(1, 16))
def test_splits_are_powers_of_two_and_fewer_for_more_rows(rows: int, heads: int) -> None:
    splits = splits_for(rows, heads)
    assert 1 <= splits <= MOST_SPLITS
    assert splits & (splits - 1) == 0
    assert splits_for(rows + 1, heads) <= splits


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=8))
def test_blocks_cover_every_prompt_token_once_at_its_position(spans: list[tuple[int, int]]) -> None:
    pieces = [PromptChunk(row, offset, length) for row, (offset, length) in enumerate(spans)]
    expected = [(piece.row, piece.offset + i) for piece in pieces for i in range(piece.length)]
    found: dict[int, tuple[int, int]] = {}
    for slot, first, position, count in prompt_blocks(pieces).tolist():
        assert 1 <= count <= PROMPT_ROWS
        for i in range(count):
            assert first + i not in found
            found[first + i] = (slot, position + i)
    assert [found[index] for index in range(len(found))] == expected


def test_few_rows_with_long_keys_are_split_into_more_programs_than_fit_at_once() -> None:
    assert splits_for(16, 8) == 16  # 2,048 programs: the last to start leave little to wait for
    assert splits_for(256, 2) == 1
