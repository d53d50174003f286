"""Headless Chromium, as the tests of pages use it: spoken to over a pipe, by the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""The browser that is installed here; Debian's package is called chromium."""


@dataclass
class Browser:
    """A page in a browser. ``requests`` and ``complaints`` are what it asked for and what it logged since `open`."""

    writing: int
    reading: Any
    session: str = ""
    last: int = 0
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    loaded: bool = False

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        self.last += 1
        told = {"id": self.last, "method": method, "params": arguments}
        os.write(
            self.writing, json.dumps(told | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self.reading.read(1)) != b"\0":
            assert byte, "the browser is gone"
            message += byte
        found: dict[str, Any] = json.loads(message)
        event, told = found.get("method"), found.get("params", {})
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event in ("Log.entryAdded", "Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            self.complaints.append(json.dumps(told))
        self.loaded |= event == "Page.loadEventFired"
        return found

    def open(self, page: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Show a file in a window of this width in pixels; narrower than 600 it is a phone's."""
        self.requests, self.complaints, self.loaded = [], [], False
        phone = width < 600
        size = {"width": width, "height": 800, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            self._next()

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page as it looks to a PNG file."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose files are in a folder."""
    assert CHROMIUM is not None
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()

    def as_it_expects() -> None:  # commands on 3, answers on 4; high numbers first, so that none is overwritten
        one, other = os.dup2(to_browser, 63), os.dup2(from_browser, 64)
        os.dup2(one, 3)
        os.dup2(other, 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    process = subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={folder}", "about:blank"],
        preexec_fn=as_it_expects,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        with os.fdopen(reading, "rb") as answers:
            made = Browser(writing, answers)
            target = made.call("Target.createTarget", url="about:blank")["targetId"]
            made.session = made.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                made.call(f"{domain}.enable")
            yield made
    finally:
        process.kill()
        process.wait()
        os.close(writing)
