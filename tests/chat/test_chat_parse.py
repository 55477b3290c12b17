"""The output parser against the reference outputs, in every cutting, by spelling and by token."""

import itertools
import json
from collections.abc import Sequence

import pytest
from encoding_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.chat.deltas import CallArguments, CallStarted, Content, Reasoning
from tided.chat.markers import BY_SPELLING, BY_TOKEN, MARKER_TOKENS
from tided.chat.messages import Tool
from tided.chat.parse import OutputParser

CASES = cases("deepseek_v41_outputs.json")
SIZES = [0, 1, 2, 3, 5, 7]


def by_token(text: str) -> str:
    for spelling, private in MARKER_TOKENS.items():
        text = text.replace(spelling, private)
    return text


def read(parser: OutputParser, text: str, size: int, reason: str = "stop") -> dict:
    """What a streaming client puts together."""
    step = size or max(len(text), 1)
    return read_pieces(parser, [text[at : at + step] for at in range(0, len(text), step)], reason)


def read_pieces(parser: OutputParser, pieces: Sequence[str], reason: str = "stop") -> dict:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(reason)
    calls: list[dict] = []
    for delta in deltas:
        if isinstance(delta, CallStarted):
            assert delta.index == len(calls)
            calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            calls[-1]["arguments"] += delta.text
    assert all(not hasattr(d, "text") or d.text for d in deltas), "an empty delta"
    return {
        "reasoning": "".join(d.text for d in deltas if isinstance(d, Reasoning)),
        "content": "".join(d.text for d in deltas if isinstance(d, Content)),
        "calls": calls,
        "finish_reason": parser.finish_reason,
    }


def parse(text: str, size: int = 0, reason: str = "stop", *, start: str = "content", tools=(), **options) -> dict:
    options.setdefault("markers", BY_SPELLING)
    return read(OutputParser(start=start, tools=tools, **options), text, size, reason)


def everywhere(text: str, reason: str = "stop", **options) -> dict:
    """The result, after checking that no cutting changes it."""
    results = [parse(text, size, reason, **options) for size in SIZES]
    results += [parse(by_token(text), size, reason, markers=BY_TOKEN, **options) for size in SIZES]
    for result in results:
        for call in result["calls"]:
            call.pop("id")
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("markers", [BY_SPELLING, BY_TOKEN], ids=["spelling", "token"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_reference_output(case, size, markers):
    options, expected = case["options"], case["expected"]
    start = "reasoning" if options["thinking"] else "content"
    parser = OutputParser(
        start="calls" if options.get("starts_inside_calls_block") else start,
        stops=options.get("stop", ()),
        tools=() if options.get("tools_enabled", True) else None,
        markers=markers,
    )
    text = case["output_text"] if markers is BY_SPELLING else by_token(case["output_text"])
    got = read(parser, text, size, options["backend_finish"])
    assert (got["reasoning"], got["content"]) == (expected["reasoning_content"], expected["content"])
    assert got["finish_reason"] == expected["finish_reason"]
    assert [c["name"] for c in got["calls"]] == [c["name"] for c in expected["tool_calls"]]
    for call, whole, wanted in zip(got["calls"], parser.calls, expected["tool_calls"], strict=True):
        if "arguments_partial" in wanted:
            assert call["arguments"] == whole.arguments == wanted["arguments_partial"]
        else:
            assert json.loads(call["arguments"]) == json.loads(whole.arguments) == wanted["arguments"]
        assert call["arguments"] == wanted.get("arguments_text", call["arguments"])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_every_single_cut_of_a_reference_output(case):
    options, text = case["options"], case["output_text"]
    start = "reasoning" if options["thinking"] else "content"

    def parser() -> OutputParser:
        return OutputParser(
            start="calls" if options.get("starts_inside_calls_block") else start,
            stops=options.get("stop", ()),
            tools=() if options.get("tools_enabled", True) else None,
            markers=BY_SPELLING,
        )

    def pieces(*parts: str) -> dict:
        return without_ids(read_pieces(parser(), parts, options["backend_finish"]))

    whole = pieces(text)
    assert all(pieces(text[:at], text[at:]) == whole for at in range(1, len(text)))


def without_ids(result: dict) -> dict:
    for call in result["calls"]:
        call.pop("id")
    return result


D = "｜DSML｜"


def block(*invokes: str) -> str:
    return f"\n\n<{D} calls>\n" + "\n".join(invokes) + f"\n</{D} calls>"


def invoke(name: str, *parameters: str) -> str:
    return f'<{D} invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{D} invoke>"


def parameter(name: str, value: str, string: bool = True) -> str:
    return f'<{D} parameter name="{name}" string="{"true" if string else "false"}">{value}</{D} parameter>'


def arguments(result: dict) -> list:
    return [json.loads(call["arguments"]) for call in result["calls"]]


def test_no_markup_in_arguments_that_end_like_a_tag():
    result = everywhere(block(invoke("run", parameter("command", "ls 2>&1"), parameter("x", "a</b"))))
    assert arguments(result) == [{"command": "ls 2>&1", "x": "a</b"}]
    assert D not in json.dumps(result, ensure_ascii=False)


def test_spelled_markers_stay_text_when_the_token_is_not_theirs():
    text = f"say </think> and <{D} calls> please"
    assert parse(text, 1, markers=BY_TOKEN)["content"] == text
    private = by_token(block(invoke("run", parameter("command", "@"))))
    spelled = f"echo </{D} parameter>"
    assert arguments(parse(private.replace("@", spelled), 3, markers=BY_TOKEN)) == [{"command": spelled}]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("invalid JSON becomes a string", parameter("a", "{x", False), {"a": "{x"}),
        ("NaN is no JSON", parameter("a", "NaN", False), {"a": "NaN"}),
        ("a declared JSON string", parameter("a", '"s"', False), {"a": "s"}),
        ("no attribute, bare string", f'<{D} parameter name="a">"s"</{D} parameter>', {"a": '"s"'}),
        ("a quote in a parameter's name", parameter('a"b', "v"), {'a"b': "v"}),
        ("the last of three wins", parameter("a", "1") + parameter("a", "2", False) + parameter("a", "3"), {"a": "3"}),
        ("a parameter without its end", f'<{D} parameter name="a" string="true">v', {"a": "v"}),
        ("deep JSON", parameter("a", "[" * 5000, False), {"a": "[" * 5000}),
    ],
)
def test_malformed_parameters(name, text, expected):
    result = everywhere(block(invoke("f", text)))
    got = arguments(result)[0]
    assert {k: v.strip() if isinstance(v, str) else v for k, v in got.items()} == expected
    assert result["finish_reason"] == "tool_calls"


