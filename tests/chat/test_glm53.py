"""GLM-5.3's prompts and outputs against the reference vectors, every cutting of them, and against random text."""

import itertools
import json
import re

import pytest
from encoding_cases import GOLDEN, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import build

from tided.api.messages import parse_messages, parse_tools
from tided.chat.deltas import CallArguments, CallStarted, Content, Reasoning
from tided.chat.fields import Fields
from tided.chat.glm53 import EFFORT_BY_NAME, MAX, REQUIRED_SPECIALS, encode_prompt
from tided.chat.glm53_markers import MARKER_TOKENS
from tided.chat.glm53_parse import Glm53Parser
from tided.chat.messages import Conversation, Message, Segment, Tool, ToolCall
from tided.chat.tokenizer import Tokenizer
from tided.errors import RequestError

PROMPTS, OUTPUTS = cases("glm53_prompts.json"), cases("glm53_outputs.json")


def conversation(request: dict) -> Conversation:
    options = request["options"]
    effort = {"low": 33, "high": 75}.get(options.get("reasoning_effort"), MAX)  # the template knows no others
    return Conversation(
        messages=parse_messages(Fields(request)),
        tools=parse_tools(Fields(request)),
        effort=effort,
        clear_thinking=options.get("clear_thinking", False),
    )


@pytest.mark.parametrize("case", PROMPTS, ids=[case["id"] for case in PROMPTS])
def test_reference_prompt(case):
    assert encode_prompt(conversation(case["request"])).text == case["expected"]["prompt"]


def by_token(text: str) -> str:
    for spelling, private in MARKER_TOKENS.items():
        text = text.replace(spelling, private)
    return text


