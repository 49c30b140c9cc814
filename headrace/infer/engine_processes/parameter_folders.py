"""Write a model's parameters as engine processes read them: a folder that loads as a model, or its adapters alone.

Parameters keep their names, types and bits, so that the fingerprint of the copy is the trainer's.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import SamplerError
from headrace.model.load import LanguageModel, fingerprint
from headrace.model.lora import lora_layers

WEIGHTS = "model.safetensors"


class ParameterWriter:
    """Writes the weights of one model. Its configuration and tokenizer are written once, into `root`, and linked."""

    def __init__(self, lm: LanguageModel, root: Path) -> None:
        self._lm, self._description = lm, root / "description"

    def write(self, folder: Path) -> str:
        """Write a folder that loads as the model; return its fingerprint."""
        self._save(self._lm.model.named_parameters(), folder)
        self._describe(folder)
        return fingerprint(self._lm.model.named_parameters())

    def write_base(self, folder: Path) -> str:
        """Write a folder that loads as the model without its adapters."""
        layers = dict(lora_layers(self._lm.model))
        plain = []
        for name, parameter in self._lm.model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if owner not in layers:
                inside = owner.removesuffix(".base")
                plain.append((f"{inside}.{leaf}" if inside in layers else name, parameter))
        self._save(plain, folder)
        self._describe(folder)
        return fingerprint(plain)

    def write_adapters(self, folder: Path) -> str:
        """Write the adapters alone, under the names of their parameters; return the fingerprint of the whole model."""
        layers = dict(lora_layers(self._lm.model))
        named = self._lm.model.named_parameters()
        self._save([(name, value) for name, value in named if name.rpartition(".")[0] in layers], folder)
        return fingerprint(self._lm.model.named_parameters())

    def _save(self, named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in named}
        size, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(folder).free
        if free < size:
            raise SamplerError(
                f"{folder.parent} has {free / 2**30:.1f} GiB left and the weights need {size / 2**30:.1f}: "
                "write 'engine.sync_folder', a folder with more room"
            )
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def _describe(self, folder: Path) -> None:
        if not self._description.is_dir():
            self._description.mkdir()
            model = self._lm.model
            model.config.save_pretrained(self._description)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(self._description)
            self._lm.tokenizer.save_pretrained(self._description)
        for file in self._description.iterdir():
            os.symlink(file, folder / file.name)
