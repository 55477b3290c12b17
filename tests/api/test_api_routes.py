"""Small routes, keys, methods, paths, headers for other origins."""

import asyncio
import hashlib
import json
import re
import typing

import msgspec
import pytest
from scripted_engine import said, settings_with

from packers.overlay import Overlay
from tided.api.auth import KeyRing
from tided.api.small_routes import numbers_of, policy_of
from tided.errors import ConfigError, QueueFullError, RequestError
from tided.settings import Cache


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("  first-key \n\nzweiter-schlüssel\n")
    return str(path)


async def test_root_and_health_without_a_key(serve, keys):
    server = await serve(api_keys_file=keys)
    for path in ("/", "/health", "/health/"):
        async with server.session.get(path) as response:
            assert (response.status, (await response.json())["engine"]) == (200, "tidelm")
        async with server.session.head(path) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_health_tells_no_secrets(serve, keys):
    server = await serve(api_keys_file=keys)
    async with server.session.get("/health") as response:
        text = await response.text()
    body = json.loads(text)
    assert body.items() >= {"status": "ok", "model": "deepseek", "busy": False, "queue": 0, "max_context": 4096}.items()
    assert body["lanes"] == {"total": 2, "busy": 0}
    assert body["engine_config"]["cache"]["context_tokens"] == 4096
    assert "secret" not in text
    assert keys not in text


async def test_health_tells_what_a_figure_is_of(serve, engine, monkeypatch):
    """What the engine declares, the settings of policy, the profile's name."""
    plain = engine.health
    about = {
        "build": {"tidelm": "1", "code": "ab"},
        "checkpoint": dict.fromkeys(("identity", "dense", "family", "tokenizer"), "cd"),
    }
    machine = {"system": "Linux", "machine": "aarch64", "processor": "", "cores": 20, "device": "NVIDIA GB10"}
    monkeypatch.setattr(engine, "health", lambda: plain() | about | {"machine": machine})
    server = await serve(profile="pair")
    async with server.session.get("/health") as response:
        body = await response.json()
    assert body.items() >= (about | {"machine": machine, "profile": "pair"}).items()
    told = body["engine_policy"]
    assert (told["tide"]["sensitivity"], told["tide"]["fidelity"], told["tide"]["record"]) == ("high", "fast", True)
    assert (told["engine"]["prefill_share"], told["experts"]["source"]) == (0.3, "checkpoint")
    assert "server" not in told


def test_every_setting_is_told_once_or_is_a_path_an_address_or_a_key_s():
    """Text in all places that name files, hosts and keys: none of it comes out."""
    settings = settings_with()
    for section in settings.__struct_fields__:
        of = getattr(settings, section)
        names = {
            name: ("hidden",) if isinstance(getattr(of, name), tuple) else "hidden"
            for name, hint in typing.get_type_hints(type(of), include_extras=True).items()
            if isinstance(getattr(of, name), str | tuple)
            if section in ("parallel", "server", "vision") or hint.__metadata__[-1].extra["path"]
        }
        settings = msgspec.structs.replace(settings, **{section: msgspec.structs.replace(of, **names)})
    numbers, policy = numbers_of(settings), policy_of(settings)
    assert "hidden" not in json.dumps([numbers, policy])
    for section, told in policy.items():
        of = getattr(settings, section)
        paths = {name for name in of.__struct_fields__ if getattr(of, name) == "hidden"}
        assert not told.keys() & numbers[section].keys()
        assert {*told, *numbers[section], *paths} == {*of.__struct_fields__}


async def test_health_and_metrics_tell_the_overlay(serve, tmp_path):
    overlay = Overlay(tmp_path / "o.safetensors", "ab12", {}, "layers 10-35 attn.wo_b")
    server = await serve(overlay=overlay)
    async with server.session.get("/health") as response:
        assert (await response.json())["overlay"] == {"sha256": "ab12", "changes": "layers 10-35 attn.wo_b"}
    async with server.session.get("/metrics") as response:
        assert 'overlay="ab12"' in await response.text()


async def test_health_tells_where_experts_are_read_from_and_how_fast_ranks_add(server, engine, monkeypatch):
    reads, plain = {"source": "pack", "in_flight_at_boot": 8, "in_flight_while_serving": 1}, engine.health
    monkeypatch.setattr(engine, "health", lambda: plain() | {"expert_reads": reads, "data_plane": {"sum_us": 12.0}})
    async with server.session.get("/health") as response:
        body = await response.json()
    assert body["engine_config"]["expert_reads"] == reads
    assert body["engine_config"]["data_plane"] == {"sum_us": 12.0}
    assert body["engine_config"]["cache"]["context_tokens"] == 4096
    assert "expert_reads" not in body


