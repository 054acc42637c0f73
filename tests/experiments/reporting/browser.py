"""A real browser, driven over a pipe in Chromium's DevTools protocol: no library and no port are needed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
_DEADLINE_S = 90.0


def installed() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one Chromium. `events`: what the browser told since the last `open`."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        # The browser reads descriptor 3 and writes 4; these two are moved out of their way first.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (read_end, write_end)]

        def in_child() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program, f"--user-data-dir={self._profile.name}", *_SWITCHES],
            preexec_fn=in_child, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (read_end, write_end, *high):
            os.close(end)
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def send(self, method: str, **parameters: Any) -> Any:
        """A command's result; raises RuntimeError with the browser's own words."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._receive()
            if got.get("id") == self._number:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return got["result"]
            self.events.append(got)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._from, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError("the browser says nothing any more")
            self._left += chunk
        message, _, self._left = self._left.partition(b"\0")
        result: dict[str, Any] = json.loads(message)
        return result

    def open(self, file: Path, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Shows a file at a window's size, in a theme, and waits until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media=media, features=theme)
        self.events.clear()
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, the page's own scripts being off or not."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def of(self, *methods: str) -> Sequence[Mapping[str, Any]]:
        """The parameters of the events of these kinds."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def screenshot(self, file: Path, height: int | None = None) -> None:
        """The page as a PNG: its first `height` pixels, or all of it."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        file.write_bytes(base64.b64decode(data))

    def pdf(self, file: Path) -> None:
        """The page as it prints."""
        file.write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"]))
