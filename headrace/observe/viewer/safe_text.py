"""Shorten text of models and unknown authors to a line, with its control characters escaped (`headrace.printable`), and
format keys and numbers in short."""

import math

from headrace.printable import visible

DUST = 1e-12  # advantages are some tenths, and float64 has 16 digits


def one_line(text: str, width: int) -> str:
    """Shorten a text to one line of at most `width` characters, with single spaces.

    >>> one_line("go  east\\nnow", 40), one_line("abcdefgh", 5)
    ('go east now', 'abcd…')
    """
    assert width > 0
    flat = " ".join(visible(text).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def last_line(text: str) -> str:
    """Return the last line of an action, which after a page of thoughts is what it does.

    >>> last_line("Let me see.\\nrun({})\\n"), last_line("go east")
    ('… run({})', 'go east')
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return text.strip() if len(lines) < 2 else f"… {lines[-1].strip()}"


def short_key(key: str | None, width: int = 12) -> str:
    """Return the beginning of an anchor key; "–" if there is none."""
    return "–" if key is None else one_line(key, width) or "(empty)"


def is_dust(value: float) -> bool:
    """Return whether a sum of advantages is zero but for rounding."""
    return abs(value) < DUST


def figure(value: float | None, *, sign: bool = False) -> str:
    """Format a number in short; with `sign`, as an advantage, of which rounding dust is shown as 0.

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
    """Format a count with its noun.

    >>> times(1, "visit"), times(3, "visit")
    ('1 visit', '3 visits')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def span(low: float, high: float, *, sign: bool = False) -> str:
    """Format a range as "-1.2 … +0.8", or as one number if both are the same."""
    if low == high or (math.isnan(low) and math.isnan(high)):
        return figure(low, sign=sign)
    return f"{figure(low, sign=sign)} … {figure(high, sign=sign)}"
