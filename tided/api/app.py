"""The HTTP application of rank 0. One engine, one model; OpenAI's API and Anthropic's."""

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.metadata import version

from aiohttp import web

from packers.overlay import Overlay
from tided.api.admission import Admission
from tided.api.auth import KeyRing, key_file
from tided.api.context import CONTEXT, Context
from tided.api.images import Images
from tided.api.json_text import to_json
from tided.api.metrics import METRICS, Metrics
from tided.api.middleware import add_headers, observe
from tided.api.ports import Engine, Limits
from tided.api.routes import DOCUMENT, add_routes, api_document
from tided.api.served import ServedModel
from tided.api.slots import Slots
from tided.api.small_routes import numbers_of
from tided.api.viewers import Viewers
from tided.chat.families import Family
from tided.chat.tokenizer import Tokenizer
from tided.errors import ConfigError
from tided.images.geometry import Geometry
from tided.settings import Server, Settings

log = logging.getLogger("tided.api")


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    family: Family,
    settings: Settings,
    *,
    identity: str = "",
    overlay: Overlay | None = None,
    limits: Limits | None = None,
    geometry: Geometry | None = None,
    profile: str = "",
) -> web.Application:
    """`identity`: names the weights that are served, part of the fingerprint that replies carry. `geometry`: of its
    vision tower, where images are taken. `profile`: its name.

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
        images=Images(served, geometry, limits.prepare_s),
        viewers=Viewers(engine, settings.model.served_name),
        fingerprint=_fingerprint(identity, settings),
        overlay=overlay,
        profile=profile,
    )
    app[METRICS] = Metrics(engine, settings.model.served_name, version("tidelm"), overlay.sha256 if overlay else "")
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_threads)
    app.cleanup_ctx.append(_publisher)
    app.on_shutdown.append(_end_of_view)
    app[DOCUMENT] = api_document(version("tidelm"))
    add_routes(app)
    return app


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
    app[CONTEXT].images.close()
    app[CONTEXT].served.grammars.close()


async def _publisher(app: web.Application) -> AsyncIterator[None]:
    running = asyncio.create_task(app[CONTEXT].viewers.run())
    yield
    running.cancel()
    await asyncio.wait([running])


async def _end_of_view(app: web.Application) -> None:
    """Before the server waits for its replies: these would not end by themselves."""
    app[CONTEXT].viewers.close()
