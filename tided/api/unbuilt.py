"""Fields that would change an answer's content and that this server does not implement: refused, never ignored."""

from tided.chat.fields import Fields, refuse


def refuse_unbuilt(body: Fields) -> None:
    if (body.integer("n", 1) or 1) > 1:
        refuse("n", "only one answer a request is supported")
    for name in ("presence_penalty", "frequency_penalty"):
        if body.number(name, 0.0, -2, 2):
            refuse(name, "penalties are not supported; leave it out or send 0")
    if body.number("repetition_penalty", 1.0, 0, 2, low_open=True) != 1:
        refuse("repetition_penalty", "penalties are not supported; leave it out or send 1")
    if body.integer("min_tokens", 0):
        refuse("min_tokens", "a least length is not supported; leave it out or send 0")
    if body.boolean("separate_reasoning") is False:
        refuse("separate_reasoning", "reasoning is always a field of its own; leave it out or send true")
    _refuse_logprobs(body)
    _refuse_formats(body)
    _refuse_legacy(body)


def _refuse_logprobs(body: Fields) -> None:
    wanted = body.boolean("logprobs")
    if body.integer("top_logprobs", 0, 20) and not wanted:
        refuse("top_logprobs", "needs logprobs to be true")
    if wanted:
        refuse("logprobs", "log probabilities are not supported")


def _refuse_formats(body: Fields) -> None:
    kind = body.fields("response_format").get("type")
    if kind not in (None, "text"):
        refuse("response_format.type", "only text is supported")
    if body.fields("logit_bias").values:
        refuse("logit_bias", "is not supported; leave it out or send an empty object")
    if "audio" in (body.array("modalities", 16) or []) or body.get("audio") is not None:
        refuse("modalities", "only text is supported")


def _refuse_legacy(body: Fields) -> None:
    for name in ("functions", "function_call"):
        if body.get(name) is not None:
            refuse(name, "is not supported; use tools")
    choice = body.get("tool_choice")
    if choice is None or choice in ("none", "auto"):
        return
    if not isinstance(choice, (str, dict)) or (isinstance(choice, str) and choice != "required"):
        body.wrong("tool_choice", "none or auto")
    refuse("tool_choice", "a forced or limited choice is not supported; send none or auto")
