"""A headless Chromium that is driven over its debugging protocol: it can reach 127.0.0.1 and nothing else."""

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
Json = dict[str, object]


def find() -> str | None:
    """The browser's path, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Chrome:
    """One page in one browser. `requests` are the addresses it asked for, `errors` what its console complained of."""

    def __init__(self, program: str, folder: Path) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._number = 0
        self._process = subprocess.Popen(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
                "--remote-debugging-port=0",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-first-run", "--disable-background-networking",
                "--hide-scrollbars", "--force-device-scale-factor=1", "--disable-extensions", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        assert self._process.stderr is not None
        address = next(line.split()[-1] for line in self._process.stderr if "DevTools listening on" in line)
        self._socket = connect(address, max_size=None)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        (target,) = [one["targetId"] for one in targets if one["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(10)

    def call(self, method: str, **params: object) -> dict:
        """One command and its answer."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))

    def size(self, width: int, height: int, is_dark: bool = False) -> None:
        """The window, and the colours that its system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Goes to a page."""
        self.call("Page.navigate", url=address)

    def js(self, expression: str) -> object:
        """The value of a JavaScript expression, true for an element; a promise is awaited."""
        plain = f"((value) => value instanceof Node ? true : value)({expression})"
        found = self.call("Runtime.evaluate", expression=plain, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 15.0) -> object:
        """Waits until an expression is true and returns it."""
        end = time.monotonic() + seconds
        while not (found := self.js(expression)):
            assert time.monotonic() < end, f"{expression} did not become true; the page says: {self.text()[:2000]}"
            time.sleep(0.05)
        return found

    def text(self) -> str:
        """All that the page says."""
        return str(self.js("document.body.innerText"))

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """One key: Enter, Tab, Space, or a name of the protocol."""
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), " ": (32, " ")}
        code, text = codes.get(key, (0, ""))
        common = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A screenshot."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
