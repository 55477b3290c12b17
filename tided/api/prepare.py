"""From a body's bytes to a request for the engine: everything that can be refused is refused here, before any reply."""

from collections.abc import Callable
from typing import Any

import msgspec

from tided.api.body import parse_object
from tided.api.chat_request import ChatRequest, parse_chat_request
from tided.api.ids import new_id
from tided.api.shape import FREE_GUIDES, Guides, guides_for
from tided.chat.deepseek_v41 import EOS, default_max_tokens, encode_prompt
from tided.chat.fields import Fields
from tided.chat.grammar import Grammars
from tided.chat.messages import Conversation, Prompt
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Request
from tided.errors import ContextOverflowError
from tided.settings import Settings


class Prepared(msgspec.Struct, frozen=True):
    """Held as long as the answer takes, so without the texts that the prompt was made of. `guides` opens the answer's
    grammar."""

    chat: ChatRequest
    prompt: Prompt
    request: Request
    guides: Guides = FREE_GUIDES

    def without_stats(self) -> "Prepared":
        return msgspec.structs.replace(self, chat=msgspec.structs.replace(self.chat, show_stats=False))

    def choices(self) -> "list[Prepared]":
        """One for each answer: the seeds follow each other, so each repeats alone."""
        return [
            self.variant(f"{self.request.request_id}-{at}" if at else self.request.request_id, at)
            for at in range(self.chat.n)
        ]

    def variant(self, request_id: str, at: int) -> "Prepared":
        sampling = msgspec.structs.replace(self.request.sampling, seed=_wrapped(self.request.sampling.seed + at))
        request = msgspec.structs.replace(self.request, request_id=request_id, sampling=sampling)
        return msgspec.structs.replace(self, request=request)


def _wrapped(seed: int) -> int:
    """Within 64 bits, with a sign."""
    return (seed + 2**63) % 2**64 - 2**63


def prepare(
    body: bytes | bytearray,
    tokenizer: Tokenizer,
    settings: Settings,
    context_tokens: int,
    alive: Callable[[], None],
    grammars: Grammars,
) -> Prepared:
    """Parses, checks, renders and tokenises. Runs in a thread: a long prompt takes seconds. `alive` is called between
    the steps and ends the work by raising."""
    value = parse_object(body)
    alive()
    return prepare_object(value, tokenizer, settings, context_tokens, alive, grammars, new_id("chatcmpl-"))


def prepare_object(
    value: dict[str, Any],
    tokenizer: Tokenizer,
    settings: Settings,
    context_tokens: int,
    alive: Callable[[], None],
    grammars: Grammars,
    request_id: str,
) -> Prepared:
    """The same from a chat completion's object."""
    thinking, fidelity = settings.server.thinking, settings.tide.fidelity
    chat = parse_chat_request(Fields(value), tokenizer.vocabulary_tokens, thinking, fidelity)
    prompt = encode_prompt(chat.conversation)
    prompt_ids = fitting_ids(tokenizer, prompt, context_tokens, chat.max_tokens or 1, alive)
    alive()
    guides = guides_for(chat.shape, chat.conversation, prompt.start, tokenizer, grammars)
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=chat.sampling,
        max_tokens=fitting_max_tokens(chat.max_tokens, len(prompt_ids), context_tokens, chat.conversation),
        stop_ids=chat.stop_ids if chat.ignore_eos else (tokenizer.special_id(EOS), *chat.stop_ids),
        fidelity=chat.fidelity,
        min_tokens=chat.min_tokens,
        logprobs=chat.logprobs,
        guided=guides.grammar is not None,
    )
    kept = msgspec.structs.replace(chat, conversation=msgspec.structs.replace(chat.conversation, messages=()))
    return Prepared(kept, msgspec.structs.replace(prompt, segments=()), request, guides)


def fitting_ids(
    tokenizer: Tokenizer, prompt: Prompt, context_tokens: int, max_tokens: int, alive: Callable[[], None]
) -> list[int]:
    """The prompt's ids. Of a prompt beyond the context no more is tokenised than shows it."""
    too_long = ContextOverflowError(context_tokens, context_tokens, max_tokens, counted=False)
    if tokenizer.least_tokens(prompt.segments) > context_tokens:
        raise too_long
    ids: list[int] = []
    for part in tokenizer.encode_in_parts(prompt.segments):
        alive()
        ids += part
        if len(ids) > context_tokens:
            raise too_long
    return ids


def fitting_max_tokens(wanted: int | None, prompt_tokens: int, context_tokens: int, conversation: Conversation) -> int:
    """What was asked for must fit beside the prompt; the default is lowered to the room left."""
    room = context_tokens - prompt_tokens
    if room < (wanted or 1):
        raise ContextOverflowError(context_tokens, prompt_tokens, wanted or 1)
    return wanted or min(room, default_max_tokens(conversation.thinking, conversation.effort))
