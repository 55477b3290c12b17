"""From the bytes of a Messages body to a request for the engine: what can be refused is refused here."""

from collections.abc import Callable

import msgspec

from tided.api.body import parse_object
from tided.api.chat_request import MAX_STOP_CHARACTERS, MAX_STOPS, ChatRequest, fidelity_of, sampling_of
from tided.api.ids import new_id
from tided.api.prepare import Prepared, fitting_ids
from tided.chat.anthropic import max_calls, parse_conversation
from tided.chat.deepseek_v41 import EOS, encode_prompt
from tided.chat.fields import Fields, refuse
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Request
from tided.errors import ContextOverflowError
from tided.settings import Settings


class PreparedMessage(msgspec.Struct, frozen=True):
    """`model`: the name that was asked for, which the reply repeats."""

    prepared: Prepared
    model: str


def prepare_message(
    body: bytes | bytearray, tokenizer: Tokenizer, settings: Settings, context_tokens: int, alive: Callable[[], None]
) -> PreparedMessage:
    """Runs in a thread, as `prepare.prepare` does. An answer longer than the room left is lowered to it: clients always
    ask for the longest."""
    fields = Fields(parse_object(body))
    alive()
    chat = parse_message_request(fields, tokenizer.vocabulary_tokens, settings)
    prompt = encode_prompt(chat.conversation)
    prompt_ids = fitting_ids(tokenizer, prompt, context_tokens, 1, alive)
    room = context_tokens - len(prompt_ids)
    if room < 1:
        raise ContextOverflowError(context_tokens, len(prompt_ids), 1)
    request = Request(
        request_id=new_id("msg_"),
        prompt_ids=prompt_ids,
        sampling=chat.sampling,
        max_tokens=min(chat.max_tokens or room, room),
        stop_ids=(tokenizer.special_id(EOS),),
        fidelity=chat.fidelity,
    )
    kept = msgspec.structs.replace(chat, conversation=msgspec.structs.replace(chat.conversation, messages=()))
    prepared = Prepared(kept, msgspec.structs.replace(prompt, segments=()), request)
    return PreparedMessage(prepared, fields.string("model") or settings.model.served_name)


def count_tokens(body: bytes | bytearray, tokenizer: Tokenizer, settings: Settings, alive: Callable[[], None]) -> int:
    """Tokens of the prompt that `prepare_message` would make, also of one that is too long."""
    fields = Fields(parse_object(body))
    alive()
    _check_others(fields)
    prompt = encode_prompt(parse_conversation(fields, settings.server.thinking))
    count = 0
    for part in tokenizer.encode_in_parts(prompt.segments):
        alive()
        count += len(part)
    return count


def parse_message_request(body: Fields, vocabulary_tokens: int, settings: Settings) -> ChatRequest:
    max_tokens = body.integer("max_tokens", 1)
    if max_tokens is None:
        refuse("max_tokens", "expected an integer of at least 1")
    _check_others(body)
    return ChatRequest(
        conversation=parse_conversation(body, settings.server.thinking),
        sampling=sampling_of(body, vocabulary_tokens),
        max_tokens=max_tokens,
        stops=_stops(body),
        stop_ids=(),
        ignore_eos=False,
        max_calls=max_calls(body),
        stream=body.boolean("stream") or False,
        usage_chunk=False,
        usage_everywhere=False,
        show_reasoning=True,
        show_stats=settings.server.anthropic_stats,
        fidelity=fidelity_of(body, settings.tide.fidelity),
    )


def _stops(body: Fields) -> tuple[str, ...]:
    given = body.array("stop_sequences", MAX_STOPS) or []
    for index, stop in enumerate(given):
        if not isinstance(stop, str) or len(stop) > MAX_STOP_CHARACTERS:
            refuse(f"stop_sequences[{index}]", f"expected a string of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stop for stop in given if stop))


def _check_others(body: Fields) -> None:
    """Fields that would change an answer's content and that this server does not implement."""
    body.string("model")
    if body.array("mcp_servers", 1000):
        refuse("mcp_servers", "this server calls no other servers; leave it out")
    output = body.fields("output_config")
    if output.get("format") is not None:
        refuse(output.param("format"), "is not supported; leave it out")
