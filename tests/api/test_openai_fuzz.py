"""Bodies at random, near and far from what the routes take: an answer or a refusal in OpenAI's shape, at once.

`make fuzz` tries 10,000 of them."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, settings_with

from tided.api.app import build_app
from tided.api.door import Door
from tided.api.ports import Limits
from tided.chat.families import DEEPSEEK_V41

EXAMPLES = int(os.environ.get("TIDE_FUZZ_EXAMPLES", "100"))

scalars = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "auto", "none", "required", "text", "json_object", "json_schema", "function", "high"])
    | st.text(max_size=8)
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
schemas = st.recursive(
    st.sampled_from([{"type": "string"}, {"enum": ["a", 1, None]}, {"$ref": "#/x"}, {}, True, {"type": "?"}])
    | st.builds(lambda pattern: {"type": "string", "pattern": pattern}, st.text("a(b)[c]{1,9}*+\\|", max_size=12)),
    lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3).map(
        lambda own: {"type": "object", "properties": own})
    | st.builds(lambda items: {"type": "array", "items": items}, inner)
    | st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
tools = st.builds(
    lambda *own: {"type": "function", "function": dict(zip(("name", "parameters", "strict"), own, strict=True))},
    st.sampled_from(["f", "g", "a b", ""]), schemas | anything, st.booleans() | anything,
)  # fmt: skip
parts = st.builds(
    lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "input_text", "image_url", "x"]), scalars
)
messages = st.builds(
    lambda role, content, more: {"role": role, "content": content, **more},
    st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"]) | scalars,
    st.text(max_size=20) | st.lists(parts | anything, max_size=3) | anything,
    st.dictionaries(st.sampled_from(("tool_calls", "tool_call_id", "reasoning_content", "prefix")), anything),
)  # fmt: skip
formats = anything | st.builds(
    lambda kind, schema: {"type": kind, "json_schema": {"name": "x", "schema": schema}},
    st.sampled_from(["json_schema", "json_object", "text"]), schemas | anything,
)  # fmt: skip
NUMBERS = (
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs", "logprobs", "best_of"),
)
OTHERS = (
    *(
        "stop",
        "stop_token_ids",
        "stream_options",
        "tool_choice",
        "logit_bias",
        "reasoning_effort",
        "reasoning",
        "thinking",
    ),
    *("enable_thinking", "chat_template_kwargs", "parallel_tool_calls", "ignore_eos", "echo", "suffix", "modalities"),
    *(
        "continue_final_message",
        "add_generation_prompt",
        "fidelity",
        "functions",
        "user",
        "metadata",
        "text",
        "background",
    ),
    *("instructions", "separate_reasoning", "include_reasoning", "x_engine_stats", "model", "unknown"),
)
choices = st.sampled_from(["auto", "none", "required"]) | st.builds(
    lambda name: {"type": "function", "function": {"name": name}}, st.sampled_from("fgh")
)
bodies = st.builds(
    lambda *shares: {name: value for share in shares for name, value in share.items()},
    st.fixed_dictionaries({"messages": st.lists(messages, min_size=1, max_size=3) | anything}),
    st.fixed_dictionaries({}, optional={"prompt": anything, "input": anything | st.lists(messages, max_size=3)}),
    st.fixed_dictionaries({}, optional={"tools": st.lists(tools | anything, max_size=3), "response_format": formats}),
    st.dictionaries(st.sampled_from(NUMBERS), scalars, max_size=3),
    st.dictionaries(st.sampled_from(OTHERS), anything, max_size=2),
    st.fixed_dictionaries({}, optional={"tool_choice": choices, "stream": st.booleans()}),
)  # fmt: skip


@pytest.fixture(scope="module")
def ask(tokenizer, ids) -> Iterator:
    """ask(path, body) -> (status, text), on a real socket."""
    engine = ScriptedEngine(ids)
    engine.script("think</think>", "Hel", "lo")
    with asyncio.Runner() as runner:
        app = build_app(engine, tokenizer, DEEPSEEK_V41, settings_with(), limits=Limits(keepalive_s=0.2))
        listener = socket.create_server(("127.0.0.1", 0))

        async def start() -> aiohttp.ClientSession:
            return aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}")

        async def post(path: str, body: str) -> tuple[int, str]:
            async with asyncio.timeout(20), session.post(path, data=body) as reply:
                return reply.status, await reply.text()

        door, session = runner.run(Door.open(app, listener)), runner.run(start())
        yield lambda path, body: runner.run(post(path, body))
        runner.run(session.close())
        runner.run(door.close())


@pytest.mark.timeout(0)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_body_gets_an_answer_or_a_refusal(ask, path):
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def tried(body):
        status, text = ask(path, json.dumps(body))
        assert status in (200, 400, 413, 429), (status, text)
        if status != 200:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "\n" not in error["message"]
        elif body.get("stream") is True:
            assert "event: response.completed" in text if path.endswith("responses") else text.endswith("[DONE]\n\n")
        else:
            assert json.loads(text)["object"] in ("chat.completion", "text_completion", "response")

    tried()
