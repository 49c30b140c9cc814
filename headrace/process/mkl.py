"""Ask MKL for products whose rows have the same bits whatever the other rows are.

On Intel's processors MKL chooses another order of summation for another number of rows or threads, even where both are
multiples of 8. Its strict mode of conditional numerical reproducibility fixes the order, and costs up to a fifth of a
small product and no measurable part of a large one. Elsewhere (AMD) such products have the same bits without it.

MKL reads the variable at its first product. So it is set when `headrace.model` is imported; a program that multiplied
matrices before that sets `MKL_CBWR=AUTO,STRICT` in its environment, and `headrace doctor` tells whether it works.
"""

import os
import platform
from pathlib import Path

VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"
CPUINFO = Path("/proc/cpuinfo")


def ask_for_stable_rows() -> None:
    """Set MKL's strict mode on processors of Intel, unless the user has chosen a mode."""
    if VARIABLE not in os.environ and is_intel():
        os.environ[VARIABLE] = STRICT


def is_intel() -> bool:
    """Tell whether the processor is one of Intel's x86 processors."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("vendor_id") and "GenuineIntel" in line for line in lines)
    except OSError:
        return "GenuineIntel" in platform.processor()  # Windows says it in PROCESSOR_IDENTIFIER
