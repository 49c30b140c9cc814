"""Screenshot of the top part of a run's report, as the README shows it.

    python docs/picture.py RUN OUT.png          RUN is a run folder; needs Chromium and Pillow

The page is opened in a headless browser, cut to the first screen and stored with a palette, which keeps it small.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, SCALE = 1200, 1020, 1.5  # CSS pixels, and device pixels of each
COLOURS = 128


def screenshot(report: Path, out: Path, *, height: int) -> None:
    """The first `height` CSS pixels of a page, in the light colour scheme."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser found: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "page.png"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={scratch}/profile",
            f"--window-size={WIDTH},{height}",
            f"--force-device-scale-factor={SCALE}",
            f"--screenshot={raw}",
            report.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(raw) as page:
            page.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    screenshot(
        Path(sys.argv[1]) / "report.html", Path(sys.argv[2]), height=int(sys.argv[3]) if len(sys.argv) > 3 else HEIGHT
    )
