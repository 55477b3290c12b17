"""CUDA graphs of one owner, which run one after another and so share their memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")


class Graphs:
    def __init__(self) -> None:
        self._memory: Any = None

    def capture(self, work: Callable[[], Found]) -> tuple[Any, Found]:
        """The graph of what `work` launches, and what it gives. Nothing runs. Threads that read experts go on using
        their own streams meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            found = work()
        self._memory = self._memory or graph.pool()
        return graph, found
