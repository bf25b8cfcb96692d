"""A real browser for tests of pages, without any driver library."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any


class Browser:
    """A headless Chromium that is spoken to over a pipe (Chrome DevTools Protocol)."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        command = [program, *flags, "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write} 2>/dev/null', "bash", *command],
            pass_fds=(to_read, to_write),
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._unread, self.events = 0, b"", list[dict[str, Any]]()
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._in], [], [], 60.0)[0], "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._unread += piece
        message, self._unread = self._unread.split(b"\0", 1)
        result: dict[str, Any] = json.loads(message)
        return result

    def open(self, address: str, width: int, phone: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        self.send("Page.navigate", url="about:blank")
        self.events.clear()
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.ask(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.1)

    def ask(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """What the browser said: errors of the script, things that the policy forbade."""
        names = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in names]

    def picture(self, file: Path) -> None:
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self._out)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._in)
