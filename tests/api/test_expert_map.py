"""GET /v1/expert-map, and the page."""

import base64
import hashlib
import re

import pytest


def drawn(generation=3, sequence=7, active=(), recent=()):
    return {
        "generation": generation,
        "layers": 2,
        "experts_per_layer": 4,
        "total_experts": 8,
        "states": ["1100", "0032"],
        "state_names": ["not_loaded", "resident", "transient", "loading"],
        "counts": {"not_loaded": 4, "resident": 2, "transient": 1, "loading": 1},
        "resident_per_layer": [2, 0],
        "activity": {"sequence": sequence, "active": list(active), "recent": list(recent)},
        "heat": None,
        "arena_slots": 4,
        "last_request_miss_rate": None,
    }


@pytest.mark.parametrize("path", ["/v1/expert-map", "/v1/v1/expert-map", "/v1/expert-map/"])
async def test_the_map(server, engine, path):
    engine.map = drawn()
    async with server.session.get(path) as response:
        body = await response.json()
        assert response.headers["ETag"] == '"3.7"'
    assert body.items() >= engine.map.items()
    assert body.items() >= {"version": 1, "model": "deepseek", "busy": False, "fault": "", "world_size": 1}.items()
    assert body["sampled_at"] > 1e9


async def test_the_page_without_javascript_names_its_data(server):
    async with server.session.get("/expert-map") as response:
        shown = re.sub(r"<script>.*?</script>", "", await response.text(), flags=re.DOTALL)
    assert "asking" not in shown
    assert re.search(r'<noscript>.*href="v1/expert-map".*</noscript>', shown, re.DOTALL)


async def test_slots_are_told_where_they_are_asked_for(server, engine):
    engine.map = drawn()
    for query, shown in (("", False), ("?slots=0", False), ("?slots=1", True)):
        async with server.session.get("/v1/expert-map" + query) as response:
            assert ("slots" in await response.json()) is shown


async def test_nothing_new_is_told_in_short(server, engine):
    engine.map = drawn()
    asked = [{"params": {"since": "3.7"}}, {"headers": {"If-None-Match": '"3.7"'}}]
    for options in asked:
        async with server.session.get("/v1/expert-map", **options) as response:
            assert (response.status, await response.read()) == (304, b"")
    for changed in (drawn(sequence=8), drawn(generation=4), drawn(active=[[1, 2]]), drawn(recent=[[1, 2]])):
        engine.map = changed
        async with server.session.get("/v1/expert-map?since=3.7") as response:
            assert response.status == 200


async def test_the_page_needs_no_key_and_nothing_from_elsewhere(serve, tmp_path):
    (keys := tmp_path / "keys").write_text("k\n")
    server = await serve(api_keys_file=str(keys))
    async with server.session.get("/expert-map") as response:
        page = await response.text()
        assert (response.status, response.content_type) == (200, "text/html")
        allowed = response.headers["Content-Security-Policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in allowed
    assert allowed.startswith("default-src 'none';")
    assert "unsafe" not in allowed
    assert "frame-ancestors 'none'" in allowed
    elsewhere = r"(?:https?:)?//[a-z]|\ssrc=|@import|url\(|\sstyle=|\son[a-z]+="
    assert not re.findall(elsewhere, page.replace("http://www.w3.org/2000/svg", ""))
    assert re.findall(r'<link[^>]*href="(\w+):', page) == ["data"]
    for path in ("/v1/expert-map", "/v1/expert-map/events"):
        async with server.session.get(path) as response:
            assert response.status == 401


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


async def test_a_browser_gets_the_page_and_a_probe_its_word(server):
    async with server.session.get("/expert-map") as response:
        page = await response.text()
    async with server.session.get("/", headers={"Accept": BROWSER}) as response:
        assert (response.content_type, await response.text()) == ("text/html", page)
        assert response.headers["Vary"] == "Accept"
        assert "Content-Security-Policy" in response.headers
    for accept in ("*/*", "application/json", "application/json, text/plain, */*", "", "text/*"):
        async with server.session.get("/", headers={"Accept": accept}) as response:
            assert await response.json() == {"status": "ok", "engine": "tidelm"}
    async with server.session.head("/", headers={"Accept": BROWSER}) as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_what_the_reply_depends_on_is_told_beside_the_origin(serve):
    server = await serve(cors_origins=("http://page",))
    async with server.session.get("/") as response:
        assert response.headers["Vary"] == "Accept, Origin"


async def test_while_nothing_is_loaded(server):
    async with server.session.get("/v1/expert-map") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "engine_unavailable")


async def test_polling_reaches_no_engine_and_waits_for_no_lane(server, engine):
    engine.map, plain = drawn(), engine.health
    engine.health = lambda: plain() | {"busy": True, "lanes": {"total": 2, "busy": 2}, "queue": 64}
    for _ in range(100):
        async with server.session.get("/v1/expert-map") as response:
            assert (response.status, (await response.json())["busy"]) == (200, True)
    assert not engine.answers
