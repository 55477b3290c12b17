"""Grammars of GLM-5.3's answers: a JSON value, tool calls, or text that may end in calls.

Tags are single tokens, and a string is raw text up to one of them. Parameters come in the order of the schema, required
ones are there, none comes twice. The format marks no types: where a schema lets a value be a string and something else,
any text will do. A turn ends with the token that opens the next one, so each of those may follow.
"""

from collections.abc import Sequence
from typing import Any

from tided.chat.glm53 import CALL, END_CALL, END_KEY, END_VALUE, KEY, STOPS, VALUE
from tided.chat.grammar import json_rule
from tided.chat.grammar_terms import Parameter, Usable, either, literal, parameters_of
from tided.chat.messages import Start, Tool
from tided.chat.tokenizer import Tokenizer

_HEAD, _TEXT = "head: /\\n{0,2}/", "text: /(.|\\n)*/"


class Glm53Grammar:
    """`grammar_terms.AnswerGrammar`."""

    def __init__(self, tokenizer: Tokenizer, usable: Usable) -> None:
        self._tag = {
            tag: f"<[{tokenizer.special_id(tag)}]>" for tag in (CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)
        }
        # The first of the stops is the end that the library itself allows after a whole answer.
        others = [f"<[{tokenizer.special_id(stop)}]>" for stop in STOPS[1:]]
        self._end = f"end: {either(others)}?"
        self._usable = usable

    def json(self, schema: dict[str, Any], tools: Sequence[Tool] = ()) -> str:
        value = f"value: {json_rule(schema)}"
        if not tools:
            return "\n".join(["start: value end", value, self._end]) + "\n"
        return "\n".join(["start: (value | head calls) end", value, *self._calls(tools, single=False)]) + "\n"

    def calls(self, tools: Sequence[Tool], start: Start, *, forced: bool, single: bool) -> str:
        opening = "start: head calls end" if forced else "start: text calls? end"
        return "\n".join([opening, *self._calls(tools, single)]) + "\n"

    def _calls(self, tools: Sequence[Tool], single: bool) -> list[str]:
        names = either([f"call_{at}" for at in range(len(tools))])
        rules = [f"calls: {names}{'' if single else '+'}", _HEAD, _TEXT, self._end]
        for at, tool in enumerate(tools):
            terms = [
                self._argument(parameter) if needed else f"({self._argument(parameter)})?"
                for parameter, needed in parameters_of(tool, self._usable)
            ]
            inside = " ".join([literal(tool.name), *terms])
            rules.append(f"call_{at}: {self._tag[CALL]} {inside} {self._tag[END_CALL]}")
        return rules

    def _argument(self, parameter: Parameter) -> str:
        key = f"{self._tag[KEY]} {literal(parameter.name)} {self._tag[END_KEY]}"
        return f"{key} {self._tag[VALUE]} {self._value(parameter)} {self._tag[END_VALUE]}"

    def _value(self, parameter: Parameter) -> str:
        if not parameter.may_be_text:
            return parameter.json() or "text"
        if not (listed := parameter.listed()):
            return "text"
        value = parameter.json()
        return either([*listed, *([value] if value is not None else [])])
