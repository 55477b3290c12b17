"""Random names of requests and replies."""

import re
import secrets
import string

_ALPHABET = string.digits + string.ascii_letters
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def new_id(prefix: str) -> str:
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(24))


def request_id(from_client: str | None) -> str:
    """The client's own id where it is harmless in a header and a log line."""
    return from_client if from_client and _CLIENT_ID.fullmatch(from_client) else new_id("req_")
