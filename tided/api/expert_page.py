"""GET /expert-map: the map as a page, and GET / for browsers. One file without anything from elsewhere, put together
from `page/` when the server starts; what the browser may run and load is this, by its digest, and this server's
answers."""

import base64
import hashlib
from importlib.resources import files

from aiohttp import web


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _read(name: str) -> str:
    return files("tided.api").joinpath("page", name).read_text("utf-8")


_STYLE, _SCRIPT = _read("style.css"), _read("app.js")
PAGE = _read("index.html").replace("/* style.css */", _STYLE).replace("/* app.js */", _SCRIPT)
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_digest(_STYLE)}",
        f"script-src {_digest(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",  # its icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def expert_page(_: web.Request) -> web.Response:
    return page()


def page() -> web.Response:
    return web.Response(text=PAGE, content_type="text/html", charset="utf-8", headers=_HEADERS)


def wants_page(accept: str) -> bool:
    """Whether it is a browser that asks: it names text/html, which no client of an API does."""
    return any(part.partition(";")[0].strip().lower() == "text/html" for part in accept.split(","))
