"""Grammars of answers, followed token by token as the engine does."""

import json
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import build

from tided.chat.anthropic_options import parse_tools
from tided.chat.deepseek_v41 import EOS
from tided.chat.deepseek_v41_grammar import DeepseekV41Grammar
from tided.chat.deepseek_v41_tools import DSML, END_THINK, write_calls
from tided.chat.fields import Fields
from tided.chat.grammar import MOST_SCHEMA_BYTES, Allowance, Grammars
from tided.chat.grammar_worker import MEMORY_BYTES
from tided.chat.messages import Tool, ToolCall
from tided.chat.schema_types import types_of
from tided.chat.segments import SegmentWriter
from tided.chat.tokenizer import Tokenizer
from tided.errors import RequestError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.open(build(tmp_path_factory.mktemp("grammar")))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, EOS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def answers(tokenizer, grammars) -> DeepseekV41Grammar:
    return DeepseekV41Grammar(tokenizer, partial(grammars.error, param="tools"))


def tool(name="f", required=None, **properties) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
    }
    return Tool(name, {"name": name, "parameters": parameters}, strict=True)


def bits(mask: bytes, token_id: int) -> bool:
    return token_id // 8 < len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


def ids_of(tokenizer, text: str) -> list[int]:
    ids = []
    for at, piece in enumerate(text.split(DSML)):
        ids += ([tokenizer.special_id(DSML)] if at else []) + tokenizer.encode_text(piece)
    return ids


def follows(tokenizer, grammars, grammar: str, text: str) -> bool:
    """Whether the text is a whole answer of the grammar: every token allowed, and then the end and nothing else."""
    guide, end = grammars.compile(grammar, "x").open(), tokenizer.special_id(EOS)
    for token_id in ids_of(tokenizer, text):
        if not bits(guide.mask(), token_id):
            return False
        guide.advance(token_id)
        assert not guide.error
    return bits(guide.mask(), end)


def block(*calls: tuple[str, dict]) -> str:
    out = SegmentWriter()
    write_calls(out, [ToolCall("", name, json.dumps(arguments)) for name, arguments in calls])
    return "".join(segment.text for segment in out.segments())


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"x": 12, "name": "a"}', True),
        ('{"x":12,\n "name":"é"}', True),
        ('{"x": 1.5, "name": "a"}', False),
        ('{"x": 12}', False),
        ('{"x": 12, "name": "a"', False),
        ('{"x": 12, "name": "a"} and more', False),
        ('{"x":          12, "name": "a"}', False),
        ("Sure: {}", False),
    ],
)
def test_json_of_a_schema_and_nothing_else(tokenizer, grammars, answers, text, fits):
    assert follows(tokenizer, grammars, answers.json(POINT), text) is fits


def test_after_the_value_only_the_end_is_allowed(tokenizer, grammars, answers):
    guide = grammars.compile(answers.json({"type": "object"}), "x").open()
    for token_id in ids_of(tokenizer, '{"a": 1}'):
        guide.advance(token_id)
    mask = guide.mask()
    assert [at for at in range(tokenizer.vocabulary_tokens) if bits(mask, at)] == [tokenizer.special_id(EOS)]
    guide.advance(tokenizer.special_id(EOS))
    assert not guide.error


def test_the_grammar_begins_after_the_reasoning_which_cannot_end_the_answer(tokenizer, grammars, answers):
    """Reasoning is free, and leads to the answer: no end and no calls inside it."""
    ids = tokenizer.special_ids
    guide = grammars.compile(answers.json(POINT), "x").open(ids[END_THINK], (ids[DSML],))
    for token_id in tokenizer.encode_text("Let me think } about [ it"):
        assert bits(guide.mask(), token_id)
        guide.advance(token_id)
    assert not bits(guide.mask(), ids[EOS])
    assert not bits(guide.mask(), ids[DSML])
    guide.advance(ids[END_THINK])
    brace, letter = tokenizer.encode_text("{")[0], tokenizer.encode_text("L")[0]
    assert bits(guide.mask(), brace)
    assert not bits(guide.mask(), letter)


F = tool("f", text={"type": "string"}, n={"type": "integer"})
G = tool("g", required=[], unit={"type": "string", "enum": ["C", "F"]}, deep={"type": "boolean"})


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (block(("f", {"text": "a</div>\n2>&1", "n": 3})), True),
        (block(("f", {"text": "", "n": -3}), ("g", {})), True),
        (block(("g", {"unit": "C", "deep": True})), True),
        (block(("g", {"deep": False})), True),
        (block(("g", {"unit": "K"})), False),
        (block(("h", {})), False),
        (block(("f", {"text": "a"})), False),
        (block(("f", {"n": 3, "text": "a"})), False),
        (block(("f", {"text": "a", "n": "3"})), False),
        (block(("f", {"text": "a", "n": 3, "more": 1})), False),
        (block(("f", {"text": "a", "n": 3})) + "more", False),
        (block(("f", {"text": "a", "n": 3}))[:-4], False),
    ],
)  # fmt: skip
def test_a_block_of_calls_is_what_history_shows_and_keeps_to_the_schemas(tokenizer, grammars, answers, text, fits):
    for forced in (True, False):
        grammar = answers.calls([F, G], "content", forced=forced, single=False)
        assert follows(tokenizer, grammars, grammar, text) is fits


