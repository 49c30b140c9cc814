"""Text that a model or a stranger wrote, made safe to look at: on a terminal it could move the cursor, change colours
or hide what stands beside it. Also the short forms of keys and numbers that the viewer shows."""

import math
import re

# C0 and C1 controls but newline and tab, line and paragraph separators, what turns the direction of text, and marks of
# no width
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")

DUST = 1e-12  # advantages are some tenths, and float64 has 16 digits


def visible(text: str) -> str:
    r"""Characters that would act instead of being seen, written out.

    >>> visible("a\x1b[31mb\u202ec\n")
    'a\\x1b[31mb\\u202ec\n'
    """
    return _UNSEEN.sub(lambda found: _escape(found[0]), text)


def one_line(text: str, width: int) -> str:
    """At most `width` characters on one line, white space as single spaces.

    >>> one_line("go  east\\nnow", 40), one_line("abcdefgh", 5)
    ('go east now', 'abcd…')
    """
    assert width > 0
    flat = " ".join(visible(text).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def last_line(text: str) -> str:
    """What an action comes to: after a page of thoughts, that is its last line.

    >>> last_line("Let me see.\\nrun({})\\n"), last_line("go east")
    ('… run({})', 'go east')
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return text.strip() if len(lines) < 2 else f"… {lines[-1].strip()}"


def short_key(key: str | None, width: int = 12) -> str:
    """The beginning of an anchor key; "–" where there is none."""
    return "–" if key is None else one_line(key, width) or "(empty)"


def is_dust(value: float) -> bool:
    """Whether a sum of advantages is no more than what rounding left of zero."""
    return abs(value) < DUST


def figure(value: float | None, *, sign: bool = False) -> str:
    """A number in short; with its sign if it is an advantage, of which dust is shown as 0.

    >>> figure(0.5), figure(-0.25, sign=True), figure(None), figure(1234567.0), figure(float("nan"))
    ('0.5', '-0.25', '–', '1.23e+06', 'nan')
    >>> figure(3.97e-17), figure(3.97e-17, sign=True), figure(-1e-9, sign=True)
    ('3.97e-17', '0', '-1e-09')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == 0 or (sign and is_dust(value)):
        return "0"
    text = f"{value:.3g}" if abs(value) < 100 else f"{value:.4g}" if abs(value) < 1e5 else f"{value:.2e}"
    return f"+{text}" if sign and value > 0 else text


def times(count: int, what: str) -> str:
    """
    >>> times(1, "visit"), times(3, "visit")
    ('1 visit', '3 visits')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def span(low: float, high: float, *, sign: bool = False) -> str:
    """ "-1.2 … +0.8", or one number where both are the same."""
    if low == high or (math.isnan(low) and math.isnan(high)):
        return figure(low, sign=sign)
    return f"{figure(low, sign=sign)} … {figure(high, sign=sign)}"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
