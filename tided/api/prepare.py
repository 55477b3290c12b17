"""From a body's bytes to a request for the engine: everything that can be refused is refused here, before any reply."""

import msgspec

from tided.api.body import parse_object
from tided.api.chat_request import ChatRequest, parse_chat_request
from tided.api.fields import Fields
from tided.api.ids import new_id
from tided.chat.deepseek_v41 import EOS, default_max_tokens, encode_prompt
from tided.chat.messages import Conversation, Prompt
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Request
from tided.errors import ContextOverflowError


class Prepared(msgspec.Struct, frozen=True):
    chat: ChatRequest
    prompt: Prompt
    request: Request

    def without_stats(self) -> "Prepared":
        return Prepared(msgspec.structs.replace(self.chat, show_stats=False), self.prompt, self.request)


def prepare(body: bytes, tokenizer: Tokenizer, context_tokens: int, thinking: bool) -> Prepared:
    """Parses, checks, renders and tokenises. `thinking` is the default of a request that does not say. Runs in an
    executor: a long prompt takes seconds."""
    chat = parse_chat_request(Fields(parse_object(body)), tokenizer.vocabulary_tokens, thinking)
    prompt = encode_prompt(chat.conversation)
    prompt_ids = tokenizer.encode(prompt.segments)
    request = Request(
        request_id=new_id("chatcmpl-"),
        prompt_ids=prompt_ids,
        sampling=chat.sampling,
        max_tokens=fitting_max_tokens(chat.max_tokens, len(prompt_ids), context_tokens, chat.conversation),
        stop_ids=chat.stop_ids if chat.ignore_eos else (tokenizer.special_id(EOS), *chat.stop_ids),
    )
    return Prepared(chat, prompt, request)


def fitting_max_tokens(wanted: int | None, prompt_tokens: int, context_tokens: int, conversation: Conversation) -> int:
    """What was asked for must fit beside the prompt; the default is lowered to the room left."""
    room = context_tokens - prompt_tokens
    if room < (wanted or 1):
        raise ContextOverflowError(context_tokens, prompt_tokens, wanted or 1)
    return wanted or min(room, default_max_tokens(conversation.thinking, conversation.effort))
