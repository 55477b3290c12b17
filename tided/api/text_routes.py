"""POST /tokenize, /detokenize and /v1/debug/prompt: text to tokens and back, and the prompt that a request would have.

They need no lane, and answer while all are busy.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from tided.api.anthropic_request import prepare_message
from tided.api.body import parse_object
from tided.api.context import CONTEXT, Context
from tided.api.exchange import receive
from tided.api.ids import new_id
from tided.api.json_text import to_json
from tided.api.logprob_json import LogprobJson
from tided.api.prepare import Prepared, fitting_ids, prepare, prepare_object
from tided.api.served import ServedModel
from tided.chat.fields import Fields, is_number, refuse
from tided.chat.messages import Prompt, Segment
from tided.chat.tokenizer import Tokenizer

T = TypeVar("T")

_ID_BYTES = 8  # what counts as the size of work on a token


class Spelled(NamedTuple):
    """A prompt's text. `specials`: where its special tokens stand, in characters, from and to."""

    text: str
    specials: list[list[int]]


class Asked(NamedTuple):
    """What /tokenize is asked about: ids, or a conversation whose images are still to be looked at."""

    ids: list[int]
    conversation: Prepared | None
    spells: bool


async def tokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    with context.admission.desk(request.content_length) as place:
        asked = await receive(request, context, place, tokenize_asked)
        ids = asked.ids
        if asked.conversation is not None:
            ids = (await context.images.seen(asked.conversation)).request.prompt_ids

    def shown() -> dict[str, Any]:
        body = {"count": len(ids), "max_model_len": context.served.context_tokens, "tokens": ids}
        text = LogprobJson(context.served.tokenizer).text
        return body | ({"token_strs": [text(one) for one in ids]} if asked.spells else {})

    return await _made(context, len(ids), shown)


async def detokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    with context.admission.desk(request.content_length) as place:
        ids = await receive(request, context, place, detokenize_asked)
    return await _made(context, len(ids), lambda: {"prompt": spelled(ids, context.served.tokenizer).text})


async def debug_prompt(request: web.Request) -> web.Response:
    """With the header `anthropic-version` the body is one of /v1/messages, else of /v1/chat/completions."""
    context, messages = request.app[CONTEXT], "anthropic-version" in request.headers
    with context.admission.desk(request.content_length) as place:
        prepared = await receive(request, context, place, _message_prepared if messages else prepare)
        prepared = await context.images.seen(prepared)
    ids, conversation = prepared.request.prompt_ids, prepared.chat.conversation

    def shown() -> dict[str, Any]:
        prompt = spelled(ids, context.served.tokenizer)
        return {
            "prompt": prompt.text,
            "prompt_token_ids": ids,
            "special_token_spans": prompt.specials,
            "thinking": conversation.thinking,
            "effort": conversation.effort if conversation.thinking else None,
            "grammar": prepared.guides.grammar is not None,
        }

    return await _made(context, len(ids), shown)


def tokenize_asked(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> Asked:
    """A text is nothing but text: whatever it spells, it becomes no special token."""
    value = parse_object(body)
    alive()
    fields = Fields(value)
    prompt, spells = fields.string("prompt"), fields.boolean("return_token_strs") or False
    if prompt is None and value.get("messages") is None:
        refuse("prompt", "expected prompt (a text) or messages (an array)")
    if prompt is None:
        return Asked([], prepare_object(value, served, alive, new_id("tokens-")), spells)
    begin = served.family.begin if fields.boolean("add_special_tokens") else ()
    segments = (Segment(prompt),) if prompt else ()
    ids = fitting_ids(served.tokenizer, Prompt(segments, "content"), served.context_tokens, 1, alive)
    return Asked([*map(served.tokenizer.special_id, begin), *ids], None, spells)


def detokenize_asked(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> list[int]:
    fields, most = Fields(parse_object(body)), served.tokenizer.vocabulary_tokens
    alive()
    ids = fields.array("tokens", served.context_tokens)
    if ids is None:
        refuse("tokens", "expected an array of token ids")
    for at, one in enumerate(ids):
        if not is_number(one) or not 0 <= one < most or one != int(one):
            refuse(f"tokens[{at}]", f"expected a token id from 0 to {most - 1}, got {str(one)[:40]}")
    return [int(one) for one in ids]


def spelled(ids: Iterable[int], tokenizer: Tokenizer) -> Spelled:
    """The text that these ids stand for; a special token is its spelling."""
    spellings = {one: spelling for spelling, one in tokenizer.special_ids.items()}
    decoder, parts, specials, characters = tokenizer.decoder(spellings), list[str](), list[list[int]](), 0
    for one in ids:
        parts.append(decoder.feed([one]))
        characters += len(parts[-1])
        if one in spellings:
            specials.append([characters - len(spellings[one]), characters])
    return Spelled("".join(parts) + decoder.flush(), specials)


def _message_prepared(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> Prepared:
    return prepare_message(body, served, alive).prepared


async def _made(context: Context, tokens: int, make: Callable[[], dict[str, Any]]) -> web.Response:
    """A reply of so many tokens, made in a thread: a million take a second."""
    text = await context.slots.run(_ID_BYTES * tokens, lambda alive: to_json(make()))
    return web.Response(text=text, content_type="application/json", charset="utf-8")
