"""Where a text may be cut without changing its token ids.

Merges never cross the words that a pre-tokenizer makes. At these places each of the pre-tokenizers in use (DeepSeek's,
GLM's, GPT-2's) ends a word whatever stands around, and none looks further back: the ids of the parts are those of the
whole. `joined_places` tries it on a tokenizer.
"""

import re
from collections.abc import Iterator
from itertools import product

import tokenizers

PIECE_CHARACTERS = 1 << 16
# A word is one piece of work that cannot be given up, so its length has a limit.
MOST_WORD_CHARACTERS = 1 << 20

# Letters that every version of Unicode in use knows as letters: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari,
# Thai, kana, Han, Hangul.
_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏα-ωЀ-ҁא-תء-غऄ-हก-ะぁ-ゖァ-ヺ一-龥가-힣"
_MARKS = ',.;:!?"\n，。、；：！？'
_CUT = re.compile(rf"(?<=\S\n)(?=[{_LETTERS}])|(?<=\S)(?= [{_LETTERS}])|(?<=[0-9{_LETTERS}])(?=[{_MARKS}])")


class UncutError(Exception):
    """More than `MOST_WORD_CHARACTERS` without a place to cut."""


def pieces(text: str) -> Iterator[str]:
    """`text` in parts of about `PIECE_CHARACTERS`."""
    at = 0
    while len(text) - at > PIECE_CHARACTERS:
        cut = _CUT.search(text, at + PIECE_CHARACTERS, at + MOST_WORD_CHARACTERS)
        if cut is None and len(text) - at > MOST_WORD_CHARACTERS:
            raise UncutError
        end = cut.start() if cut else len(text)
        yield text[at:end]
        at = end
    if at < len(text):
        yield text[at:]


def joined_places(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Examples of places at which we would cut and the tokenizer does not; empty for those that we can cut for."""
    return [f"{left}{right}" for left, right in _probes() if not _ends_a_word(tokenizer, f"a{left}", f"{right}b")]


def _probes() -> Iterator[tuple[str, str]]:
    letters = _LETTERS.replace("-", "")  # the ends of the ranges
    yield from product("\n", letters)
    yield from product(f"aé7.,\u0301🌊)_'{letters}", (f" {letter}" for letter in letters[::4]))
    yield from product("09" + letters, _MARKS)


def _ends_a_word(tokenizer: tokenizers.Tokenizer, left: str, right: str) -> bool:
    whole, before, after = (_words(tokenizer, text) for text in (left + right, left, right))
    return tokenizer.pre_tokenizer is not None and whole == before + after


def _words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    splitter = tokenizer.pre_tokenizer
    return [] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
