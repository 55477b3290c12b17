"""Rank 0's HTTP side: bound before anything is loaded, answering 503 until the engine serves."""

import asyncio
from contextlib import suppress
from typing import Self

from packers.shards import Checkpoint
from tided.api.app import build_app
from tided.api.auth import KeyRing
from tided.api.context import CONTEXT
from tided.api.door import Door
from tided.chat.families import Family, family_of
from tided.chat.tokenizer import Tokenizer
from tided.control.wire import listen_tcp
from tided.engine.audit import Auditor
from tided.engine.client import EngineClient
from tided.images.geometry import Geometry
from tided.models.families import open_checkpoint
from tided.settings import Settings


class Front:
    """`client` is the engine as the API sees it."""

    def __init__(self, client: EngineClient, door: Door, keys: KeyRing) -> None:
        self.client, self._door, self._keys = client, door, keys
        self._audits = asyncio.create_task(client.audit_when_idle())

    def reload(self) -> None:
        """Reads again what may change while the server runs."""
        self._keys.reload()

    @classmethod
    async def open(cls, settings: Settings, profile: str = "") -> Self:
        """Raises UnavailableError: port in use; DataError: checkpoint or tokenizer; ConfigError: key file."""
        listener = listen_tcp(settings.server.host, settings.server.port, "server.port")
        try:
            tokenizer, family, checkpoint, geometry = await asyncio.to_thread(_read, settings)
            audit = settings.audit
            auditor = Auditor(
                audit.remember_tokens, audit.idle_s, settings.tide.sync_slots > 0, settings.cache.context_tokens
            )
            client = EngineClient(settings.engine.lanes, settings.engine.queue, tokenizer.token_bytes, auditor)
            app = build_app(
                client,
                tokenizer,
                family,
                settings,
                identity=checkpoint.served_identity(),
                overlay=checkpoint.overlay,
                geometry=geometry,
                profile=profile,
            )
            door = await Door.open(app, listener)
        except BaseException:
            listener.close()
            raise
        return cls(client, door, app[CONTEXT].keys)

    async def close(self, timeout_s: float) -> None:
        """Closes the port and waits for replies under way, but not for readers that do not read."""
        self._audits.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._door.close(), timeout_s)


def _read(settings: Settings) -> tuple[Tokenizer, Family, Checkpoint, Geometry | None]:
    checkpoint = open_checkpoint(settings.model)
    geometry = Geometry.of(checkpoint.config) if settings.vision.rank >= 0 else None
    return Tokenizer.open(checkpoint.path), family_of(checkpoint.config), checkpoint, geometry