def test_a_repeated_parameter_is_one_key_in_the_whole_reply():
    parser = OutputParser(start="content", tools=(), markers=BY_SPELLING)
    read(parser, block(invoke("f", parameter("a", "1"), parameter("a", "2"))), 1)
    assert parser.calls[0].arguments == '{"a": "2"}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f'\n\n<{D} calls>\n<{D} invoke name="f">\n</{D} calls>', [{}]),
        (f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} invoke name="g">\n</{D} calls>', [{}, {}]),
        (f'\n\n<{D} calls>\n<{D} invoke name="f">\n' + parameter("a", "1"), [{"a": "1"}]),
        (f"\n\n<{D} calls>\n" + invoke("f"), [{}]),
        (f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n</{D}invoke>\n</{D}tool_calls>tail', [{}]),
        (block(invoke("f")) + block(invoke("g")), [{}]),
        (block("chatter", invoke("f"), "more", invoke("g")), [{}, {}]),
    ],
)
def test_recovered_blocks(text, calls):
    result = everywhere("before" + text)
    assert (arguments(result), result["content"], result["finish_reason"]) == (calls, "before", "tool_calls")


@pytest.mark.parametrize("text", [block(), f"\n\n<{D} calls>", f"\n\n<{D} calls>\nhm\n</{D} calls>\nmore"])
def test_a_block_without_a_call_leaves_nothing(text):
    result = everywhere("text" + text)
    assert (result["content"], result["calls"], result["finish_reason"]) == ("text", [], "stop")


@pytest.mark.parametrize("tag", [f"</{D} calls>", f"</{D} invoke>", f"</{D}parameter>"])
def test_stray_closing_tags_are_swallowed(tag):
    assert everywhere(f"a{tag}b")["content"] == "ab"
    assert everywhere(f"a{tag}b</think>c", start="reasoning")["reasoning"] == "ab"


TOOL = Tool("f", {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}})


def test_an_invoke_without_block_counts_once_closed_and_declared():
    assert arguments(everywhere("x\n\n" + invoke("f", parameter("a", "1")), tools=(TOOL,))) == [{"a": "1"}]
    prose = f'write <{D} invoke name="f"> to call'
    assert everywhere(prose, tools=(TOOL,))["content"] == prose
    unknown = "see\n" + invoke("g") + " end"
    assert everywhere(unknown, tools=(TOOL,))["content"] == unknown


