"""A real browser on a pipe: opens a page, presses keys, asks what is there, takes pictures. Needs a chromium binary."""

import base64
import fcntl
import json
import os
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="no chromium binary is installed (Debian: apt install chromium)"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Tab:
    """One page of the browser, spoken to in the DevTools protocol over descriptors 3 and 4 of its process."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._count, self._buffer = to_browser, from_browser, 0, b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            while b"\0" not in self._buffer:
                received = os.read(self._from, 1 << 20)
                assert received, "the browser has ended"
                self._buffer += received
            raw, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
        raise TimeoutError(method)

    def open(
        self, page: Path | str, *, width: int = 1400, height: int = 1000, dark: bool = False, address: str = ""
    ) -> None:
        """Load the page, a file or a URL; wait until its script has run and all that it asks for has come or failed."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=(page if isinstance(page, str) else page.as_uri()) + address)
        deadline_s = time.monotonic() + 60
        while self.ask("document.readyState == 'complete' && document.documentElement.dataset.ready") != "yes":
            assert time.monotonic() < deadline_s, "the page's own script did not run, or a picture never came"

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        named = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        code = {"key": key, "windowsVirtualKeyCode": named[key]} if key in named else {"key": key, "text": key}
        if key == "Enter":
            code["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A fresh browser; it is gone afterwards."""
    assert BINARY is not None
    here_read, there_write = os.pipe()
    there_read, here_write = os.pipe()
    home = {**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)}

    def arrange() -> None:  # in the child: both ends out of the way first, then where the browser looks for them
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there_read, there_write)]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        [BINARY, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(3, 4),
        preexec_fn=arrange,
        env=home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(there_read)
    os.close(there_write)
    try:
        yield Tab(here_write, here_read)
    finally:
        os.close(here_write)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(here_read)


def browse(page: Path, profile: Path, *options: str) -> str:
    """Open the page in a fresh headless browser and return what it prints."""
    assert BINARY is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    )
    command = [BINARY, *flags, *options, page.as_uri()]
    home = {**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)}
    done = subprocess.run(command, capture_output=True, timeout=90, check=True, env=home)
    return done.stdout.decode()


def decode_png(data: bytes) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
    """Size and RGB pixels of an 8-bit PNG that is not interlaced."""
    at, chunks = 8, b""
    width = height = channels = 0
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (depth, interlaced) == (8, 0)
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            chunks += body
        at += 12 + length
    raw, stride = zlib.decompress(chunks), width * channels
    before = bytearray(stride)
    pixels: list[tuple[int, int, int]] = []
    for row in range(height):
        start = row * (stride + 1)
        line = _unfilter(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, channels)
        pixels += [(line[x], line[x + 1], line[x + 2]) for x in range(0, stride, channels)]
        before = line
    return (width, height), pixels


def _unfilter(kind: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    for x in range(len(line)):
        left = line[x - channels] if x >= channels else 0
        corner = above[x - channels] if x >= channels else 0
        up = above[x]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        elif kind == 4:
            ahead = left + up - corner
            guess = min((left, up, corner), key=lambda value: abs(ahead - value))
        else:
            break
        line[x] = (line[x] + guess) & 255
    return line
