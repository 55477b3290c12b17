"""A headless Chromium, by its DevTools protocol: as much of it as the tests of the page need."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_S = 60.0


def chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `complaints`: errors of its console, exceptions, refused loads, in order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        self.seen: dict[str, int] = defaultdict(int)
        self.requests: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._replies.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, given: dict[str, Any]) -> None:
        self.seen[method] += 1
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"]))
        elif "willReadFrequently" in str(given):
            pass  # what a test reads of a canvas
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(given["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"])

    async def send(self, method: str, **given: Any) -> Any:
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": given})
        told = await asyncio.wait_for(reply, WAIT_S)
        assert "error" not in told, told
        return told["result"]

    async def open(self, url: str, width: int, height: int = 900, scale: float = 1, dark: bool = True) -> None:
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 700}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.dark(dark)
        await self.send("Page.navigate", url=url)

    async def dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page, once it is there."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = await self.send("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = WAIT_S) -> Any:
        """Polls until an expression is true; its value."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            with suppress(AssertionError):
                if value := await self.ask(expression):
                    return value
            assert asyncio.get_running_loop().time() < deadline, (expression, self.complaints)
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self, path: Path, full: bool = True) -> None:
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))

    async def close(self) -> None:
        await self._socket.close()
        self._reading.cancel()


class Browser:
    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._port, self._session = port, session

    async def page(self) -> Page:
        async with self._session.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as reply:
            found = await reply.json(content_type=None)
        return Page(await self._session.ws_connect(found["webSocketDebuggerUrl"], max_msg_size=64 << 20))


@asynccontextmanager
async def browser(program: str, folder: Path) -> AsyncIterator[Browser]:
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-port=0",
        f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as session:
            yield Browser(await _port(folder, process), session)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


async def _port(folder: Path, process: subprocess.Popen[bytes]) -> int:
    file, deadline = folder / "DevToolsActivePort", asyncio.get_running_loop().time() + WAIT_S
    while not (file.exists() and len(lines := file.read_text().splitlines()) > 1):
        assert process.poll() is None, "the browser has ended"
        assert asyncio.get_running_loop().time() < deadline, "the browser does not start"
        await asyncio.sleep(0.05)
    return int(lines[0])
