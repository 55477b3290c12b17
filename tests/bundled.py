"""The bundled models, and a random one of the family of each: what a test has to know to run on all of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors.torch import load_file

from tided.chat import deepseek_v41, glm53
from tided.chat.messages import Conversation, Message, Prompt
from tided.chat.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "minis"
GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Random:
    """A checkpoint of the same family with few layers and random weights: for what asks for no training, in
    milliseconds a step. `experts`: how many, `some`: about half, `least`: as many as a token wants."""

    path: Path
    layers: int
    experts: int
    some: int
    least: int
    read_prompt: Callable[[Path], list[int]]

    @property
    def prompt(self) -> list[int]:
        """Its own tokens again and again; others where it is cut elsewhere."""
        return _prompt(self) * 4


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
    random: Random

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


@cache
def _prompt(of: Random) -> list[int]:
    return of.read_prompt(of.path)


def _deepseek_prompt(path: Path) -> list[int]:
    ids: list[int] = json.loads((path / "inputs.json").read_text())["prompt_ids"]
    return ids


def _glm_prompt(path: Path) -> list[int]:
    ids: list[int] = load_file(path / "golden_main.safetensors")["tokens"].tolist()
    return ids


RANDOM_DEEPSEEK = Random(GOLDEN / "deepseek-v41", 10, 80, 45, 30, _deepseek_prompt)
RANDOM_GLM = Random(GOLDEN / "glm53", 4, 64, 40, 16, _glm_prompt)
DEEPSEEK = Mini(
    name="deepseek",
    encode=deepseek_v41.encode_prompt,
    stops=("<｜end▁of▁sentence｜>",),
    experts=480,
    most=400,
    some=312,
    few=156,
    least=40,
    ranks=(2, 4),
    random=RANDOM_DEEPSEEK,
)
GLM = Mini(
    name="glm",
    encode=glm53.encode_prompt,
    stops=glm53.STOPS,
    experts=256,
    most=214,
    some=172,
    few=84,
    least=32,
    ranks=(2,),
    random=RANDOM_GLM,
)
MINIS = (DEEPSEEK, GLM)


def named(name: str) -> Mini:
    return next(mini for mini in MINIS if mini.name == name)
