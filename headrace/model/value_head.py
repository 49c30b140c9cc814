"""Scalar heads on a causal language model: hidden state -> one number per token, for critics and reward models.

A scalar model is transformers' own sequence-classification model with one label: trunk, and a linear layer `score`
without bias. So `AutoModelForSequenceClassification` loads a saved one, and reads the number at the last token.

Shape letters: R rows (tokens), D width.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from headrace.errors import ModelError, boundary
from headrace.model.compute_thread import MODEL_CONSTRUCTION
from headrace.model.folder_check import check_model_folder
from headrace.model.load import LanguageModel, load_model, model_folder, own_storage, prepare
from headrace.model.supported import check_supported
from headrace.model.vision.kinds import text_config
from headrace.storage.hub import hub_name


def load_scalar_model(
    path: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> LanguageModel:
    """Load a saved scalar model, or a causal model with its output head replaced by a scalar one of zeros."""
    folder = Path(path)
    if not folder.exists() and hub_name(path) is not None:
        folder = model_folder(path, code=trust_remote_code)
    if not is_scalar_folder(folder):
        return with_scalar_head(
            load_model(path, device=device, dtype=dtype, trust_remote_code=trust_remote_code),
            trust_remote_code=trust_remote_code,
        )
    check_model_folder(folder, trust_remote_code=trust_remote_code)
    with MODEL_CONSTRUCTION, boundary(ModelError, f"the scalar model in {folder} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        check_supported(config)
        check_one_label(config, folder)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, attn_implementation="eager"
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return prepare(own_storage(model.to(device)), tokenizer, source=path)


def check_one_label(config: Any, folder: Path) -> None:
    """Raise ModelError if a sequence classifier has more than one label."""
    if config.num_labels != 1:
        raise ModelError(f"{folder} is a classifier with {config.num_labels} labels: a reward model has one")


def is_scalar_folder(folder: Path) -> bool:
    """Tell whether a model folder holds a sequence classifier rather than a causal model."""
    if not (folder / "config.json").is_file():
        return False
    with boundary(ModelError, f"{folder / 'config.json'} cannot be read"):
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
        return any(str(name).endswith("ForSequenceClassification") for name in architectures)


def with_scalar_head(lm: LanguageModel, *, trust_remote_code: bool = False) -> LanguageModel:
    """Move the trunk of `lm` under a scalar head of zeros. `lm` must not be used afterwards.

    If the padding token also ends a turn, the saved model has no padding token: transformers reads the score at the
    last token that is not padding, which would be the one before the end.
    """
    if lm.vision is not None:
        raise ModelError(
            f"models of type '{lm.vision.model_type}' get no scalar head: use a text model as critic or reward "
            "model, or a value head on the policy's trunk"
        )
    config = type(lm.model.config).from_dict(lm.model.config.to_dict())
    config.num_labels = 1
    if config.pad_token_id in lm.eos_tokens:
        config.pad_token_id = None
    with boundary(ModelError, f"models of type '{config.model_type}' get no scalar head"):
        with MODEL_CONSTRUCTION, torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
        trunk = lm.model.base_model
        setattr(model, model.base_model_prefix, trunk)
        trunk.config = model.config
        trunk.get_input_embeddings().padding_idx = config.pad_token_id  # as it will be when the saved model is loaded
        model.score = new_value_head(lm)
    return replace(prepare(model, lm.tokenizer, source=lm.source), eos_tokens=lm.eos_tokens)


def new_value_head(lm: LanguageModel) -> nn.Linear:
    """Make a scalar head of zeros for the width of `lm`; in host memory if the weights of `lm` have not been read."""
    device = torch.device("cpu") if lm.device.type == "meta" else lm.device
    head = nn.Linear(text_config(lm.model.config).hidden_size, 1, bias=False, device=device, dtype=lm.dtype)
    nn.init.zeros_(head.weight)
    return head


def has_scalar_head(lm: LanguageModel) -> bool:
    return hasattr(lm.model, "score")


def scalars(head: nn.Module, hidden_RD: Tensor) -> Tensor:
    """Compute one number per row, in float32 (float64 stays float64)."""
    values_R: Tensor = head(hidden_RD)[:, 0]
    return values_R.float() if values_R.dtype in (torch.bfloat16, torch.float16) else values_R
