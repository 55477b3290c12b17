"""The demand of steps that are graphs themselves, whose wishes lie where those before lay: added up by one replay.
Where drafts are judged this stands between two steps, while the device waits.

The graph takes in which rows count and where their wishes are kept, adds, writes the wishes into that place of the
host's memory, and sends the totals: who looks at them there launches nothing, and waits for no later work. Making it
runs the launch once with no row that counts: it is compiled then, and leaves no trace."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from kernels.demand_triton import add_some_demand


class Standing:
    """`seen`: layers, lanes, wanted, scores, weights, missed of `tables.Together`, on CUDA, each of fixed address;
    `books`, `light` as `add_demand` takes them; `send` copies the totals. The wishes of `steps` steps are kept."""

    def __init__(
        self, seen: tuple[Tensor, ...], books: tuple[Tensor, ...], light: float, send: Callable[[], None], steps: int
    ) -> None:
        wanted, weights = seen[2], seen[4]
        here = torch.zeros(1 + wanted.shape[1], dtype=torch.int64, pin_memory=True)
        there = here.to(wanted.device, copy=True)
        added = weights.new_empty(*wanted.shape[:2], 8)
        # Pinned, so the device writes there itself: a step's place alone, and nobody copies.
        kept = (
            torch.zeros(steps, *wanted.shape, dtype=wanted.dtype, pin_memory=True),
            torch.zeros(steps, *weights.shape, dtype=weights.dtype, pin_memory=True),
        )

        def work() -> None:
            there.copy_(here, non_blocking=True)
            add_some_demand(seen, books, light, there, kept, added)
            send()

        work()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            work()
        self.layers = seen[0].cpu()
        self._told, self._memory = here.numpy(), (here, there, kept, added)  # a graph holds nothing that it works on
        self._kept = list(zip(kept[0].unbind(), kept[1].unbind(), strict=True))
        self.behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._turn = 0

    def add(self, rows: Collection[int] | None) -> tuple[Tensor, Tensor]:
        """`rows` count; None: all. -> wanted and weights [n, R, k] on the host, of others without weight, there once
        `behind` has come; overwritten after as many calls as steps are kept."""
        self.behind.synchronize()  # the graph has taken in what it was told before
        self._turn = (self._turn + 1) % len(self._kept)
        self._told[0], self._told[1:] = self._turn, rows is None
        for row in rows or ():
            self._told[1 + row] = 1
        self._graph.replay()
        self.behind.record()
        return self._kept[self._turn]
