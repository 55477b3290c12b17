"""The body of POST /v1/chat/completions, checked and resolved."""

import secrets
from typing import cast, get_args

import msgspec

from tided.api.messages import parse_messages, parse_tools
from tided.api.served import ServedModel
from tided.api.shape import parse_choice, parse_format
from tided.api.thinking import resolve_thinking
from tided.api.unbuilt import refuse_unbuilt
from tided.chat.families import Family
from tided.chat.fields import INT64_MAX, Fields, refuse
from tided.chat.messages import Conversation, Message, Tool
from tided.chat.shape import FREE, AnswerShape
from tided.chat.text import shorten
from tided.engine.types import Fidelity, Sampling

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS, MAX_BIASES, MAX_N, MAX_TOP_LOGPROBS = 16, 256, 64, 1024, 4, 20
MAX_SALT_CHARACTERS = 256
MAX_LOOP_BREAK = 1000
DEFAULT_TEMPERATURE, DEFAULT_TOP_P = 1.0, 0.95


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`max_tokens` None: the default limit. `max_calls`: the answer ends after that many tool calls. `n`: answers, with
    seeds that follow each other. `logprobs`, `loop_break`: as in `Request`. `reasoning_apart` False: it is part of the
    text. `show_stop`: the stop string that ended the answer is part of it."""

    conversation: Conversation
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    max_calls: int | None
    stream: bool
    usage_chunk: bool
    usage_everywhere: bool
    show_reasoning: bool
    show_stats: bool
    fidelity: Fidelity
    loop_break: int = 0
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    reasoning_logprobs: bool = False
    reasoning_apart: bool = True
    shape: AnswerShape = FREE
    show_stop: bool = False
    cache_salt: str = ""


def parse_chat_request(body: Fields, served: ServedModel) -> ChatRequest:
    thinking, vocabulary_tokens = served.settings.server.thinking, served.tokenizer.vocabulary_tokens
    served.check_model(body.string("model"))
    refuse_unbuilt(body)
    options = body.fields("stream_options")
    tools = parse_tools(body)
    single = body.boolean("parallel_tool_calls") is False
    shape = AnswerShape(choice=parse_choice(body, tools), format=parse_format(body), single=single)
    ignore_eos, min_tokens = body.boolean("ignore_eos") or False, body.integer("min_tokens", 0) or 0
    if (ignore_eos or min_tokens) and shape.bound(shape.shown_tools(tools)):
        refuse("ignore_eos" if ignore_eos else "min_tokens", "contradicts a grammar, which ends the answer")
    return ChatRequest(
        conversation=read_conversation(body, thinking, tools, shape, served.family),
        sampling=sampling_of(body, vocabulary_tokens),
        max_tokens=max_tokens_of(body),
        stops=stops_of(body),
        stop_ids=stop_ids_of(body, vocabulary_tokens),
        ignore_eos=ignore_eos,
        max_calls=1 if single else None,
        stream=body.boolean("stream") or False,
        usage_chunk=options.boolean("include_usage") or False,
        usage_everywhere=options.boolean("continuous_usage_stats") or False,
        show_reasoning=body.boolean("include_reasoning") is not False
        and body.fields("reasoning").boolean("exclude") is not True,
        show_stats=body.boolean("x_engine_stats") is not False,
        fidelity=fidelity_of(body, served.settings.tide.fidelity),
        loop_break=loop_break_of(body, 0 if ignore_eos else served.settings.engine.loop_break),
        min_tokens=min_tokens,
        n=body.integer("n", 1, MAX_N) or 1,
        logprobs=_logprobs(body),
        reasoning_logprobs=body.boolean("logprobs_include_reasoning") or False,
        reasoning_apart=body.boolean("separate_reasoning") is not False,
        shape=shape,
        show_stop=body.boolean("include_stop_str_in_output") or False,
        cache_salt=cache_salt_of(body, served),
    )


def read_conversation(
    body: Fields, default: bool, tools: tuple[Tool, ...], shape: AnswerShape, family: Family
) -> Conversation:
    """What decides the prompt. `default`: whether a request that does not say is thought about."""
    messages = parse_messages(body)
    thinking, effort = resolve_thinking(body, default, family)
    return Conversation(
        messages=messages,
        tools=shape.shown_tools(tools),
        thinking=thinking,
        effort=effort,
        schema=shape.shown_schema,
        must_call=shape.choice.mode == "required",
        continue_final=_continues(body, messages),
        clear_thinking=body.fields("chat_template_kwargs").boolean("clear_thinking") or False,
    )


def _continues(body: Fields, messages: tuple[Message, ...]) -> bool:
    """Whether the last message is an answer to go on with. `prefix` on that message is DeepSeek's way to say so."""
    last = len(messages) - 1
    wanted = body.boolean("continue_final_message")
    generation = body.boolean("add_generation_prompt")
    if wanted and generation:
        refuse("add_generation_prompt", "contradicts continue_final_message")
    if generation is False and not wanted:
        refuse("add_generation_prompt", "false is only supported with continue_final_message")
    if not (wanted or body.values["messages"][last].get("prefix")):
        return False
    if messages[last].role != "assistant" or messages[last].calls:
        refuse(f"messages[{last}]", "only an assistant message without tool calls can be continued")
    return True


