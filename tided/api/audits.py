"""POST /v1/requests/{id}/audit: a finished answer, scored again with every expert. Waits until nobody else asks."""

from typing import Any

import msgspec
from aiohttp import web

from tided.api.context import CONTEXT, NOTE, Context, Note
from tided.api.json_text import to_json
from tided.api.logprob_json import LogprobJson
from tided.errors import RequestError


async def audit(request: web.Request) -> web.Response:
    context, name = request.app[CONTEXT], request.match_info["id"]
    _check_owner(context, request[NOTE], name)
    found = msgspec.to_builtins(await context.engine.audit(name))
    return web.Response(text=to_json(_shown(context, found)), content_type="application/json", charset="utf-8")


def _check_owner(context: Context, note: Note, name: str) -> None:
    """An answer is that of the key that asked for it, though it be the only one by now."""
    asker = context.engine.asker_of(name)
    if asker and asker != context.served_to(note).asker:
        raise RequestError("No such answer is remembered.", status=404, code="request_not_found", param="id")


def _shown(context: Context, found: dict[str, Any]) -> dict[str, Any]:
    """With the tokens' texts."""
    text = LogprobJson(context.served.tokenizer).text
    return found | {
        "differences": [
            one | {"text": text(one["token_id"]), "exact_text": text(one["exact_id"])} for one in found["differences"]
        ]
    }
