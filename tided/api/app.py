"""The HTTP application of rank 0. One engine, one model; OpenAI's API and Anthropic's."""

import hashlib
import ipaddress
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.metadata import version

from aiohttp import web

from tided.api.admission import Admission
from tided.api.anthropic import count, messages
from tided.api.auth import KeyRing, key_file
from tided.api.completions import completions
from tided.api.context import CONTEXT, Context
from tided.api.expert_map import expert_map
from tided.api.json_text import to_json
from tided.api.metrics import METRICS, Metrics, metrics
from tided.api.middleware import Handler, add_headers, expect, observe
from tided.api.openai import chat_completions
from tided.api.ports import Engine, Limits
from tided.api.responses import responses
from tided.api.served import ServedModel
from tided.api.slots import Slots
from tided.api.small_routes import health, hello, model, models, numbers_of, root, trace
from tided.chat.families import Family
from tided.chat.tokenizer import Tokenizer
from tided.errors import ConfigError
from tided.settings import Server, Settings

log = logging.getLogger("tided.api")


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    family: Family,
    settings: Settings,
    *,
    identity: str = "",
    limits: Limits | None = None,
) -> web.Application:
    """`identity`: the checkpoint's content identity, part of the fingerprint that replies carry.

    Raises ConfigError for an unusable key file and for an address that needs one, DataError for a tokenizer without
    the model's special tokens.
    """
    served = ServedModel.of(family, tokenizer, settings)
    limits = limits or Limits()
    keys = KeyRing.load(key_file(settings.server))
    if keys.open and not _is_loopback(settings.server.host):
        _refuse_open(settings.server)
    app = web.Application(middlewares=[observe])
    app[CONTEXT] = Context(
        engine=engine,
        served=served,
        keys=keys,
        limits=limits,
        admission=Admission(engine, settings.engine.queue, settings.server.max_body_bytes),
        slots=Slots(limits.prepare_s),
        fingerprint=_fingerprint(identity, settings),
    )
    app[METRICS] = Metrics(engine, settings.model.served_name, version("tidelm"))
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_threads)
    _add_routes(app)
    return app


def build_runner(app: web.Application) -> web.AppRunner:
    """A runner whose handlers end with their client's connection, also while a request waits in the queue.

    Bodies come as they were sent: unfolding them has its own limits (`body.decompressed`).
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        keepalive_timeout=app[CONTEXT].limits.idle_s,
        access_log=None,
        handle_signals=False,
        auto_decompress=False,
        shutdown_timeout=app[CONTEXT].limits.close_s,
    )


def _add_routes(app: web.Application) -> None:
    _add(app, "GET", "/", root)
    _add(app, "GET", "/health", health)
    _add(app, "GET", "/api/hello", hello)
    _add(app, "GET", "/metrics", metrics)
    for prefix in ("/v1", "/v1/v1"):
        _add(app, "GET", f"{prefix}/models", models)
        app.router.add_get(prefix + "/models/{id:.+}", model)
        _add(app, "GET", prefix + "/requests/{id}/residency", trace)
        _add(app, "POST", f"{prefix}/chat/completions", chat_completions)
        _add(app, "POST", f"{prefix}/completions", completions)
        _add(app, "POST", f"{prefix}/responses", responses)
        _add(app, "GET", f"{prefix}/expert-map", expert_map)
        _add(app, "POST", f"{prefix}/messages", messages)
        _add(app, "POST", f"{prefix}/messages/count_tokens", count)


def _add(app: web.Application, method: str, path: str, handler: Handler) -> None:
    """With and without a slash at the end: a redirect would cost some clients their key."""
    for spelling in {path, path.rstrip("/") + "/"}:
        if method == "GET":
            app.router.add_get(spelling, handler)
        else:
            app.router.add_route(method, spelling, handler, expect_handler=expect)


def _refuse_open(server: Server) -> None:
    if not server.allow_open:
        raise ConfigError(
            f"anyone who reaches {server.host} could ask",
            where="server.host",
            hint="Set server.api_keys_file, or server.allow_open where the network is yours alone.",
        )
    log.warning("anyone who reaches %s may ask, as server.allow_open says", server.host)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _fingerprint(identity: str, settings: Settings) -> str:
    digest = hashlib.sha256(f"{identity}\n{to_json(numbers_of(settings))}".encode())
    return f"tidelm-{digest.hexdigest()[:8]}"


async def _threads(app: web.Application) -> AsyncIterator[None]:
    yield
    app[CONTEXT].slots.close()
