"""The folder of a server: the model that it makes for itself is there whole or not at all."""

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
