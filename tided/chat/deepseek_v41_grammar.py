"""Grammars of DeepSeek-V4.1's answers: a JSON value, a block of tool calls, or text that may end in one.

In a block the names are those of declared tools, parameters come in the order of the schema, required ones are there,
none comes twice, values have their types, and behind the block there is nothing. A value that the schema lets be a
string and something else may be either.
"""

from collections.abc import Sequence
from typing import Any

from tided.chat.deepseek_v41_tools import DSML
from tided.chat.grammar import json_rule
from tided.chat.grammar_terms import Parameter, Usable, either, literal, parameters_of
from tided.chat.messages import Start, Tool
from tided.chat.tokenizer import Tokenizer


class DeepseekV41Grammar:
    """`grammar_terms.AnswerGrammar`."""

    def __init__(self, tokenizer: Tokenizer, usable: Usable) -> None:
        self._mark = f"<[{tokenizer.special_id(DSML)}]>"
        self._usable = usable

    def json(self, schema: dict[str, Any], tools: Sequence[Tool] = ()) -> str:
        if not tools:
            return f"start: value\nvalue: {json_rule(schema)}\n"
        return f"start: value | head calls\nvalue: {json_rule(schema)}\nhead: /\\n{{0,2}}</\n" + self._calls(
            tools, False
        )

    def calls(self, tools: Sequence[Tool], start: Start, *, forced: bool, single: bool) -> str:
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
        given = parameters_of(tool, self._usable)
        names = [f"parameter_{at}_{number}" for number in range(len(given))]
        rules = [f"{name}: {' | '.join(self._forms(one))}" for name, (one, _) in zip(names, given, strict=True)]
        terms = [name if needed else f"{name}?" for name, (_, needed) in zip(names, given, strict=True)]
        # Without parameters there is an empty line between the tags.
        empty = "" if any(needed for _, needed in given) else ' | "\\n</"'
        some = f'{" ".join(terms)} "</"' if terms else '"</"'
        opening = literal(f' invoke name="{tool.name}">\n')
        body = f"({some}{empty})"
        return [f'call_{at}: "<" {self._mark} {opening} {body} {self._mark} " invoke>\\n"', *rules]

    def _forms(self, parameter: Parameter) -> list[str]:
        """The forms in which the parameter may be written."""
        forms = []
        if parameter.may_be_text:
            opening = literal(f' parameter name="{parameter.name}" string="true">')
            listed = parameter.listed(behind="</")
            forms.append(f'"<" {self._mark} {opening} {either(listed) if listed else "raw"} close')
        if (value := parameter.json()) is not None:
            opening = literal(f' parameter name="{parameter.name}" string="false">')
            forms.append(f'"<" {self._mark} {opening} {value} "</" close')
        return forms
