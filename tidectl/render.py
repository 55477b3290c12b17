"""`tidectl render`: the prompt of a request, as text or as token ids."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidectl import stdin
from tidectl.fits import MAX_CONFIG_BYTES
from tided.api.chat_request import read_conversation
from tided.api.messages import parse_tools
from tided.api.shape import parse_choice, parse_format
from tided.chat.anthropic import parse_request
from tided.chat.families import FAMILIES, GLM53, Family, family_of
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Conversation
from tided.chat.shape import AnswerShape
from tided.chat.tokenizer import Tokenizer
from tided.errors import DataError, RequestError

_OPTIONS = ("tool_choice", "response_format", "continue_final_message")
_UNDERSTOOD = {"thinking", "reasoning_effort", "clear_thinking", "task", "add_generation_prompt", *_OPTIONS}


def run(name: str | None, api: Literal["openai", "anthropic"], profile: Path | None, as_ids: bool) -> None:
    """`name` of the family; None: that of the profile's checkpoint."""
    body = stdin.json_object(stdin.text(), "stdin")
    of_profile, thinking, tokenizer = _of_profile(profile, name is None, as_ids)
    family = of_profile or FAMILIES[name or ""]
    try:
        prompt = family.encode_prompt(conversation(family, api, body, thinking))
        text = prompt.text if tokenizer is None else json.dumps(tokenizer.encode(prompt.segments)) + "\n"
    except RequestError as error:
        raise DataError(error.what, where="stdin") from error
    # The bytes themselves: an encoding of the terminal, or a translated line end, would make another prompt.
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _of_profile(profile: Path | None, of_family: bool, as_ids: bool) -> tuple[Family | None, bool, Tokenizer | None]:
    """(the family, where asked for; whether to think when a request does not say; the tokenizer, where needed)."""
    if profile is None:
        return None, True, None
    from tided.profile import load

    settings = load(profile)
    checkpoint = Path(settings.model.path)
    family = _family_at(checkpoint / "config.json") if of_family else None
    return family, settings.server.thinking, Tokenizer.open(checkpoint) if as_ids else None


def _family_at(config: Path) -> Family:
    try:
        with config.open("rb") as file:
            found = msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        hint = "name the family with --family"
        raise DataError("the model family cannot be read there", where=str(config), hint=hint) from error
    return family_of(found)


def conversation(family: Family, api: str, body: dict[str, Any], thinking: bool) -> Conversation:
    """Raises RequestError."""
    if api == "anthropic":
        read, _ = parse_request(Fields(body), thinking, family=family)
        return read
    if "options" in body:
        return _of_options(family, body, thinking)
    return _of_body(family, Fields(body), thinking)


def _of_body(family: Family, body: Fields, thinking: bool) -> Conversation:
    tools = parse_tools(body)
    shape = AnswerShape(choice=parse_choice(body, tools), format=parse_format(body))
    return read_conversation(body, thinking, tools, shape, family)


def _of_options(family: Family, request: dict[str, Any], thinking: bool) -> Conversation:
    """`options` beside `messages` and `tools`: what an encoder is told, not what an API is sent."""
    options = Fields(request).fields("options")
    if unknown := set(options.values) - _UNDERSTOOD:
        refuse(options.param(min(unknown)), f"is unknown; known: {', '.join(sorted(_UNDERSTOOD))}")
    body = {name: request.get(name) for name in ("messages", "tools")}
    body |= {name: options.get(name) for name in _OPTIONS}
    body |= {"enable_thinking": options.boolean("thinking"), "reasoning_effort": _effort(family, options.values)}
    read = _of_body(family, Fields(body), thinking)
    tasks: list[Any] = [message.get("task") for message in request["messages"]]
    last_user = max((at for at, message in enumerate(read.messages) if message.role == "user"), default=None)
    if options.get("task") is not None and last_user is not None:
        tasks[last_user] = options.string("task")
    messages = (msgspec.structs.replace(m, task=task) for m, task in zip(read.messages, tasks, strict=True))
    return msgspec.structs.replace(
        read,
        messages=tuple(messages),
        open_turn=options.boolean("add_generation_prompt") is not False,
        clear_thinking=options.boolean("clear_thinking") or False,
    )


def _effort(family: Family, options: Mapping[str, Any]) -> Any:
    """GLM's template makes Max of every effort but two, where an API's names are translated first."""
    effort = options.get("reasoning_effort")
    return effort if family is not GLM53 or effort in ("low", "high") else "max"
