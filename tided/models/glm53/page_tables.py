"""Where the rows of a step find their contexts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tided.cache.context import Context


class PageTables:
    """Of R rows: `there` [R, most pages] int64 on the device, of fixed address, a lane's page table and behind it its
    first page; a copy on the host, and which table each row had last."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self._here = torch.zeros(rows, pages, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there: Tensor = self._here.to(device, copy=True)
        self._told: list[Tensor | None] = [None] * rows

    def tell(self, lanes: Sequence[Context]) -> None:
        """The rows' lanes. Copies, without waiting, what the device does not know; the copy before must be done."""
        tables, changed = self._here.numpy(), False
        for row, lane in enumerate(lanes):
            if self._told[row] is not lane.page_table:  # which is never changed, but replaced
                tables[row] = lane.pages[0]
                tables[row, : len(lane.pages)] = lane.pages
                self._told[row], changed = lane.page_table, True
        if changed:
            self.there.copy_(self._here, non_blocking=True)
