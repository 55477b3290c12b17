"""Bytes that a rank's weights take in memory, those of experts, drafter and vision tower excepted."""

import math

from tided.models.deepseek_v41.drafter import CUT, HELD, MATRICES, PACKED
from tided.models.deepseek_v41.names import Inventory

EMBEDDING = "embed.weight"  # as stored, whatever else is
BEHIND = ("mtp.", "vision.", "aligner.", "image_")
ON_DISK = (".experts.", "engram.embed.")
HALF = ".k_weight"  # of a product that is kept as one
KEPT_AS_STORED = (
    *MATRICES,
    "head.weight",
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "indexer.wk.weight",
    "indexer.weights_proj.weight",
)
SHARED = (*CUT, "head.weight", EMBEDDING)  # over the ranks


def dense_bytes(inventory: Inventory, ranks: int, packed: bool) -> int:
    """What `load` allocates of the tensors of `inventory` on one rank."""
    total = 0
    for name, spec in inventory.items():
        if name.startswith(BEHIND) or name.endswith(HALF) or any(part in name for part in ON_DISK):
            continue
        kind = "matrix" if name.endswith(KEPT_AS_STORED) else str(spec.dtype)
        each = 2 if name == EMBEDDING else (PACKED if packed else HELD).get(kind, 4)
        total += each * math.prod(spec.shape) // (ranks if any(part in name for part in SHARED) else 1)
    return total
