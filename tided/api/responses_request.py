"""The body of POST /v1/responses as the chat completion it is: nothing is stored, each holds its whole conversation."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from tided.api.body import parse_object
from tided.api.ids import new_id
from tided.api.prepare import Prepared, prepare_object
from tided.api.served import ServedModel
from tided.chat.fields import Fields, refuse
from tided.errors import RequestError

MAX_ITEMS = 10_000
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "parallel_tool_calls", "tool_choice"),
    *("reasoning", "enable_thinking", "chat_template_kwargs", "fidelity", "loop_break", "x_engine_stats", "ignore_eos"),
    "cache_salt",
)
_STATEFUL = ("previous_response_id", "conversation", "prompt")
_OWN_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


class PreparedResponse(msgspec.Struct, frozen=True):
    """`shown`: the request's fields that the reply repeats."""

    prepared: Prepared
    shown: dict[str, Any]


def prepare_response(body: bytes | bytearray, served: ServedModel, alive: Callable[[], None]) -> PreparedResponse:
    """Runs in a thread, as `prepare.prepare` does."""
    value = parse_object(body)
    alive()
    chat, origins = as_chat(Fields(value))
    try:
        prepared = prepare_object(chat, served, alive, new_id("resp_"))
    except RequestError as error:
        if error.param is not None:
            own = _own_name(error.param, origins)
            raise RequestError(
                str(error).replace(error.param, own), status=error.status, kind=error.kind, code=error.code, param=own
            ) from None
        raise
    images = tuple(replace(image, param=_own_name(image.param, origins)) for image in prepared.images)
    return PreparedResponse(replace(prepared, images=images), _shown(value, prepared))


def as_chat(body: Fields) -> tuple[dict[str, Any], list[int]]:
    """(the chat completion's body, the input item that each message came from; -1: the instructions)."""
    for name in _STATEFUL:
        if body.get(name) is not None:
            refuse(name, "nothing is stored here; send the whole conversation as input")
    if body.boolean("background"):
        refuse("background", "is not supported; leave it out or send false")
    chat = {name: body.get(name) for name in _SAME if body.get(name) is not None}
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    if (form := body.fields("text").get("format")) is not None:
        chat["response_format"] = form
    if (tools := body.array("tools", 512)) is not None:
        chat["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    chat["messages"], origins = _messages(body)
    return chat, origins


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """Flat here, nested in chat completions."""
    if not isinstance(tool, dict):
        refuse(path, "expected an object")
    if (kind := Fields(tool, f"{path}.").string("type")) not in (None, "function"):
        return {"type": kind}
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _messages(body: Fields) -> tuple[list[dict[str, Any]], list[int]]:
    messages: list[dict[str, Any]] = []
    origins: list[int] = []
    if instructions := body.string("instructions"):
        messages.append({"role": "system", "content": instructions})
        origins.append(-1)
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], [*origins, 0]
    if given is not None and not isinstance(given, list):
        body.wrong("input", "a text or an array")
    items = body.array("input", MAX_ITEMS)
    if not items:
        refuse("input", "expected a text or an array of at least one item")
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            refuse(f"input[{at}]", "expected an object")
        message = _message(Fields(item, f"input[{at}]."))
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            _join(messages[-1], message)
        else:
            messages.append(message)
            origins.append(at)
    return messages, origins


def _join(turn: dict[str, Any], more: dict[str, Any]) -> None:
    """Reasoning, text and calls of one turn are items of their own here."""
    for name, value in more.items():
        if name == "content":
            turn["content"] = [*turn.get("content", ()), *value]
        elif name == "reasoning_content":
            turn[name] = turn.get(name, "") + value
        elif name == "tool_calls":
            turn[name] = [*turn.get(name, ()), *value]


def _message(item: Fields) -> dict[str, Any]:
    kind = item.get("type")
    if kind is None or kind == "message":
        return {"role": item.get("role"), "content": _parts(item, "content")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": "".join(_reasoning(item))}
    if kind == "function_call":
        function = {"name": item.string("name"), "arguments": item.string("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.string("call_id") or "", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.string("call_id"), "content": _parts(item, "output")}
    return item.wrong("type", "message, reasoning, function_call or function_call_output")


def _reasoning(item: Fields) -> Iterator[str]:
    for at, part in enumerate(item.array("content", MAX_ITEMS) or ()):
        path = item.param(f"content[{at}]")
        if not isinstance(part, dict):
            refuse(path, "expected an object")
        yield Fields(part, f"{path}.").string("text") or ""


def _parts(item: Fields, name: str) -> list[Any]:
    given = item.get(name)
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    parts = item.array(name, MAX_ITEMS) or []
    return [_part(part) if isinstance(part, dict) else part for part in parts]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "output_text":
        return {**part, "type": "text"}
    return {**part, "type": "image_url"} if kind == "input_image" else part


def _own_name(param: str, origins: list[int]) -> str:
    if found := _MESSAGE.match(param):
        origin = origins[int(found.group(1))]
        return "instructions" if origin < 0 else f"input[{origin}]{param[found.end() :]}"
    if found := _FUNCTION.match(param):
        return found.group(1) + param[found.end() :]
    for name, own in _OWN_NAMES.items():
        if param == name or param.startswith(f"{name}."):
            return own + param[len(name) :]
    return param


def _shown(value: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    sampling, chat = prepared.request.sampling, prepared.chat
    effort = value.get("reasoning", {}).get("effort") if isinstance(value.get("reasoning"), dict) else None
    return {
        "instructions": value.get("instructions"),
        "max_output_tokens": chat.max_tokens,
        "parallel_tool_calls": not chat.shape.single,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (value.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": value.get("tool_choice") or "auto",
        "tools": value.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "metadata": value.get("metadata") if isinstance(value.get("metadata"), dict) else {},
    }