@pytest.mark.parametrize(
    ("state", "status"), [("starting", "loading"), ("draining", "draining"), ("fault", "fault"), ("ready", "ok")]
)
async def test_health_of_every_state(server, engine, state, status):
    engine.state, engine.fault = state, "rank 1 is silent" if state == "fault" else ""
    async with server.session.get("/health") as response:
        body = await response.json()
        assert (response.status, body["status"]) == (200 if state == "ready" else 503, status)
        assert body.get("fault") == ("rank 1 is silent" if state == "fault" else None)


async def test_models(server):
    for path in ("/v1/models", "/v1/models/", "/v1/v1/models", "/v1/models?limit=1000"):
        async with server.session.get(path, allow_redirects=False) as response:
            assert response.status == 200
            body = await response.json()
    [card] = body["data"]
    assert body["object"] == "list"
    assert (body["first_id"], body["last_id"], body["has_more"]) == ("deepseek", "deepseek", False)
    assert card.items() >= {"id": "deepseek", "object": "model", "type": "model", "max_model_len": 4096}.items()
    assert card["capabilities"] == {"vision": False, "tools": True, "reasoning": True}
    for path in ("/v1/models/deepseek", "/v1/v1/models/deepseek/"):
        async with server.session.get(path) as response:
            assert (response.status, await response.json()) == (200, card)
    async with server.session.get("/v1/models/a/b") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
    async with server.session.head("/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"")


@pytest.mark.parametrize(("context_tokens", "pool_tokens"), [(4096, 1024), (1024, 4096)])
async def test_the_smaller_of_context_and_pool_is_the_limit(serve, context_tokens, pool_tokens):
    """A request longer than the pool would wait for ever."""
    server = await serve(cache=Cache(context_tokens=context_tokens, pool_tokens=pool_tokens))
    async with server.session.get("/v1/models") as response:
        [card] = (await response.json())["data"]
    assert (card["max_model_len"], card["context_length"], card["max_output_tokens"]) == (1024, 1024, 1023)
    async with server.session.get("/health") as response:
        assert (await response.json())["max_context"] == 1024
    for fields in ({"max_tokens": 1024}, {"max_tokens": 1, "content": "tide " * 1100}):
        text = fields.pop("content", "hi")
        error = await server.refused(said(text, **fields))
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 1024 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"])
async def test_spellings_of_the_path(server, engine, path):
    engine.script("</think>x")
    assert (await server.ask(said("hi"), path=path))[0] == 200
    assert (await server.ask(said("hi"), path=path + "?beta=true"))[0] == 200


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/v1/v1/models", "/%00", "/../etc/passwd"])
async def test_unknown_paths(server, path):
    for method in ("GET", "POST"):
        async with server.session.request(method, path, allow_redirects=False) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (404, "not_found")
            assert "/openapi.json" in error["message"]
            assert response.headers["x-should-retry"] == "false"
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET,HEAD"),
        ("POST", "/health", "GET,HEAD"),
        ("PUT", "/", "GET,HEAD"),
    ],
)
async def test_wrong_methods(server, method, path, allowed):
    async with server.session.request(method, path) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (405, "method_not_allowed")
        assert error["message"].endswith(f"it takes {allowed.replace(',', ', ')}.")
        assert response.headers["Allow"] == allowed


GOOD = [
    {"Authorization": "Bearer first-key"},
    {"Authorization": "bearer  first-key "},
    {"x-api-key": "first-key"},
    {"Authorization": "Bearer stale", "x-api-key": "first-key"},
    {"Authorization": "Bearer first-key", "x-api-key": "stale"},
]
BAD = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer first-ke"},
    {"Authorization": "Bearer first-key2"},
    {"Authorization": "Basic first-key"},
    {"Authorization": "first-key"},
    {"x-api-key": ""},
    {"x-api-key": "FIRST-KEY"},
]


@pytest.mark.parametrize("headers", GOOD, ids=str)
async def test_right_keys(serve, keys, engine, headers):
    engine.script("</think>x")
    server = await serve(api_keys_file=keys)
    assert (await server.ask(said("hi"), headers=headers))[0] == 200


