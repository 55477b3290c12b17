"""A hub of one repository, on this machine's loopback address: what was fetched is lent to other nodes, through the
ssh connection over which they ask for it. So bytes come over the internet once, and then over the nodes' own link."""

import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import msgspec

from packers.manifest import Manifest
from tided.errors import UsageError

RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})")
SILENCE_S = 60.0
MAX_LOAN_BYTES = 4096


class Loan(msgspec.Struct, forbid_unknown_fields=True):
    """What another node reads on its stdin: where the files are lent to it, and by which word."""

    endpoint: str
    token: str


def take() -> None:
    """For this process, in place of the hub: before anything of that is imported. Raises UsageError."""
    try:
        loan = msgspec.json.decode(sys.stdin.buffer.readline(MAX_LOAN_BYTES), type=Loan)
    except msgspec.DecodeError as error:
        raise UsageError("--lent is for `tidectl fetch --to-node`, which says on stdin where from") from error
    os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"] = loan.endpoint, loan.token
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = (
        "127.0.0.1"  # the node's proxy would get the word, and not get here
    )


class Lender(NamedTuple):
    port: int
    token: str


@contextmanager
def lending(directory: Path, manifest: Manifest) -> Iterator[Lender]:
    """While it is up, the manifest's files can be had by whoever knows the token."""
    token = secrets.token_urlsafe(24)
    about = {"directory": directory, "manifest": manifest, "token": token}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), about))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield Lender(server.server_port, token)
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """GET of what is there, and of ranges of files; nothing else."""

    directory: Path
    manifest: Manifest
    token: str
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        path, about, files = urlsplit(self.path).path, f"/api/models/{self.manifest.repository}", self._files()
        if not secrets.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.token}"):
            self._answer(401, {"error": "another word is wanted"})
        elif path in (about, f"{about}/revision/{self.manifest.commit}"):
            self._answer(200, self._listed())
        elif path.startswith(files) and (name := unquote(path.removeprefix(files))) in self.manifest.files:
            self._range(name)
        else:
            self._answer(404, {"error": "is not lent"})

    def _files(self) -> str:
        return f"/{self.manifest.repository}/resolve/{quote(self.manifest.commit)}/"

    def _listed(self) -> dict[str, Any]:
        """Each with the sum that it had when it came."""
        siblings = [
            {"rfilename": name, "size": one.bytes, "lfs": {"sha256": one.sha256, "size": one.bytes, "pointerSize": 0}}
            for name, one in self.manifest.files.items()
        ]
        name = self.manifest.repository
        return {"id": name, "modelId": name, "sha": self.manifest.commit, "siblings": siblings}

    def _range(self, name: str) -> None:
        asked, size = RANGE.fullmatch(self.headers.get("Range", "")), self.manifest.files[name].bytes
        begin, last = (int(asked[1]), int(asked[2])) if asked else (0, -1)
        if not begin <= last < size:
            self._answer(416, {"error": "a range of the file is wanted"})
            return
        try:
            file = (self.directory / name).open("rb")
        except OSError:
            self._answer(404, {"error": "is not here any more"})
            return
        with file, suppress(OSError):  # whoever asked has gone: it asks again
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - begin))
            self.end_headers()
            self.connection.sendfile(file, begin, last + 1 - begin)
            return
        self.close_connection = True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
