"""The bundled models: what a test has to know of each to run on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tided.chat import deepseek_v41, glm53
from tided.chat.messages import Conversation, Message, Prompt
from tided.chat.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "minis"


@dataclass(frozen=True)
class Mini:
    """`experts`: how many there are; `most`: enough that little is substituted, `some`: two thirds, as the bundled
    profile keeps, `few`: a third, `least`: as many as a token wants. `ranks`: numbers of them that can share it."""

    name: str
    encode: Callable[[Conversation], Prompt]
    stops: tuple[str, ...]
    experts: int
    most: int
    some: int
    few: int
    least: int
    ranks: tuple[int, ...]

    @property
    def path(self) -> Path:
        return FOLDER / self.name

    @property
    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self.path)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.special_id(token) for token in self.stops)

    def ids(self, text: str) -> list[int]:
        """A question without thinking, and the opening of its answer."""
        messages = (Message(role="user", parts=(text,)),)
        return self.tokenizer.encode(self.encode(Conversation(messages=messages, thinking=False)).segments)

    def __str__(self) -> str:
        return self.name


@cache
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.open(path)


DEEPSEEK = Mini("deepseek", deepseek_v41.encode_prompt, ("<｜end▁of▁sentence｜>",), 480, 400, 312, 156, 40, (2, 4))
GLM = Mini("glm", glm53.encode_prompt, glm53.STOPS, 256, 214, 172, 84, 32, (2,))
MINIS = (DEEPSEEK, GLM)


def named(name: str) -> Mini:
    return next(mini for mini in MINIS if mini.name == name)
