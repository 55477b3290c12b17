"""GET /v1/expert-map: where every routed expert is. Reads what the engine shows, and asks it nothing."""

import time

from aiohttp import web

from tided.api.context import CONTEXT
from tided.api.errors import unavailable
from tided.api.json_text import to_json


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
