"""A headless Chromium, driven through the pipe of its DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The path of the browser; None if there is none."""

_REPLY_TIMEOUT_S = 120.0


class Page:
    """One page of a browser."""

    def __init__(self, commands: int, replies: int):
        self._commands, self._replies = commands, replies
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        (target, *_) = [t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.body !== null")

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON represents it."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 30.0) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {timeout_s:g} s: {expression}; the page says:\n{self.text()}")
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """Return the text of the page, as a reader sees it."""
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self) -> bytes:
        """Return the visible part of the page as a PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._number:
            pass  # an event
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._replies], [], [], _REPLY_TIMEOUT_S)[0]:
                raise TimeoutError(f"the browser does not answer within {_REPLY_TIMEOUT_S:g} s")
            if not (data := os.read(self._replies, 1 << 20)):
                raise RuntimeError("the browser has ended")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start a browser with the new profile directory ``profile``, and yield its page; ends the browser."""
    assert CHROMIUM is not None
    command_read, command_write = os.pipe()
    reply_read, reply_write = os.pipe()

    def place_pipes() -> None:  # the protocol reads from descriptor 3 and writes to 4
        high = [os.dup(command_read), os.dup(reply_write)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-software-rasterizer",
            "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=place_pipes,
        start_new_session=True,
    )
    os.close(command_read)
    os.close(reply_write)
    try:
        yield Page(command_write, reply_read)
    finally:
        os.close(command_write)  # the browser ends with its pipe
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        os.close(reply_read)
