"""GET /, /health, /v1/models and the residency of requests: they wait for no lane and for no device."""

import time
import typing
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from packers.overlay import Overlay
from tided.api.context import CONTEXT, Context
from tided.api.expert_page import page, wants_page
from tided.api.json_text import to_json
from tided.api.served import unknown_model
from tided.chat.text import shorten
from tided.errors import RequestError
from tided.settings import Settings

MOST_STATS = 100
POLICY = ("experts", "tide", "cache", "engine", "memory", "audit")  # sections without an address, a host, a key
_STATUS = {"ready": "ok", "starting": "loading", "draining": "draining", "fault": "fault"}


async def root(request: web.Request) -> web.Response:
    """Clients probe whether anybody listens; a browser gets the page."""
    reply = page() if wants_page(request.headers.get("Accept", "")) else _json({"status": "ok", "engine": "tidelm"})
    reply.headers["Vary"] = "Accept"
    return reply


async def hello(_: web.Request) -> web.Response:
    """What Claude Code warms its connection with."""
    return _json({"status": "ok"})


async def health(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    engine = dict(context.engine.health())
    status, fault = _STATUS[engine.pop("state")], engine.pop("fault", "")
    measured: dict[str, Any] = {name: engine.pop(name) for name in ("expert_reads", "data_plane") if name in engine}
    body = {
        "status": status,
        "engine": "tidelm",
        "model": context.served.settings.model.served_name,
        "profile": context.profile,
        **engine,
        "overlay": _overlay(context.overlay),
        "max_context": context.served.context_tokens,
        "uptime_s": round(time.monotonic() - context.started_s, 3),
        "engine_config": {**numbers_of(context.served.settings), **measured},
        "engine_policy": policy_of(context.served.settings),
    }
    return _json(body | ({"fault": fault} if fault else {}), status=200 if status == "ok" else 503)


def _overlay(overlay: Overlay | None) -> dict[str, str] | None:
    return {"sha256": overlay.sha256, "changes": overlay.points} if overlay else None


async def models(request: web.Request) -> web.Response:
    """One shape that both vendors' clients read."""
    context = request.app[CONTEXT]
    cards = [_card(context, name) for name in context.served.names]
    page = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return _json({"object": "list", "data": cards, **page})


async def model(request: web.Request) -> web.Response:
    context, name = request.app[CONTEXT], request.match_info["id"].rstrip("/")
    if name not in context.served.names:
        raise unknown_model(context.served.settings.model.served_name)
    return _json(_card(context, name))


async def stats(request: web.Request) -> web.Response:
    """GET /v1/stats: what the last answers cost, the newest first."""
    query = request.query.get("n", "10")
    count = int(query) if query.isascii() and query.isdigit() and len(query) <= len(str(MOST_STATS)) else 0
    if not 1 <= count <= MOST_STATS:
        raise RequestError(f"n: expected an integer, 1 to {MOST_STATS}, got {shorten(query)}", param="n")
    return _json({"object": "list", "data": request.app[CONTEXT].engine.recent(count)})


async def trace(request: web.Request) -> web.Response:
    """GET /v1/requests/{id}/residency: `tidectl why`. Numbers of the engine, no text."""
    found = request.app[CONTEXT].engine.trace(request.match_info["id"])
    if found is None:
        raise RequestError(
            "No such request, or it has not ended, or newer ones have taken its place.",
            status=404, code="request_not_found", param="id",
        )  # fmt: skip
    return _json(found)


def numbers_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings that change what is computed, by section. By their kind no path, address or key is among them."""
    return _told(settings, tuple(typing.get_type_hints(Settings)), lambda extra: extra.get("affects") == "numbers")


def policy_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """The others on which it depends what is resident, and how fast. No path is among them."""
    return _told(settings, POLICY, lambda extra: extra.get("affects") != "numbers" and not extra.get("path"))


def _told(settings: Settings, sections: Sequence[str], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return {
        section: {
            name: msgspec.to_builtins(getattr(getattr(settings, section), name))
            for name, hint in typing.get_type_hints(type(getattr(settings, section)), include_extras=True).items()
            if any(wanted(extra) for extra in _extras(hint))
        }
        for section in sections
    }


def _extras(hint: Any) -> list[dict[str, Any]]:
    return [meta.extra for meta in getattr(hint, "__metadata__", ()) if getattr(meta, "extra", None)]


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "tidelm",
        "max_model_len": context.served.context_tokens,
        "context_length": context.served.context_tokens,
        "max_output_tokens": context.served.context_tokens - 1,
        "capabilities": {"vision": context.served.sees, "tools": True, "reasoning": True},
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z"),
    }


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, text=to_json(body), content_type="application/json", charset="utf-8")
