"""Byte-level BPE with the special tokens of a real model, and encoding without injection."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minis.dialogue import Segment

# Letters with one leading mark, single digits (sums are worked digit by digit), punctuation runs, newlines, spaces.
_SPLIT = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocabulary: int, first: list[str], top: list[str]) -> Tokenizer:
    """Special tokens `first` get the lowest ids and `top` the highest."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(top),
        special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    specials = first + top

    def clean() -> Iterable[str]:
        for text in texts:
            for token in specials:
                text = text.replace(token, " ")
            yield text

    tok.train_from_iterator(clean(), trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in top])
    if tok.get_vocab_size() != vocabulary:
        raise ValueError(f"vocabulary has {tok.get_vocab_size()} entries")
    return tok


class Encoder:
    """Segments -> ids; text segments never yield a special id."""

    def __init__(self, path: Path) -> None:
        raw = json.loads(path.read_text("utf-8"))
        self.full = Tokenizer.from_file(str(path))
        self.special = {t["content"]: t["id"] for t in raw["added_tokens"]}
        raw["added_tokens"] = []
        self.plain = Tokenizer.from_str(json.dumps(raw))

    def encode(self, docs: list[list[Segment]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Documents -> (ids uint16, weights float32), each."""
        texts = [s.text for d in docs for s in d if not s.special]
        encoded = iter(self.plain.encode_batch_fast(texts, add_special_tokens=False))
        result = []
        for d in docs:
            ids: list[int] = []
            weights: list[float] = []
            for s in d:
                part = [self.special[s.text]] if s.special else next(encoded).ids
                ids += part
                weights += [s.weight] * len(part)
            result.append((np.array(ids, dtype=np.uint16), np.array(weights, dtype=np.float32)))
        return result

    def ids(self, doc: list[Segment]) -> list[int]:
        return [int(i) for i in self.encode([doc])[0][0]]

    def decode(self, ids: list[int]) -> str:
        return self.full.decode(ids, skip_special_tokens=False)
