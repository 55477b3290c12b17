"""Engram addressing: compressed token ids, hash multipliers, primes and row numbers."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from minis.config import Config

SEED_STEP = 10007
_PROTECTED = "\ue000"


def compressed_key(text: str, token: str) -> str:
    """The key under which tokens of (nearly) equal text share one compressed id."""
    if "\ufffd" in text:
        return token
    t = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    t = "".join(c for c in t if unicodedata.category(c) != "Mn").lower()
    out: list[str] = []
    for c in t:
        if c in " \t\r\n":
            if not out or out[-1] != " ":
                out.append(" ")
        else:
            out.append(c)
    t = "".join(out)
    if t == " ":
        return t
    return t.strip() or text


def compressed_map(size: int, decode: Callable[[int], str], token: Callable[[int], str]) -> np.ndarray:
    """[size] int64: token id -> compressed id, in order of first appearance."""
    seen: dict[str, int] = {}
    return np.array(
        [seen.setdefault(compressed_key(decode(i), token(i)), len(seen)) for i in range(size)], dtype=np.int64
    )


def compressed_of(tok: Tokenizer) -> np.ndarray:
    return compressed_map(
        tok.get_vocab_size(), lambda i: tok.decode([i], skip_special_tokens=False), lambda i: tok.id_to_token(i) or ""
    )


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def primes(cfg: Config) -> list[list[int]]:
    """One list of column moduli per Engram layer; a prime is never used twice."""
    used: set[int] = set()
    result: list[list[int]] = []
    for _layer in cfg.engram_layers:
        columns: list[int] = []
        for _n in range(2, cfg.engram_ngram + 1):
            value = cfg.engram_vocab - 1
            for _head in range(cfg.engram_heads):
                value += 1
                while not _is_prime(value) or value in used:
                    value += 1
                used.add(value)
                columns.append(value)
        result.append(columns)
    return result


def multipliers(cfg: Config, layer: int) -> list[int]:
    bound = (2**63 - 1) // cfg.engram_compressed // 2
    return [int(v) * 2 + 1 for v in np.random.default_rng(SEED_STEP * layer).integers(0, bound, cfg.engram_ngram)]


@dataclass
class Hasher:
    """Constant tensors of the hash, on one device."""

    table: Tensor  # [vocab] int64
    pad: int
    multipliers: list[list[int]]
    moduli: list[Tensor]  # per layer [columns] int64
    offsets: list[Tensor]

    @classmethod
    def build(cls, cfg: Config, table: np.ndarray, device: torch.device | str = "cpu") -> Hasher:
        moduli = [torch.tensor(c, dtype=torch.int64) for c in primes(cfg)]
        return cls(
            table=torch.from_numpy(table).to(device),
            pad=int(table[cfg.engram_pad]),
            multipliers=[multipliers(cfg, layer) for layer in cfg.engram_layers],
            moduli=[m.to(device) for m in moduli],
            offsets=[(m.cumsum(0) - m).to(device) for m in moduli],
        )

    def ids(self, tokens: Tensor, position: Tensor) -> list[Tensor]:
        """tokens, position [B, T] (position counts from the document's start) -> per layer rows [B, T, columns]."""
        c = self.table[tokens]
        result = []
        for mult, moduli, offsets in zip(self.multipliers, self.moduli, self.offsets, strict=True):
            heads = moduli.numel() // (len(mult) - 1)
            r = c * mult[0]
            columns = []
            for back in range(1, len(mult)):
                shifted = torch.nn.functional.pad(c, (back, 0))[:, : c.shape[1]]
                shifted = torch.where(position >= back, shifted, self.pad)
                r = r ^ (shifted * mult[back])
                columns.append(r.unsqueeze(-1).expand(-1, -1, heads))
            result.append(torch.cat(columns, -1) % moduli + offsets)
        return result
