"""Token ids to text while they arrive, never splitting a character.

A token of a byte-level vocabulary is a byte string; its bytes are read from the vocabulary's spelling of it.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence

from tided.errors import DataError


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table): printable Latin-1 stands
    for itself, the other bytes in order for the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def token_bytes(vocabulary: Mapping[str, int], special_ids: Mapping[str, int], where: str) -> list[bytes | None]:
    """Bytes by token id; None for special tokens and for ids that no token has."""
    alphabet, specials = byte_alphabet(), set(special_ids.values())
    table: list[bytes | None] = [None] * (max([*vocabulary.values(), *specials], default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in specials:
            continue
        try:
            table[token_id] = bytes(alphabet[character] for character in token)
        except KeyError:
            raise DataError(f"token {token_id} is not in a byte-level alphabet", where=where) from None
    return table


class StreamDecoder:
    """The text of one answer. What all calls return, joined, is the text of all ids, for every cutting.

    A byte that cannot become valid is one U+FFFD at once; an unfinished character at the end is one U+FFFD.
    """

    def __init__(self, bytes_by_id: Sequence[bytes | None], marks: Mapping[int, str]) -> None:
        self._bytes, self._marks = bytes_by_id, marks
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(self._piece(token_id) for token_id in token_ids)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _piece(self, token_id: int) -> str:
        data = self._bytes[token_id] if token_id < len(self._bytes) else None
        if data is not None:
            return self._utf8.decode(data)
        mark = self._marks.get(token_id)
        return "" if mark is None else self.flush() + mark
