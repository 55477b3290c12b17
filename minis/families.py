"""What a family of minis brings to the preparation of its data: special tokens, chat format, configuration."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minis import encoding
from minis.config import from_dict, mini_config
from minis.dialogue import Dialogue, Segment
from minis.engram import compressed_of, primes
from minis.glm53 import config as glm_config
from minis.glm53 import encoding as glm_encoding
from minis.tokenizer import Encoder


@dataclass(frozen=True)
class Family:
    """`first` and `top`: special tokens with the lowest and the highest ids; the first one opens every document and the
    third is the pad. `opening`: what stands before a text. `configure` writes what else the trainer reads."""

    vocabulary: int
    first: list[str]
    top: list[str]
    opening: tuple[str, ...]
    render: Callable[[Dialogue, random.Random], list[Segment]]
    configure: Callable[[Path, Encoder], None]


def _write(out: Path, config: dict[str, Any]) -> None:
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def _configure_deepseek(out: Path, enc: Encoder) -> None:
    table = compressed_of(enc.full)
    specials = {"noise": enc.special[encoding.NOISE], "image": enc.special[encoding.IMAGE]}
    rows = [sum(c) for c in primes(from_dict(mini_config(int(table.max()) + 1, [0, 0], specials)))]
    _write(out, mini_config(int(table.max()) + 1, rows, specials))
    np.save(out / "compressed.npy", table)


def _configure_glm(out: Path, enc: Encoder) -> None:
    _write(out, glm_config.mini_config(enc.full.get_vocab_size(), enc.special))


FAMILIES = {
    "deepseek": Family(
        8192,
        encoding.FIRST_SPECIALS,
        encoding.TOP_SPECIALS,
        (encoding.BOS,),
        lambda dialogue, _rng: encoding.render(dialogue),
        _configure_deepseek,
    ),
    "glm": Family(
        6144,
        glm_encoding.FIRST_SPECIALS,
        glm_encoding.TOP_SPECIALS,
        glm_encoding.OPENING,
        glm_encoding.training_render,
        _configure_glm,
    ),
}
