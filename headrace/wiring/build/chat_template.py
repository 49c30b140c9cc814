"""Choose the chat template of a tokenizer: that of the configuration, its own, or the plain one. Loads no model."""

import re
from pathlib import Path
from typing import Any

from headrace.config import ModelConfig
from headrace.config.paths import is_template_text
from headrace.errors import ConfigError, boundary
from headrace.render import plain_template


def set_template(tokenizer: Any, c: ModelConfig) -> str | None:
    """Give a tokenizer the template of `model.chat_template`, or, if it has none, the plain one, which checkpoints then
    have too. Returns a sentence that says so if the plain one is used."""
    if c.chat_template is not None:
        tokenizer.chat_template = read_template(c.chat_template)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = plain_template(tokenizer)
    if tokenizer.chat_template != plain_template_of(tokenizer):
        return None
    return (
        "there is no chat template, so every message is put on a line of its own and the assistant's ends with "
        f"{tokenizer.eos_token!r}; this template is saved with the checkpoints; set 'model.chat_template' for another"
    )


def unread_options(tokenizer: Any, c: ModelConfig) -> list[str]:
    """List the `model.template_options` that the template of a tokenizer does not name, so that they change nothing."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    return [name for name in c.template_options if not re.search(rf"\b{re.escape(name)}\b", text)]


def plain_template_of(tokenizer: Any) -> str | None:
    """Return the plain template of a tokenizer; None if it has no end-of-sequence token, and so no such template."""
    return None if tokenizer.eos_token is None else plain_template(tokenizer)


def read_template(text: str) -> str:
    """Return a chat template: Jinja itself, or the contents of the file that is named. Raises ConfigError."""
    if is_template_text(text):
        return text
    with boundary(ConfigError, f"'model.chat_template' is \"{text}\", which is no Jinja text and cannot be read"):
        return Path(text).read_text(encoding="utf-8")
