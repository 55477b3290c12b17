"""JSON as it stands in replies: one line, non-ASCII as itself."""

import json
from typing import Any

# Line ends for some readers of event streams, though not for the standard; legal in JSON only as escapes to them.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


_encode = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make an encoder for every token


def to_json(value: Any) -> str:
    return _encode(value).translate(_LINE_ENDS)
