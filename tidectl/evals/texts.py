"""Texts as requests whose answers are known: token ids of a prompt, and what the answer must be.

A line of a file is a plain text, {"text": ...}, whose first tokens are the prompt; or a conversation as a client sends
it, {"messages": [...], "tools": [...], "thinking": ..., "effort": ...}, of which every answer counts. "domain" names
what the texts are about. Of the bundled ones (`heldout.jsonl`, drawn by `bench/heldout/draw.py`) no training has seen
prose and code; the conversations are others from the small worlds that the minis were trained on, and many of their
answers occur in training too, of `lang` and `qa` most (`bench/heldout/seen.py` counts them).
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tided.chat.families import GLM53, Family, family_of
from tided.chat.glm53 import OBSERVATION, USER
from tided.chat.messages import Conversation, Message, Role, Tool, ToolCall
from tided.chat.tokenizer import Tokenizer
from tided.errors import DataError

FILE = Path(__file__).with_name("heldout.jsonl")
PLAIN_PROMPT_TOKENS = 48  # of a plain text; the rest is its answer
MOST_FILE_BYTES = 1 << 30


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class Call(msgspec.Struct, frozen=True):
    function: Function


class Turn(msgspec.Struct, frozen=True):
    role: Role
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] = []


class Row(msgspec.Struct, frozen=True):
    """A line of a file. One of `text` and `messages`."""

    domain: str = "texts"
    text: str | None = None
    messages: list[Turn] = []
    tools: list[dict[str, Any]] = []
    thinking: bool = False
    effort: int = 75


@dataclass(frozen=True)
class Text:
    """`ids`: the prompt, then the answer, its end token included. `row`: the line that it is of."""

    domain: str
    ids: list[int]
    prompt_tokens: int
    row: int = 0

    @property
    def answer_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def key(self) -> str:
        """Names the prompt and the answer."""
        return hashlib.blake2b(f"{self.prompt_tokens} {self.ids}".encode(), digest_size=12).hexdigest()

    def cut(self, answer_tokens: int) -> "Text":
        return replace(self, ids=self.ids[: self.prompt_tokens + answer_tokens])


def read(checkpoint: Path, most_tokens: int, file: Path = FILE) -> dict[str, list[Text]]:
    """By domain, in the file's order; every answer of a conversation is a request of its own. Longer ones are left
    out. `checkpoint`: the directory of tokenizer.json and config.json. Raises DataError for a line that is no text."""
    tokenizer, texts = Tokenizer.open(checkpoint), dict[str, list[Text]]()
    family = family_of(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    for number, row in enumerate(rows(file), 1):
        try:
            found = [plain(row, tokenizer, family)] if row.text is not None else list(answers(row, tokenizer, family))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"line {number} is no conversation of this model: {error}", where=str(file)) from error
        texts.setdefault(row.domain, []).extend(
            replace(text, row=number) for text in found if len(text.ids) <= most_tokens and text.answer_tokens > 0
        )
    return texts


def rows(file: Path) -> Iterator[Row]:
    """Raises DataError for a file that cannot be read, and for a line that is neither a text nor a conversation."""
    try:
        if file.stat().st_size > MOST_FILE_BYTES:
            raise DataError(f"over {MOST_FILE_BYTES} bytes", where=str(file), hint="draw fewer texts")
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"the texts cannot be read ({error.strerror})", where=str(file)) from error
    hint = '{"domain": ..., "text": ...} or {"domain": ..., "messages": [{"role": ..., "content": ...}, ...]} a line'
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"line {number}: {error}", where=str(file), hint=hint) from error
        if (row.text is None) == (not row.messages):
            raise DataError(f"line {number}: expected text or messages", where=str(file), hint=hint)
        yield row


def plain(row: Row, tokenizer: Tokenizer, family: Family) -> Text:
    ids = [*map(tokenizer.special_id, family.begin), *tokenizer.encode_text(row.text or "")]
    return Text(row.domain, ids, min(PLAIN_PROMPT_TOKENS, len(ids) - 1))


def answers(row: Row, tokenizer: Tokenizer, family: Family) -> Iterator[Text]:
    for at, message in enumerate(row.messages):
        if message.role == "assistant":
            prompt = tokenizer.encode(family.encode_prompt(conversation(row, at, True)).segments)
            whole = tokenizer.encode(family.encode_prompt(conversation(row, at + 1, False)).segments)
            if family is GLM53:  # its turns end with the opener of the next
                whole.append(tokenizer.special_id(OBSERVATION if message.tool_calls else USER))
            if whole[: len(prompt)] != prompt:
                raise ValueError(f"{row.domain}: a prompt is not the beginning of its conversation")
            yield Text(row.domain, whole, len(prompt))


def conversation(row: Row, messages: int, open_turn: bool) -> Conversation:
    tools = tuple(Tool(tool["function"]["name"], tool["function"]) for tool in row.tools)
    shown = tuple(map(message_of, row.messages[:messages]))
    return Conversation(messages=shown, tools=tools, thinking=row.thinking, effort=row.effort, open_turn=open_turn)


def message_of(given: Turn) -> Message:
    calls = [call.function for call in given.tool_calls]
    return Message(
        given.role,
        (given.content,) if given.content else (),
        given.reasoning_content or "",
        tuple(ToolCall(str(at), call.name, call.arguments) for at, call in enumerate(calls)),
    )
