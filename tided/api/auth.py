"""API keys. A key is compared by its digest with every key there is, so time tells neither length nor place.

The file is looked at again while the server runs: a key that is added opens it within a second, one that is taken out
does so no longer. A file that cannot be used leaves the keys as they are.
"""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tided.errors import ConfigError, RequestError
from tided.settings import Server

log = logging.getLogger("tided.api")

LOOK_EVERY_S = 1.0
MOST_BYTES = 1 << 20

Stamp = tuple[int, int, int]  # of a file: which, how long, when written


class KeyRing:
    """The keys that open the server; none: everybody may ask. `source` is the file they came from."""

    def __init__(self, keys: tuple[str, ...] = (), source: Path | None = None, stamp: Stamp | None = None) -> None:
        self._digests = tuple(_digest(key) for key in keys)
        self._source, self._stamp = source, stamp
        self._looked_s = time.monotonic()

    @classmethod
    def load(cls, path: str) -> Self:
        """An empty `path` is an open server; a file without keys is a mistake. Raises ConfigError."""
        if not path:
            return cls()
        source = Path(path)
        stamp = _stamp(source)  # first: what is written meanwhile is read again
        return cls(read_keys(source), source, stamp)

    @property
    def count(self) -> int:
        return len(self._digests)

    @property
    def open(self) -> bool:
        return not self._digests

    def check(self, headers: Mapping[str, str]) -> str:
        """The right credential's digest, hexadecimal (of an open server: none).

        Raises 401 without one; the same words for a missing and a wrong one.
        """
        self._look_again()
        given = [_bearer(headers.get("Authorization", "")), headers.get("x-api-key", "")]
        # A list, not `any` over a generator: every credential meets every key.
        matches = [(hmac.compare_digest(_digest(key), known), known) for key in given for known in self._digests]
        right = [known for matched, known in matches if matched]
        if not self.open and not right:
            raise RequestError(
                "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )
        return right[0].hex() if right else ""

    def _look_again(self) -> None:
        now_s = time.monotonic()
        if self._source is None or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if _stamp(self._source) != self._stamp:
            self.reload()

    def reload(self) -> None:
        """Reads the file again, whether or not it changed, and tells in the log what came of it."""
        if self._source is None:
            return log.info("there is no file of API keys to read again: anyone who reaches the server may ask")
        self._stamp = _stamp(self._source)
        try:
            self._digests = tuple(_digest(key) for key in read_keys(self._source))
        except ConfigError as error:
            return log.error("the API keys stay as they are: %s", error)
        return log.info("%d API keys are read again from %s", self.count, self._source)


def key_file(server: Server) -> str:
    """Where the keys are; empty: nowhere. Raises ConfigError for a credential that the service manager did not give."""
    if not server.api_keys_credential:
        return server.api_keys_file
    if server.api_keys_file:
        raise ConfigError("server.api_keys_file and server.api_keys_credential are both set", hint="Keep one of them.")
    directory, name = os.environ.get("CREDENTIALS_DIRECTORY", ""), server.api_keys_credential
    if not directory or "/" in name:
        raise ConfigError(
            f"there is no credential {name!r}", hint="Name it with LoadCredential= in the unit, without a path."
        )
    return str(Path(directory) / name)


def read_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and lines that begin with # are none. Raises ConfigError for a file
    without keys, and for a key that holds a blank."""
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys cannot be read: {error}", where=str(path)) from error
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and key[0] != "#"}
    if broken := [number for number, key in keys.items() if len(key.split()) > 1]:
        raise ConfigError(
            "a key holds no blanks", where=f"{path}:{broken[0]}", hint="Write one key a line; # begins a comment."
        )
    if not keys:
        raise ConfigError("holds no API key", where=str(path), hint="Write one key a line, or set no file.")
    return tuple(keys.values())


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
