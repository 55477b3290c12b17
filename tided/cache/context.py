"""Everything that one request's context is: its pages of the pool, window rings, compressor remainders, n-gram tail."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class ContextShape:
    """`layers` window rings of `window` rows of `head_dim`; the last `tail_tokens` compressed token ids."""

    layers: int
    window: int
    head_dim: int
    tail_tokens: int
    pad_id: int  # stands for the tokens before the first
    dtype: torch.dtype


@dataclass
class Remainder:
    """Tokens of an unfinished group, fp32 [n, head_dim] with n < ratio: projected rows and their gates."""

    rows: Tensor
    gates: Tensor


class Context:
    """A lane's state. A window row of position p lies at `windows[layer, p % window]`."""

    def __init__(self, index: int, shape: ContextShape, device: torch.device) -> None:
        self.index = index
        self.position = 0
        self.pages: list[int] = []
        self.page_table: Tensor = torch.empty(0, dtype=torch.int64, device=device)
        self.windows: Tensor = torch.zeros(shape.layers, shape.window, shape.head_dim, dtype=shape.dtype, device=device)
        self.remainders: dict[int, Remainder] = {}
        self.tail: NDArray[np.int64] = np.full(shape.tail_tokens, shape.pad_id, dtype=np.int64)

    def take(self, pages: list[int]) -> None:
        if pages:
            self.pages.extend(pages)
            self.page_table = torch.tensor(self.pages, dtype=torch.int64, device=self.windows.device)

    def drop_pages(self) -> None:
        self.pages = []
        self.page_table = self.page_table[:0]
