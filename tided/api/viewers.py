"""Who looks at the experts as they move: one publisher, and a bounded queue for each viewer.

The engine's thread shows what it shows, whoever looks (`engine.board`). Ten times a second, while somebody does, the
publisher copies a byte an expert, finds what changed, and gives the same few bytes to all. A viewer that is slower than
that skips: its queue is emptied, and the next thing it gets is the whole map. One that takes nothing at all is given up
like any stalled reader.

Events, in the order of a stream's beginning:

    map    the whole: `layers`, `experts`, and `cells`, base64 of a byte an expert (its state times 16, and its heat of
           0 to 9, 15 where nobody follows it)
    tide   columns of samples (`tide_log`): the last quarter of an hour, then a sample a second
    now    lanes, reads, memory, counts: at most four times a second, and only where something of it has changed
    cells  base64 of three bytes a change: its place (layer * experts + expert) times 64, and its byte
"""

import asyncio
import base64
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import numpy as np

from tided.api.errors import unavailable
from tided.api.json_text import to_json
from tided.api.ports import Engine
from tided.api.speeds import LaneSpeeds
from tided.api.sse import comment
from tided.api.tide_log import EVERY_S, TideLog, as_columns
from tided.errors import RequestError

log = logging.getLogger("tided.api")

CELLS_EVERY_S = 0.1
NOW_EVERY_S = 0.25
QUEUE = 32  # events that may wait for a viewer
MOST_VIEWERS = 16
MEMORY_STEP = 64 << 20  # of memory that is available: what changes by less changes nothing
WHOLE_SHARE = 4  # where more than one in so many cells changed, the whole map is shorter
STATES = ("not_loaded", "resident", "transient", "loading")


class Viewer:
    """The events that wait for one reader."""

    def __init__(self) -> None:
        self.events: deque[str] = deque()
        self.skipped = False  # it was too slow: it is to begin anew
        self.ended = False  # nothing comes any more, whoever publishes
        self.arrived = asyncio.Event()

    def put(self, event: str) -> None:
        if self.ended:
            return
        if len(self.events) >= QUEUE:
            self.events.clear()
            self.skipped = True
        self.events.append(event)
        self.arrived.set()

    def end(self) -> None:
        self.ended = True
        self.arrived.set()


