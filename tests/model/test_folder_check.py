"""Model folders of strangers: no code of theirs runs, nothing is unpickled, and no other folder is read."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DataError, ModelError
from headrace.model.load import load_model
from headrace.model.quantized import Quantization
from headrace.model.tiny import save_tiny
from headrace.model.tokenizer import load_tokenizer
from headrace.model.value_head import load_scalar_model
from headrace.render import Renderer
from headrace.types import Message

LOADERS: dict[str, Callable[[str], Any]] = {
    "model": load_model,
    "quantised reference": lambda path: load_model(path, quantization=Quantization(bits=8, quantizer="plain")),
    "scalar model": load_scalar_model,
}


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sound"
    save_tiny(folder, words=["a", "b"], width=32, layers=1, heads=2, kv_heads=1, context=64, seed=0)
    return folder


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """It appears when code of the folder has run."""
    return tmp_path / "owned"


@pytest.fixture
def folder(saved: Path, tmp_path: Path, mark: Path) -> Path:
    """A sound model beside files that would leave the mark if they were run or unpickled."""
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "model" / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    for file in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt"):
        (tmp_path / "model" / file).write_bytes(pickle.dumps(Bomb(mark)))
    (tmp_path / "elsewhere.bin").write_bytes(pickle.dumps(Bomb(mark)))
    return tmp_path / "model"


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def write(file: Path, text: str) -> None:
    file.write_text(text)


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def list_shards(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def name_code(folder: Path, **fields: object) -> None:
    code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "evil.Evil")
    edit(folder / "config.json", auto_map=code, **fields)


def list_pickled_shards(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "pytorch_model-00001-of-00002.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def leave_only_a_list_of_pickled_shards(folder: Path) -> None:
    list_pickled_shards(folder)
    for file in (folder / "model.safetensors", *folder.glob("*.bin"), *folder.glob("*.pt")):
        file.unlink()


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickled weights": (remove_weights, "has pickled weights .* so they are not: convert them to safetensors"),
    "a list of pickled shards": (leave_only_a_list_of_pickled_shards, "has pickled weights .*bin.index.json"),
    "a pickled shard": (lambda folder: list_shards(folder, "pytorch_model.bin"), "is no .safetensors file of"),
    "a shard elsewhere": (
        lambda folder: list_shards(folder, "../model.safetensors"),
        "is no .safetensors file of",
    ),
    "its own weights file": (
        lambda folder: edit(folder / "config.json", transformers_weights="adapter_model.bin"),
        "names a file of weights",
    ),
    "its own code": (lambda folder: name_code(folder, model_type="evil"), "needs Python code that it brings along"),
    "a kernel of the hub": (
        lambda folder: edit(folder / "config.json", attn_implementation="evil/kernel"),
        "sets attn_implementation to 'evil/kernel', code of another repository",
    ),
    "a kernel, deeper": (
        lambda folder: edit(folder / "config.json", text_config={"_experts_implementation": {"": "evil/kernel:f"}}),
        "code of another repository",
    ),
    "an adapter": (
        lambda folder: write(folder / "adapter_config.json", '{"base_model_name_or_path": "evil/model"}'),
        "would load another base model",
    ),
    "no JSON object": (lambda folder: write(folder / "config.json", "[]"), "JSON object|cannot be read"),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_sentence(folder: Path, mark: Path, attack: str, loader: str) -> None:
    arm, message = HOSTILE[attack]
    if loader == "scalar model":
        edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    arm(folder)
    with pytest.raises(ModelError, match=message) as caught:
        LOADERS[loader](str(folder))
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_code_and_pickles_beside_a_model_that_needs_neither_are_left_alone(folder: Path, mark: Path) -> None:
    name_code(folder)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    assert type(load_model(str(folder)).model).__module__.startswith("transformers.models.llama")
    load_tokenizer(folder)
    assert not mark.exists()


def test_a_list_of_pickled_shards_beside_safetensors_is_not_read(folder: Path, mark: Path) -> None:
    """Many models on the hub have both."""
    list_pickled_shards(folder)
    load_model(str(folder))
    assert not mark.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(folder: Path, mark: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match="contains custom code"):
            load(folder)
    assert not mark.exists()


def test_code_runs_only_if_it_is_trusted(folder: Path, mark: Path) -> None:
    """The tests above could not fail if the code did not run at all."""
    name_code(folder, model_type="evil")
    with pytest.raises(ModelError):
        load_model(str(folder), trust_remote_code=True)
    assert mark.exists()


def test_the_bomb_works(folder: Path, mark: Path) -> None:
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()


def test_a_chat_template_cannot_leave_its_sandbox(folder: Path, mark: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        f"{{{{ cycler.__init__.__globals__.os.mkdir({str(mark)!r}) }}}}{{{{ messages[0].content }}}}"
    )
    lm = load_model(str(folder))
    with pytest.raises(DataError, match="unsafe"):
        Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens).prompt([Message(role="user", content="a")])
    assert not mark.exists()
