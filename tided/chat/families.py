"""The text formats of the models, by family: what a prompt is, and how output is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from tided.chat import deepseek_v41, glm53, glm53_markers, glm53_parse, markers, parse
from tided.chat.deltas import Delta
from tided.chat.messages import Conversation, Prompt, Start, Tool
from tided.chat.parse_calls import FinishedCall

FamilyName = Literal["deepseek-v41", "glm53"]
FinishReason = Literal["stop", "length", "tool_calls"]


class Parser(Protocol):
    """Output in pieces of text, in any cutting, to pieces of an answer."""

    finish_reason: FinishReason

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
    """`efforts`: number by name. `stop_tokens` end an answer. `marks`: what a decoder puts for each marker token, for
    parsers that are made with `by_token`."""

    name: FamilyName
    encode_prompt: Callable[[Conversation], Prompt]
    parser: MakeParser
    required_specials: tuple[str, ...]
    stop_tokens: tuple[str, ...]
    marks: Mapping[str, str]
    efforts: Mapping[str, int]
    default_effort: int
    default_max_tokens: Callable[[bool, int], int]


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
    encode_prompt=deepseek_v41.encode_prompt,
    parser=_deepseek_parser,
    required_specials=deepseek_v41.REQUIRED_SPECIALS,
    stop_tokens=(deepseek_v41.EOS,),
    marks=markers.MARKER_TOKENS,
    efforts=deepseek_v41.EFFORT_BY_NAME,
    default_effort=deepseek_v41.DEFAULT_EFFORT,
    default_max_tokens=deepseek_v41.default_max_tokens,
)
GLM53 = Family(
    name="glm53",
    encode_prompt=glm53.encode_prompt,
    parser=glm53_parse.Glm53Parser,
    required_specials=glm53.REQUIRED_SPECIALS,
    stop_tokens=glm53.STOPS,
    marks=glm53_markers.MARKER_TOKENS,
    efforts=glm53.EFFORT_BY_NAME,
    default_effort=glm53.DEFAULT_EFFORT,
    default_max_tokens=glm53.default_max_tokens,
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in (DEEPSEEK_V41, GLM53)}