def sampling_of(body: Fields, vocabulary_tokens: int) -> Sampling:
    top_k = body.integer("top_k", -1) or 0
    seed = body.integer("seed", -INT64_MAX - 1)
    return Sampling(
        temperature=body.number("temperature", DEFAULT_TEMPERATURE, 0, 2),
        top_p=body.number("top_p", DEFAULT_TOP_P, 0, 1, low_open=True),
        top_k=top_k if 0 < top_k < vocabulary_tokens else 0,
        min_p=body.number("min_p", 0.0, 0, 1),
        seed=secrets.randbits(63) if seed is None else seed,
        presence_penalty=body.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=body.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=body.number("repetition_penalty", 1.0, 0, 2, low_open=True),
        logit_bias=_bias(body.fields("logit_bias"), vocabulary_tokens),
    )


def _bias(given: Fields, vocabulary_tokens: int) -> dict[int, float]:
    if len(given.values) > MAX_BIASES:
        refuse("logit_bias", f"{len(given.values)} entries, at most {MAX_BIASES} are allowed")
    bias = {}
    for name in given.values:
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary_tokens):
            refuse("logit_bias", f"expected token ids from 0 to {vocabulary_tokens - 1} as names, got {shorten(name)}")
        bias[int(name)] = given.number(name, 0.0, -100, 100)
    return bias


def _logprobs(body: Fields) -> int | None:
    wanted, top = body.boolean("logprobs"), body.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        refuse("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def fidelity_of(body: Fields, default: Fidelity) -> Fidelity:
    given = body.string("fidelity")
    if given is None:
        return default
    if given not in get_args(Fidelity):
        body.wrong("fidelity", "fast, balanced or exact")
    return cast(Fidelity, given)


def loop_break_of(body: Fields, default: int) -> int:
    """As `Request.loop_break`. An answer that may not end by itself is not ended for it, unless the request says so."""
    given = body.integer("loop_break", 0, MAX_LOOP_BREAK)
    if given == 1:
        body.wrong("loop_break", f"0 (off), or an integer, 2 to {MAX_LOOP_BREAK}")
    return default if given is None else given


def max_tokens_of(body: Fields) -> int | None:
    limits = [body.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
    return next((limit for limit in limits if limit is not None), None)


def stops_of(body: Fields) -> tuple[str, ...]:
    given = body.get("stop")
    stops = [given] if isinstance(given, str) else body.array("stop", MAX_STOPS) or []
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or len(stop) > MAX_STOP_CHARACTERS:
            refuse(f"stop[{index}]", f"expected a string of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def cache_salt_of(body: Fields, served: ServedModel) -> str:
    """Who has another one finds nothing of these prompts in the prompt cache, nor by the time an answer takes."""
    salt = body.string("cache_salt") or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        refuse("cache_salt", f"{len(salt)} characters, at most {MAX_SALT_CHARACTERS} are allowed")
    return f"{served.tenant} {salt}" if served.tenant else salt


def stop_ids_of(body: Fields, vocabulary_tokens: int) -> tuple[int, ...]:
    given = body.array("stop_token_ids", MAX_STOP_IDS) or []
    entries = Fields({str(index): value for index, value in enumerate(given)}, "stop_token_ids.")
    ids = [entries.integer(str(index), 0, vocabulary_tokens - 1) for index in range(len(given))]
    return tuple(token_id for token_id in ids if token_id is not None)
