"""From a body's bytes to a request for the engine: everything that can be refused is refused here, before any reply."""

from collections.abc import Callable
from typing import Any

import msgspec

from tided.api.body import parse_object
from tided.api.chat_request import ChatRequest, parse_chat_request
from tided.api.guides import FREE_GUIDES, Guides, guides_for
from tided.api.ids import new_id
from tided.api.messages import images_of
from tided.api.served import ServedModel
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Conversation, Image, Message, Prompt
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Pixels, Request
from tided.errors import ContextOverflowError


class Prepared(msgspec.Struct, frozen=True):
    """Held as long as the answer takes, so without the texts that the prompt was made of. `guides` opens the answer's
    grammar. `lowers`: as `prepare_chat`. `images` are still to be looked at (`tided.api.images`): each has one token in
    the prompt so far; `pixels` are those of images that have been."""

    chat: ChatRequest
    prompt: Prompt
    request: Request
    guides: Guides = FREE_GUIDES
    lowers: bool = False
    images: tuple[Image, ...] = ()
    pixels: tuple[Pixels, ...] = ()

    def without_pixels(self) -> "Prepared":
        """What is left of it once the engine has them."""
        return msgspec.structs.replace(self, pixels=())

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


def prepare(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> Prepared:
    """Parses, checks, renders and tokenises. Runs in a thread: a long prompt takes seconds. `alive` is called between
    the steps and ends the work by raising."""
    value = parse_object(body)
    alive()
    return prepare_object(value, served, alive, new_id("chatcmpl-"))


def prepare_object(value: dict[str, Any], served: ServedModel, alive: Callable[[], None], request_id: str) -> Prepared:
    """The same from a chat completion's object."""
    return prepare_chat(parse_chat_request(Fields(value), served), served, alive, request_id)


def prepare_chat(
    chat: ChatRequest, served: ServedModel, alive: Callable[[], None], request_id: str, *, lowers: bool = False
) -> Prepared:
    """From the conversation on, whatever API it came by. `lowers`: an answer that is longer than the room is lowered to
    it, and not refused."""
    tokenizer = served.tokenizer
    prompt = rendered(chat.conversation, served)
    wanted = None if lowers else chat.max_tokens
    prompt_ids = fitting_ids(tokenizer, prompt, served.context_tokens, wanted or 1, alive)
    max_tokens = fitting_max_tokens(chat, len(prompt_ids), served, lowers=lowers)
    alive()
    guides = guides_for(chat.shape, chat.conversation, prompt.start, served, alive)
    plain = request_of(chat, served, request_id, prompt_ids, max_tokens)
    request = msgspec.structs.replace(plain, guided=guides.grammar is not None)
    kept = msgspec.structs.replace(chat, conversation=msgspec.structs.replace(chat.conversation, messages=()))
    bare = msgspec.structs.replace(prompt, segments=(), images=())
    return Prepared(kept, bare, request, guides, lowers, prompt.images)


def request_of(
    chat: ChatRequest, served: ServedModel, request_id: str, prompt_ids: list[int], max_tokens: int
) -> Request:
    """What every API asks of the engine alike."""
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=chat.sampling,
        max_tokens=max_tokens,
        stop_ids=chat.stop_ids if chat.ignore_eos else (*served.stop_ids, *chat.stop_ids),
        fidelity=chat.fidelity,
        min_tokens=chat.min_tokens,
        loop_break=chat.loop_break,
        logprobs=chat.logprobs,
        cache_salt=chat.cache_salt,
        asker=served.asker,
    )


def rendered(conversation: Conversation, served: ServedModel) -> Prompt:
    """Raises RequestError for an image where none can be, and for no thinking where the model always thinks."""
    if served.family.always_thinks and not conversation.thinking and not served.settings.server.allow_no_thinking:
        refuse("thinking", "the model that is served here has no mode without it; leave it on")
    prompt = served.family.encode_prompt(conversation)
    if not served.sees:
        # A format without images has a text in their place: an old one must not end a conversation for good.
        asked = conversation.messages if served.family.image else _last_question(conversation.messages)
        if seen := next(images_of(asked), None):
            refuse(seen.param, "images are not supported by this server", code="image_input_not_supported")
        return prompt
    for image in images_of([one for one in conversation.messages if one.role not in ("user", "tool")]):
        refuse(image.param, "an image may stand in messages of the user, and in tool results")
    return prompt


def _last_question(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=0)
    return messages[last:]


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


def fitting_max_tokens(chat: ChatRequest, prompt_tokens: int, served: ServedModel, *, lowers: bool = False) -> int:
    """What was asked for must fit beside the prompt, unless it is lowered; the default always is."""
    room, wanted = served.context_tokens - prompt_tokens, chat.max_tokens
    if room < (1 if lowers else wanted or 1):
        raise ContextOverflowError(served.context_tokens, prompt_tokens, 1 if lowers else wanted or 1)
    conversation = chat.conversation
    return min(room, wanted or served.family.default_max_tokens(conversation.thinking, conversation.effort))
