"""Load a tokenizer without its model, for a remote model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headrace.errors import ModelError, boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOnly:
    """A tokenizer and the tokens that end a turn."""

    tokenizer: Any  # of transformers, which has no types
    eos_tokens: tuple[int, ...]  # those of the generation config beside it, if there is one, then the tokenizer's own


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> TokenizerOnly:
    with boundary(ModelError, f"the tokenizer in {folder} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        listed = _read_eos_tokens(folder / "generation_config.json")
    ends = dict.fromkeys([*listed, tokenizer.eos_token_id])
    return TokenizerOnly(tokenizer=tokenizer, eos_tokens=tuple(int(token) for token in ends if token is not None))


def _read_eos_tokens(file: Path) -> list[int | None]:
    if not file.is_file():
        return []
    tokens = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return list(tokens) if isinstance(tokens, list) else [tokens]
