"""The prompt format of GLM-5.3, as its makers' template writes it.

    [gMASK]<sop><|system|>Reasoning Effort: Max [<|system|>tools]
    { <|system|>… <|user|>… <|assistant|><think>reasoning</think>content{calls} <|observation|>{results} }
    <|assistant|><think>

Nothing stands between blocks, and turns have no end token. Only this module makes special tokens: a message that
spells one stays text. The model has no mode without thinking: without it the prompt closes an empty reasoning itself.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tided.chat.arguments import sent_arguments
from tided.chat.messages import Conversation, Image, Message, Prompt, Start, Tool
from tided.chat.segments import SegmentWriter
from tided.errors import RequestError

BEGIN = ("[gMASK]", "<sop>")
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
END_OF_TEXT = "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
RESULT, END_RESULT = "<tool_response>", "</tool_response>"
STOPS = (END_OF_TEXT, USER, OBSERVATION)
CALL_TAGS = (CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)
_ROLES = (SYSTEM, USER, ASSISTANT, OBSERVATION)
REQUIRED_SPECIALS = (*BEGIN, *_ROLES, END_OF_TEXT, THINK, END_THINK, *CALL_TAGS, RESULT, END_RESULT)

# The model knows three efforts. A number up to the first bound is Low, up to the second High.
LOW, HIGH, MAX = 33, 75, 100
DEFAULT_EFFORT = MAX
EFFORT_BY_NAME = {"minimal": LOW, "low": LOW, "medium": HIGH, "high": HIGH, "xhigh": MAX, "max": MAX, "ultra": MAX}

_NO_IMAGE = (
    "<reminder>You are unable to process this image because you don't have multi-modal input ability. "
    "Try different methods.</reminder>"
)
_NO_THINKING = "GLM-5.3 has no mode without thinking: its reasoning was closed before it began"
_TOOLS = "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" + (
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_END = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
_HIDDEN = ("strict", "defer_loading")


def default_max_tokens(thinking: bool, effort: int) -> int:
    """The answer's limit when the client names none (before it is lowered to the room left)."""
    if not thinking:
        return 8192
    return 131072 if effort > HIGH else 65536


def encode_prompt(conversation: Conversation) -> Prompt:
    return _Renderer(conversation).render()


class _Renderer:
    def __init__(self, conversation: Conversation) -> None:
        self.given = conversation
        self.out = SegmentWriter()
        self.messages = conversation.messages
        self.last_user = max((at for at, m in enumerate(self.messages) if m.role == "user"), default=-1)

    def render(self) -> Prompt:
        for token in (*BEGIN, SYSTEM):
            self.out.special(token)
        self.out.text(f"Reasoning Effort: {self._effort()}")
        if self.given.tools:
            self._tools(self.given.tools)
        last = len(self.messages) - 1
        for at, block in _blocks(self.messages):
            if self.given.continue_final and at == last and block[0].role == "assistant":
                return self._continued_turn(block[0])
            self._block(at, block)
        start = self._open_turn() if self.given.open_turn else "content"
        return Prompt(self.out.segments(), start, notes=() if self.given.thinking else (_NO_THINKING,))

    def _effort(self) -> str:
        if not self.given.thinking or self.given.effort <= LOW:
            return "Low"
        return "High" if self.given.effort <= HIGH else "Max"

    def _tools(self, tools: Sequence[Tool]) -> None:
        self.out.special(SYSTEM)
        shown = [_tool_json(tool) + "\n" for tool in tools if tool.shown.get("defer_loading") is not True]
        self.out.text(_TOOLS + "".join(shown))
        for index, piece in enumerate(re.split(f"({'|'.join(CALL_TAGS)})", _TOOLS_END)):
            (self.out.special if index % 2 else self.out.text)(piece)

    def _block(self, at: int, block: Sequence[Message]) -> None:
        role = block[0].role
        if role == "assistant":
            self._answer(block[0], at)
        elif role == "tool":
            self.out.special(OBSERVATION)
            for result in block:
                self.out.special(RESULT)
                self._parts(result)
                self.out.special(END_RESULT)
        else:
            self.out.special(SYSTEM if role == "system" else USER)
            self._parts(block[0])

    def _parts(self, message: Message) -> None:
        for part in message.parts:
            self.out.text(_NO_IMAGE if isinstance(part, Image) else part)

    def _answer(self, message: Message, at: int) -> None:
        reasoning, content = _split(message)
        self._reasoning("" if self.given.clear_thinking and at < self.last_user else reasoning)
        self.out.special(END_THINK)
        self.out.text(content.strip())
        for call in message.calls:
            self.out.special(CALL)
            self.out.text(call.name)
            for name, value in sent_arguments(call.arguments).items():
                self._argument(name, value)
            self.out.special(END_CALL)

    def _argument(self, name: str, value: Any) -> None:
        self.out.special(KEY)
        self.out.text(name)
        self.out.special(END_KEY)
        self.out.special(VALUE)
        self.out.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        self.out.special(END_VALUE)

    def _reasoning(self, reasoning: str) -> None:
        self.out.special(ASSISTANT)
        self.out.special(THINK)
        self.out.text(reasoning)

    def _continued_turn(self, message: Message) -> Prompt:
        """The last turn left open for the model to go on with."""
        reasoning, content = _split(message)
        self._reasoning(reasoning)
        if reasoning and not content and self.given.thinking:
            return Prompt(self.out.segments(), "reasoning", leading=False)
        self.out.special(END_THINK)
        self.out.text(content.strip())
        return Prompt(self.out.segments(), "content", leading=False)

    def _open_turn(self) -> Start:
        self._reasoning("")
        if self.given.thinking:
            return "reasoning"
        self.out.special(END_THINK)
        return "content"


def _split(message: Message) -> tuple[str, str]:
    """(reasoning, content). Content that holds the reasoning, as some clients send it back, is split."""
    content = "".join(_NO_IMAGE if isinstance(part, Image) else part for part in message.parts)
    if message.reasoning or END_THINK not in content:
        return message.reasoning, content
    before, _, after = content.rpartition(END_THINK)
    return before.partition(END_THINK)[0].rpartition(THINK)[2], after


def _blocks(messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
    """(index of its first message, the messages of a block): neighbouring tool results share a block."""
    results: list[Message] = []
    calls: list[str] = []
    for at, message in enumerate(messages):
        if message.role == "latest_reminder" or message.task is not None:
            raise RequestError(
                f"messages[{at}]: GLM-5.3 knows neither reminders nor quick tasks", param=f"messages[{at}].role"
            )
        if message.role == "tool":
            results.append(message)
            continue
        if results:
            yield at - len(results), _in_call_order(results, calls)
            results = []
        if message.role == "assistant":
            calls = [call.id for call in message.calls]
        yield at, [message]
    if results:
        yield len(messages) - len(results), _in_call_order(results, calls)


def _in_call_order(results: list[Message], calls: list[str]) -> list[Message]:
    """In the order of the calls where every result names its own; otherwise as they came."""
    ids = [result.call_id for result in results]
    if len(set(ids)) < len(ids) or len(set(calls)) < len(calls) or not set(ids) <= set(calls):
        return results
    order = {call_id: at for at, call_id in enumerate(calls)}
    return sorted(results, key=lambda result: order[result.call_id or ""])


def _tool_json(tool: Tool) -> str:
    """Names of the outer object are written raw, as the template does."""
    members = ((key, value) for key, value in tool.shown.items() if key not in _HIDDEN)
    return "{" + ", ".join(f'"{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in members) + "}"
