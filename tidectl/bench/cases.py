"""What is measured, as data: prompts, streams, what a repetition changes. Every prompt follows from the seed."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

PROSE = (
    "Write a long story in plain prose about a harbour town and the people who keep its lighthouse. "
    "Describe the weather, the work and the talk in detail, and do not stop early."
)
CODE = (
    "Write a complete Python module that parses a small arithmetic language: tokens, a recursive descent parser, an "
    "evaluator, and unit tests. Write the code in full, with docstrings, and do not stop early."
)
# Words of the long prompts. No cache can hold them: their order is drawn anew for each repetition.
_TEXT = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which you
were all her she there would their we him been has when who will no more if out so up said what its about than into
can only other time new some could these two may first then do any like my now over such our man me even most made after
did many off before must well back through years much where your way down should because long each just state people
too how little good world make very year still see work life men day use three water under house light harbour wind
stone paper road river bread window winter letter garden table music
"""
WORDS = tuple(_TEXT.split())


class Ask(NamedTuple):
    """One request: a single message of a user. `most_tokens`: the longest answer."""

    prompt: str
    most_tokens: int
    seed: int


class Sizes(NamedTuple):
    """`answer_tokens` of a decode case, `prompt_tokens` of a long prompt, `streams` side by side."""

    answer_tokens: int = 1024
    prompt_tokens: int = 8192
    streams: int = 4
    seed: int = 1


class Case(NamedTuple):
    """`turns(sizes, words, repetition)` -> groups of requests: those of a group run side by side, groups one after the
    other. `words`: how many of ours make a prompt of `sizes.prompt_tokens`. `headline`: the figure of the table."""

    name: str
    about: str
    headline: str
    turns: Callable[[Sizes, int, int], list[list[Ask]]]


def long_text(seed: int, words: int) -> str:
    return " ".join(_drawn(random.Random(seed), words))


def _drawn(draw: random.Random, words: int) -> Iterator[str]:
    """Sentences of 6 to 18 words."""
    left = 0
    for index in range(words):
        word = draw.choice(WORDS)
        start, left = left == 0, left - 1 if left else draw.randint(5, 17)
        yield (word.capitalize() if start else word) + ("." if left == 0 or index == words - 1 else "")


def _one(prompt: str) -> Callable[[Sizes, int, int], list[list[Ask]]]:
    return lambda sizes, words, repetition: [[Ask(prompt, sizes.answer_tokens, sizes.seed + repetition)]]


def _long(sizes: Sizes, words: int, repetition: int) -> list[list[Ask]]:
    seed = sizes.seed + repetition
    text = long_text(seed * 1_000_003, words)
    return [[Ask(f"{text}\n\nGo on with this text.", max(sizes.answer_tokens // 8, 16), seed)]]


def _streams(sizes: Sizes, words: int, repetition: int) -> list[list[Ask]]:
    seed = sizes.seed + repetition * sizes.streams
    kinds = (PROSE, CODE)
    return [[Ask(kinds[i % 2], sizes.answer_tokens, seed + i) for i in range(sizes.streams)]]


def _prefix(sizes: Sizes, words: int, repetition: int) -> list[list[Ask]]:
    """The same long text twice, the second time with another last line."""
    seed, most = sizes.seed + repetition, 16
    text = long_text(seed * 2_000_003, words)
    return [[Ask(f"{text}\n\nIn one word: {line}", most, seed)] for line in ("what is it about?", "where is it set?")]


def _switch(sizes: Sizes, words: int, repetition: int) -> list[list[Ask]]:
    """Prose, then code, then code again: what the change of domain costs, and what is left of it one answer later."""
    seed = sizes.seed + repetition
    return [[Ask(prompt, sizes.answer_tokens, seed)] for prompt in (PROSE, CODE, CODE)]


CASES = (
    Case("prose", "one answer in prose", "tok_s", _one(PROSE)),
    Case("code", "one answer in code", "tok_s", _one(CODE)),
    Case("long-prompt", "a prompt that no cache holds", "ttft_s", _long),
    Case("streams", "several answers at once, prose and code", "total_tok_s", _streams),
    Case("prefix", "a long prompt again, with another last line", "ttft_s", _prefix),
    Case("switch", "prose, code, code: speed after a change of domain", "tok_s", _switch),
)
USUAL = ("prose", "code", "long-prompt")
BY_NAME = {case.name: case for case in CASES}
