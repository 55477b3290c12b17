"""API keys. A key is compared by its digest with every key there is, so time tells neither length nor place."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tided.errors import ConfigError, RequestError


class KeyRing:
    """The keys that open the server; none: everybody may ask."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def load(cls, path: str) -> Self:
        """Keys of a file, one a line; empty lines and lines that begin with # are none. An empty `path` is an open
        server; a file without keys is a mistake, and so is a key that holds a blank."""
        if not path:
            return cls()
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys cannot be read: {error}", where=path) from error
        keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and key[0] != "#"}
        if broken := [number for number, key in keys.items() if len(key.split()) > 1]:
            raise ConfigError(
                "a key holds no blanks", where=f"{path}:{broken[0]}", hint="Write one key a line; # begins a comment."
            )
        if not keys:
            raise ConfigError("holds no API key", where=path, hint="Write one key a line, or set no file.")
        return cls(tuple(keys.values()))

    @property
    def open(self) -> bool:
        return not self._digests

    def check(self, headers: Mapping[str, str]) -> str:
        """The right credential's name for the log (of an open server: none).

        Raises 401 without one; the same words for a missing and a wrong one.
        """
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
        return f"key {right[0].hex()[:6]}" if right else ""


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