def test_wrapped_arguments_are_unwrapped_only_when_alone_and_unknown():
    wrapped = parameter("arguments", '{"a": 1}', False)
    assert arguments(everywhere(block(invoke("f", wrapped)), tools=(TOOL,))) == [{"a": 1}]
    both = everywhere(block(invoke("f", wrapped, parameter("a", "2"))), tools=(TOOL,))
    assert arguments(both) == [{"arguments": {"a": 1}, "a": "2"}]
    assert arguments(everywhere(block(invoke("g", wrapped)), tools=(TOOL,))) == [{"arguments": {"a": 1}}]
    meant = Tool("f", {"name": "f", "parameters": {"properties": {"arguments": {}}}})
    assert arguments(everywhere(block(invoke("f", wrapped)), tools=(meant,))) == [{"arguments": {"a": 1}}]


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        (f'<{D} parameter name="li', '{"li'),
        (f'<{D} parameter name="limit" stri', '{"limit'),
        (f'<{D} parameter name="limit" string="false">2', '{"limit": 2'),
        (f'<{D} parameter name="limit" string="true">2</', '{"limit": "2'),
        (f'<{D} parameter name="limit" string="true">2</{D} para', '{"limit": "2"'),
    ],
)
def test_cut_calls_show_what_had_come(text, sent):
    result = everywhere(f'\n\n<{D} calls>\n<{D} invoke name="f">\n' + text, "length")
    assert (result["calls"][0]["arguments"], result["finish_reason"]) == (sent, "length")


def test_an_end_inside_a_parameter_is_no_natural_end():
    text = f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="a" string="true">v'
    assert everywhere(text)["finish_reason"] == "length"


def test_max_calls_ends_the_answer():
    result = everywhere(block(invoke("f"), invoke("g")), max_calls=1)
    assert [call["name"] for call in result["calls"]] == ["f"]
    assert result["finish_reason"] == "tool_calls"


def test_stop_strings():
    assert everywhere("abc DEFGHIJ more", stops=["DEFGHIJ"])["content"] == "abc "
    assert everywhere("abc DEFGHX", stops=["DEFGHIJ"])["content"] == "abc DEFGHX"
    assert everywhere("ends in DEF", stops=["DEFGHIJ"])["content"] == "ends in DEF"
    assert everywhere("aab", stops=["ab", "aab"])["content"] == ""
    assert everywhere("x\n\n" + block(invoke("f")).lstrip(), stops=["\n\n"])["content"] == "x"
    assert everywhere("x\n\n" + block(invoke("f")).lstrip(), stops=["\n\n"])["calls"] == []
    held = everywhere("abc ST" + block(invoke("f")), stops=["STOP"])
    assert (held["content"], held["finish_reason"]) == ("abc ST", "tool_calls")
    assert everywhere("</think>\n\nfine", start="reasoning", stops=["\n\n"])["content"] == "fine"
    assert len(everywhere(block(invoke("f")), stops=["\n\n"])["calls"]) == 1


def test_newlines_after_a_continued_prompt_are_kept():
    assert everywhere("\n\nmore", leading=False)["content"] == "\n\nmore"


def test_newlines_are_held_until_it_is_clear_whose_they_are():
    parser = OutputParser(start="reasoning", tools=())
    for _ in range(3000):
        assert parser.feed("\n") == []
    assert parser.feed("x") == [Reasoning("x")]
    for _ in range(3000):
        assert parser.feed("\n") == []
    assert parser.feed("y") == [Reasoning("\n" * 3000 + "y")]


def test_call_ids_are_unique():
    parser = OutputParser(start="content", tools=(), markers=BY_SPELLING)
    read(parser, block(*[invoke("f")] * 20), 0)
    ids = {call.id for call in parser.calls}
    assert len(ids) == 20
    assert all(len(i) == 29 and i.startswith("call_") for i in ids)


TEXTS = st.text(st.characters(exclude_characters="<\n", exclude_categories=["Cs"]), max_size=8)
TAGS = [
    f"<{D}",
    f"</{D}",
    f"<{D} calls>",
    " calls>",
    "tool_calls>",
    " invoke>",
    ' invoke name="f">',
    f"</{D} parameter>",
]
NAMES = [' parameter name="a" string="true">', ' parameter name="b">']
PIECES = st.sampled_from(["</think>", *TAGS, *NAMES, "\n", "é潮🌊", "x", " ", '"', "<", "7"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=14), st.lists(st.integers(0, 90), max_size=6), st.sampled_from(["stop", "length"]))
def test_no_cutting_of_anything_changes_it(parts, at, reason):
    text = "".join(parts)
    ends = sorted({min(end, len(text)) for end in at} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    for tools in ((TOOL,), None):
        parsers = [OutputParser(start="reasoning", tools=tools, markers=BY_SPELLING) for _ in range(2)]
        whole, cut = (
            without_ids(read_pieces(parser, given, reason))
            for parser, given in zip(parsers, ([text], pieces), strict=True)
        )
        assert whole == cut


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, st.dictionaries(st.sampled_from("abc"), TEXTS, max_size=3), st.integers(1, 9))
def test_reasoning_content_and_calls_are_all_that_was_written(reasoning, content, given_arguments, size):
    call = block(invoke("f", *(parameter(name, value) for name, value in given_arguments.items())))
    got = parse(f"{reasoning}</think>{content}{call}", size, start="reasoning", tools=(TOOL,))
    assert (got["reasoning"], got["content"], arguments(got)) == (reasoning, content, [given_arguments])
