"""The prompt format against the reference prompts, byte for byte, with the spans of the special tokens."""

import msgspec
import pytest
from encoding_cases import cases

from tided.api.messages import parse_messages, parse_tools
from tided.chat.deepseek_v41 import DEFAULT_EFFORT, EFFORT_BY_NAME, encode_prompt
from tided.chat.fields import Fields
from tided.chat.messages import Conversation, Message, Prompt, Tool, ToolCall

CASES = cases("deepseek_v41_prompts.json")


def conversation(request: dict) -> Conversation:
    options = request["options"]
    messages = list(parse_messages(Fields(request)))
    tasks = [value.get("task") for value in request["messages"]]
    if "task" in options:
        tasks[max(i for i, m in enumerate(messages) if m.role == "user")] = options["task"]
    effort = options.get("reasoning_effort", DEFAULT_EFFORT)
    schema = options.get("response_format", {}).get("json_schema", {}).get("schema")
    return Conversation(
        messages=tuple(msgspec.structs.replace(m, task=task) for m, task in zip(messages, tasks, strict=True)),
        tools=() if options.get("tool_choice") == "none" else parse_tools(Fields(request)),
        thinking=options["thinking"],
        effort=EFFORT_BY_NAME.get(effort, effort),
        schema=schema,
        must_call=options.get("tool_choice") == "required",
        continue_final=options.get("continue_final_message", False),
        open_turn=options.get("add_generation_prompt", True),
    )


def spans(prompt: Prompt) -> list[list[int]]:
    found, at = [], 0
    for segment in prompt.segments:
        if segment.special:
            found.append([at, at + len(segment.text)])
        at += len(segment.text)
    return found


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_reference_prompt(case):
    prompt = encode_prompt(conversation(case["request"]))
    assert prompt.text == case["expected"]["prompt"]
    if "special_token_spans" in case["expected"]:
        assert spans(prompt) == case["expected"]["special_token_spans"]


def test_next_turn_begins_with_this_one():
    first, second = (
        next(c["expected"]["prompt"] for c in CASES if c["id"] == f"ds-prefix-pair-1{letter}") for letter in "ab"
    )
    assert second.startswith(first)


def chat(*messages: Message, **options) -> Prompt:
    return encode_prompt(Conversation(messages=messages, **options))


def test_text_between_specials_is_one_segment():
    prompt = chat(Message("system", ("Be exact.",)), Message("user", ("a",)), Message("user", ("b",)))
    assert not any(not a.special and not b.special for a, b in zip(prompt.segments, prompt.segments[1:], strict=False))
    assert [s.text for s in prompt.segments if not s.special][1:] == ["a\n\nb"]


def test_unpaired_surrogates_become_replacement_characters_also_inside_arguments():
    call = ToolCall("c", "f", '{"a": "\\ud800"}')
    prompt = chat(Message("user", ("x\udfff",)), Message("assistant", calls=(call,)), tools=(Tool("f", {"name": "f"}),))
    prompt.text.encode()
    assert "x\ufffd" in prompt.text
    assert '">\ufffd<' in prompt.text


@pytest.mark.parametrize("text", ["", "not json", "[1]", "NaN", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_become_one_string_parameter(text):
    prompt = chat(Message("assistant", calls=(ToolCall("c", "f", text),)))
    assert f'parameter name="arguments" string="true">{text}</' in prompt.text


def test_results_without_ids_keep_their_order_and_unknown_ids_come_first():
    calls = tuple(ToolCall(f"c{n}", "f", "{}") for n in range(3))
    results = [Message("tool", (str(n),), call_id=call_id) for n, call_id in enumerate((None, "c2", "?"))]
    text = chat(Message("user", ("q",)), Message("assistant", calls=calls), *results).text
    assert text.index(">0<") < text.index(">2<") < text.index(">1<")


def test_empty_system_messages_leave_no_trace():
    bare = chat(Message("user", ("q",)), thinking=False)
    assert chat(Message("system", ("",)), Message("user", ("q",)), Message("system"), thinking=False) == bare


def test_the_current_tool_round_keeps_its_reasoning_without_tools():
    call = Message("assistant", reasoning="because", calls=(ToolCall("c", "f", "{}"),))
    question = Message("user", ("q",))
    assert "because" in chat(question, call, Message("tool", ("r",), call_id="c")).text
    assert "because" not in chat(question, call, Message("tool", ("r",), call_id="c"), Message("user", ("next",))).text


def test_continue_says_where_the_output_begins():
    question = Message("user", ("q",))
    prompt = chat(question, Message("assistant", ("half",), "why"), continue_final=True)
    assert prompt.text.endswith("<think>why</think>half")
    assert (prompt.start, prompt.leading) == ("content", False)
    prompt = chat(question, Message("assistant", (), "Let me"), continue_final=True)
    assert (prompt.start, prompt.leading) == ("reasoning", False)
