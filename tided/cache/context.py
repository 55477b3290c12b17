"""Everything that one request's context is: its pages of the pool, window rings, compressor remainders, n-gram tail."""

from collections.abc import Mapping
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

    def parts(self) -> dict[str, Tensor]:
        """All that the context is but its position and its pages, by name, copied to the CPU."""
        parts = {"windows": self.windows, "tail": torch.from_numpy(self.tail)}
        for layer, remainder in self.remainders.items():
            parts |= {f"remainder.{layer}.rows": remainder.rows, f"remainder.{layer}.gates": remainder.gates}
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in parts.items()}

    def put(self, parts: Mapping[str, Tensor]) -> None:
        """What `parts` gave, into a fresh context. Raises ValueError for parts of another shape."""
        if parts["windows"].shape != self.windows.shape or parts["tail"].shape != self.tail.shape:
            raise ValueError("windows or tail of another model")
        self.windows.copy_(parts["windows"])
        self.tail = parts["tail"].numpy().copy()
        for name, rows in parts.items():
            kind, _, rest = name.partition(".")
            layer, _, what = rest.partition(".")
            if kind == "remainder" and what == "rows":
                gates = parts[f"remainder.{layer}.gates"]
                device = self.windows.device
                self.remainders[int(layer)] = Remainder(rows.to(device, copy=True), gates.to(device, copy=True))