async def test_the_other_key_and_its_letters(serve, keys):
    server = await serve(api_keys_file=keys)
    headers = {"Authorization": "Bearer zweiter-schlüssel"}
    async with server.session.get("/v1/models", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("headers", BAD, ids=str)
async def test_wrong_keys(serve, keys, headers):
    server = await serve(api_keys_file=keys)
    for method, path in [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nothing"), ("POST", "/")]:
        async with server.session.request(method, path, headers=headers, data=b"{") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"] == {
                "message": "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                "type": "authentication_error",
                "param": None,
                "code": "invalid_api_key",
            }


async def test_a_key_in_the_query_is_none(serve, keys):
    server = await serve(api_keys_file=keys)
    async with server.session.get("/v1/models?api_key=first-key&key=first-key") as response:
        assert response.status == 401


async def raw(port: int, text: bytes, *, until: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(text)
        async with asyncio.timeout(5):
            return await reader.readuntil(until)
    finally:
        writer.close()


async def test_the_key_is_checked_before_the_body_is_read(serve, keys):
    server = await serve(api_keys_file=keys)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    assert b" 401 " in await raw(server.port, head + b"\r\n", until=b"\r\n")
    waiting = head + b"Expect: 100-continue\r\n"
    assert b" 401 " in await raw(server.port, waiting + b"\r\n", until=b"\r\n")
    right = waiting + b"x-api-key: first-key\r\n\r\n"
    assert b" 100 Continue" in await raw(server.port, right, until=b"\r\n")


async def test_a_body_that_does_not_come_is_given_up(server):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    reply = await raw(server.port, head, until=b"}}")
    assert b" 408 " in reply
    assert b"timeout_error" in reply


async def test_every_key_is_compared(monkeypatch):
    """No early exit: the time must not tell which key was near."""
    import hmac

    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr("tided.api.auth.hmac.compare_digest", lambda a, b: compared.append(b) or original(a, b))
    KeyRing(("a", "b", "c")).check({"Authorization": "Bearer a", "x-api-key": "b"})
    assert len(compared) == 6
    assert len(set(compared)) == 3


def test_key_files(tmp_path):
    assert KeyRing.load("").open
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing.load(str(tmp_path / "missing"))
    empty = tmp_path / "empty"
    empty.write_text("\n  \n")
    with pytest.raises(ConfigError, match="holds no API key"):
        KeyRing.load(str(empty))


def test_comments_in_a_key_file_are_no_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# keys of the house\n\n  # more\nfirst-key\n#second-key\nlast#key\n")
    ring = KeyRing.load(str(path))
    for key in ("first-key", "last#key"):
        ring.check({"x-api-key": key})
    for key in ("# keys of the house", "# more", "#second-key", "second-key", "#", ""):
        with pytest.raises(RequestError):
            ring.check({"x-api-key": key})
    path.write_text("# only\n# comments\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        KeyRing.load(str(path))
    for blank in (" ", "\t", "\u00a0"):
        path.write_text(f"# a\ngood\nbad{blank}key # of mine\n")
        with pytest.raises(ConfigError, match="no blanks") as refusal:
            KeyRing.load(str(path))
        assert refusal.value.where == f"{path}:3"


async def test_pages_of_other_origins_may_ask_where_the_profile_says_so(serve, engine):
    engine.script("</think>x")
    wanted = {"Origin": "http://page", "Access-Control-Request-Headers": "authorization, x-thing"}
    for origins, allowed in [(("*",), "*"), (("http://page", "http://other"), "http://page")]:
        server = await serve(cors_origins=origins)
        async with server.session.options("/v1/chat/completions", headers=wanted) as response:
            assert (response.status, await response.read()) == (204, b"")
            assert response.headers["Access-Control-Allow-Origin"] == allowed
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-thing"
            assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS, HEAD"
            assert response.headers["Access-Control-Max-Age"] == "600"
            assert response.headers["Vary"] == "Origin"
        async with server.post(said("hi", stream=True), headers=wanted) as response:
            assert response.headers["Access-Control-Allow-Origin"] == allowed
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
            assert "Access-Control-Allow-Credentials" not in response.headers


@pytest.mark.parametrize("origins", [(), ("http://other",), ("http://page.evil",)], ids=str)
async def test_pages_of_other_origins_may_not_ask(serve, origins):
    server = await serve(cors_origins=origins)
    for method in ("OPTIONS", "GET"):
        async with server.session.request(method, "/health", headers={"Origin": "http://page"}) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "code", "retry"),
    [
        (QueueFullError(32), 429, "rate_limit_error", "queue_full", "true"),
        (RequestError("loading", status=503, kind="server_error"), 503, "server_error", "engine_unavailable", "true"),
        (RequestError("bad", param="seed"), 400, "invalid_request_error", None, "false"),
    ],
    ids=str,
)
async def test_the_engines_refusals(server, engine, refusal, status, kind, code, retry):
    engine.refusal = refusal
    for stream in (False, True):
        async with server.post(said("hi", stream=stream)) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"], error["code"]) == (status, kind, code)
            assert response.headers["x-should-retry"] == retry
            if retry == "true":
                assert 1 <= int(response.headers["Retry-After"]) <= 60
    engine.state = "draining"
    async with server.post(said("hi")) as response:
        assert (response.status, response.headers.get("Retry-After")) == (503, "30")


async def test_every_reply_has_a_request_id(server):
    for path in ("/", "/nothing", "/v1/chat/completions"):
        async with server.session.post(path, data=b"x") as response:
            assert re.fullmatch(r"req_[0-9A-Za-z]{24}", response.headers["x-request-id"])


async def test_the_log_names_the_key_by_its_digest_only(serve, keys, caplog):
    server = await serve(api_keys_file=keys)
    with caplog.at_level("INFO", "tided.api"):
        async with server.session.get("/v1/models", headers=GOOD[0]) as response:
            assert response.status == 200
    assert f"key={hashlib.sha256(b'first-key').hexdigest()[:6]}" in caplog.text
    assert "first-key" not in caplog.text


async def test_the_fingerprint_changes_with_weights_and_numbers(tokenizer):
    from tided.api.app import _fingerprint

    settings = settings_with()
    prints = {
        _fingerprint("a", settings),
        _fingerprint("b", settings),
        _fingerprint("a", settings_with(port=9)),
    }
    assert len(prints) == 2


@pytest.mark.parametrize("name", ["chatcmpl-1", "latest"])
async def test_what_became_of_a_request_s_experts_is_told_to_who_has_a_key(serve, keys, name):
    server = await serve(api_keys_file=keys)
    async with server.session.get(f"/v1/requests/{name}/residency") as reply:
        assert reply.status == 401
    headers = {"Authorization": "Bearer first-key"}
    async with server.session.get(f"/v1/requests/{name}/residency", headers=headers) as reply:
        assert (reply.status, await reply.json()) == (200, {"request_id": "chatcmpl-1", "pairs": []})
    async with server.session.get("/v1/requests/other/residency", headers=headers) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (404, "request_not_found")


async def test_an_audit_is_told_with_the_texts_of_what_differs(server, engine):
    engine.script("Hello")
    _, reply = await server.ask(said("hi"))
    path = f"/v1/requests/{reply['id']}/audit"
    status, found = await server.ask({}, path=path)
    assert status == 200
    assert (found["differ"], found["residency_loss"]) == (1, 0.25)
    [one] = found["differences"]
    assert (one["at"], one["token_id"], one["exact_id"]) == (2, 5, 6)
    assert one["text"] != one["exact_text"]
    error = await server.refused({}, 404, path="/v1/requests/other/audit")
    assert error["code"] == "request_not_found"


@pytest.mark.parametrize("shared", [False, True])
async def test_an_answer_is_audited_for_the_key_that_asked(serve, engine, tmp_path, shared):
    """Another's answer is as good as none, also where they share a cache, and once the other's key is taken out."""
    (tmp_path / "keys").write_text("first-key\nsecond-key\n")
    server = await serve(api_keys_file=str(tmp_path / "keys"), shared_cache=shared)
    engine.script("Hello")
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
    _, reply = await server.ask(said("hi"), headers=first)
    path = f"/v1/requests/{reply['id']}/audit"
    assert (await server.ask({}, path=path))[0] == 401
    status, found = await server.ask({}, path=path, headers=first)
    assert (status, len(found["differences"])) == (200, 1)
    assert (await server.ask({}, path=path, headers=second))[0] == 404
    (tmp_path / "keys").write_text("second-key\n")
    server.context.keys.reload()
    assert (await server.ask({}, path=path, headers=first))[0] == 401
    assert (await server.ask({}, path=path, headers=second))[0] == 404
    _, reply = await server.ask(said("hi"), headers=second)
    assert (await server.ask({}, path=f"/v1/requests/{reply['id']}/audit", headers=second))[0] == 200
