"""The prompt format of DeepSeek-V4.1, as the checkpoint's own encoder writes it.

    BOS [<｜System｜> effort line, system text, tools, response format]
    { <｜User｜>… <｜Assistant｜>(<think>reasoning</think> | </think>)content[call block] EOS }
    <｜Assistant｜>(<think> | </think>)

Nothing stands between blocks. Only this module makes special tokens: a message that spells one stays text.
"""

import json
from collections.abc import Iterator, Sequence

import msgspec

from tided.chat.deepseek_v41_tools import DSML, END_THINK, THINK, open_calls, tools_section, write_calls
from tided.chat.messages import Conversation, Image, Message, Part, Prompt, Start
from tided.chat.segments import SegmentWriter

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT, REMINDER = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"
REQUIRED_SPECIALS = (BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML)

DEFAULT_EFFORT = 75
EFFORT_BY_NAME = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100, "ultra": 100}

_EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_SCHEMA = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
# `action` follows the ordinary header of the answer; every other task takes the header's place.
_TASK_AFTER_HEADER = "action"


def default_max_tokens(thinking: bool, effort: int) -> int:
    """The answer's limit when the client names none (before it is lowered to the room left)."""
    if not thinking:
        return 8192
    return 131072 if effort == 100 else 65536


def encode_prompt(conversation: Conversation) -> Prompt:
    renderer = _Renderer(conversation)
    return msgspec.structs.replace(renderer.render(), images=tuple(renderer.images))


class _Renderer:
    def __init__(self, conversation: Conversation) -> None:
        self.given = conversation
        self.out = SegmentWriter()
        messages = list(conversation.messages)
        self.lead = messages.pop(0).text if messages and messages[0].role == "system" else ""
        # Layout messages without text are dropped, or they would render as bare tokens.
        self.messages = [m for m in messages if m.role != "system" or m.text]
        self.last_user = max((i for i, m in enumerate(self.messages) if m.role in ("user", "system")), default=-1)
        self.task: str | None = None
        self.images: list[Image] = []

    def render(self) -> Prompt:
        self.out.special(BOS)
        self._leading_system()
        last = len(self.messages) - 1
        for first, block in _blocks(self.messages):
            if block[0].role != "assistant":
                self._input_block(block)
            elif self.given.continue_final and first == last:
                return self._continued_turn(block[0])
            else:
                self._finished_turn(block[0], first)
        start = self._open_turn() if self.given.open_turn else "content"
        return Prompt(self.out.segments(), start)

    def _leading_system(self) -> None:
        given = self.given
        if not (given.thinking or self.lead or given.tools or given.schema is not None):
            return
        self.out.special(SYSTEM)
        if given.thinking:
            self.out.text(_EFFORT_LINE.format(given.effort))
        self.out.text(self.lead)
        if given.tools:
            self.out.text("\n\n")
            self.out.extend(tools_section(given.tools))
        if given.schema is not None:
            self.out.text(_SCHEMA + json.dumps(given.schema, ensure_ascii=False))

    def _input_block(self, block: Sequence[Message]) -> None:
        role = block[0].role
        self.out.special({"system": SYSTEM, "latest_reminder": REMINDER}.get(role, USER))
        for index, message in enumerate(block):
            self.out.text("\n\n" if index else "")
            self.out.text("<tool_result>" if message.role == "tool" else "")
            self._parts(message.parts)
            self.out.text("</tool_result>" if message.role == "tool" else "")
        self.task = block[-1].task
        if self.task not in (None, _TASK_AFTER_HEADER):
            self.out.special(f"<｜{self.task}｜>")

    def _parts(self, parts: Sequence[Part]) -> None:
        for index, part in enumerate(parts):
            self.out.text("\n\n" if index else "")
            if isinstance(part, Image):
                self.out.special(IMAGE)
                self.images.append(part)
            else:
                self.out.text(part)

    def _keeps_reasoning(self, index: int) -> bool:
        """With tools every turn keeps its reasoning; without, only the turns of the question at hand."""
        return self.given.thinking and (bool(self.given.tools) or index > self.last_user)

    def _header(self, *specials: str) -> None:
        """Opens an answer, unless a task token has taken the header's place."""
        task, self.task = self.task, None
        if task in (None, _TASK_AFTER_HEADER):
            for special in (ASSISTANT, *specials):
                self.out.special(special)
        if task == _TASK_AFTER_HEADER:
            self.out.special(f"<｜{task}｜>")

    def _finished_turn(self, message: Message, index: int) -> None:
        self._answer(message, self._keeps_reasoning(index))
        if message.calls:
            write_calls(self.out, message.calls)
        self.out.special(EOS)

    def _answer(self, message: Message, with_reasoning: bool) -> None:
        if with_reasoning:
            self._header(THINK)
            self.out.text(message.reasoning)
            self.out.special(END_THINK)
        else:
            self._header(END_THINK)
        self._parts(message.parts)

    def _continued_turn(self, message: Message) -> Prompt:
        """The last turn left open for the model to go on with."""
        if self.given.thinking and message.reasoning and not message.text:
            self._header(THINK)
            self.out.text(message.reasoning)
            return Prompt(self.out.segments(), "reasoning", leading=False)
        self._answer(message, self.given.thinking)
        return Prompt(self.out.segments(), "content", leading=False)

    def _open_turn(self) -> Start:
        task = self.task
        self._header(THINK if self.given.thinking else END_THINK)
        if task is not None:
            return "content"
        if self.given.thinking:
            return "reasoning"
        if self.given.must_call:
            open_calls(self.out)
            return "calls"
        return "content"


def _blocks(messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
    """(index of its first message, the messages of a block): neighbouring user texts and tool results share a block."""
    block: list[Message] = []
    calls: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message.role in ("user", "tool"):
            block.append(message)
            continue
        if block:
            yield index - len(block), _in_call_order(block, calls)
            block = []
        if message.role == "assistant":
            calls = {call.id: at for at, call in reversed(list(enumerate(message.calls)))}
        yield index, [message]
    if block:
        yield len(messages) - len(block), _in_call_order(block, calls)


def _in_call_order(block: list[Message], calls: dict[str, int]) -> list[Message]:
    """The block with its tool results in the order of the calls they answer; a result without an id counts in turn."""
    results = [message for message in block if message.role == "tool"]
    order = [at if m.call_id is None else calls.get(m.call_id, 0) for at, m in enumerate(results)]
    ranked = iter([results[at] for at in sorted(range(len(results)), key=order.__getitem__)])
    return [next(ranked) if message.role == "tool" else message for message in block]
