"""The order of tasks: permutations, resumption from any cursor, and the checks before a run."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.data.shuffle import fingerprint, permutation
from headrace.data.task_source import TaskSource, filter_prompts, find_overlap
from headrace.errors import CheckpointError, DataError
from headrace.render import Renderer
from headrace.types import Message, Task


def make_tasks(size: int, word: str = "go") -> list[Task]:
    return [
        Task(id=str(i), messages=(Message(role="user", content=f"{word} {i}"),), data={"answer": i})
        for i in range(size)
    ]


@given(st.integers(1, 40), st.integers(0, 2**63), st.integers(0, 5))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    source = TaskSource(make_tasks(size), seed)
    for _ in range(epoch):
        source.get_prompts(size)
    assert sorted(int(task.id) for task in source.get_prompts(size)) == list(range(size))
    assert source.epoch == epoch


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 70), st.integers(0, 50))
def test_resuming_from_any_cursor_gives_the_same_sequence(size: int, seed: int, before: int, after: int) -> None:
    tasks = make_tasks(size)
    whole = TaskSource(tasks, seed).get_prompts(before + after)
    first = TaskSource(tasks, seed)
    first.get_prompts(before)
    second = TaskSource(tasks, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.get_prompts(after) == whole[before:]


def test_permutations_differ_by_seed_and_epoch_and_never_change() -> None:
    orders = [tuple(permutation(50, key=(seed,), epoch=epoch).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    # splitmix64 seeded by blake2b of "(0, 0)", worked out in plain integers; other numbers break resumption of runs
    assert permutation(8, key=(0,), epoch=0).tolist() == [1, 4, 3, 0, 2, 6, 5, 7]


def test_a_source_goes_through_the_permutation_of_each_epoch_in_turn() -> None:
    source = TaskSource(make_tasks(20), 3)
    orders = [[int(task.id) for task in source.get_prompts(20)] for _ in range(3)]
    assert orders == [permutation(20, key=(3,), epoch=epoch).tolist() for epoch in range(3)]
    assert orders[0] != orders[1]


def test_every_place_is_equally_likely() -> None:
    # 4000 epochs of 5 tasks: each (task, place) is expected 800 times, standard deviation sqrt(4000*.2*.8) = 25.3
    counts = [[0] * 5 for _ in range(5)]
    for epoch in range(4000):
        for place, index in enumerate(permutation(5, key=(1,), epoch=epoch).tolist()):
            counts[index][place] += 1
    assert all(abs(count - 800) < 5 * 25.3 for row in counts for count in row)


def test_next_and_get_prompts_share_one_cursor_across_epochs() -> None:
    one, many = TaskSource(make_tasks(3), 5), TaskSource(make_tasks(3), 5)
    assert tuple(one.next() for _ in range(7)) == many.get_prompts(7)
    assert one.state_dict() == many.state_dict()
    assert (one.state_dict()["epoch"], one.state_dict()["offset"]) == (2, 1)


def test_a_cursor_of_other_data_or_another_seed_is_refused() -> None:
    state = TaskSource(make_tasks(3), 5).state_dict()
    for tasks in (make_tasks(4), make_tasks(3, "stay"), make_tasks(3)[::-1]):
        with pytest.raises(CheckpointError, match="not those of the checkpoint"):
            TaskSource(tasks, 5).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed 5, not 6"):
        TaskSource(make_tasks(3), 6).load_state_dict(state)
    with pytest.raises(DataError, match="no tasks"):
        TaskSource([], 0)


def test_fingerprints_tell_structures_apart() -> None:
    values = [["a", "b"], ["ab"], [["a"], "b"], [{"a": "b"}], [("a", 1)], [("a", "1")], [("a", 1.0)], [None], []]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])


def make_renderer() -> Renderer:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return Renderer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>"))


def test_long_prompts_are_left_out_and_counted() -> None:
    tasks = [Task(id=str(n), messages=(Message(role="user", content="x " * n),)) for n in (3, 9, 4, 5)]
    silent = Task(id="world", data={"size": 3})
    filtered = filter_prompts([*tasks, silent], make_renderer(), 4)
    assert [task.id for task in filtered.kept] == ["3", "4", "world"]
    assert (filtered.dropped_count, filtered.longest) == (2, 9)


def test_a_task_that_only_has_a_system_message_is_one_whose_environment_speaks_first() -> None:
    rules = (Message(role="system", content="x " * 9),)
    worlds = [Task(id=str(n), messages=rules, data={"size": n}) for n in range(3)]
    assert filter_prompts(worlds, make_renderer(), 4).kept == tuple(worlds)
    assert find_overlap(worlds[:2], worlds[1:]) == 1
    question = (Message(role="user", content="why"),)
    assert find_overlap([Task(id="plain", messages=question)], [Task(id="ruled", messages=(*rules, *question))]) == 1


def test_overlap_counts_held_out_tasks_seen_in_training() -> None:
    train = make_tasks(5)
    held_out = [
        Task(id="other id", messages=train[2].messages),
        Task(id="2", messages=(Message(role="user", content="new"),), data=train[2].data),
        Task(id="world", data={"size": 3}),
    ]
    assert find_overlap(train, held_out) == 1
    assert find_overlap([*train, Task(id="w", data={"size": 3})], held_out) == 2
    assert find_overlap(train, []) == 0
