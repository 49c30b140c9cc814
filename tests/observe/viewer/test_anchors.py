"""Every action taken in a state, with its returns; and the picture of the states."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.rollouts.files import save_trajectories
from headrace.observe.rollouts.records import EpisodeRecord, read_lines
from headrace.observe.viewer.anchors import anchors, find_anchors
from headrace.observe.viewer.graph import ENDED, HEIGHT, SOLVED, STRIDE_X, WIDTH, Graph, state_graph, transitions
from support import rollout_files


def test_the_actions_of_a_state_by_hand(tmp_path: Path) -> None:
    # gamma 0.5. G: 7/0: 1/4 1/2 1; 7/1: 1/8 1/4 1/2 1; 7/2: 0 0 0
    found = anchors(rollout_files.lines(tmp_path / "a.jsonl"))
    assert [(anchor.key, len(anchor.visits), anchor.num_episodes) for anchor in found] == [
        ("S", 5, 3),
        ("A", 3, 3),
        ("B", 2, 2),
    ]
    start, after, _ = found
    assert start.mean_return == pytest.approx((1 / 4 + 1 / 8 + 1 / 4 + 0 + 0) / 5)
    assert [(choice.action, len(choice.visits), choice.mean_return) for choice in start.choices] == [
        ("on", 3, pytest.approx((1 / 4 + 1 / 4 + 0) / 3)),
        ("left", 1, 1 / 8),
        ("jump", 1, 0.0),
    ]
    assert [(visit.episode, visit.index, visit.returns) for visit in start.choices[0].visits] == [
        ("7/0", 0, 0.25),
        ("7/2", 0, 0.0),
        ("7/1", 1, 0.25),
    ]
    assert after.choices[1].action == "back"
    assert after.choices[1].mean_step_advantage == pytest.approx(0 - 1 / 3)
    assert after.choices[1].mean_advantage == pytest.approx(-2 / 3 - 1 / 3)


def test_states_are_found_by_key_then_by_beginning_then_by_part(tmp_path: Path) -> None:
    found = anchors(rollout_files.lines(tmp_path / "a.jsonl"))
    assert [anchor.key for anchor in find_anchors(found, "A")] == ["A"]
    assert [anchor.key for anchor in find_anchors(found, "")] == ["S", "A", "B"]
    assert find_anchors(found, "x") == ()


def test_transitions_lead_to_the_next_state_and_to_the_end(tmp_path: Path) -> None:
    moves = {
        (move.source, move.target): len(move.visits) for move in transitions(rollout_files.lines(tmp_path / "a.jsonl"))
    }
    assert moves == {("S", "A"): 3, ("A", "B"): 2, ("B", SOLVED): 2, ("S", "S"): 1, ("A", "S"): 1, ("S", ENDED): 1}


def test_the_picture_has_states_in_layers_and_actions_with_their_returns(tmp_path: Path) -> None:
    graph = state_graph(rollout_files.lines(tmp_path / "a.jsonl"))
    assert graph is not None
    places = {node.key: node for node in graph.nodes}
    assert [(key, node.kind, (node.x - places["S"].x) / STRIDE_X) for key, node in places.items()] == [
        ("S", "start", 0.0),
        ("A", "state", 1.0),
        ("B", "state", 2.0),
        (SOLVED, "solved", 3.0),
        (ENDED, "ended", 3.0),
    ]
    assert places["S"].note == "5 visits · G 0.125"
    assert (places[SOLVED].note, places[ENDED].note) == ("2 episodes", "1 episode")
    assert [places[key].tone for key in "SAB"] == [0, 1, 4]  # mean G of 1/8, 1/3 and 1
    edges = {(edge.source, edge.target): edge for edge in graph.edges}
    assert edges["S", "A"].labels == ("on ×3 · 0.167",)
    assert edges["B", SOLVED].tone == 1  # advantages of 1/3
    assert edges["A", "S"].tone == -2  # -2/3 - 1/3
    assert graph.left_out == 0
    assert state_graph(rollout_files.lines(tmp_path / "b.jsonl")) == graph


def test_many_states_are_cut_to_the_most_visited(tmp_path: Path) -> None:
    path = [(f"room {k}", "on") for k in range(30)]
    scored = [rollout_files.episode(f"3/{k}", "long", path, solved=True) for k in range(2)]
    save_trajectories(tmp_path / "a.jsonl", scored)
    graph = state_graph(read_lines(tmp_path / "a.jsonl"), max_nodes=10)
    assert graph is not None
    assert graph.left_out == 20
    assert sum(node.kind in ("state", "start") for node in graph.nodes) == 10


def test_what_is_said_of_a_loop_stands_between_its_state_and_the_one_above(tmp_path: Path) -> None:
    """Two states in one layer, in each of which two actions led nowhere: labels of two lines, letters 12 high."""
    paths: list[list[tuple[str | None, str]]] = [
        [("S", way), (way, "sit"), (way, "sing"), (way, "on")] for way in ("left", "right")
    ]
    graph, _ = drawn(paths, tmp_path)
    assert graph is not None
    loops = [edge for edge in graph.edges if edge.source == edge.target]
    assert [len(edge.labels) for edge in loops] == [2, 2]
    for edge in loops:
        assert edge.label_y - 12 > 0
        for node in graph.nodes:
            beside = abs(node.x + WIDTH / 2 - edge.label_x) >= WIDTH
            assert beside or edge.label_y - 12 > node.y + HEIGHT or edge.label_y < node.y


def test_steps_without_a_state_have_no_picture(tmp_path: Path) -> None:
    save_trajectories(
        tmp_path / "a.jsonl", [rollout_files.episode("3/0", "t", [(None, "on"), (None, "on")], solved=True)]
    )
    lines = read_lines(tmp_path / "a.jsonl")
    assert state_graph(lines) is None
    assert anchors(lines) == ()


PATHS = st.lists(
    st.lists(
        st.tuples(st.sampled_from([None, "", *"STUVWXY"]), st.sampled_from(["on", "back", "a\nb"])),
        min_size=1,
        max_size=9,
    ),
    min_size=1,
    max_size=5,
)


def drawn(paths: list[list[tuple[str | None, str]]], folder: Path) -> tuple[Graph | None, tuple[EpisodeRecord, ...]]:
    scored = [rollout_files.episode(f"1/{k}", "t", path, solved=k % 2 == 0) for k, path in enumerate(paths)]
    save_trajectories(folder / "a.jsonl", scored)
    lines = read_lines(folder / "a.jsonl")
    return state_graph(lines), lines


@given(PATHS)
def test_any_picture_is_whole_and_nothing_lies_on_anything_else(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[tuple[str | None, str]]]
) -> None:
    graph, lines = drawn(paths, tmp_path_factory.mktemp("graph"))
    states = {state for path in paths for state, _ in path if state is not None}
    if graph is None:
        assert not states
        return
    assert {node.key for node in graph.nodes} - {SOLVED, ENDED} == states
    for k, node in enumerate(graph.nodes):
        assert 0 <= node.x <= graph.width - WIDTH
        assert 0 <= node.y <= graph.height - HEIGHT
        for other in graph.nodes[:k]:
            assert abs(node.x - other.x) >= WIDTH or abs(node.y - other.y) >= HEIGHT
    assert [(edge.source, edge.target) for edge in graph.edges] == [
        (move.source, move.target) for move in transitions(lines)
    ]
    starts = {line.steps[0].anchor for line in lines}
    assert all(node.x == min(each.x for each in graph.nodes) for node in graph.nodes if node.key in starts)