def test_the_calls_of_a_real_agent_fit_the_grammar_of_its_tools(tokenizer, grammars, answers):
    """Schemas as agents have them, with formats, defaults and unions; every call of the recorded session."""
    agent = json.loads((Path(__file__).parents[1] / "e2e/sessions/agent.json").read_text())
    grammar = answers.calls(parse_tools(Fields(agent)), "content", forced=True, single=False)
    turns = [message["content"] for turn in agent["turns"] for message in turn if message["role"] == "assistant"]
    made = [[(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"] for blocks in turns]
    assert sum(map(len, made)) == 8
    for calls in made:
        assert follows(tokenizer, grammars, grammar, block(*calls)), calls
    for name, arguments in (
        ("Read", {"path": "x"}),
        ("Grep", {"pattern": "x", "output_mode": "all"}),
        ("web_search", {}),
    ):
        assert not follows(tokenizer, grammars, grammar, block((name, arguments)))


def test_text_before_a_block_or_without_one_is_free_unless_a_call_is_forced(tokenizer, grammars, answers):
    with_text = "Let me look < 3 </b>." + block(("g", {}))
    free, forced = (answers.calls([F, G], "content", forced=it, single=False) for it in (False, True))
    assert follows(tokenizer, grammars, free, "Just words.")
    assert follows(tokenizer, grammars, free, with_text)
    assert not follows(tokenizer, grammars, forced, "Just words.")
    assert not follows(tokenizer, grammars, forced, with_text)


def test_one_call_where_one_is_asked_for_and_the_prompt_may_have_opened_the_block(tokenizer, grammars, answers):
    opened = answers.calls([F, G], "calls", forced=True, single=True)
    inside = block(("g", {})).partition(" calls>\n")[2]
    twice = block(("g", {}), ("g", {})).partition(" calls>\n")[2]
    assert follows(tokenizer, grammars, opened, inside)
    assert not follows(tokenizer, grammars, opened, twice)


def test_with_tools_a_json_answer_is_the_value_or_a_block(tokenizer, grammars, answers):
    grammar = answers.json(POINT, [G])
    assert follows(tokenizer, grammars, grammar, '{"x": 1, "name": ""}')
    assert follows(tokenizer, grammars, grammar, block(("g", {})))
    assert not follows(tokenizer, grammars, grammar, "text")


def test_what_cannot_be_expressed_leaves_any_json_there(tokenizer, grammars, answers):
    odd = tool(
        a={"type": "array", "uniqueItems": True, "items": {"type": "integer"}, "contains": {"const": 3}},
        b={"$ref": "#/nowhere"},
    )
    assert grammars.error(answers.json({"$ref": "#/nowhere"}), "x")
    grammar = answers.calls([odd], "content", forced=True, single=False)
    assert follows(tokenizer, grammars, grammar, block(("f", {"a": [1, 2], "b": {"any": [None]}})))
    assert not follows(tokenizer, grammars, grammar, block(("f", {"a": {}, "b": 1})))


def test_shared_definitions_are_followed(tokenizer, grammars, answers):
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}, "s": {"$ref": "#/$defs/word"}},
        "required": ["p", "s"],
        "$defs": {"point": POINT, "word": {"type": "string"}},
    }
    grammar = answers.calls([Tool("f", {"name": "f", "parameters": parameters})], "content", forced=True, single=True)
    assert follows(tokenizer, grammars, grammar, block(("f", {"p": {"x": 1, "name": "n"}, "s": "raw"})))
    assert not follows(tokenizer, grammars, grammar, block(("f", {"p": {"x": "1", "name": "n"}, "s": "raw"})))


def test_listed_strings_of_any_characters_are_held(tokenizer, grammars, answers):
    """JSON writes DEL as it is; the library does not read it so."""
    odd = '\x00\x1f"\\\x7f\x80\u2028\ufeff\U0010ffff'
    named = tool("f", **{"a\x7f": {"enum": [odd, ""]}})
    grammar = answers.calls([named], "content", forced=True, single=False)
    assert follows(tokenizer, grammars, grammar, block(("f", {"a\x7f": odd})))
    assert follows(tokenizer, grammars, grammar, block(("f", {"a\x7f": ""})))
    assert not follows(tokenizer, grammars, grammar, block(("f", {"a\x7f": odd[:-1]})))


