"""States that a power loss may leave behind, from the recorded file operations of a process.

The model is weaker than any file system in use. A write or truncation is certain once its file was fsynced after it;
a creation, rename or removal once its folder was. Anything else may be there or not, each by itself and in any order;
a lost write leaves nothing, zeros, or its first half and zeros. A rename is one operation: it happened or it did not.
"""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from support.faulty_disk import Kind, Operation


class Fate(Enum):
    """What became of an operation that was not certain."""

    KEPT = "kept"
    LOST = "lost"
    ZEROS = "zeros"  # of a write: the file has its length
    TORN = "torn"  # of a write: its first half and zeros


@dataclass(eq=False)
class Node:
    """A file (`content`) or a folder (`entries`)."""

    is_folder: bool
    content: bytearray = field(default_factory=bytearray)
    entries: dict[str, "Node"] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """One change of a node, made by the operation numbered `at`; certain from operation `certain` on."""

    at: int
    node: Node
    kind: str  # write, truncate, link, rename, unlink
    offset: int = 0
    data: bytes = b""
    places: tuple[tuple[Node, str], ...] = ()  # folder and name: the new one last
    certain: int | None = None

    @property
    def is_data(self) -> bool:
        return self.kind in ("write", "truncate")


class History:
    """All changes below `root`, a folder that was there before, with `before` in it."""

    def __init__(self, root: Path, before: Path, operations: Sequence[Operation]) -> None:
        self.root = str(root)
        self.operations = operations
        self.changes: list[Change] = []
        self.top = Node(is_folder=True)
        self._inodes: dict[int, Node] = {}
        self._pending: list[Change] = []
        for path in sorted(before.rglob("*")):
            folder, name = self._place(Path(self.root) / path.relative_to(before))
            folder.entries[name] = node = Node(is_folder=path.is_dir())
            if path.is_file():
                node.content += path.read_bytes()
        copies: dict[int, tuple[Node, Node]] = {}
        self._initial = _copy(self.top, copies)
        self._before = list(copies.values())  # nodes that were there before, and as they were
        for number, operation in enumerate(operations):
            self._follow(number, operation)

    def _place(self, path: Path | str) -> tuple[Node, str]:
        *parents, name = Path(os.path.relpath(path, self.root)).parts
        node = self.top
        for parent in parents:
            node = node.entries[parent]
        return node, name

    def _node(self, path: str) -> Node | None:
        if os.path.normpath(path) == self.root:
            return self.top
        folder, name = self._place(path)
        return folder.entries.get(name)

    def _follow(self, number: int, operation: Operation) -> None:
        kind, path = operation.kind, operation.path
        if kind == Kind.OPEN_WRITE:
            node = self._node(path)
            if node is None and not operation.flags & os.O_CREAT:
                node = self._renamed_unseen(number, path, self._inodes[operation.inode])
            elif node is None:
                node = self._link(number, path, Node(is_folder=False))
            self._inodes[operation.inode] = node
            if operation.flags & os.O_TRUNC and not node.is_folder:
                self._add(Change(number, node, "truncate"))
        elif kind == Kind.MKDIR:
            self._link(number, path, Node(is_folder=True))
        elif kind == Kind.WRITE:
            self._add(
                Change(number, self._inodes[operation.inode], "write", offset=operation.offset, data=operation.data)
            )
        elif kind == Kind.TRUNCATE:
            self._add(Change(number, self._inodes[operation.inode], "truncate", offset=operation.offset))
        elif kind == Kind.RENAME:
            source, target = self._place(path), self._place(operation.target)
            node = source[0].entries[source[1]]
            self._add(Change(number, node, "rename", places=(source, target)))
        elif kind == Kind.LINK:
            node = self._node(path)
            assert node is not None
            self._link(number, operation.target, node)
        elif kind == Kind.UNLINK:
            place = self._place(path)
            self._add(Change(number, place[0].entries[place[1]], "unlink", places=(place,)))
        elif kind == Kind.FSYNC:
            synced = self._inodes[operation.inode]
            for change in [change for change in self._pending if _covers(synced, change)]:
                change.certain = number
                self._pending.remove(change)
        else:
            raise AssertionError(f"{kind} is not recorded")

    def _renamed_unseen(self, number: int, path: str, node: Node) -> Node:
        """Note a rename that the library did not catch: safetensors makes that system call itself."""
        (place,) = _places(self.top, node)
        self._add(Change(number, node, "rename", places=(place, self._place(path))))
        return node

    def _link(self, number: int, path: str, node: Node) -> Node:
        self._add(Change(number, node, "link", places=(self._place(path),)))
        return node

    def _add(self, change: Change) -> None:
        self.changes.append(change)
        self._pending.append(change)
        _apply(change, Fate.KEPT)

    def uncertain(self, after: int) -> list[Change]:
        """Return the changes that a power loss after so many operations may undo."""
        return [c for c in self.changes if c.at < after and (c.certain is None or c.certain >= after)]

    def state(self, after: int, fates: dict[int, Fate]) -> Node:
        """Return the top folder after a power loss; `fates`: of uncertain changes, by their index in `changes`."""
        copies: dict[int, tuple[Node, Node]] = {}
        top = _copy(self._initial, copies)
        nodes = {id(node): copies[id(before)][1] for node, before in self._before}
        for index, change in enumerate(self.changes):
            if change.at < after:
                places = tuple((_twin(folder, nodes), name) for folder, name in change.places)
                twin = Change(
                    change.at, _twin(change.node, nodes), change.kind, change.offset, change.data, places=places
                )
                _apply(twin, fates.get(index, Fate.KEPT))
        return top

    def fates(self, after: int, policy: str, luck: random.Random) -> dict[int, Fate]:
        """Choose what becomes of every uncertain change: see POLICIES."""
        uncertain = set(map(id, self.uncertain(after)))
        indices = [index for index, change in enumerate(self.changes) if id(change) in uncertain]
        names = [index for index in indices if not self.changes[index].is_data]
        journalled = luck.randint(0, len(names))
        fates: dict[int, Fate] = {}
        for index in indices:
            is_data = self.changes[index].is_data
            lost = luck.choice([Fate.LOST, Fate.ZEROS, Fate.TORN]) if is_data else Fate.LOST
            if policy == "all lost":
                fates[index] = Fate.LOST
            elif policy == "names kept":
                fates[index] = lost if is_data else Fate.KEPT
            elif policy == "data kept":
                fates[index] = Fate.KEPT if is_data else Fate.LOST
            elif policy == "in order":  # a journal of names
                keep = luck.random() < 0.5 if is_data else names.index(index) < journalled
                fates[index] = Fate.KEPT if keep else lost
            elif policy == "any":
                fates[index] = Fate.KEPT if luck.random() < 0.5 else lost
            else:
                assert policy == "all kept", policy
        return fates


