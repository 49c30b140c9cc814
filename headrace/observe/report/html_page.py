"""Parts of every page: a template environment that escapes, and a script that the page's policy allows by its hash."""

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from headrace.printable import visible


def page_environment() -> Environment:
    """Build the environment of templates: every text is escaped, characters that act on a reader included."""
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )


def report_parts() -> dict[str, Any]:
    """Return the report's style sheet and script, and the hash of the script for the content security policy."""
    package = files("headrace.observe.report")
    script = (package / "report.js").read_text(encoding="utf-8")
    return {
        "style": Markup((package / "report.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _visible(value: Any) -> Any:
    """Escape characters that act instead of being displayed, in every text that a template shows but markup of ours."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