def test_listed_strings_that_the_library_does_not_take_leave_any_text(tokenizer, grammars):
    def usable(text: str) -> str:
        return "lexer error" if "odd" in text and "%json" not in text else grammars.error(text, "tools")

    own, listed = DeepseekV41Grammar(tokenizer, usable), tool("f", a={"enum": ["odd", "b"]})
    grammar = own.calls([listed], "content", forced=True, single=False)
    assert follows(tokenizer, grammars, grammar, block(("f", {"a": "any"})))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({"const": 3}, {"number", "integer"}),
        ({"const": 10**400}, {"number", "integer"}),
        ({"enum": [-(10**400), 1.5, 2.0]}, {"number", "integer"}),
        ({"const": 1.5}, {"number"}),
        ({"type": "number"}, {"number", "integer"}),
        ({}, None),
    ],
)
def test_the_types_a_schema_allows(schema, types):
    assert types_of(schema, {}) == types


def test_a_schema_that_cannot_be_enforced_is_refused_with_the_field_and_the_reason(grammars, answers):
    for schema in ({"type": "sausage"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        with pytest.raises(RequestError, match="cannot be enforced") as refused:
            grammars.compile(answers.json(schema), "response_format.json_schema.schema")
        assert refused.value.param == "response_format.json_schema.schema"
    large = {"enum": ["x" * MOST_SCHEMA_BYTES]}
    with pytest.raises(RequestError, match="bytes"):
        grammars.compile(answers.json(large), "x")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('abc é<{"\\', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("ab", max_size=2), values, max_size=4))
def test_every_object_as_json_writes_it_is_a_json_object(tokenizer, grammars, answers, value):
    assert follows(tokenizer, grammars, answers.json({"type": "object"}), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize("seed", range(8))
def test_a_model_that_draws_at_random_can_only_write_the_schema(tokenizer, grammars, answers, seed):
    """Every draw is the grammar's choice; a random walk that ends has written a value."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy", 3]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    guide, end, pick = (
        grammars.compile(answers.json(schema), "x").open(),
        tokenizer.special_id(EOS),
        random.Random(seed),
    )
    ids = []
    for _ in range(200):
        mask = guide.mask()
        token_id = pick.choice([at for at in range(tokenizer.vocabulary_tokens) if bits(mask, at)])
        guide.advance(token_id)
        if token_id == end:
            break
        ids.append(token_id)
    value = json.loads(tokenizer.decoder().feed(ids))
    assert set(value) == {"a", "b"}
    assert value["a"] in ("x", "yy", 3)
    assert isinstance(value["b"], bool)


LARGE = f"start: ({' | '.join(json.dumps(f'v{at:07}') for at in range(50_000))})"


def test_all_grammars_of_a_request_share_its_time(tokenizer):
    own, allowance = Grammars(tokenizer, EOS), Allowance(left_s=60)
    assert not own.error(LARGE, "x", allowance)
    assert 0 < allowance.left_s < 60
    (process,) = own._processes._running
    nothing = Allowance(left_s=0.0)
    assert not own.error(LARGE, "x", nothing), "it is known"
    with pytest.raises(RequestError, match=r"x: cannot be enforced.* more than 1 s"):
        own.error('start: "b"', "x", nothing)
    assert process.poll() is None, "what has no time is not begun"
    own.close()


def test_what_all_parameters_may_refer_to_does_not_grow_with_their_number(tokenizer, grammars):
    """200 KB that each of 300 parameters would have in the grammar."""
    parameters = {
        "type": "object",
        "properties": {f"p{at}": {"type": "integer"} for at in range(300)},
        "$defs": {"large": {"description": "x" * 200_000}},
    }
    own = DeepseekV41Grammar(tokenizer, partial(grammars.error, param="tools", allowance=Allowance()))
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"tools: more than .* bytes of schemas"):
        own.calls([Tool("f", {"name": "f", "parameters": parameters})], "content", forced=True, single=True)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 10_000_000


def test_work_that_nobody_waits_for_ends(grammars):
    def gone() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        grammars.error('start: "never seen"', "x", Allowance(gone))


def test_a_process_that_takes_too_much_memory_is_replaced(tokenizer, monkeypatch):
    popen = subprocess.Popen
    program = "import tided.chat.grammar_worker as w; w.MEMORY_BYTES = 100 << 20; w.main()"
    own = Grammars(tokenizer, EOS)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", program], **more))
        with pytest.raises(RequestError, match=r"x: cannot be enforced: .* too much memory"):
            own.error(LARGE, "x", Allowance(left_s=60))
    assert not own.error('start: "a"', "x")
    own.close()


def test_a_process_has_limits_of_its_own(tokenizer):
    own = Grammars(tokenizer, EOS)
    assert not own.error('start: "a"', "x")
    (process,) = own._processes._running
    lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[0] for line in lines}
    assert limits["Max address space"] == str(MEMORY_BYTES)
    assert 0 < int(limits["Max cpu time"]) < 60, "a server that is gone ends nothing"
    own.close()
    assert process.wait(30) == -signal.SIGKILL
    with pytest.raises(RequestError, match="stopping"):
        own.error('start: "b"', "x")
