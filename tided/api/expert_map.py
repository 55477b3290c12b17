"""GET /v1/expert-map: where every routed expert is, once; /v1/expert-map/events: as it changes. Both read what the
engine shows, and ask it nothing."""

import time
from contextlib import aclosing

from aiohttp import hdrs, web

from tided.api.context import CONTEXT, NOTE
from tided.api.errors import unavailable
from tided.api.json_text import to_json
from tided.api.sse import EventStream, ReaderStalledError


async def expert_map(request: web.Request) -> web.Response:
    """`?since=` the generation that the client has, or its ETag: 304 while nothing has changed or moves. `?slots=1`:
    with every expert's slot of the arena."""
    context = request.app[CONTEXT]
    found = context.engine.expert_map(request.query.get("slots", "0") not in ("", "0"))
    if found is None:
        raise unavailable("the model is still being loaded")
    activity = found["activity"]
    tag = f'"{found["generation"]}.{activity["sequence"]}"'
    known = tag in (request.query.get("since"), request.headers.get("If-None-Match"))
    known = known or request.query.get("since") == tag.strip('"')
    if known and not activity["active"] and not activity["recent"]:
        return web.Response(status=304, headers={"ETag": tag})
    health = context.engine.health()
    body = {
        "version": 1,
        "sampled_at": round(time.time(), 3),
        "model": context.served.settings.model.served_name,
        "busy": health["busy"],
        "fault": health["fault"],
        "rank": 0,
        "world_size": context.served.settings.parallel.ranks,
        **found,
    }
    return web.Response(text=to_json(body), content_type="application/json", charset="utf-8", headers={"ETag": tag})


async def expert_events(request: web.Request) -> web.StreamResponse:
    """Server-sent events for as long as the client reads (`viewers`). `?follow=0`: all that is now, and the end."""
    context = request.app[CONTEXT]
    if request.method == hdrs.METH_HEAD or request.query.get("follow", "1") == "0":
        return web.Response(text=context.viewers.whole(), content_type="text/event-stream", charset="utf-8")
    stream = EventStream(request, context.limits.stall_s)
    async with aclosing(context.viewers.follow(context.limits.keepalive_s)) as texts:
        first = await anext(texts)  # refused before the status line
        try:
            await stream.open()
            await stream.write(first)
            async for text in texts:
                await stream.write(text)
            return await stream.close()
        except (ReaderStalledError, TimeoutError, ConnectionError):
            request[NOTE].outcome = "reader gone"
            return stream.abort()
