"""From the bytes of a Messages body to a request for the engine: what can be refused is refused here."""

import time
from collections.abc import Callable

import msgspec

from tided.api.body import parse_object
from tided.api.chat_request import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    ChatRequest,
    cache_salt_of,
    fidelity_of,
    loop_break_of,
    sampling_of,
)
from tided.api.ids import new_id
from tided.api.prepare import Prepared, prepare_chat, rendered
from tided.api.served import ServedModel
from tided.chat.anthropic import parse_request
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Image, Prompt
from tided.errors import ContextOverflowError, RequestError

COUNT_S = 10.0  # a refusal is not kept waiting longer for the length of what it refuses


class Counted(msgspec.Struct, frozen=True):
    """Tokens of a prompt, with one for each of `images`."""

    tokens: int
    images: tuple[Image, ...]


class LongPromptError(ContextOverflowError):
    """Counted to its end, with one token for each of `images`, which are still to be looked at."""

    def __init__(self, context_tokens: int, prompt_tokens: int, max_tokens: int, images: tuple[Image, ...]) -> None:
        super().__init__(context_tokens, prompt_tokens, max_tokens)
        self.images = images


class PreparedMessage(msgspec.Struct, frozen=True):
    """`model`: the name that was asked for, which the reply repeats."""

    prepared: Prepared
    model: str


def prepare_message(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> PreparedMessage:
    """Runs in a thread, as `prepare.prepare` does. An answer longer than the room left is lowered to it: clients always
    ask for the longest. A prompt that is too long is counted to its end: they shorten by the difference."""
    fields = Fields(parse_object(body))
    alive()
    chat = parse_message_request(fields, served)
    try:
        prepared = prepare_chat(chat, served, alive, new_id("msg_"), lowers=True)
    except ContextOverflowError as error:
        prompt = rendered(chat.conversation, served)
        raise _long(error, prompt, served, alive) from None
    return PreparedMessage(prepared, fields.string("model") or served.settings.model.served_name)


def count_tokens(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> Counted:
    """Tokens of the prompt that `prepare_message` would make, also of one that is too long."""
    fields = Fields(parse_object(body))
    alive()
    _check_others(fields, served)
    conversation, _ = parse_request(fields, served.settings.server.thinking, family=served.family)
    prompt = rendered(conversation, served)
    return Counted(_count(prompt, served, alive), prompt.images)


def _count(prompt: Prompt, served: ServedModel, alive: Callable[[], None], longest_s: float = float("inf")) -> int:
    """The prompt's tokens, or those that `longest_s` was enough for."""
    count, deadline = 0, time.monotonic() + longest_s
    for part in served.tokenizer.encode_in_parts(prompt.segments):
        alive()
        count += len(part)
        if time.monotonic() > deadline:
            break
    return count


def _long(
    error: ContextOverflowError, prompt: Prompt, served: ServedModel, alive: Callable[[], None]
) -> ContextOverflowError:
    """`error`, counted to the prompt's end."""
    tokens = error.prompt_tokens
    if not error.counted:
        try:
            tokens = _count(prompt, served, alive, COUNT_S)
        except RequestError:  # a text behind the context that cannot be cut into tokens
            return error
        if tokens <= error.context_tokens:  # the time was short: that it is too long is all that is known
            return error
    return LongPromptError(error.context_tokens, tokens, error.max_tokens, prompt.images)


def parse_message_request(body: Fields, served: ServedModel) -> ChatRequest:
    settings = served.settings
    max_tokens = body.integer("max_tokens", 1)
    if max_tokens is None:
        refuse("max_tokens", "expected an integer of at least 1")
    _check_others(body, served)
    conversation, shape = parse_request(body, settings.server.thinking, family=served.family)
    return ChatRequest(
        conversation=conversation,
        sampling=sampling_of(body, served.tokenizer.vocabulary_tokens),
        max_tokens=max_tokens,
        stops=_stops(body),
        stop_ids=(),
        ignore_eos=False,
        max_calls=1 if shape.single else None,
        stream=body.boolean("stream") or False,
        usage_chunk=False,
        usage_everywhere=False,
        show_reasoning=True,
        show_stats=settings.server.anthropic_stats,
        fidelity=fidelity_of(body, settings.tide.fidelity),
        loop_break=loop_break_of(body, settings.engine.loop_break),
        shape=shape,
        cache_salt=cache_salt_of(body, served),
    )


def _stops(body: Fields) -> tuple[str, ...]:
    given = body.array("stop_sequences", MAX_STOPS) or []
    for index, stop in enumerate(given):
        if not isinstance(stop, str) or len(stop) > MAX_STOP_CHARACTERS:
            refuse(f"stop_sequences[{index}]", f"expected a string of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stop for stop in given if stop))


def _check_others(body: Fields, served: ServedModel) -> None:
    """Fields that would change an answer's content and that this server does not implement."""
    served.check_model(body.string("model"))
    if body.array("mcp_servers", 1000):
        refuse("mcp_servers", "this server calls no other servers; leave it out")