def read(parser: Glm53Parser, pieces, reason: str = "stop") -> dict:
    """What a streaming client puts together."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(reason)
    calls: list[dict] = []
    for delta in deltas:
        if isinstance(delta, CallStarted):
            assert delta.index == len(calls)
            calls.append({"name": delta.name, "arguments": ""})
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            calls[-1]["arguments"] += delta.text
    assert all(not hasattr(delta, "text") or delta.text for delta in deltas), "an empty delta"
    return {
        "reasoning": "".join(d.text for d in deltas if isinstance(d, Reasoning)),
        "content": "".join(d.text for d in deltas if isinstance(d, Content)),
        "calls": calls,
        "finish_reason": parser.finish_reason,
    }


def cuttings(text: str):
    """Whole, every single cut, and pieces of N characters."""
    yield [text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield from ([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 5, 7, 11))


TOOLS = tuple(
    Tool(name, {"name": name, "parameters": {"type": "object", "properties": properties}})
    for name, properties in {
        "read_file": {"path": {"type": "string"}, "limit": {"type": "integer"}},
        "read": {"path": {"type": "string"}},
        "run_shell": {
            "command": {"type": "string"},
            "timeout_s": {"type": "number"},
            "env": {"type": "object"},
            "dry": {"type": "boolean"},
            "tags": {"type": "array"},
        },
        "write": {"text": {"type": "string"}},
        "list_ports": {},
        "mixed": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "place": {"$ref": "#/$defs/place"},
            "choice": {"enum": ["1", "2"]},
        },
    }.items()
)
TOOLS[-1].shown["parameters"]["$defs"] = {"place": {"type": "object"}}


def everywhere(text: str, reason: str = "stop", *, start="content", tools=TOOLS, **options) -> dict:
    """The result, after checking that no cutting changes it, by spelling or by token."""
    results = [
        read(Glm53Parser(start=start, tools=tools, by_token=tokens, **options), pieces, reason)
        for tokens in (False, True)
        for pieces in cuttings(by_token(text) if tokens else text)
    ]
    assert all(result == results[0] for result in results)
    return results[0]


def arguments(result: dict) -> list:
    return [json.loads(call["arguments"]) for call in result["calls"]]


@pytest.mark.parametrize("case", OUTPUTS, ids=[case["id"] for case in OUTPUTS])
def test_reference_output(case):
    declared = json.loads((GOLDEN / "glm53_outputs.json").read_text(encoding="utf-8"))
    options, expected = case["options"], case["expected"]
    got = everywhere(
        case["output_text"],
        options["backend_finish"],
        start="reasoning",
        stops=options.get("stop", ()),
        tools=parse_tools(Fields(declared)),
    )
    assert (got["reasoning"], got["content"]) == (expected["reasoning_content"], expected["content"])
    assert got["finish_reason"] == expected["finish_reason"]
    calls = [(call["name"], json.loads(call["arguments"])) for call in got["calls"]]
    assert calls == [(call["name"], call["arguments"]) for call in expected["tool_calls"]]


def call(name: str, *pairs: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>{name}{inner}</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>write<arg_key>text</arg_key>a b</arg_value></tool_call>", {"text": "a b"}),
        ("<tool_call>read_filepath</arg_key><arg_value>a</arg_value></tool_call>", {"path": "a"}),
        ("<tool_call>read_file path</arg_key>a</arg_value></tool_call>", {"path": "a"}),
        ("<tool_call>write<arg_key> text <arg_value>a</arg_value></tool_call>", {"text": "a"}),
        ("<tool_call>write<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n", {"text": "a"}),
        ("<tool_call>list_ports\n</tool_call>", {}),
        ("<tool_call>list_ports", {}),
        (call("mixed", ("maybe", "null")), {"maybe": None}),
        (call("mixed", ("maybe", " x ")), {"maybe": " x "}),
        (call("mixed", ("maybe", "7")), {"maybe": "7"}),
        (call("mixed", ("either", "7")), {"either": 7}),
        (call("mixed", ("either", "7.5")), {"either": "7.5"}),
        (call("mixed", ("either", "7" * 400)), {"either": int("7" * 400)}),
        (call("mixed", ("place", '{"a": 1}')), {"place": {"a": 1}}),
        (call("mixed", ("choice", "1")), {"choice": "1"}),
        (call("unknown", ("a", "7"), ("b", '"s"'), ("c", "NaN")), {"a": 7, "b": '"s"', "c": "NaN"}),
        (call("write", ("text", "1"), ("text", "2")), {"text": "2"}),
        (call("write", ("text", "<arg_key></tool_call></think>")), {"text": "<arg_key></tool_call></think>"}),
    ],
    ids=range(18),
)
def test_recovered_calls(text, expected):
    result = (
        everywhere(text)
        if len(text) < 1000
        else read(Glm53Parser(start="content", tools=TOOLS, by_token=False), [text])
    )
    assert (arguments(result), result["finish_reason"]) == ([expected], "tool_calls")


def test_json_deeper_than_any_reader_is_text():
    text = call("run_shell", ("env", "[" * 100_000))
    assert arguments(read(Glm53Parser(start="content", tools=TOOLS, by_token=False), [text])) == [
        {"env": "[" * 100_000}
    ]


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("<arg_key>pa", '{"pa'),
        ("<arg_key>path</arg_key>", '{"path'),
        ("<arg_key>path</arg_key><arg_value>a", '{"path": "a'),
        ("<arg_key>limit</arg_key><arg_value>2", '{"limit": 2'),
    ],
)
def test_cut_calls_show_what_had_come(text, sent):
    result = everywhere("<tool_call>read_file" + text, "length")
    assert (result["calls"][0]["arguments"], result["finish_reason"]) == (sent, "length")


def test_the_beginning_of_a_spelled_tag_is_dropped_from_a_cut_call():
    text = "<tool_call>write<arg_key>text</arg_key><arg_value>a</arg_"
    results = [read(Glm53Parser(start="content", tools=TOOLS, by_token=False), cut, "length") for cut in cuttings(text)]
    assert all(result["calls"] == [{"name": "write", "arguments": '{"text": "a'}] for result in results)


def test_calls_without_their_end_are_ended_by_the_next():
    text = "<tool_call>write<arg_key>text</arg_key><arg_value>a</arg_value>" + call("list_ports") * 2
    assert arguments(everywhere(text)) == [{"text": "a"}, {}, {}]
    assert arguments(everywhere(text, max_calls=1)) == [{"text": "a"}]


def test_markup_is_text_without_tools_and_when_the_token_is_not_its():
    text = "say </arg_key> and <tool_call>write</tool_call>"
    assert everywhere(text, tools=None)["content"] == text
    assert read(Glm53Parser(start="content", tools=TOOLS), [text])["content"] == text


def test_stray_tags_and_empty_calls_leave_nothing():
    assert everywhere("a</tool_call>b</think>c")["content"] == "abc"
    result = everywhere("a<tool_call>\n</tool_call>")
    assert (result["content"], result["calls"], result["finish_reason"]) == ("a", [], "stop")


def test_stop_strings():
    assert everywhere("abc DEFGHIJ more", stops=["DEFGHIJ"])["content"] == "abc "
    assert everywhere("ends in DEF", stops=["DEFGHIJ"])["content"] == "ends in DEF"
    assert everywhere("x\n\n" + call("list_ports"), stops=["\n\n"])["calls"] == []
    held = everywhere("abc ST" + call("list_ports"), stops=["STOP"])
    assert (held["content"], held["finish_reason"]) == ("abc ST", "tool_calls")


PIECES = st.sampled_from([*MARKER_TOKENS, "\n", " ", "write", "text", "é潮🌊", "<", "</", "<|user", '"', "\\", "7"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 60), max_size=6), st.sampled_from(["stop", "length"]))
def test_no_cutting_of_anything_changes_it(parts, at, reason):
    text = "".join(parts)
    ends = sorted({min(end, len(text)) for end in at} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    for tools in (TOOLS, None):
        whole, cut = (
            read(Glm53Parser(start="reasoning", tools=tools, by_token=False), given, reason)
            for given in ([text], pieces)
        )
        assert whole == cut
        assert reason == "length" or all(json.loads(c["arguments"]) is not None for c in whole["calls"][:-1])


WORDS = st.text(st.characters(exclude_characters="<\n", exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS, st.lists(st.tuples(WORDS, WORDS), max_size=3), st.integers(1, 9))
def test_reasoning_content_and_calls_are_all_that_was_written(reasoning, content, pairs, size):
    """Also a turn that is read is the turn that is rendered again."""
    keys = [(f"k{at}{key.strip()}".strip(), value) for at, (key, value) in enumerate(pairs)]
    tool = Tool("f", {"name": "f", "parameters": {"properties": {key: {"type": "string"} for key, _ in keys}}})
    text = f"{reasoning}</think>{content}{call('f', *keys)}"
    parser = Glm53Parser(start="reasoning", tools=[tool], by_token=False)
    got = read(parser, [text[at : at + size] for at in range(0, len(text), size)])
    assert (got["reasoning"], got["content"]) == (reasoning, content)
    assert arguments(got) == [dict(keys)]
    again = Message("assistant", (content,), reasoning, (ToolCall("c", "f", got["calls"][0]["arguments"]),))
    rendered = encode_prompt(Conversation(messages=(Message("user", ("q",)), again), open_turn=False)).text
    assert rendered.endswith(text.replace(content + "<tool_call>", content.strip() + "<tool_call>"))


SPELLINGS = st.sampled_from([*REQUIRED_SPECIALS, "a", "\n", "<tools>"])
ANY = st.lists(SPELLINGS | st.text(max_size=3), max_size=4).map("".join)


@settings(max_examples=200, deadline=None)
@given(ANY, ANY, ANY, ANY, ANY)
def test_text_never_becomes_a_special_token(system, user, reasoning, answer, result):
    """The specials of a prompt are those of the same conversation with harmless words."""

    def specials(*texts):
        a, b, c, d, e = texts
        made = (ToolCall("1", "f" + a, json.dumps({"k" + b: e})),)
        messages = [Message("system", (a,)), Message("user", (b,)), Message("assistant", (d,), c or "x", made)]
        tools = (Tool("f", {"name": "f", "description": a + b}),)
        prompt = encode_prompt(Conversation(messages=(*messages, Message("tool", (e,), call_id="1")), tools=tools))
        return [segment.text for segment in prompt.segments if segment.special]

    assert specials(system, user, reasoning, answer, result) == specials("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(build(tmp_path_factory.mktemp("glm"), REQUIRED_SPECIALS))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ANY, ANY), min_size=1, max_size=3))
def test_ids_hold_exactly_the_prompts_own_specials(tokenizer, turns):
    """And the bytes of everything else: emoji and Han characters at the borders included."""
    messages = [m for asked, said in turns for m in (user(asked), Message("assistant", (said,), said))]
    prompt = encode_prompt(Conversation(messages=(*messages, user("涨🌊"))))
    ids = tokenizer.encode(prompt.segments)
    spelled = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}
    assert [spelled[i] for i in ids if i in spelled] == [s.text for s in prompt.segments if s.special]
    decoder = tokenizer.decoder(spelled)
    assert "".join(decoder.feed([token_id]) for token_id in ids) == prompt.text


@pytest.mark.parametrize("case", [c for c in OUTPUTS if "潮" in c["output_text"] or "é" in c["output_text"]])
def test_an_answer_by_its_tokens_is_the_answer_by_its_text(tokenizer, case):
    """As the server reads it: ids to text with marks, text to pieces."""
    declared = json.loads((GOLDEN / "glm53_outputs.json").read_text(encoding="utf-8"))
    tools = parse_tools(Fields(declared))
    pieces = re.split("(" + "|".join(map(re.escape, MARKER_TOKENS)) + ")", case["output_text"])
    ids = tokenizer.encode([Segment(piece, special=at % 2 == 1) for at, piece in enumerate(pieces)])
    decoder = tokenizer.decoder({tokenizer.special_id(spelling): mark for spelling, mark in MARKER_TOKENS.items()})
    streamed = read(Glm53Parser(start="reasoning", tools=tools), [decoder.feed([token_id]) for token_id in ids])
    assert streamed == read(Glm53Parser(start="reasoning", tools=tools, by_token=False), [case["output_text"]])
    assert streamed["content"] or streamed["calls"]


def user(text: str) -> Message:
    return Message("user", (text,))


def test_without_thinking_the_prompt_closes_an_empty_reasoning():
    prompt = encode_prompt(Conversation(messages=(user("q"),), thinking=False, effort=100))
    assert prompt.text.endswith("Reasoning Effort: Low<|user|>q<|assistant|><think></think>")
    assert prompt.start == "content"


@pytest.mark.parametrize(("effort", "word"), [(1, "Low"), (33, "Low"), (34, "High"), (75, "High"), (76, "Max")])
def test_efforts_by_number(effort, word):
    assert f"Effort: {word}<" in encode_prompt(Conversation(messages=(user("q"),), effort=effort)).text


@pytest.mark.parametrize(("name", "word"), [("minimal", "Low"), ("medium", "High"), ("high", "High"), ("xhigh", "Max")])
def test_efforts_by_name(name, word):
    prompt = encode_prompt(Conversation(messages=(user("q"),), effort=EFFORT_BY_NAME[name]))
    assert f"Effort: {word}<" in prompt.text


def test_results_that_cannot_all_be_told_apart_keep_their_order():
    calls = tuple(ToolCall(f"c{at}", "f", "{}") for at in range(2))
    for ids in (("c1", None), ("c1", "?"), ("c1", "c1")):
        results = [Message("tool", (str(at),), call_id=call_id) for at, call_id in enumerate(ids)]
        text = encode_prompt(Conversation(messages=(user("q"), Message("assistant", calls=calls), *results))).text
        assert text.index(">0<") < text.index(">1<")


@pytest.mark.parametrize("text", ["", "not json", "[1]", "NaN", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_become_one_string(text):
    prompt = encode_prompt(Conversation(messages=(Message("assistant", calls=(ToolCall("c", "f", text),)),)))
    assert f"<arg_key>arguments</arg_key><arg_value>{text}</arg_value>" in prompt.text


def test_continue_says_where_the_output_begins():
    half = Message("assistant", ("half",), "why")
    prompt = encode_prompt(Conversation(messages=(user("q"), half), continue_final=True))
    assert prompt.text.endswith("<think>why</think>half")
    assert (prompt.start, prompt.leading) == ("content", False)
    prompt = encode_prompt(Conversation(messages=(user("q"), Message("assistant", (), "Let me")), continue_final=True))
    assert prompt.text.endswith("<think>Let me")
    assert (prompt.start, prompt.leading) == ("reasoning", False)


@pytest.mark.parametrize("odd", [Message("latest_reminder", ("x",)), Message("user", ("x",), task="query")])
def test_what_the_model_does_not_know_is_refused(odd):
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        encode_prompt(Conversation(messages=(odd,)))


def test_next_turn_begins_with_this_one():
    first, second = (
        next(c["expected"]["prompt"] for c in PROMPTS if c["id"] == f"glm-prefix-pair-{letter}") for letter in "ab"
    )
    assert second.startswith(first)
