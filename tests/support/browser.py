"""Driver for a headless Chromium over its DevTools pipe."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Browser:
    """A browser. Commands and answers are JSON, each terminated by a zero byte."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive meanwhile go to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read(60)
            if answer is None:
                raise TimeoutError(f"the browser did not answer {method}")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Collect events until none arrives for `seconds`; after the first, only those already there."""
        while (event := self._read(seconds)) is not None:
            self.events.append(event)
            seconds = 0

    def _read(self, seconds: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            if not select([self._back], [], [], seconds)[0]:
                return None
            self._rest += os.read(self._back, 2**20)
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    @contextmanager
    def page(self, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator["Page"]:
        """Open a tab in a fresh browser context, with the given size and colour scheme."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **metrics)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """A browser tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this tab."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Navigate to a URL and wait until it is loaded."""
        if "errorText" in (answer := self.call("Page.navigate", url=url)):
            raise RuntimeError(f"{url}: {answer['errorText']}")
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def reload(self) -> None:
        """Reload the page and wait until it is loaded."""
        self.see("window.stale = true")
        self.call("Page.reload")
        self.wait("!window.stale && document.readyState === 'complete'")

    def see(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 120) -> Any:
        """Evaluate an expression until it is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.see(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script} did not come true; the page says: {self.text()[:2000]}")
            self._browser.listen(0.05)
        return value

    def text(self) -> str:
        """Visible text of the page."""
        text: str = self.see("document.body.innerText")
        return text

    def happened(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of one kind in this tab so far."""
        self._browser.listen(0)
        mine = (event for event in self._browser.events if event.get("sessionId") == self._session)
        return [event["params"] for event in mine if event["method"] == method]

    def faults(self) -> list[str]:
        """Script errors and violations of the content security policy; HTTP errors do not count."""
        thrown = [e["exceptionDetails"]["exception"]["description"] for e in self.happened("Runtime.exceptionThrown")]
        logged = [one["entry"] for one in self.happened("Log.entryAdded")]
        return thrown + [one["text"] for one in logged if one["level"] == "error" and one["source"] != "network"]


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a Chromium with a fresh profile."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise FileNotFoundError("chromium is not installed (apt-get install chromium)")
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    theirs_in, ours_out, ours_in, theirs_out = ends
    with tempfile.TemporaryDirectory(prefix="solrl-browser-", ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4. Bash can redirect descriptors with two digits to them.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", script, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            process.terminate()
            process.wait(30)
            os.close(ours_out)
            os.close(ours_in)
