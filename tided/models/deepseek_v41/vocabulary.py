"""The compressed vocabulary of Engram: tokens that read alike share an id.

Every hash of the tables rests on these ids, so a map that comes out otherwise would look up noise without an error: its
size is compared with the checkpoint's."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers import normalizers as n

from tided.errors import DataError

_LONE_SPACE = "\ue000"  # private use: cannot come from a normalised token
_NORMALISE = n.Sequence(
    [
        n.NFKC(),
        n.NFD(),
        n.StripAccents(),
        n.Lowercase(),
        n.Replace(Regex(r"[ \t\r\n]+"), " "),
        n.Replace(Regex(r"^ $"), _LONE_SPACE),
        n.Strip(),
        n.Replace(_LONE_SPACE, " "),
    ]
)


def compressed_vocabulary(tokenizer_path: Path, vocab_size: int, expected: int) -> NDArray[np.int64]:
    """Token id -> compressed id, [vocab_size]. Raises DataError unless exactly `expected` ids come out."""
    mapped = compressed_ids(tokenizer_path, vocab_size)
    found = int(mapped.max()) + 1
    if found != expected:
        raise DataError(
            f"gives {found} compressed ids for Engram, config.json states {expected}",
            where=str(tokenizer_path),
            hint="the tokenizer is not the one that the Engram tables were made with",
        )
    return mapped


def compressed_ids(tokenizer_path: Path, vocab_size: int) -> NDArray[np.int64]:
    """Token id -> compressed id, [vocab_size]."""
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as e:  # the library raises bare Exception for a missing or damaged file
        raise DataError(f"cannot be read as a tokenizer: {e}", where=str(tokenizer_path)) from e
    ids: dict[str, int] = {}
    mapped = [ids.setdefault(_key(tokenizer, token), len(ids)) for token in range(vocab_size)]
    return np.array(mapped, dtype=np.int64)


def _key(tokenizer: Tokenizer, token: int) -> str:
    """What a token reads as. A fragment of a character has no text of its own and counts by its spelling."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token) or ""
    normal: str = _NORMALISE.normalize_str(text)
    return normal or text