POLICIES = ("all lost", "names kept", "data kept", "all kept", "in order", "any")


def _covers(synced: Node, change: Change) -> bool:
    if change.is_data:
        return change.node is synced
    return any(folder is synced for folder, _ in change.places)


def _apply(change: Change, fate: Fate) -> None:
    if fate is Fate.LOST:
        return
    content, end = change.node.content, change.offset + len(change.data)
    if change.kind == "write":
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        half = len(change.data) // 2
        if fate is Fate.KEPT:
            content[change.offset : end] = change.data
        elif fate is Fate.TORN:
            content[change.offset : change.offset + half] = change.data[:half]
    elif change.kind == "truncate":
        if fate is Fate.KEPT:
            del content[change.offset :]
            content.extend(bytes(change.offset - len(content)))
    else:
        for folder, name in change.places if change.kind == "unlink" else change.places[:-1]:
            if folder.entries.get(name) is change.node:
                del folder.entries[name]
        if change.kind != "unlink":
            folder, name = change.places[-1]
            folder.entries[name] = change.node


def _places(folder: Node, node: Node) -> Iterator[tuple[Node, str]]:
    for name, entry in folder.entries.items():
        if entry is node:
            yield folder, name
        yield from _places(entry, node)


def _twin(node: Node, nodes: dict[int, Node]) -> Node:
    if id(node) not in nodes:
        nodes[id(node)] = Node(is_folder=node.is_folder)
    return nodes[id(node)]


def _copy(node: Node, copies: dict[int, tuple[Node, Node]]) -> Node:
    """Copy a tree; `copies` gets every node with its copy, by the node's id."""
    copy = Node(is_folder=node.is_folder, content=bytearray(node.content))
    copies[id(node)] = node, copy
    copy.entries = {name: _copy(entry, copies) for name, entry in node.entries.items()}
    return copy


def write_tree(top: Node, folder: Path) -> None:
    """Write a state into an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in top.entries.items():
        if node.is_folder:
            write_tree(node, folder / name)
        else:
            (folder / name).write_bytes(node.content)


def tree_files(top: Node, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for name, node in sorted(top.entries.items()):
        if node.is_folder:
            yield from tree_files(node, f"{prefix}{name}/")
        else:
            yield prefix + name, bytes(node.content)


def folder_files(folder: Path) -> Iterable[tuple[str, bytes]]:
    return [
        (path.relative_to(folder).as_posix(), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()
    ]
