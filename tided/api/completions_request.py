"""The body of POST /v1/completions: texts or ids that the model goes on with, no conversation."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tided.api.body import parse_object
from tided.api.chat_request import (
    MAX_N,
    ChatRequest,
    cache_salt_of,
    fidelity_of,
    loop_break_of,
    sampling_of,
    stop_ids_of,
    stops_of,
)
from tided.api.ids import new_id
from tided.api.prepare import Prepared, fitting_ids, request_of
from tided.api.served import ServedModel
from tided.chat.fields import Fields, is_number, refuse
from tided.chat.messages import Conversation, Prompt, Segment
from tided.chat.tokenizer import Tokenizer
from tided.errors import ContextOverflowError, RequestError

MAX_PROMPTS, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, DEFAULT_MAX_TOKENS = 8, 5, 100, 16
MAX_SCORES = 400_000
"""Log probabilities of prompts' tokens that one reply holds, all its choices together: they are kept until it is told,
and are some 30 MB of JSON then, two seconds of a processor's time."""


class PreparedCompletion(msgspec.Struct, frozen=True):
    """`prepared`: prompt by prompt, `n` of each. `echoes`: what stands before each answer's text. `echo_logprobs`: how
    many of the likeliest tokens are told beside each of an echo's; None: they are not told. `prompt_logprobs`: how
    many of the likeliest tokens are told beside each of the prompt's, by id; None: not by id."""

    prepared: list[Prepared]
    echoes: list[str]
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def without_stats(self) -> "PreparedCompletion":
        return msgspec.structs.replace(self, prepared=[one.without_stats() for one in self.prepared])


