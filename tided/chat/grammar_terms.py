"""What the grammars of all families are put together from: literals, and values of a schema.

What the library cannot express of a value's schema leaves any JSON of its types there.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tided.chat.grammar import json_rule
from tided.chat.messages import Start, Tool
from tided.chat.schema_types import ALL_TYPES, types_of

Usable = Callable[[str], str]
"""Why a grammar's text cannot be compiled; empty when it can (`Grammars.error`). May raise RequestError."""


class AnswerGrammar(Protocol):
    """Writes the grammars of one family's answers."""

    def json(self, schema: dict[str, Any], tools: Sequence[Tool] = ()) -> str:
        """A value of the schema; with tools, that or calls."""
        ...

    def calls(self, tools: Sequence[Tool], start: Start, *, forced: bool, single: bool) -> str:
        """`forced`: calls and nothing before them; else text may come before or instead. `start`: where the answer
        begins; `calls`: the prompt has opened the block."""
        ...


class Parameter:
    """One parameter of a tool. `shared`: what its schema may refer to."""

    def __init__(self, name: str, schema: Any, shared: dict[str, Any], usable: Usable) -> None:
        self.name = name
        self._schema: dict[str, Any] = schema if isinstance(schema, dict) else {}
        self._shared, self._usable = shared, usable
        self._types = types_of(self._schema, shared) or ALL_TYPES

    @property
    def may_be_text(self) -> bool:
        return "string" in self._types

    def listed(self, behind: str = "") -> list[str]:
        """The terms of the strings that the schema lists, each with `behind` after it; none where any string will do,
        and where the library takes no such term."""
        values = [self._schema["const"]] if "const" in self._schema else self._schema.get("enum")
        texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        terms = [literal(text + behind) for text in texts]
        return [] if terms and self._usable(f"start: {either(terms)}\n") else terms

    def json(self) -> str | None:
        """The term of a value that is no string; None where only a string is possible."""
        types = sorted(self._types - {"string"})
        if not types:
            return None
        narrowed = {**self._shared, "allOf": [self._schema, {"type": types}]}
        for candidate in (narrowed,) if self.may_be_text else ({**self._schema, **self._shared}, narrowed):
            rule = json_rule(candidate)
            if not self._usable(f"start: value\nvalue: {rule}\n"):
                return rule
        return json_rule({"type": types})


def parameters_of(tool: Tool, usable: Usable) -> list[tuple[Parameter, bool]]:
    """(the parameter, whether it must be there), in the order of the schema."""
    given = tool.shown.get("parameters")
    schema: dict[str, Any] = given if isinstance(given, dict) else {}
    found = schema.get("properties")
    properties: dict[str, Any] = found if isinstance(found, dict) else {}
    required = schema.get("required")
    needed = {entry for entry in required if isinstance(entry, str)} if isinstance(required, list) else set()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [(Parameter(name, value, shared, usable), name in needed) for name, value in properties.items()]


def literal(text: str) -> str:
    """The library's literals are JSON's, but for DEL, which it does not take as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def either(texts: Sequence[str]) -> str:
    return f"({' | '.join(texts)})"
