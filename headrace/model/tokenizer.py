"""A tokenizer without its model, for a model that is elsewhere."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headrace.errors import ModelError, boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOnly:
    """`eos_tokens`: those of the generation config beside it, if there is one, then the tokenizer's own."""

    tokenizer: Any  # of transformers, which has no types
    eos_tokens: tuple[int, ...]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> TokenizerOnly:
    with boundary(ModelError, f"the tokenizer in {folder} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        listed = _listed(folder / "generation_config.json")
    ends = dict.fromkeys([*listed, tokenizer.eos_token_id])
    return TokenizerOnly(tokenizer=tokenizer, eos_tokens=tuple(int(token) for token in ends if token is not None))


def _listed(file: Path) -> list[int | None]:
    if not file.is_file():
        return []
    told = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return list(told) if isinstance(told, list) else [told]
