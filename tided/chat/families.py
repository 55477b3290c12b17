"""The text formats of the models, by family: what a prompt is, and how output is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from tided.chat import deepseek_v41, deepseek_v41_tools, glm53, glm53_markers, glm53_parse, markers, parse
from tided.chat.answer_parse import FinishReason
from tided.chat.calls_reading import FinishedCall
from tided.chat.deepseek_v41_grammar import DeepseekV41Grammar
from tided.chat.deltas import Delta
from tided.chat.glm53_grammar import Glm53Grammar
from tided.chat.grammar_terms import AnswerGrammar, Usable
from tided.chat.messages import Conversation, Prompt, Start, Tool
from tided.chat.tokenizer import Tokenizer
from tided.errors import DataError

FamilyName = Literal["deepseek-v41", "glm53"]


class Parser(Protocol):
    """Output in pieces of text, in any cutting, to pieces of an answer."""

    finish_reason: FinishReason

    @property
    def state(self) -> str:
        """`reasoning`, `content`, or what no text of the answer comes from."""
        ...

    @property
    def done(self) -> bool: ...
    @property
    def stop_string(self) -> str | None: ...
    @property
    def calls(self) -> list[FinishedCall]: ...
    def feed(self, text: str) -> list[Delta]: ...
    def finish(self, reason: Literal["stop", "length"]) -> list[Delta]: ...


class MakeParser(Protocol):
    def __call__(
        self,
        *,
        start: Start,
        leading: bool = True,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
        by_token: bool = True,
        max_calls: int | None = None,
    ) -> Parser: ...


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """`model_type`: of a checkpoint's configuration. `efforts`: number by name. `begin`: what every prompt begins with.
    `stop_tokens` end an answer; the first is the end of a text. `marks`: what a decoder puts for each marker token, for
    parsers that are made with `by_token`. `end_think` ends the reasoning. `image`: the token that stands for an image;
    empty: the format has none. `always_thinks`: it has no mode without thinking."""

    name: FamilyName
    model_type: str
    encode_prompt: Callable[[Conversation], Prompt]
    parser: MakeParser
    required_specials: tuple[str, ...]
    begin: tuple[str, ...]
    stop_tokens: tuple[str, ...]
    end_think: str
    marks: Mapping[str, str]
    efforts: Mapping[str, int]
    default_effort: int
    default_max_tokens: Callable[[bool, int], int]
    grammar: Callable[[Tokenizer, Usable], AnswerGrammar]
    image: str = ""
    always_thinks: bool = False

    @property
    def barred_from_reasoning(self) -> tuple[str, ...]:
        """Tokens that would end the reasoning otherwise than by its end: the end of the answer, and calls."""
        return tuple(dict.fromkeys((*self.stop_tokens, *(mark for mark in self.marks if mark != self.end_think))))


def _deepseek_parser(
    *,
    start: Start,
    leading: bool = True,
    stops: Sequence[str] = (),
    tools: Sequence[Tool] | None = None,
    by_token: bool = True,
    max_calls: int | None = None,
) -> Parser:
    spelling = markers.BY_TOKEN if by_token else markers.BY_SPELLING
    return parse.OutputParser(
        start=start, leading=leading, stops=stops, tools=tools, markers=spelling, max_calls=max_calls
    )


DEEPSEEK_V41 = Family(
    name="deepseek-v41",
    model_type="deepseek_v41",
    encode_prompt=deepseek_v41.encode_prompt,
    parser=_deepseek_parser,
    required_specials=deepseek_v41.REQUIRED_SPECIALS,
    begin=(deepseek_v41.BOS,),
    stop_tokens=(deepseek_v41.EOS,),
    end_think=deepseek_v41_tools.END_THINK,
    marks=markers.MARKER_TOKENS,
    efforts=deepseek_v41.EFFORT_BY_NAME,
    default_effort=deepseek_v41.DEFAULT_EFFORT,
    default_max_tokens=deepseek_v41.default_max_tokens,
    grammar=DeepseekV41Grammar,
    image=deepseek_v41.IMAGE,
)
GLM53 = Family(
    name="glm53",
    model_type="glm_moe_dsa",
    encode_prompt=glm53.encode_prompt,
    parser=glm53_parse.Glm53Parser,
    required_specials=glm53.REQUIRED_SPECIALS,
    begin=glm53.BEGIN,
    stop_tokens=glm53.STOPS,
    end_think=glm53.END_THINK,
    marks=glm53_markers.MARKER_TOKENS,
    efforts=glm53.EFFORT_BY_NAME,
    default_effort=glm53.DEFAULT_EFFORT,
    default_max_tokens=glm53.default_max_tokens,
    always_thinks=True,
    grammar=Glm53Grammar,
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in (DEEPSEEK_V41, GLM53)}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's config.json. Raises DataError naming those that are known."""
    name = config.get("model_type")
    for family in FAMILIES.values():
        if family.model_type == name:
            return family
    known = ", ".join(family.model_type for family in FAMILIES.values())
    raise DataError(f"no text format is known for model_type {name!r}", where="config.json", hint=f"known: {known}")
