"""Schemas that would be compiled for minutes: refused in time, while others are answered, and nothing of them stays."""

import asyncio
import json
import threading
import time
from unittest.mock import Mock

import pytest
from scripted_engine import said

from tided.api.prepare import prepare
from tided.settings import Cache

# 24 patterns at once, of which each doubles the work.
SLOW = {"allOf": [{"type": "string", "pattern": (".*" + chr(97 + at)) * 2 + ".*"} for at in range(24)]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW}}}


def strict(schema, name="f"):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}]}


# A value of that schema which may be a number too: it is looked at by itself.
BODIES = [
    pytest.param(FORMAT, "response_format.json_schema.schema", id="format"),
    pytest.param(strict({"anyOf": [SLOW, {"type": "object", "properties": {"b": SLOW}}]}), "tools", id="strict tool"),
]


@pytest.mark.parametrize(("fields", "param"), BODIES)
async def test_a_schema_that_is_compiled_for_minutes_is_refused_and_others_are_answered(server, engine, fields, param):
    """As many at once as there are threads for short bodies, twice."""
    engine.script("</think>x")
    async with asyncio.timeout(60):
        for _ in range(2):
            refused = [asyncio.create_task(server.ask(said("hi", **fields))) for _ in range(2)]
            assert (await server.ask(said("hi")))[0] == 200
            for status, reply in await asyncio.gather(*refused):
                assert (status, reply["error"]["param"]) == (400, param)
                assert "more than 1 s to compile; make them simpler" in reply["error"]["message"]


async def test_the_server_stops_though_schemas_are_being_compiled(server):
    processes = server.context.served.grammars._processes
    asked = [asyncio.create_task(server.ask(said("hi", **FORMAT))) for _ in range(2)]
    async with asyncio.timeout(60):
        while len(processes._running) < 2:
            await asyncio.sleep(0.01)
        running = list(processes._running)
        await server.door.close()
        await asyncio.gather(*asked, return_exceptions=True)
    deadline_s = time.monotonic() + 30
    while any(thread.name.startswith("prepare") and thread.is_alive() for thread in threads_of(server)):
        assert time.monotonic() < deadline_s, "a thread that never ends keeps the process from ending"
        await asyncio.sleep(0.01)
    assert all(process.wait(30) is not None for process in running)


def threads_of(server) -> list[threading.Thread]:
    return list(server.context.slots._executor._threads)


async def test_the_work_ends_between_schemas_when_its_client_has_gone(server):
    asked = []
    for schema in ({"type": "string"}, {"type": "integer"}):
        alive = Mock()
        prepare(json.dumps(said("hi", **strict(schema))).encode(), server.context.served, alive)
        asked.append(alive.call_count)
    assert asked[1] == asked[0] + 1, "a string alone is not tried"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_odd_values_in_a_schema_leave_any_value_there(server, engine, path):
    engine.script("</think>x")
    odd = {"properties": {"a": {"enum": [10**400]}, "b": {"const": -(10**400)}}, "required": [{}, [], None, 1, "a"]}
    own = {"name": "f", "strict": True, "input_schema" if path == "/v1/messages" else "parameters": odd}
    tool = {"type": "function", "function": own} if path == "/v1/chat/completions" else own
    tool = {"type": "function", **own} if path == "/v1/responses" else tool
    asked = {"input": "hi"} if path == "/v1/responses" else said("hi", max_tokens=9)
    status, reply = await server.ask({"model": "x", **asked, "tools": [tool]}, path=path)
    assert status == 200, reply
    assert engine.request.guided


async def test_an_equal_request_compiles_nothing(serve, engine, monkeypatch):
    """17 tools of 4 parameters, each of which was tried."""
    server = await serve(cache=Cache(context_tokens=1 << 16, pool_tokens=1 << 17))
    engine.script("</think>x")
    values = [{"type": "integer"}, {"type": "array"}, {"type": "object"}, {"type": ["string", "null"]}]
    tools = []
    for at in range(17):
        properties = {f"p{number}": {**value, "title": f"{at}"} for number, value in enumerate(values)}
        function = {"name": f"f{at}", "parameters": {"type": "object", "properties": properties}, "strict": True}
        tools.append({"type": "function", "function": function})
    status, reply = await server.ask(said("hi", tools=tools))
    assert status == 200, reply
    grammars = server.context.served.grammars
    tried, compiled = Mock(wraps=grammars._processes.ask), Mock(wraps=grammars._new)
    monkeypatch.setattr(grammars._processes, "ask", tried)
    monkeypatch.setattr(grammars, "_new", compiled)
    assert (await server.ask(said("again", tools=tools)))[0] == 200
    assert (tried.call_count, compiled.call_count) == (0, 0)
    assert (await server.ask(said("again", tools=tools[1:])))[0] == 200
    assert (tried.call_count, compiled.call_count) == (1, 1), "another answer of the same parameters"