def prepare_completion(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> PreparedCompletion:
    """Runs in a thread, as `prepare.prepare` does."""
    fields = Fields(parse_object(body))
    alive()
    try:
        return _prepared(fields, served, alive)
    except RequestError as error:
        # What is told of the prompt of any route; here it has another name.
        error.param = "prompt" if error.param == "messages" else error.param
        raise


def _prepared(fields: Fields, served: ServedModel, alive: Callable[[], None]) -> PreparedCompletion:
    by_id = fields.integer("prompt_logprobs", 0, MAX_PROMPT_LOGPROBS)
    chat = _chat(fields, served, by_id is not None)
    reply_id, echo = new_id("cmpl-"), fields.boolean("echo") or False
    echo_logprobs = chat.logprobs if echo else None
    told = [most for most in (echo_logprobs, by_id) if most is not None]
    adapts = fields.boolean("adapt") is not False
    if not adapts and not (told and chat.max_tokens == 0):
        refuse("adapt", "false is for prompts that are scored, without an answer (max_tokens 0)")
    # The engine always draws one: of a prompt that is only looked at it is not told.
    max_tokens = DEFAULT_MAX_TOKENS if chat.max_tokens is None else max(chat.max_tokens, 1)
    prepared, echoes, scores = [], [], 0
    for at, prompt in enumerate(_prompts(fields)):
        ids = _ids(fields, prompt, served, max_tokens, alive)
        if len(ids) + max_tokens > served.context_tokens:
            raise ContextOverflowError(served.context_tokens, len(ids), max_tokens)
        scores += len(ids) * sum(1 + most for most in told) * chat.n
        if scores > MAX_SCORES:
            refuse("prompt", f"{scores} log probabilities, a reply tells at most {MAX_SCORES}: ask for fewer at a time")
        plain = request_of(chat, served, reply_id, ids, max_tokens)
        request = msgspec.structs.replace(plain, scored=bool(told), scored_top=max(told, default=0), adapts=adapts)
        one = Prepared(chat, Prompt((), "content", leading=False), request)
        numbers = range(at * chat.n, (at + 1) * chat.n)
        prepared += [one.variant(f"{reply_id}-{k}" if k else reply_id, k - at * chat.n) for k in numbers]
        text = prompt if isinstance(prompt, str) else served.tokenizer.decoder().feed(prompt)
        echoes += [text if echo else ""] * chat.n
    return PreparedCompletion(prepared, echoes, echo_logprobs, by_id)


def _chat(body: Fields, served: ServedModel, is_scored: bool) -> ChatRequest:
    """The fields that a completion shares with a chat. `is_scored`: something is told of the prompt."""
    vocabulary_tokens = served.tokenizer.vocabulary_tokens
    served.check_model(body.string("model"))
    if body.string("suffix"):
        refuse("suffix", "is not supported; leave it out")
    n = body.integer("n", 1, MAX_N) or 1
    if (best_of := body.integer("best_of", 1)) is not None and best_of != n:
        refuse("best_of", "is only supported where it equals n")
    given = body.integer("max_completion_tokens", 1), body.integer("max_tokens", 0)
    max_tokens = given[1] if given[0] is None else given[0]
    if max_tokens == 0 and not body.boolean("echo") and not is_scored:
        refuse("max_tokens", "0 says nothing without echo or prompt_logprobs; expected an integer of at least 1")
    options = body.fields("stream_options")
    return ChatRequest(
        conversation=Conversation(messages=(), thinking=False),
        sampling=sampling_of(body, vocabulary_tokens),
        max_tokens=max_tokens,
        stops=stops_of(body),
        stop_ids=stop_ids_of(body, vocabulary_tokens),
        ignore_eos=body.boolean("ignore_eos") or False,
        max_calls=None,
        stream=body.boolean("stream") or False,
        usage_chunk=options.boolean("include_usage") or False,
        usage_everywhere=options.boolean("continuous_usage_stats") or False,
        show_reasoning=False,
        show_stats=body.boolean("x_engine_stats") is not False,
        fidelity=fidelity_of(body, served.settings.tide.fidelity),
        loop_break=loop_break_of(body, 0 if body.boolean("ignore_eos") else served.settings.engine.loop_break),
        min_tokens=body.integer("min_tokens", 0) or 0,
        n=n,
        logprobs=body.integer("logprobs", 0, MAX_LOGPROBS),
        show_stop=body.boolean("include_stop_str_in_output") or False,
        cache_salt=cache_salt_of(body, served),
    )


def _prompts(body: Fields) -> list[str | list[int]]:
    given = body.get("prompt")
    if given is None or given == "" or given == []:
        return [""]
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and _is_ids(given):
        return [[*map(int, given)]]
    if not isinstance(given, list):
        body.wrong("prompt", "a string, a list of token ids, or a list of either")
    if len(given) > MAX_PROMPTS:
        refuse("prompt", f"{len(given)} prompts, at most {MAX_PROMPTS} are allowed")
    for at, one in enumerate(given):
        if not isinstance(one, str) and not (isinstance(one, list) and _is_ids(one)):
            refuse(f"prompt[{at}]", "expected a string or a list of token ids")
    return [one if isinstance(one, str) else [*map(int, one)] for one in given]


def _is_ids(given: list[Any]) -> bool:
    return all(is_number(value) and value == int(value) for value in given)


def _ids(
    body: Fields, prompt: str | list[int], served: ServedModel, max_tokens: int, alive: Callable[[], None]
) -> list[int]:
    tokenizer, context_tokens = served.tokenizer, served.context_tokens
    begin = [tokenizer.special_id(token) for token in served.family.begin]
    parses, begins = body.boolean("parse_special") is not False, body.boolean("add_bos") is not False
    if isinstance(prompt, str):
        segments = tuple(_segments(prompt, tokenizer) if parses else [Segment(prompt)] if prompt else [])
        ids = fitting_ids(tokenizer, Prompt(segments, "content"), context_tokens, max_tokens, alive)
        has_begun = ids[: len(begin)] == begin
        return ids if has_begun or (ids and not begins) else [*begin, *ids]
    if wrong := [value for value in prompt if not 0 <= value < tokenizer.vocabulary_tokens]:
        refuse("prompt", f"token ids are from 0 to {tokenizer.vocabulary_tokens - 1}, got {str(wrong[0])[:40]}")
    if len(prompt) > context_tokens:
        raise ContextOverflowError(context_tokens, len(prompt), max_tokens)
    return list(prompt) or begin


def _segments(text: str, tokenizer: Tokenizer) -> Iterator[Segment]:
    """Here, and only here, a client's text may spell special tokens: it writes the whole prompt."""
    for at, piece in enumerate(tokenizer.special_spellings.split(text)):
        if piece:
            yield Segment(piece, special=at % 2 == 1)
