"""Text to token ids and back, from a checkpoint's `tokenizer.json`.

Only a prompt's encoder makes special tokens. Text is tokenised by a copy of the tokenizer without its added vocabulary,
so no text, whatever it spells, becomes a special token.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import tokenizers

from tided.chat.cuts import MOST_WORD_CHARACTERS, UncutError, joined_places, pieces
from tided.chat.detokenizer import StreamDecoder, token_bytes
from tided.chat.messages import Segment
from tided.errors import DataError, RequestError

BATCH_CHARACTERS = 4 << 16


class Tokenizer:
    """`special_ids`: id by spelling of every added token; `token_bytes`: None for those. Threads may share one."""

    def __init__(
        self, plain: tokenizers.Tokenizer, special_ids: Mapping[str, int], bytes_by_id: Sequence[bytes | None]
    ) -> None:
        self._plain = plain
        self.special_ids = special_ids
        self._bytes = self.token_bytes = bytes_by_id
        self.vocabulary_tokens = len(bytes_by_id)
        self.special_spellings = re.compile(f"({'|'.join(map(re.escape, special_ids))})")
        self._longest_bytes = max((len(data) for data in bytes_by_id if data), default=1)

    @classmethod
    def open(cls, directory: Path) -> Self:
        path = directory / "tokenizer.json"
        try:
            definition = json.loads(path.read_text(encoding="utf-8"))
            special_ids = {token["content"]: token["id"] for token in definition.get("added_tokens", ())}
            vocabulary = definition["model"]["vocab"]
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("is no tokenizer file of the tokenizers library", where=str(path)) from error
        tokenizer = cls(
            _without_added_tokens(definition, path), special_ids, token_bytes(vocabulary, special_ids, str(path))
        )
        tokenizer._check(path)
        return tokenizer

    def special_id(self, spelling: str) -> int:
        try:
            return self.special_ids[spelling]
        except KeyError:
            raise DataError(f"the tokenizer has no token {spelling}") from None

    def require(self, spellings: Iterable[str]) -> None:
        if missing := [spelling for spelling in spellings if spelling not in self.special_ids]:
            raise DataError(f"the tokenizer lacks the tokens {', '.join(missing)}")

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of a prompt. Texts are tokenised one by one, so a prompt's ids begin with those of its beginning."""
        return list(chain.from_iterable(self.encode_in_parts(segments)))

    def encode_in_parts(self, segments: Iterable[Segment]) -> Iterator[list[int]]:
        """The same ids, part by part: between two parts the caller may stop. Each takes a fraction of a second.

        Raises RequestError for a text that cannot be cut into such parts.
        """
        for batch in _batches(self._items(segments)):
            texts = [item for item in batch if isinstance(item, str)]
            encoded = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
            ids: list[int] = []
            for item in batch:
                ids += [item] if isinstance(item, int) else next(encoded).ids
            yield ids

    def least_tokens(self, segments: Iterable[Segment]) -> int:
        """A number of tokens that a prompt has for sure, without tokenising: none is longer than the longest."""
        if self._plain.normalizer is not None:
            return 0  # the text may become shorter before it becomes tokens
        return sum(1 if segment.special else len(segment.text) // self._longest_bytes for segment in segments)

    def _items(self, segments: Iterable[Segment]) -> Iterator[int | str]:
        for segment in segments:
            if segment.special:
                yield self.special_id(segment.text)
                continue
            try:
                yield from pieces(segment.text)
            except UncutError:
                raise RequestError(
                    f"A text holds more than {MOST_WORD_CHARACTERS} characters without a space, a line break or "
                    "a punctuation mark between words",
                    param="messages",
                ) from None

    def encode_text(self, text: str) -> list[int]:
        return self.encode([Segment(text)])

    def decoder(self, marks: Mapping[int, str] | None = None) -> StreamDecoder:
        """A decoder of one answer. `marks`: what a special token stands for; the others have no text."""
        return StreamDecoder(self._bytes, marks or {})

    def _check(self, path: Path) -> None:
        """The promise of this module, tried on every spelling there is."""
        forbidden = set(self.special_ids.values())
        for spelling in self.special_ids:
            if forbidden & set(self.encode_text(f"a {spelling}\n{spelling}")):
                raise DataError(f"text that spells {spelling} would become that token", where=str(path))
        if joined := joined_places(self._plain):
            raise DataError(f"its words go on over {joined[0]!r}, where long texts are cut", where=str(path))


def _batches(items: Iterable[int | str]) -> Iterator[list[int | str]]:
    """Several pieces a call: the library tokenises them beside each other."""
    batch: list[int | str] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += 1 if isinstance(item, int) else len(item)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _without_added_tokens(definition: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    plain = {**definition, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    if plain.get("normalizer") == {"type": "Sequence", "normalizers": []}:
        plain["normalizer"] = None  # as checkpoints spell that there is none
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"is refused by the tokenizers library: {error}", where=str(path)) from error
