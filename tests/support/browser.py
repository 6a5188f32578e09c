"""A real browser without a screen: Chromium, driven over WebDriver, which is JSON over HTTP on loopback.

Needs Debian's packages `chromium` and `chromium-driver`, or others that have these programs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

_WATCHDOG_S = 60.0
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
KEYS = {"tab": "\ue004", "left": "\ue012", "right": "\ue014", "end": "\ue010", "escape": "\ue00c"}


def missing() -> str:
    """Which program a browser needs that is not here; empty where there are all of them."""
    programs = ("chromium", "chromedriver")
    return ", ".join(name for name in programs if shutil.which(name) is None)


@contextlib.contextmanager
def started_browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in an empty folder; ended with the `with`, and its driver with it."""
    command = [str(shutil.which("chromedriver")), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        try:
            yield from _session(_port_of(driver), folder)
        finally:
            driver.terminate()


def _port_of(driver: subprocess.Popen[str]) -> int:
    """It says which port it has got, once it listens there."""
    assert driver.stdout is not None
    said = []
    for line in driver.stdout:
        said.append(line)
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError(f"chromedriver did not start: {''.join(said)}")


def _session(port: int, folder: Path) -> Iterator[Browser]:
    options = {
        "binary": shutil.which("chromium"),
        "args": [*_SWITCHES, f"--user-data-dir={folder}"],
    }
    wanted = {
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    base = f"http://127.0.0.1:{port}/session"
    session = _asked("POST", base, {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
    browser = Browser(f"{base}/{session}")
    try:
        yield browser
    finally:
        browser.quit()


def _asked(method: str, url: str, body: Mapping[str, object] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    # Not by way of a proxy that the environment may name: it is this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_WATCHDOG_S) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"the browser cannot do {url}: {error.read().decode()[:2000]}") from None


class Browser:
    """One window."""

    def __init__(self, url: str) -> None:
        self._url = url

    def quit(self) -> None:
        _asked("DELETE", self._url)

    def show(self, page: Path, *, width: int = 1200, scheme: Literal["light", "dark"] = "light") -> None:
        """Opens a page in a window of this width, as a reader with this colour scheme sees it; the pointer is away."""
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", media="", features=features)
        self.console()
        self.requests()
        self._post("url", {"url": page.as_uri()})

    def script(self, text: str, *args: object) -> Any:
        """What the body of a function returns, run on the page."""
        return self._post("execute/sync", {"script": text, "args": args})

    def point_at(self, x: float, y: float) -> None:
        """Moves the pointer there, in pixels of the window."""
        move = {"type": "pointerMove", "duration": 0, "x": int(x), "y": int(y)}
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]})

    def press(self, *keys: str) -> None:
        """Presses keys one after the other, by their names in `KEYS`."""
        strokes = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": strokes})

    def console(self) -> list[str]:
        """What the page has complained about, since it is shown or since the last call."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses that were asked for, since the page is shown or since the last call; not by the browser's own
        first page, which may still be at it."""
        entries = [json.loads(entry["message"])["message"] for entry in self._post("se/log", {"type": "performance"})]
        sent = [each["params"] for each in entries if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if not each["documentURL"].startswith("chrome://")]

    def screenshot(self, path: Path) -> None:
        """All of the page, as wide as the window."""
        shot = self._command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _act(self, *sources: Mapping[str, object]) -> None:
        self._post("actions", {"actions": sources})

    def _command(self, name: str, **params: object) -> Any:
        return self._post("goog/cdp/execute", {"cmd": name, "params": params})

    def _post(self, what: str, body: Mapping[str, object] | Mapping[str, Sequence[object]]) -> Any:
        return _asked("POST", f"{self._url}/{what}", body)
