"""The curl lines of the pages, sent as they stand: every route has one, and none is refused."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from scripted_engine import ScriptedEngine

from tided.api.routes import ROUTES

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/openai.md", "docs/anthropic.md", "docs/http.md")
NO_VALUE = {"-s", "-N", "-sN"}
MAP = {"layers": 2, "experts": 4, "generation": 1, "activity": {"sequence": 1, "active": [], "recent": []}}


class Example(NamedTuple):
    method: str
    url: str
    body: str | None
    headers: dict[str, str]


def examples(page: str) -> list[Example]:
    """A command begins an indented line, and goes on over lines that are indented further."""
    lines = re.findall(r"^ {4}(curl .*(?:\n {5,}.*)*)", page, re.MULTILINE)
    return [read(shlex.split(line)) for line in lines]


def read(words: list[str]) -> Example:
    """Raises where a line has what no example needs."""
    url, body, headers, rest = "", None, {}, iter(words[1:])
    for word in rest:
        if word == "-d":
            body = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word not in NO_VALUE:
            assert not word.startswith("-"), word
            assert not url, (url, word)
            url = word
    return Example("GET" if body is None else "POST", url, body, headers)


def template(path: str) -> str:
    """The path of the table that serves it."""
    found = [one.path for one, _ in ROUTES if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", one.path), path)]
    return next((one for one in found if "{" not in one), found[0])


async def test_every_example_of_the_pages_is_answered_and_every_route_has_one(serve, engine: ScriptedEngine) -> None:
    engine.map = MAP
    engine.script("Oslo.")
    server = await serve(model_aliases=["mini-deepseek"])
    sent = set()
    for page in PAGES:
        for one in examples((ROOT / page).read_text()):
            parts = urlsplit(one.url)
            assert (parts.scheme, parts.netloc) == ("http", "127.0.0.1:8000")
            target = f"{parts.path}?{parts.query}".rstrip("?")
            data = None if one.body is None else one.body.encode()
            async with server.session.request(one.method, target, data=data, headers=one.headers) as reply:
                assert (reply.status, await reply.read() != b"") == (200, True), (page, one)
            sent.add((one.method, template(parts.path)))
    assert sent == {(one.method, one.path) for one, _ in ROUTES}


def test_a_line_is_read_as_a_shell_would() -> None:
    text = "    curl -s http://h/x -d '{\"a\":\n      1}' -H 'n: v'\n    curl -s http://h/y\n    tidectl status\n"
    assert examples(text) == [
        Example("POST", "http://h/x", '{"a":\n      1}', {"n": "v"}),
        Example("GET", "http://h/y", None, {}),
    ]
