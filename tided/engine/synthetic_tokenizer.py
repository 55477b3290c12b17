"""A tokenizer for weights that are made up: every byte is a token, and the tokens that are no text have the released
places. The rest of the vocabulary is words that no text becomes, so that an answer, which is noise, can be read."""

import json
from collections.abc import Mapping
from typing import Any

# A word with what stands before it, a digit, signs, line ends, spaces: long texts may be cut between them.
_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # what byte-level tokenizers write as itself


def tokenizer_json(vocabulary: int, special: Mapping[str, int]) -> bytes:
    """tokenizer.json of the tokenizers library."""
    taken = set(special.values())
    free = (number for number in range(vocabulary) if number not in taken)
    vocab = {letter: next(free) for letter in _letters()}
    vocab |= {f"Ġw{number}": number for number in free}
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(text, number) for text, number in sorted(special.items(), key=lambda one: one[1])],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    return json.dumps(definition, ensure_ascii=False).encode()


def _letters() -> list[str]:
    """The spelling of every byte."""
    others = iter(range(256, 512))
    return [chr(byte) if byte in _BYTES else chr(next(others)) for byte in range(256)]


def _added(text: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}
