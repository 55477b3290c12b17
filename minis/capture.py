"""A training step that is captured once as a CUDA graph and then replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minis.data import Batch


class Captured:
    """Warms up on a side stream, where parameters move, then captures the whole step on the buffers of `batch`."""

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch) -> None:
        self.batch = batch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.report = step(batch)

    def __call__(self, b: Batch) -> Tensor:
        self.batch.copy_(b)
        self.graph.replay()
        return self.report
