"""A hub on this machine, with its faults: cut transfers, refusals that pass. Repositories are directories."""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^/]+)")
ABOUT = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?")


class Hub:
    """`failures`: share of range requests that go wrong, by a seed. `sent_bytes`: of bodies of ranges. `token`: what a
    request must carry."""

    def __init__(self, repositories: dict[str, Path], failures: float = 0.0, seed: int = 1, token: str = "") -> None:
        self.repositories, self.failures, self.token = repositories, failures, token
        self.chance, self.lock = random.Random(seed), threading.Lock()
        self.sent_bytes = self.requests = self.failed = 0
        self.whole_files = False
        self.down = False

    def fate(self) -> str:
        with self.lock:
            self.requests += 1
            if self.down:
                return "refused"
            if self.chance.random() >= self.failures:
                return "served"
            self.failed += 1
            return self.chance.choice(["cut", "refused", "busy"])


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The hub's address, while it is up."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._answer(401, b"{}")
        elif match := RESOLVE.fullmatch(self.path):
            self._range(*match.groups())
        elif match := ABOUT.match(self.path):
            self._about(match[1])
        else:
            self._answer(404, b"{}")

    def _about(self, name: str) -> None:
        path = self.hub.repositories.get(name)
        if path is None:
            self._answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(path.iterdir())]
        self._answer(200, json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": files}).encode())

    def _range(self, name: str, commit: str, file: str) -> None:
        path, fate = self.hub.repositories[name] / file, self.hub.fate()
        if fate == "refused":
            self._answer(503, b"", {})
            return
        if fate == "busy":
            self._answer(429, b"", {"Retry-After": "1"})
            return
        begin, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        assert commit == COMMIT
        with path.open("rb") as opened:
            opened.seek(begin)
            body = opened.read(end + 1 - begin)
        if self.hub.whole_files:
            self._answer(200, path.read_bytes())
            return
        sent = body[: self.hub.chance.randrange(len(body))] if fate == "cut" else body
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(sent)
        self.hub.sent_bytes += len(sent)
        if fate == "cut":
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
