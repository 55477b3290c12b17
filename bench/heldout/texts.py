"""Held-out texts as requests whose answers are known: token ids of a prompt, and what the answer must be."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tided.chat.families import GLM53, Family, family_of
from tided.chat.glm53 import OBSERVATION, USER
from tided.chat.messages import Conversation, Message, Tool, ToolCall
from tided.chat.tokenizer import Tokenizer

FILE = Path(__file__).with_name("texts.jsonl")
PLAIN_PROMPT_TOKENS = 48  # of a plain text; the rest is its answer


@dataclass(frozen=True)
class Text:
    """`ids`: the prompt, then the answer, its end token included."""

    domain: str
    ids: list[int]
    prompt_tokens: int

    @property
    def answer_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def key(self) -> str:
        """Names the prompt and the answer."""
        return hashlib.blake2b(f"{self.prompt_tokens} {self.ids}".encode(), digest_size=12).hexdigest()

    def cut(self, answer_tokens: int) -> "Text":
        return Text(self.domain, self.ids[: self.prompt_tokens + answer_tokens], self.prompt_tokens)


def read(checkpoint: Path, most_tokens: int) -> dict[str, list[Text]]:
    """By domain, in the file's order; every answer of a conversation is a request of its own. Longer ones are left
    out."""
    tokenizer, texts = Tokenizer.open(checkpoint), dict[str, list[Text]]()
    family = family_of(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    for line in FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found = [plain(row, tokenizer, family)] if "text" in row else list(answers(row, tokenizer, family))
        texts.setdefault(row["domain"], []).extend(text for text in found if len(text.ids) <= most_tokens)
    return texts


def plain(row: dict[str, Any], tokenizer: Tokenizer, family: Family) -> Text:
    ids = [*map(tokenizer.special_id, family.begin), *tokenizer.encode_text(row["text"])]
    return Text(row["domain"], ids, PLAIN_PROMPT_TOKENS)


def answers(row: dict[str, Any], tokenizer: Tokenizer, family: Family) -> Iterator[Text]:
    for at, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            prompt = tokenizer.encode(family.encode_prompt(conversation(row, at, True)).segments)
            whole = tokenizer.encode(family.encode_prompt(conversation(row, at + 1, False)).segments)
            if family is GLM53:  # its turns end with the opener of the next
                whole.append(tokenizer.special_id(OBSERVATION if message.get("tool_calls") else USER))
            if whole[: len(prompt)] != prompt:
                raise ValueError(f"{row['domain']}: a prompt is not the beginning of its conversation")
            yield Text(row["domain"], whole, len(prompt))


def conversation(row: dict[str, Any], messages: int, open_turn: bool) -> Conversation:
    tools = tuple(Tool(tool["function"]["name"], tool["function"]) for tool in row.get("tools", ()))
    shown = tuple(map(message_of, row["messages"][:messages]))
    return Conversation(
        messages=shown, tools=tools, thinking=row["thinking"], effort=row["effort"], open_turn=open_turn
    )


def message_of(given: dict[str, Any]) -> Message:
    calls = [call["function"] for call in given.get("tool_calls", ())]
    return Message(
        given["role"],
        (given["content"],) if given["content"] else (),
        given.get("reasoning_content") or "",
        tuple(ToolCall(str(at), call["name"], call["arguments"]) for at, call in enumerate(calls)),
    )