class Viewers:
    """`model`: its served name."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._tides, self._speeds = TideLog(engine), LaneSpeeds()
        self._open: set[Viewer] = set()
        self._cells = b""  # as all viewers know them
        self._now: dict[str, Any] = {}
        self._sampled_s = self._told_s = float("-inf")
        self._came = asyncio.Event()
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._open)

    async def follow(self, silence_s: float) -> AsyncGenerator[str]:
        """Texts to write, each of one event or more, or a comment after `silence_s` without any; until the server ends.
        Raises RequestError 429 where too many
        look already, 503 while nothing is loaded."""
        viewer = self._enter()
        try:
            while True:
                if not viewer.events and not viewer.ended:
                    viewer.arrived.clear()
                    try:
                        await asyncio.wait_for(viewer.arrived.wait(), silence_s)
                    except TimeoutError:
                        yield comment("keep-alive")
                        continue
                text, skipped = "".join(viewer.events), viewer.skipped
                viewer.events.clear()
                viewer.skipped = False
                if viewer.ended:
                    if text and not skipped:
                        yield text
                    return
                yield self.whole() if skipped else text
        finally:
            self._open.discard(viewer)

    def close(self) -> None:
        """The server ends: so do all streams."""
        self._closed = True
        self._end()

    async def run(self) -> None:
        """Publishes until it is cancelled. Where that fails, who looks is told by the end of its stream."""
        while True:
            try:
                self.publish(time.monotonic(), time.time())
            except Exception:
                log.exception("the expert map could not be published")
                self._end()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), CELLS_EVERY_S if self._open else EVERY_S)
            self._came.clear()

    def publish(self, now_s: float, unix_s: float) -> None:
        """What has changed since the last time, to all viewers."""
        sample = None
        if now_s - self._sampled_s >= EVERY_S:
            self._sampled_s = now_s
            sample = self._tides.take(unix_s)
        if not self._open:
            return
        if sample is not None:
            self._tell(_event("tide", as_columns([sample])))
        self._tell_cells()
        if now_s - self._told_s >= NOW_EVERY_S:
            self._tell_now(now_s)

    def _enter(self) -> Viewer:
        if len(self._open) >= MOST_VIEWERS:
            what = f"{MOST_VIEWERS} viewers follow the map already; with follow=0 it is told once"
            raise RequestError(what, status=429, kind="rate_limit_error", code="too_many_viewers")
        viewer = Viewer()
        viewer.put(self.whole())
        self._open.add(viewer)
        self._came.set()
        return viewer

    def whole(self) -> str:
        """Events of all that is, as of now: what a viewer has to know to understand what follows. Raises RequestError
        503 while nothing is loaded, and when the server ends."""
        if self._closed or self._engine.cells() is None:
            raise unavailable("the server is ending" if self._closed else "the model is still being loaded")
        self._tell_cells()
        self._tell_now(time.monotonic())
        tides = as_columns(list(self._tides.samples))
        return self._map() + _event("tide", {"whole": True, **tides}) + _event("now", self._now)

    def _map(self) -> str:
        shape = self._engine.shape()
        return _event(
            "map",
            {
                "model": self._model,
                "layers": shape[0],
                "experts": shape[1],
                "states": STATES,
                "cells": base64.b64encode(self._cells).decode(),
            },
        )

    def _tell_cells(self) -> None:
        cells = self._engine.cells() or b""
        if cells == self._cells:
            return
        before, self._cells = self._cells, cells
        changed = delta(before, cells) if len(before) == len(cells) else None
        self._tell(self._map() if changed is None else _event("cells", {"cells": changed}))

    def _tell_now(self, now_s: float) -> None:
        now = self._state_now(now_s)
        self._told_s = now_s
        if now != self._now:
            self._now = now
            self._tell(_event("now", now))

    def _state_now(self, now_s: float) -> dict[str, Any]:
        health, figures = self._engine.health(), self._engine.figures()
        available = figures.get("available_bytes", {})
        lanes = self._speeds.told(figures.get("lanes", []), now_s)
        counted = Counter(self._cells)
        totals = [sum(n for cell, n in counted.items() if cell >> 4 == state) for state in range(len(STATES))]
        return {
            "state": health["state"],
            "fault": health["fault"],
            "queue": health["queue"],
            "lanes_total": health["lanes"]["total"],
            "lanes": lanes,
            "tok_s": health.get("decode_tok_s"),
            "generation": health.get("generation"),
            "counts": dict(zip(STATES, totals, strict=True)),
            "available_bytes": {str(rank): nbytes - nbytes % MEMORY_STEP for rank, nbytes in available.items()},
            **{name: figures.get(name) for name in _FIGURES},
        }

    def _tell(self, event: str) -> None:
        for viewer in self._open:
            viewer.put(event)

    def _end(self) -> None:
        for viewer in self._open:
            viewer.end()


_FIGURES = (
    "swaps", "drafted", "accepted", "answer_tokens", "kv_tokens_used", "kv_tokens_capacity", "arena_bytes",
    "device_bytes", "reads_nbytes", "reads_failed", "reads_hot_issued", "reads_hot_used",
    "reads_hot_late", "reads_waited_reads",
)  # fmt: skip


def delta(before: bytes, now: bytes) -> str | None:
    """base64 of three bytes a change, the highest first: place * 64 + cell. None: the whole is shorter, or the map has
    more places than that can tell."""
    old, new = np.frombuffer(before, dtype=np.uint8), np.frombuffer(now, dtype=np.uint8)
    places = np.flatnonzero(old != new)
    if len(places) * WHOLE_SHARE > len(new) or len(new) > 1 << 18:
        return None
    codes = (places.astype(np.uint32) << 6) | new[places]
    packed = np.stack([codes >> 16, codes >> 8, codes], axis=1).astype(np.uint8)
    return base64.b64encode(packed.tobytes()).decode()


def _event(name: str, value: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {to_json(value)}\n\n"
