"""JSON as it stands in replies: one line, non-ASCII as itself."""

import json
from typing import Any

# Line ends for some readers of event streams, though not for the standard; legal in JSON only as escapes to them.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)
