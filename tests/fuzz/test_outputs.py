"""What a model may write, by families: any text, in any pieces, with stop strings and limits, is an answer of the same
parts; what is written on the way is what stands at the end."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.damage import EXAMPLES, FUZZ
from tided.chat.deltas import CallArguments, CallStarted, Content, Delta, Reasoning
from tided.chat.families import FAMILIES, Family
from tided.chat.messages import Tool

SHAPE = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}}
TOOLS = [Tool(name, {"name": name, "parameters": SHAPE}) for name in ("f", "find")]
DSML = "｜DSML｜"
INVOKE, PARAMETER = f"<{DSML} invoke name=", f"<{DSML} parameter name="
MARKUP = (
    f"<{DSML} calls>", f"</{DSML} calls>", f'{INVOKE}"f">', f'{INVOKE}"g">', f"</{DSML} invoke>",
    f'{PARAMETER}"a" string="true">', f'{PARAMETER}"n" string="false">', f"</{DSML} parameter>",
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|user|>",
    "<|observation|>", "<|endoftext|>", "<think>", "</think>", "find", "a", "n", "STOP",
)  # fmt: skip
CALLS = (
    f"\n\n<{DSML} calls>\n",
    f'{INVOKE}"f">\n{PARAMETER}"a" string="true">x STOP</{DSML} parameter>\n</{DSML} invoke>\n',
    f'{INVOKE}"find">\n{PARAMETER}"n">7</{DSML} parameter>\n{PARAMETER}"b">"</{DSML} parameter>\n</{DSML} invoke>\n',
    "\n\n<tool_call>find<arg_key>a</arg_key><arg_value>7 STOP</arg_value><arg_key>n</arg_key><arg_value>7</arg_value>",
    "</tool_call>",
    "<tool_call>f</tool_call>",
)
TEXTS = st.text(st.sampled_from("aZ <>/|｜\"'\\{}[]:,0-\n\té潮🌊\u200d\x00"), max_size=6)
WRITTEN = st.lists(st.sampled_from(CALLS) | st.sampled_from(MARKUP) | TEXTS, max_size=24).map("".join)


def parameters(arguments: str) -> Any:
    """By what a client reads: of a parameter that came twice a stream has both, and its last value counts."""
    try:
        return json.loads(arguments)
    except ValueError:  # cut off
        return arguments


def read(family: Family, pieces: list[str], reason: Any, **options: Any) -> list[Any]:
    """The answer as a client puts it together."""
    parser = family.parser(by_token=False, **options)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish(reason)
    parts: list[Any] = ["", "", [], parser.finish_reason, parser.stop_string]
    for delta in deltas:
        match delta:
            case Reasoning(text):
                parts[0] += text
            case Content(text):
                parts[1] += text
            case CallStarted(index, _, name):
                assert index == len(parts[2])
                parts[2].append([name, ""])
            case CallArguments(index, text):
                assert index == len(parts[2]) - 1
                parts[2][index][1] += text
    assert len(parser.calls) >= len(parts[2])
    for call, (name, arguments) in zip(parser.calls, parts[2], strict=False):
        assert (call.name, parameters(call.arguments)) == (name, parameters(arguments))
    if parser.finish_reason != "length":
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in parts[2])
    assert (parser.finish_reason == "tool_calls") <= bool(parts[2])
    return parts


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_answer(family):
    @settings(FUZZ, max_examples=4 * EXAMPLES)
    @given(
        WRITTEN, st.lists(st.integers(0, 200), max_size=12), st.sampled_from(["stop", "length"]),
        st.sampled_from([TOOLS, None]), st.sampled_from([(), ("STOP",), ("\n", "潮")]), st.sampled_from([None, 1]),
        st.sampled_from(["reasoning", "content"]),
    )  # fmt: skip
    def tried(text, at, reason, tools, stops, most, start):
        options = {"tools": tools, "stops": stops, "max_calls": most, "start": start}
        ends = sorted({min(end, len(text)) for end in at} | {0, len(text)})
        cut = [text[a:b] for a, b in itertools.pairwise(ends)]
        whole = read(family, [text], reason, **options)
        assert whole == read(family, cut, reason, **options) == read(family, list(text), reason, **options)
        assert tools or not whole[2]
        assert all(stop not in whole[1] for stop in stops)

    tried()
