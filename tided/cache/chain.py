"""Names of prefixes by what they hold: a hash over everything that a context depends on, chunk after chunk.

Two prompts share the keys of the chunks that they have in common, and nothing else does. A prefix is named at the end
of a chunk, and once more at the end of the prompt, where its logits are kept too."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Image(NamedTuple):
    """Pixels that stand in place of the token ids from `first` on; `digest` is of the pixels."""

    first: int
    digest: bytes


class Chain(NamedTuple):
    """`chunks[i]`: key of the first (i + 1) * chunk_tokens tokens; `whole`: of all of them, logits included."""

    chunk_tokens: int
    tokens: int
    chunks: tuple[str, ...]
    whole: str


def chain(seed: str, ids: Sequence[int], chunk_tokens: int, images: Sequence[Image] = ()) -> Chain:
    """`seed` names the model, its numbers and whatever else decides what the tokens become (`tided.engine.caching`)."""
    data, key, chunks = np.asarray(ids, dtype="<i8"), _hash(b"seed", seed.encode()), []
    for first in range(0, len(data), chunk_tokens):
        last = first + chunk_tokens
        pixels = b"".join(
            image.first.to_bytes(8, "little") + image.digest for image in images if first <= image.first < last
        )
        part = data[first:last].tobytes()
        key = _hash(key, len(part).to_bytes(8, "little"), part, pixels)
        if last <= len(data):
            chunks.append(key.hex())
    return Chain(chunk_tokens, len(data), tuple(chunks), _hash(key, b"whole").hex())


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
