"""Everything that one request's context is: its pages of the pool, window rings, compressor remainders, n-gram tail."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class After:
    """What a context holds beside its rings and pages after a token. `remainders` by layer."""

    remainders: dict[int, Remainder]
    tail: NDArray[np.int64]


@dataclass(frozen=True)
class Undo:
    """What a block of rows replaced, until it is known how many of them stay: of all rings, the rows [layers, n - 1, d]
    at the `places` of every row but the first, which always stays. `after` each row is added as rows are computed."""

    start: int
    places: Tensor
    windows: Tensor
    after: list[After] = field(default_factory=list)


class Context:
    """A lane's state. A window row of position p lies at `windows[layer, p % window]`.

    Rows of a block may be taken back once: `begin_block` before they are computed, `keep` after. In between, `undo`
    holds what they replaced. Compressed rows need none of it: what lies behind the last token is never read, and is
    written again before it is."""

    def __init__(self, index: int, shape: ContextShape, device: torch.device) -> None:
        self.index = index
        self.position = 0
        self.pages: list[int] = []
        self.page_table: Tensor = torch.empty(0, dtype=torch.int64, device=device)
        self.windows: Tensor = torch.zeros(shape.layers, shape.window, shape.head_dim, dtype=shape.dtype, device=device)
        self.remainders: dict[int, Remainder] = {}
        self.tail: NDArray[np.int64] = np.full(shape.tail_tokens, shape.pad_id, dtype=np.int64)
        self.undo: Undo | None = None

    def begin_block(self, rows: int) -> None:
        """`rows` tokens come next; all but the first may be taken back. At most as many as a window has."""
        size = self.windows.shape[1]
        places = torch.arange(self.position + 1, self.position + rows, device=self.windows.device) % size
        self.undo = Undo(self.position, places, self.windows[:, places])

    def keep(self, rows: int) -> None:
        """Of the block, only the first `rows` tokens ever came."""
        assert self.undo is not None, "begin_block comes first"
        undo, self.undo = self.undo, None
        self.windows[:, undo.places[rows - 1 :]] = undo.windows[:, rows - 1 :]
        self.position = undo.start + rows
        self.remainders, self.tail = undo.after[rows - 1].remainders, undo.after[rows - 1].tail

    def take(self, pages: list[int]) -> None:
        if pages:
            self.pages.extend(pages)
            self.page_table = torch.tensor(self.pages, dtype=torch.int64, device=self.windows.device)

    def give(self, kept: int) -> list[int]:
        """The pages from number `kept` on, which are the context's no more. A table of which none goes stays the same:
        whoever has told it to a device knows it by that."""
        if kept >= len(self.pages):
            return []
        given, self.pages = self.pages[kept:], self.pages[:kept]
        self.page_table = self.page_table[:kept]
        return given

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
