"""The folder of a server: the model that it makes for itself is there whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from headrace.errors import StorageError
from headrace.service.settings import ServeConfig, ServedModel
from headrace.wiring.commands.serve import open_service


def test_a_server_whose_disk_was_full_while_it_wrote_its_model_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig(model=ServedModel(path="tiny"))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(PreTrainedTokenizerFast, "save_pretrained", _no_space)  # the weights are written by then
        with pytest.raises(StorageError, match=r"the model cannot be written to .*tiny: OSError: .*No space left"):
            with open_service(config):
                pass
    with open_service(config) as opened:
        assert opened.card.context == 512


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


GARBAGE = """
import gc, sys, weakref
from headrace.service.settings import ServeConfig, ServedModel
from headrace.wiring.commands.serve import open_service

class Node:
    pass

with open_service(ServeConfig(model=ServedModel(path="tiny"))):
    nodes = [Node() for _ in range(20_000)]
    for node in nodes:
        node.itself = node
    gc.collect(1)  # they have grown old
    gc.collect(1)
    alive = weakref.WeakSet(nodes)
    del nodes, node
    for _ in range(60):  # what requests leave behind
        younger = [[] for _ in range(2000)]
    print("left", len(alive))
"""


@pytest.mark.slow
def test_a_server_does_not_keep_old_garbage_until_there_is_as_much_as_the_libraries_have(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", GARBAGE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["left 0"], done.stderr
