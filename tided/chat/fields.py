"""Reads fields of a JSON object: absent and null are the same, a boolean is no number, 10.0 is an integer.

Every fault is a `RequestError` that names the field (`param`) and shows the value, cut to 200 characters.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from tided.chat.text import shorten
from tided.errors import RequestError

INT64_MAX = 2**63 - 1


def refuse(param: str, what: str, *, code: str | None = None) -> NoReturn:
    raise RequestError(f"{param}: {what}", param=param, code=code)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Fields:
    """One object of a request. `path` leads from the body to it ("stream_options.")."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values, self.path = values, path

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def param(self, name: str) -> str:
        return f"{self.path}{name}"

    def wrong(self, name: str, expected: str) -> NoReturn:
        refuse(self.param(name), f"expected {expected}, got {shorten(_as_json(self.get(name)))}")

    def number(
        self, name: str, default: float, low: float, high: float, *, low_open: bool = False, hint: str = ""
    ) -> float:
        value = self.get(name)
        if value is None:
            return default
        inside = is_number(value) and low <= value <= high
        if not inside or (low_open and value == low):
            self.wrong(name, hint or f"a number from {low:g}{' (exclusive)' if low_open else ''} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int = INT64_MAX) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        # The range first: int() of an infinity raises, and so does float() of an integer beyond every float.
        if not is_number(value) or not low <= value <= high or value != int(value):
            self.wrong(name, f"an integer of at least {low}" if high == INT64_MAX else f"an integer, {low} to {high}")
        return int(value)

    def boolean(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.wrong(name, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.wrong(name, "a string")
        return value

    def array(self, name: str, most: int) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.wrong(name, "an array")
        if len(value) > most:
            refuse(self.param(name), f"{len(value)} entries, at most {most} are allowed")
        return value

    def fields(self, name: str) -> "Fields":
        """The object under `name`; absent is an empty one."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, "an object")
        return Fields(value or {}, f"{self.param(name)}.")


def _as_json(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return repr(value) if isinstance(value, str) and len(value) < 1000 else str(value)[:1000]
