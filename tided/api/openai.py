"""POST /v1/chat/completions."""

from aiohttp import web

from tided.api.answers import Answers
from tided.api.context import CONTEXT, NOTE
from tided.api.exchange import answer_in_pieces, answer_whole, receive
from tided.api.openai_wire import ChatWire
from tided.api.prepare import prepare


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    request[NOTE].generation = answers = await _submitted(request)
    wire = ChatWire(answers, context.served.tokenizer, context.served.settings.model.served_name, context.fingerprint)
    try:
        if answers.prepared.chat.stream:
            return await answer_in_pieces(request, context, answers, wire, request[NOTE])
        return await answer_whole(context, answers, wire)
    finally:
        # Also when the client has gone: the handler is cancelled then, wherever it waits.
        answers.close()


async def _submitted(request: web.Request) -> Answers:
    """What the answer does not need, images above all, is let go here."""
    context = request.app[CONTEXT]
    with context.admission.place(request.content_length) as place:
        prepared = await context.images.seen(await receive(request, context, place, prepare))
        if request.headers.get("x-engine-stats") == "0":
            prepared = prepared.without_stats()
        choices, keepalive_s = prepared.choices(), context.limits.keepalive_s
        return Answers(context.engine, choices, context.served, keepalive_s, each=len(choices))
