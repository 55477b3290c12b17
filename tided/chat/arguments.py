"""The arguments of one tool call: as a client sent them back, and as JSON text that grows while the model writes."""

import json
from typing import Any

_WRAPPERS = ("arguments", "input")


def json_value(raw: str) -> str | None:
    """`raw` itself where it is one JSON value, or None."""
    try:
        json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return raw.strip()


def as_json(raw: str, kind: str | None) -> str:
    """JSON for a value written as `raw`. kind "false": JSON by declaration, None: not declared. Never invalid JSON."""
    value = json_value(raw)
    if value is None or (kind is None and value.startswith('"')):
        return _quote(raw)
    return value


def sent_arguments(text: str) -> dict[str, Any]:
    """The arguments of an earlier call, by name. What is no JSON object becomes one string parameter."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


class Arguments:
    """Each method returns the text to send. `parameters`: the tool's own names, None when the tool is unknown.

    A parameter that comes twice: its last value counts. A stream has then sent both, in order, and JSON readers keep
    the last; `text` has one.
    """

    def __init__(self, parameters: frozenset[str] | None) -> None:
        self._parameters = parameters
        self._values: dict[str, str] = {}
        self._sent = ""
        self._string: list[str] = []
        self._wrapper: tuple[str, str] | None = None
        self.closed = False

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def text(self) -> str:
        if not self.closed:
            return self._sent
        if self._wrapper is not None:
            return self._wrapper[1]
        return "{" + ", ".join(f"{_quote(name)}: {value}" for name, value in self._values.items()) + "}"

    def open_string(self, name: str) -> str:
        self._string = []
        return self._send(self._release() + self._key(name) + '"')

    def string(self, text: str) -> str:
        escaped = _quote(text)[1:-1]
        self._string.append(escaped)
        return self._send(escaped)

    def close_string(self, name: str) -> str:
        self._values[name] = f'"{"".join(self._string)}"'
        return self._send('"')

    def value(self, name: str, value: str) -> str:
        if self._looks_wrapped(name, value):
            self._wrapper = (name, value)
            return ""
        sent = self._release() + self._key(name) + value
        self._values[name] = value
        return self._send(sent)

    def cut(self, name: str, value: str | None) -> str:
        """What had come of a parameter when the answer was cut: of its name, or of its value."""
        key = self._release() + self._key(name)
        return self._send(key.removesuffix('": ') if value is None else key + value)

    def close(self) -> str:
        self.closed = True
        if self._wrapper is not None:
            return self._send(self._wrapper[1])
        return self._send("}" if self._values else "{}")

    def _looks_wrapped(self, name: str, value: str) -> bool:
        """{"arguments": {…}} where the tool has no such parameter: the object inside is meant, if nothing follows."""
        first = not self._values and self._wrapper is None and name in _WRAPPERS
        return first and self._parameters is not None and name not in self._parameters and value.startswith("{")

    def _release(self) -> str:
        if self._wrapper is None:
            return ""
        (name, value), self._wrapper = self._wrapper, None
        text = self._key(name) + value
        self._values[name] = value
        return text

    def _key(self, name: str) -> str:
        return f"{', ' if self._values else '{'}{_quote(name)}: "

    def _send(self, text: str) -> str:
        self._sent += text
        return text


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
