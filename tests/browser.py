"""Chromium without a window, driven by its own protocol over two pipes: one start for many pages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

PROGRAM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
TALLEST = 16_000
"""Pixels: Chromium draws no taller picture."""


class Browser:
    """One tab."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest, self._last, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Send one command and give its result."""
        self._last += 1
        asked: dict[str, Any] = {"id": self._last, "method": method, "params": given}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._message(time.monotonic() + 120)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            got = os.read(self._back, 1 << 20)
            if not got:
                raise RuntimeError("the browser ended")
            self._rest += got
        one, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(one)
        return found

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def look(
        self, width: int, scheme: Literal["light", "dark"] = "light", media: str = "screen", height: int = 1000
    ) -> None:
        """Set the window's size, the colour scheme that is preferred, and the medium."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, url: str, until: str = "true", wait_s: float = 60.0) -> bool:
        """Open a page and wait until a JavaScript expression is true in it; say whether it became so."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            try:
                if self.run(f"document.readyState === 'complete' && !!({until})"):
                    return True
            except RuntimeError:
                pass  # between two pages
            time.sleep(0.2)
        return False

    def shoot(self, path: Path, *, whole: bool = True) -> None:
        """Write the page as a PNG: all of it, or what the window shows."""
        given: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], TALLEST), "scale": 1}
            given = {"clip": clip, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **given)["data"]))

    def print(self, path: Path) -> None:
        """Write the page as a PDF of A4 sheets, as the printer would get it."""
        sheet = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False, "preferCSSPageSize": True}
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", **sheet)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, gone when this ends."""
    assert PROGRAM is not None
    (read, write), (back, answer) = _pipe(), _pipe()

    def adopt() -> None:
        os.dup2(read, 3)
        os.dup2(answer, 4)

    command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4), preexec_fn=adopt
    )
    os.close(read)
    os.close(answer)
    try:
        yield Browser(write, back)
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(write)
        os.close(back)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the two that Chromium reads and writes."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends)
    for fd in ends:
        os.close(fd)
    return high[0], high[1]
