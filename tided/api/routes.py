"""Every route, once: the application serves this table, and its document (`openapi`) describes it."""

from aiohttp import web

from tided.api.anthropic import count, messages
from tided.api.audits import audit
from tided.api.completions import completions
from tided.api.expert_map import expert_events, expert_map
from tided.api.expert_page import expert_page
from tided.api.json_text import to_json
from tided.api.metrics import CONTENT_TYPE, metrics
from tided.api.middleware import Handler, expect
from tided.api.openai import chat_completions
from tided.api.openapi.document import EVENTS, Operation, Query, document
from tided.api.openapi.terms import integer, one, text
from tided.api.responses import responses
from tided.api.small_routes import MOST_STATS, health, hello, model, models, root, stats, trace
from tided.api.text_routes import debug_prompt, detokenize, tokenize

DOCUMENT: web.AppKey[str] = web.AppKey("document", str)


async def openapi(request: web.Request) -> web.Response:
    return web.Response(text=request.app[DOCUMENT], content_type="application/json", charset="utf-8")


_GET: tuple[tuple[Operation, Handler], ...] = (
    (Operation(path="/", about="Whether anybody listens; for a browser the page of the map.", gives="Alive"), root),
    (Operation(path="/health", about="Whether the engine serves, and how.", gives="Health", refusals=(503,)), health),
    (Operation(path="/api/hello", about="What Claude Code warms its connection with.", gives="Alive"), hello),
    (
        Operation(path="/expert-map", about="The map as a page, live; its data needs a key.", media="text/html"),
        expert_page,
    ),
    (Operation(path="/metrics", about="Prometheus' text format.", media=CONTENT_TYPE), metrics),
    (Operation(path="/openapi.json", about="This document.", gives="Document"), openapi),
    (Operation(path="/v1/models", about="The names of the served model.", gives="ModelList"), models),
    (Operation(path="/v1/models/{id}", about="One of them.", gives="ModelCard", refusals=(404,)), model),
    (
        Operation(
            path="/v1/requests/{id}/residency",
            about="What a request that has ended wanted of the experts, missed and got; of `latest`: the newest.",
            gives="Residency",
            refusals=(404,),
        ),
        trace,
    ),
    (
        Operation(
            path="/v1/stats",
            about="What the last answers cost, the newest first.",
            gives="Stats",
            query=(Query("n", "How many; 10 unless said.", integer(1, MOST_STATS)),),
            refusals=(400,),
        ),
        stats,
    ),
    (
        Operation(
            path="/v1/expert-map",
            about="Where every routed expert is.",
            gives="ExpertMap",
            query=(
                Query("since", "The ETag that is known: 304 while nothing has changed or moves.", text()),
                Query("slots", "1: with every expert's slot of the arena.", one("0", "1")),
            ),
            refusals=(304, 503),
        ),
        expert_map,
    ),
    (
        Operation(
            path="/v1/expert-map/events",
            about="The map and the tide as they move, for as long as the client reads.",
            media=EVENTS,
            streams="ExpertEvent",
            query=(Query("follow", "0: all that is now, and the end.", one("0", "1")),),
            refusals=(429, 503),
        ),
        expert_events,
    ),
)
_POST: tuple[tuple[Operation, Handler], ...] = (
    (
        Operation(
            method="POST",
            path="/v1/chat/completions",
            about="OpenAI's chat completions.",
            takes="ChatRequest",
            gives="ChatReply",
            streams="ChatChunk",
        ),
        chat_completions,
    ),
    (
        Operation(
            method="POST",
            path="/v1/completions",
            about="A text that goes on.",
            takes="CompletionRequest",
            gives="CompletionReply",
            streams="CompletionChunk",
        ),
        completions,
    ),
    (
        Operation(
            method="POST",
            path="/v1/responses",
            about="OpenAI's Responses. Nothing is stored.",
            takes="ResponseRequest",
            gives="ResponseReply",
            streams="ResponseEvent",
        ),
        responses,
    ),
    (
        Operation(
            method="POST",
            path="/v1/messages",
            about="Anthropic's messages.",
            takes="MessageRequest",
            gives="MessageReply",
            streams="MessageEvent",
        ),
        messages,
    ),
    (
        Operation(
            method="POST",
            path="/v1/messages/count_tokens",
            about="Tokens of the prompt that /v1/messages would make.",
            takes="CountRequest",
            gives="TokenCount",
        ),
        count,
    ),
    (
        Operation(
            method="POST",
            path="/v1/requests/{id}/audit",
            about="A finished answer scored again with every expert, when nobody else asks; of `latest`: the newest.",
            gives="Audit",
            refusals=(400, 404, 429, 500, 503),
        ),
        audit,
    ),
    (
        Operation(
            method="POST",
            path="/tokenize",
            about="A text's tokens, or those of the prompt of a chat.",
            takes="TokenizeRequest",
            gives="Tokenized",
        ),
        tokenize,
    ),
    (
        Operation(
            method="POST",
            path="/detokenize",
            about="The text of tokens; special ones as they are spelled.",
            takes="DetokenizeRequest",
            gives="Detokenized",
        ),
        detokenize,
    ),
    (
        Operation(
            method="POST",
            path="/v1/debug/prompt",
            about="The prompt that a chat would have; with the header anthropic-version, that a message would.",
            takes="DebugRequest",
            gives="DebugPrompt",
        ),
        debug_prompt,
    ),
)
ROUTES = _GET + _POST
"""What is served, and by whom."""


def api_document(version: str) -> str:
    return to_json(document((operation for operation, _ in ROUTES), version))


def add_routes(app: web.Application) -> None:
    """Clients whose base URL ends in /v1 may add another."""
    for operation, handler in ROUTES:
        path = operation.path.replace("/models/{id}", "/models/{id:.+}")
        for prefix in ("", "/v1") if path.startswith("/v1/") else ("",):
            _add(app, operation.method, prefix + path, handler)


def _add(app: web.Application, method: str, path: str, handler: Handler) -> None:
    """With and without a slash at the end: a redirect would cost some clients their key."""
    spellings = {path} if path.endswith("}") else {path, path.rstrip("/") + "/"}
    for spelling in spellings:
        if method == "GET":
            app.router.add_get(spelling, handler)
        else:
            app.router.add_route(method, spelling, handler, expect_handler=expect)
