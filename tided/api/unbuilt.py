"""Fields that would change an answer's content and that this server does not implement: refused, never ignored."""

from tided.chat.fields import Fields, refuse


def refuse_unbuilt(body: Fields) -> None:
    if "audio" in (body.array("modalities", 16) or []) or body.get("audio") is not None:
        refuse("modalities", "only text is supported")
    for name in ("functions", "function_call"):
        if body.get(name) is not None:
            refuse(name, "is not supported; use tools")
