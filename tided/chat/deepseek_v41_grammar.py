"""Grammars of DeepSeek-V4.1's answers: a JSON value, a block of tool calls, or text that may end in one.

In a block the names are those of declared tools, parameters come in the order of the schema, required ones are there,
none comes twice, values have their types, and behind the block there is nothing. A value that the schema lets be a
string and something else may be either. What the library cannot express of a value's schema leaves any JSON there.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tided.chat.deepseek_v41_tools import DSML
from tided.chat.grammar import json_rule
from tided.chat.messages import Start, Tool
from tided.chat.tokenizer import Tokenizer

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_Known = Callable[[str], str]


class AnswerGrammar:
    """`usable`: why a grammar's text cannot be compiled, empty when it can (`Grammars.error`)."""

    def __init__(self, tokenizer: Tokenizer, usable: _Known) -> None:
        self._mark = f"<[{tokenizer.special_id(DSML)}]>"
        self._usable = usable

    def json(self, schema: dict[str, Any], tools: Sequence[Tool] = ()) -> str:
        """A value of the schema; with tools, that or a block of calls."""
        if not tools:
            return f"start: value\nvalue: {json_rule(schema)}\n"
        return f"start: value | head calls\nvalue: {json_rule(schema)}\nhead: /\\n{{0,2}}</\n" + self._calls(
            tools, False
        )

    def calls(self, tools: Sequence[Tool], start: Start, *, forced: bool, single: bool) -> str:
        """`forced`: a block and nothing before it; else text may come before or instead. `start`: where the answer
        begins; `calls`: the prompt has opened the block."""
        block = self._calls(tools, single)
        if start == "calls":
            return "start: invokes\n" + block
        if forced:
            return "start: head calls\nhead: /\\n{0,2}</\n" + block
        return "start: text | head calls\ntext: /(.|\\n)*/\nhead: /(.|\\n)*</\n" + block

    def _calls(self, tools: Sequence[Tool], single: bool) -> str:
        """The rule `calls` begins behind its `<`."""
        names = " | ".join(f"call_{at}" for at in range(len(tools)))
        rules = [
            f'calls: {self._mark} " calls>\\n" invokes',
            f'invokes: ({names}){"" if single else "+"} "</" {self._mark} " calls>"',
            f'close: {self._mark} " parameter>\\n"',
            # A value and its closing tag's first two characters are one lexeme: a value may hold them too.
            "raw: /(.|\\n)*<\\//",
        ]
        for at, tool in enumerate(tools):
            rules += self._tool(at, tool)
        return "\n".join(rules) + "\n"

    def _tool(self, at: int, tool: Tool) -> list[str]:
        given = tool.shown.get("parameters")
        schema: dict[str, Any] = given if isinstance(given, dict) else {}
        found = schema.get("properties")
        properties: dict[str, Any] = found if isinstance(found, dict) else {}
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        terms, rules = [], []
        for number, (name, value) in enumerate(properties.items()):
            rule = f"parameter_{at}_{number}"
            terms.append(rule if name in needed else f"{rule}?")
            rules.append(f"{rule}: {' | '.join(self._parameter(name, value, shared))}")
        # Without parameters there is an empty line between the tags.
        empty = "" if needed & set(properties) else ' | "\\n</"'
        some = f'{" ".join(terms)} "</"' if terms else '"</"'
        opening = _literal(f' invoke name="{tool.name}">\n')
        body = f"({some}{empty})"
        return [f'call_{at}: "<" {self._mark} {opening} {body} {self._mark} " invoke>\\n"', *rules]

    def _parameter(self, name: str, schema: Any, shared: dict[str, Any]) -> list[str]:
        """The forms in which the parameter may be written."""
        schema = schema if isinstance(schema, dict) else {}
        types = types_of(schema, shared)
        forms = []
        if "string" in types:
            opening = _literal(f' parameter name="{name}" string="true">')
            forms.append(f'"<" {self._mark} {opening} {self._text(schema)} close')
        if others := [kind for kind in _TYPES[1:] if kind in types]:
            opening = _literal(f' parameter name="{name}" string="false">')
            forms.append(f'"<" {self._mark} {opening} {self._value(schema, others, shared)} "</" close')
        return forms

    def _text(self, schema: dict[str, Any]) -> str:
        """A raw string; of a schema that lists its values, one of them."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list):
            return "raw"
        texts = [value for value in listed if isinstance(value, str)]
        return "(" + " | ".join(_literal(f"{text}</") for text in texts) + ")" if texts else "raw"

    def _value(self, schema: dict[str, Any], types: list[str], shared: dict[str, Any]) -> str:
        narrowed = {**shared, "allOf": [schema, {"type": types}]}
        for candidate in ({**schema, **shared}, narrowed) if "string" not in types_of(schema, shared) else (narrowed,):
            rule = json_rule(candidate)
            if not self._usable(f"start: value\nvalue: {rule}\n"):
                return rule
        return json_rule({"type": types})


def types_of(schema: dict[str, Any], shared: dict[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema allows; all where it does not say."""
    everything = frozenset(_TYPES)
    if depth == 0:
        return everything
    allowed = everything
    given = schema.get("type")
    if isinstance(given, str | list):
        allowed &= frozenset([given] if isinstance(given, str) else [kind for kind in given if isinstance(kind, str)])
        allowed |= {"integer"} if "number" in allowed else frozenset()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        allowed &= frozenset(kind for value in listed for kind in _types_of_value(value))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (target := _resolved(reference, shared)) is not None:
        allowed &= types_of(target, shared, depth - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            found = (types_of(branch, shared, depth - 1) for branch in branches if isinstance(branch, dict))
            allowed &= frozenset().union(*found)
    return allowed or everything


def _types_of_value(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, str):
        return ("string",)
    if isinstance(value, int | float):
        return ("number", "integer")
    return ("array",) if isinstance(value, list) else ("object",)


def _resolved(reference: str, shared: dict[str, Any]) -> dict[str, Any] | None:
    root, _, rest = reference.partition("/")
    key, _, name = rest.partition("/")
    section = shared.get(key) if root == "#" else None
    target = section.get(name) if isinstance(section, dict) else None
    return target if isinstance(target, dict) else None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
