"""Whether to think and how hard, from the many ways in which clients say so."""

from typing import NoReturn

from tided.chat.families import Family
from tided.chat.fields import Fields, is_number

_NAMES = "none, minimal, low, medium, high, xhigh, max or a number from 1 to 100"


def resolve_thinking(body: Fields, default: bool, family: Family) -> tuple[bool, int]:
    """(thinking, effort 1..100). The first that speaks decides: the template's switches, the request's, the
    effort, the server's default."""
    template, reasoning = body.fields("chat_template_kwargs"), body.fields("reasoning")
    said = ((reasoning, "effort"), (body, "reasoning_effort"), (template, "reasoning_effort"))
    efforts = [_effort(fields, name, family) for fields, name in said]
    effort = next((value for value in efforts if value is not None), None)
    switches = [
        template.boolean("thinking"),
        body.boolean("enable_thinking"),
        template.boolean("enable_thinking"),
        _thinking_type(body.fields("thinking")),
        reasoning.boolean("enabled"),
        None if effort is None else effort > 0,
    ]
    thinking = next((switch for switch in switches if switch is not None), default)
    return thinking, effort or family.default_effort


def _thinking_type(fields: Fields) -> bool | None:
    kind = fields.get("type")
    if kind is not None and kind not in ("enabled", "disabled"):
        fields.wrong("type", "enabled or disabled")
    return None if kind is None else kind == "enabled"


def _effort(fields: Fields, name: str, family: Family) -> int | None:
    """The effort's number; 0 for "none", None where nothing is said."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        if value in family.efforts or value == "none":
            return family.efforts.get(value, 0)
        value = int(value) if value.isascii() and value.isdigit() and len(value) <= 3 else None
    if not is_number(value) or not 1 <= value <= 100 or value != int(value):
        _wrong(fields, name)
    return int(value)


def _wrong(fields: Fields, name: str) -> NoReturn:
    fields.wrong(name, _NAMES)
