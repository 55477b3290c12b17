"""How the rows of a layer are kept in the pool: as they are computed, or in FP8 (`kernels.latent_rows`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import latent_rows
from kernels.numerics import Numerics
from tided.cache.pool import Pool
from tided.cache.share import Share
from tided.models.glm53.config import Config
from tided.settings import Settings


@dataclass(frozen=True)
class RowFormat:
    """A row is a latent and a rotated key, [c + r]. `dtype` uint8: packed, `width` bytes; else `width` is c + r."""

    latent_dim: int
    row_dim: int
    dtype: torch.dtype

    @property
    def packed(self) -> bool:
        return self.dtype is torch.uint8

    @property
    def width(self) -> int:
        return latent_rows.row_bytes(self.latent_dim, self.row_dim - self.latent_dim) if self.packed else self.row_dim

    def kept(self, rows: Tensor) -> Tensor:
        """rows [T, c + r] fp32 -> [T, width]"""
        return latent_rows.pack(rows, self.latent_dim) if self.packed else rows.to(self.dtype)

    def read(self, kept: Tensor) -> Tensor:
        """kept [..., width] -> [..., c + r] fp32"""
        return latent_rows.unpack(kept, self.latent_dim) if self.packed else kept.to(torch.float32)


def row_format(c: Config, settings: Settings, numerics: Numerics) -> RowFormat:
    """Index keys are kept as they are computed in either: the choice of tokens does not depend on it."""
    dtype = torch.uint8 if settings.cache.dtype == "fp8" else numerics.cache
    return RowFormat(c.kv_lora_rank, c.row_dim, dtype)


@dataclass(frozen=True)
class Contexts:
    """Where a model's contexts lie: the pool, the format of its rows, and this rank's share of them."""

    pool: Pool
    rows: RowFormat
    share: Share
