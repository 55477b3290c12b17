"""A hub on this machine, with its faults: cut transfers, refusals that pass, lies. Repositories are directories."""

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub.utils import close_session

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ELSEWHERE = "/elsewhere"
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
ABOUT = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?")


class Hub:
    """`failures`: share of range requests that go wrong, by a seed. `sent_bytes`: of bodies of ranges. `token`: what a
    request must carry. `commit`: the newest; a repository of an earlier one is `NAME@COMMIT`. `bytes_per_s`: of a
    connection, 0: at once. `lies`: by file, "sum" (a wrong one is published), "short" (it ends a byte before its
    listing says), "damaged" (a bit of what is sent), "damaged once". `extra`: names that are listed, without a file.
    `elsewhere`: an address that bodies come from, and `told_elsewhere` what authorisations it was told."""

    def __init__(self, repositories: dict[str, Path], failures: float = 0.0, seed: int = 1, token: str = "") -> None:
        self.repositories, self.failures, self.token = repositories, failures, token
        self.chance, self.lock = random.Random(seed), threading.Lock()
        self.sent_bytes = self.requests = self.failed = 0
        self.whole_files = False
        self.down = False
        self.commit, self.bytes_per_s = COMMIT, 0
        self.lies: dict[str, str] = {}
        self.extra: list[str] = []
        self.elsewhere = ""
        self.told_elsewhere: set[str | None] = set()

    def directory(self, name: str, commit: str) -> Path | None:
        """Of a repository at a commit."""
        return self.repositories.get(name if commit == self.commit else f"{name}@{commit}")

    def listed(self, path: Path, name: str) -> dict[str, Any]:
        """As the hub does: large files by their sha256, small ones by their git blob."""
        data, lie = path.read_bytes(), self.lies.get(name)
        size, digest = len(data) + (lie == "short"), hashlib.sha256(data + b"?" * (lie == "sum")).hexdigest()
        if name.endswith(".safetensors"):
            return {"rfilename": name, "size": size, "lfs": {"sha256": digest, "size": size, "pointerSize": 134}}
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data + b"?" * (lie == "sum")).hexdigest()
        return {"rfilename": name, "size": size, "blobId": blob}

    def body(self, name: str, body: bytes) -> bytes:
        with self.lock:
            lie = self.lies.get(name, "")
            if lie == "damaged once":
                del self.lies[name]
        return body[:-1] + bytes([body[-1] ^ 1]) if lie.startswith("damaged") else body

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
        close_session()  # of the client, which would keep its connections
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path.startswith(ELSEWHERE):
            self.hub.told_elsewhere.add(self.headers.get("Authorization"))
            match = RESOLVE.fullmatch(self.path.removeprefix(ELSEWHERE))
            assert match
            self._range(*match.groups())
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._answer(401, b"{}")
        elif match := RESOLVE.fullmatch(self.path):
            if self.hub.elsewhere:
                self._answer(302, b"", {"Location": f"{self.hub.elsewhere}{ELSEWHERE}{self.path}"})
            else:
                self._range(*match.groups())
        elif match := ABOUT.match(self.path):
            self._about(match[1], match[2] or "main")
        else:
            self._answer(404, b"{}")

    def _about(self, name: str, revision: str) -> None:
        commit = revision if re.fullmatch("[0-9a-f]{40}", revision) else self.hub.commit
        path = self.hub.directory(name, commit)
        if path is None:
            self._answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        files = [self.hub.listed(path / file, file) for file in names]
        files += [{"rfilename": name, "size": 3} for name in self.hub.extra]
        self._answer(200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": files}).encode())

    def _range(self, name: str, commit: str, file: str) -> None:
        root, fate = self.hub.directory(name, commit), self.hub.fate()
        assert root is not None, commit
        path = root / file
        if fate == "refused":
            self._answer(503, b"", {})
            return
        if fate == "busy":
            self._answer(429, b"", {"Retry-After": "1"})
            return
        begin, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        if begin >= path.stat().st_size:
            self._answer(416, b"")
            return
        with path.open("rb") as opened:
            opened.seek(begin)
            body = self.hub.body(file, opened.read(end + 1 - begin))
        if self.hub.whole_files:
            self._answer(200, path.read_bytes())
            return
        sent = body[: self.hub.chance.randrange(len(body))] if fate == "cut" else body
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._send(sent)
        if fate == "cut":
            self.close_connection = True

    def _send(self, body: bytes) -> None:
        """What a client that was killed does not take is not counted."""
        rate = self.hub.bytes_per_s
        step = rate // 50 if rate else max(1, len(body))
        try:
            for at in range(0, len(body), step):
                part = body[at : at + step]
                self.wfile.write(part)
                with self.hub.lock:
                    self.hub.sent_bytes += len(part)
                if rate:
                    time.sleep(len(part) / rate)
        except OSError:
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
