"""What comes on stdin, and JSON of the command line, with errors that say where it is wrong."""

import json
import sys
from typing import Any

from tided.errors import DataError


def text() -> str:
    """All of stdin, byte for byte: no line end is translated."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8: byte {error.start}", where="stdin") from error


def json_object(source: str, where: str) -> dict[str, Any]:
    value = json_value(source, where)
    if not isinstance(value, dict):
        raise DataError("expected a JSON object", where=where)
    return value


def json_value(source: str, where: str) -> Any:
    try:
        return json.loads(source)
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON: {error.msg}", where=f"{where}:{error.lineno}:{error.colno}") from error
    except RecursionError as error:
        raise DataError("is nested too deeply", where=where) from error
