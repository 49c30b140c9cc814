"""Files that another process writes, cuts, replaces and removes."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.dashboard.tail import TailedFile


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"one\ntw")
    tailed = TailedFile(path)
    assert tailed.read().lines == [b"one"]
    assert tailed.read().lines == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tailed.read().lines == [b"two", b"three"]


def test_a_file_that_a_resume_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    tailed = TailedFile(path)
    tailed.read()
    path.write_bytes(b"1\n")
    cut = tailed.read()
    assert (cut.restarted, cut.lines) == (True, [b"1"])


def test_a_file_that_was_cut_and_has_grown_past_the_place_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    tailed = TailedFile(path)
    tailed.read()
    with path.open("r+b") as file:  # the same inode, other bytes where reading stopped
        file.truncate(2)
        file.seek(2)
        file.write(b"4\n5\n6\n")
    grown = tailed.read()
    assert (grown.restarted, grown.lines) == (True, [b"1", b"4", b"5", b"6"])


def test_a_file_that_vanishes_and_comes_back_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tailed = TailedFile(path)
    assert tailed.read() == tailed.read()
    path.write_bytes(b"1\n")
    assert tailed.read().lines == [b"1"]
    path.unlink()
    gone = tailed.read()
    assert (gone.restarted, gone.lines) == (True, [])
    path.write_bytes(b"2\n")
    assert tailed.read().lines == [b"2"]


def test_a_large_file_is_read_in_pieces_and_a_line_longer_than_a_piece_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [b"a" * 5, b"b" * 300, b"c" * 7, b"d" * 64]
    path.write_bytes(b"\n".join(lines) + b"\n")
    tailed, found = TailedFile(path, max_read=64), []
    for _ in range(20):
        new = tailed.read()
        found += new.lines
        if not new.has_more:
            break
    assert found == lines
    assert tailed.progress == 1.0


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=30)), max_size=20))
def test_however_a_file_is_written_its_whole_lines_are_seen(tmp_path_factory, changes) -> None:  # type: ignore[no-untyped-def]
    """Lines since the last restart are those of the file, whatever was appended or cut between two looks."""
    path = tmp_path_factory.mktemp("tail") / "f"
    path.write_bytes(b"")
    tailed, seen = TailedFile(path, max_read=16), []
    for cuts, text in changes:
        if cuts:
            path.write_bytes(text)
        else:
            with path.open("ab") as file:
                file.write(text)
        while True:
            new = tailed.read()
            seen = new.lines if new.restarted else seen + new.lines
            if not new.has_more:
                break
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
    # a file that was cut and written again with the same bytes before the place cannot be told from one that grew
    assert seen == whole or (len(seen) == len(whole) and seen[-2:] == whole[-2:])
