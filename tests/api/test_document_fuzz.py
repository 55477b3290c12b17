"""The routes against their own document: whatever it allows, and what is just outside of it, gets an answer or a
refusal as it says, at once. `make fuzz` tries 10,000 requests."""

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
import uvloop
from documented import DOCUMENT, check_events
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks
from scripted_engine import ScriptedAnswer, ScriptedEngine, settings_with

from tided.api.app import build_app
from tided.api.door import Door
from tided.api.openapi.document import EVENTS
from tided.chat.deepseek_v41_tools import DSML
from tided.chat.families import DEEPSEEK_V41

EXAMPLES = int(os.environ.get("TIDE_FUZZ_EXAMPLES", "20"))
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
SCHEMA.config.max_stream_events = 100_000  # it would cut streams short: four answers have more than its twenty
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
POSTED = [operation for operation in OPERATIONS if operation.method == "post"]
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
JSON_CHECKS = [openapi_checks.response_schema_conformance]
REJECTIONS = [openapi_checks.negative_data_rejection]
FUZZ = settings(
    deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=[Phase.generate, Phase.shrink]
)
PATIENCE_S = 20
ENDLESS = {"/v1/expert-map/events"}  # held to the document by test_expert_events.py
CALLS = f'\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n</{DSML} invoke>\n</{DSML} calls>'
ANSWERS = [("thought</think>", "an", "swer"), ("</think>",), ("a</think>b", CALLS), ("the tide 涨潮",)]


def play(answer: ScriptedAnswer) -> None:
    """Answers of every kind, the same for the same prompt."""
    kind = len(answer.request.prompt_ids) % len(ANSWERS)
    answer.start()
    for piece in ANSWERS[kind]:
        answer.say(piece)
    answer.finish("length" if kind == len(ANSWERS) - 1 else "stop")


@pytest.fixture(scope="module")
def url(tokenizer, ids) -> Iterator[str]:
    """A server on a loop of its own: the generated requests are sent by a client that blocks."""
    engine = ScriptedEngine(ids)
    engine.play = play
    engine.map = {
        "generation": 1, "layers": 1, "experts_per_layer": 2, "total_experts": 2, "states": ["01"],
        "state_names": ["not_loaded", "resident"], "counts": {"resident": 1}, "resident_per_layer": [1],
        "activity": {"sequence": 0, "active": [], "recent": []}, "heat": None, "arena_slots": 1,
        "last_request_miss_rate": 0.5,
    }  # fmt: skip
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Door:
        return await Door.open(build_app(engine, tokenizer, DEEPSEEK_V41, settings_with()), listener)

    listener = socket.create_server(("127.0.0.1", 0))
    door = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    asyncio.run_coroutine_threadsafe(door.close(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", POSTED, ids=lambda operation: operation.path)
def test_bodies(url, operation, mode):
    """Near the document: those that it allows, and those that break it in one place."""
    counts: Counter[int] = Counter()
    streams = EVENTS in DOCUMENT["paths"][operation.path]["post"]["responses"]["200"]["content"]

    @settings(FUZZ, max_examples=EXAMPLES)
    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    def tried(case, stream):
        if streams and stream and mode.is_positive:
            case.body["stream"] = True
        reply = case.call(base_url=url, timeout=PATIENCE_S)
        counts[reply.status_code] += 1
        streamed = reply.headers["content-type"][0].startswith(EVENTS)
        assert streamed == (streams and reply.status_code == 200 and case.body.get("stream") is True)
        if streamed:
            check_events(operation.path, reply.text)
        # A stream is checked above; and what is too large is refused for that.
        without = JSON_CHECKS if streamed else REJECTIONS if reply.status_code == 413 else []
        case.validate_response(reply, checks=[one for one in CHECKS if one not in without])

    tried()
    if "{" in operation.path:
        assert set(counts) <= {400, 404}, counts  # of an id that nobody has
    else:
        assert counts[200] if mode.is_positive else counts[400], counts


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "operation",
    [one for one in OPERATIONS if one.method == "get" and one.path not in ENDLESS],
    ids=lambda one: one.path,
)
def test_what_is_asked_without_a_body(url, operation):
    @settings(FUZZ, max_examples=max(2, EXAMPLES // 10))
    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def tried(case):
        case.validate_response(case.call(base_url=url, timeout=PATIENCE_S), checks=CHECKS)

    tried()
