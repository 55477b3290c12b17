"""The models whose shapes made-up weights can have: their configurations, tensors and files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packers.generated import Mark
from packers.shards import TensorSpec
from tided.models.deepseek_v41 import released as ds41
from tided.models.deepseek_v41.config import read_config as read_ds41
from tided.models.deepseek_v41.hashing import table_rows
from tided.models.deepseek_v41.names import expected_tensors
from tided.models.deepseek_v41.vocabulary import compressed_ids
from tided.models.glm53 import released as glm53
from tided.models.glm53.config import read_config as read_glm53

ENGRAM_VOCABULARY = 16_000_000  # of the released one
ENGRAM_HEADS = 3 * 8


@dataclass(frozen=True)
class Like:
    """`layers` and `experts`: how many there may be. `config`: of a mark, once the tokenizer is in the directory.
    `engram_vocabulary`: of all layers, 0 where the model has no Engram. `files`: groups of tensors, in the order of the
    files; `group` says which one a tensor, by the parts of its name, is of."""

    layers: range
    experts: range
    engram_vocabulary: int
    vocabulary: int
    special: Mapping[str, int]
    config: Callable[[Mark, Path], dict[str, Any]]
    tensors: Callable[[dict[str, Any]], Mapping[str, TensorSpec]]
    files: tuple[str, ...]
    group: Callable[[list[str]], str]


def _ds41_config(mark: Mark, directory: Path) -> dict[str, Any]:
    engram = [layer for layer in ds41.ENGRAM if layer < mark.layers]
    return ds41.released(
        mark.layers,
        mark.experts,
        table_rows(mark.engram_vocabulary, ENGRAM_HEADS, len(engram)),
        mark.engram_vocabulary,
        int(compressed_ids(directory / "tokenizer.json", ds41.VOCABULARY).max()) + 1,
    )


def _ds41_group(parts: list[str]) -> str:
    if parts[0] in ("vision", "aligner"):
        return "vision"
    if parts[0] == "layers" and parts[2] == "engram":
        return f"engram.{parts[1]}"
    if parts[0] in ("layers", "mtp"):
        return f"{parts[0]}.{parts[1]}"
    return "head" if parts[0] in ("norm", "head") else "embed"


def _glm53_group(parts: list[str]) -> str:
    if parts[1] == "layers":
        return f"layers.{parts[2]}"
    return "embed" if parts[1] == "embed_tokens" else "head"


LIKE: Mapping[str, Like] = {
    "ds41": Like(
        range(2, ds41.LAYERS + 1),
        range(6, ds41.EXPERTS + 1),
        ENGRAM_VOCABULARY,
        ds41.VOCABULARY,
        ds41.SPECIAL,
        _ds41_config,
        lambda config: expected_tensors(read_ds41(config)),
        ("vision", "embed", "layers", "head", "mtp", "engram"),
        _ds41_group,
    ),
    "glm53": Like(
        range(glm53.DENSE_LAYERS + 1, glm53.LAYERS + 1),
        range(glm53.TOP_K, glm53.EXPERTS + 1),
        0,
        glm53.VOCABULARY,
        glm53.SPECIAL,
        lambda mark, directory: glm53.released(mark.layers, mark.experts),
        lambda config: glm53.stored_tensors(read_glm53(config)),
        ("embed", "layers", "head"),
        _glm53_group,
    ),
}
