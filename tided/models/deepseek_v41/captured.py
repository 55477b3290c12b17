"""Decode steps as CUDA graphs: one for each number of rows, in as many pieces as there are places where Engram rows
must have come from the disk.

Once a number of rows is captured (`models.prepared`; `engine.warming` has it done before a rank serves) a step is: a
copy of what its rows are (positions, and the addresses of their lanes' memory), the pieces, and the logits. Whatever
else changes between steps is read where it lies: routing tables and expert slots, pages, rings. The host reads nothing.

The device has no work while the host makes a step of the tokens that it has just read. So before the first piece is
launched nothing is done but to write what the rows are, where the graph itself copies it from; all else is done beside
the device.

A lane's rows of an open group (`Remainder`) are views of the ring where the kernels keep them, so a context can be
copied, parked and taken back as anywhere else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import RECENT_TOKENS, ROW_FIELDS
from kernels.linear import Fp8Matrix
from kernels.rows import ROWS
from tided.cache.context import Context, Remainder
from tided.experts.tables import Together
from tided.models import prepared
from tided.models.copies import Copies
from tided.models.deepseek_v41.engram_rows import Asked
from tided.models.deepseek_v41.step import Pass, Span

POSITION, LANE = 1, 2  # of a row's fields; see `rounding_triton`

if TYPE_CHECKING:
    from tided.models.deepseek_v41.decode import DecodeStep, Scratch
    from tided.models.deepseek_v41.model import DeepseekV41


class Recent:
    """A lane's newest projections of layers that compress several tokens: [layers, RECENT_TOKENS, 2, d] fp32, rows and
    gates, a token's by its position."""

    def __init__(self, model: "DeepseekV41", windows: Tensor) -> None:
        ratios = {layer: model.blocks[layer].attention.ratio for layer in model.remainder_layers}
        self._layers = [(place, layer, ratio) for place, (layer, ratio) in enumerate(ratios.items())]
        shape = (max(1, len(ratios)), RECENT_TOKENS, 2, model.context_shape.head_dim)
        self.data: Tensor = torch.zeros(shape, device=model.norm.device)
        self.address, self.windows_address = self.data.data_ptr(), windows.data_ptr()
        self._views: dict[tuple[int, int], Remainder] = {}

    def open_groups(self, end: int) -> dict[int, Remainder]:
        """What a context of `end` tokens has of groups that are open."""
        return {layer: self._view(place, end, end % ratio) for place, layer, ratio in self._layers if end % ratio}

    def adopt(self, context: Context) -> None:
        """What the context holds of open groups, if others than the kernels left it."""
        for layer, mine in self.open_groups(context.position).items():
            theirs = context.remainders.get(layer, mine)
            if theirs is not mine and theirs.rows.data_ptr() != mine.rows.data_ptr():
                mine.rows.copy_(theirs.rows)
                mine.gates.copy_(theirs.gates)

    def _view(self, place: int, end: int, count: int) -> Remainder:
        """A group begins at a multiple of its size, and so does not wrap."""
        last = end % RECENT_TOKENS
        view = self._views.get((place, last))
        if view is None:
            first = (end - count) % RECENT_TOKENS
            rows = self.data[place, first : first + count]
            view = self._views[place, last] = Remainder(rows[:, 0], rows[:, 1])
        return view


@dataclass(frozen=True)
class Captured:
    """A step's pieces, each a graph and the Engram layer that comes behind it, and where they leave the logits. A step
    that runs eagerly later leaves its own elsewhere."""

    pieces: list[tuple[Any, int | None]]
    logits: Tensor

    def parts(self) -> Iterator[int]:
        """As `DecodeStep.parts`."""
        for graph, follows in self.pieces:
            graph.replay()
            if follows is not None:
                yield follows


@dataclass
class Prepared(prepared.Prepared["DecodeStep", Captured]):
    """And the inputs on the host, which the step copies."""

    meta: NDArray[np.int64]
    engram: dict[int, NDArray[np.uint8]]


class DecodeSteps(prepared.FixedSteps[Prepared]):
    def __init__(self) -> None:
        super().__init__()
        self._known: bool | None = None  # whether kernels know the model's shape; None: nobody has asked
        self._recent: WeakKeyDictionary[Context, Recent] = WeakKeyDictionary()
        self._scratch: Scratch | None = None

    def serve(self, model: "DeepseekV41", rows: int) -> bool:
        """Whether steps of so many rows are computed here: weights that only kernels read, a shape that they know."""
        if self._known is None:
            streams, window = model.blocks[0].hc_attn.streams, model.context_shape.window
            ratios = {block.attention.ratio for block in model.blocks} - {0}
            known = streams & (streams - 1) == 0 and window % 32 == 0 and all(RECENT_TOKENS % n == 0 for n in ratios)
            self._known = known and isinstance(model.blocks[0].attention.inputs, Fp8Matrix)
        return self._known and rows <= ROWS

    @torch.inference_mode()
    def run(
        self, model: "DeepseekV41", contexts: list[Context], counts: Sequence[int], token_ids: Tensor, alone: bool
    ) -> Tensor:
        """token_ids [R] of the lanes' next ones, whose pages are there -> logits [R, V]. Moves the lanes on. `alone`:
        the logits are the next step's to write over. Else other rows follow before these are used and their demand is
        added up, so both are copied."""
        tokens: list[int] = token_ids.tolist()
        made = self.prepared.get(len(tokens)) or self._prepare(model, len(tokens))
        bank = model.blocks[0].moe.bank
        waits = bank.urgent is not None and bank.urgent.active
        if alone:
            bank.tap.add_up()  # what the step before left lies where this one writes
        made.copies.wait()
        self._describe(model, made, contexts, counts, tokens)
        step = made.step.waiting = _pass(made, contexts, counts, not alone) if waits else None
        captured = None if waits else made.captured
        parts = made.step.parts() if captured is None else captured.parts()
        try:
            layer = next(parts, None)
            # The device has its first work: what follows is done beside it.
            step = step or _pass(made, contexts, counts)
            history, asked = model.engrams.begin(step, np.array(tokens)), dict[int, Asked]()
            while layer is not None:
                asked[layer] = asked.get(layer) or model.engrams.ask_for(layer, history)
                asked[layer].put(made.engram[layer])
                layer = next(parts, None)
                for later in made.engram.keys() - asked.keys():
                    asked[later] = model.engrams.ask_for(later, history)
        finally:
            made.copies.made()
            made.step.waiting = None  # it holds its lanes, whose rings would stay when they close
        for rows in asked.values():
            rows.remember()
        logits = made.step.logits if captured is None else captured.logits
        assert logits is not None
        if not waits:
            capture = self._capture if self.captures and logits.is_cuda else None
            made.recorded(bank.tap, (span.lane for span in step.spans), alone, capture)
        for span in step.spans:
            left = self._recent[span.lane].open_groups(span.end)
            if span.after is not None:
                span.after.remainders.update(left)
            span.lane.remainders, span.lane.position = left, span.end
        return logits if alone else logits.clone()

    def _describe(
        self, model: "DeepseekV41", made: Prepared, contexts: list[Context], counts: Sequence[int], tokens: list[int]
    ) -> None:
        """Writes what the rows are, for the step to copy."""
        fields = list[tuple[int, ...]]()
        for lane, count in zip(contexts, counts, strict=True):
            recent = self._recent.get(lane)
            if recent is None:
                recent = self._recent[lane] = Recent(model, lane.windows)
            if lane.remainders:
                recent.adopt(lane)
            first, start, pages = len(fields), lane.position, lane.page_table.data_ptr()
            of_lane = (lane.index, recent.windows_address, pages, recent.address, first, start)
            fields += [(tokens[first + i], start + i, *of_lane) for i in range(count)]
        made.meta[:] = fields

    def _prepare(self, model: "DeepseekV41", rows: int) -> Prepared:
        from kernels.router_triton import room  # a compiler, which a CPU need not have
        from tided.models.deepseek_v41.decode import DecodeStep, Inputs

        device, on_cuda = model.norm.device, model.norm.is_cuda
        layers, moe = len(model.blocks), model.blocks[0].moe
        shape = model.context_shape

        def host(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, pin_memory=on_cuda)

        routed = room(layers, rows, moe.top_k, device=device)
        on_host = {
            layer: host(rows, part.hashing.primes.size, part.table.row_bytes, dtype=torch.uint8)
            for layer, part in model.engrams.layers.items()
        }
        meta = host(rows, ROW_FIELDS, dtype=torch.int64)
        inputs = Inputs(
            meta_here=meta,
            meta=meta.to(device, copy=True),
            engram_here=on_host,
            engram={layer: memory.to(device, copy=True) for layer, memory in on_host.items()},
            held=torch.zeros(shape.layers, rows, shape.head_dim, dtype=shape.dtype, device=device),
            routed=routed,
        )
        self._scratch = self._scratch or _scratch(model)
        numbers = torch.tensor([block.moe.layer for block in model.blocks], device=device)
        wish = (routed.wanted, routed.wanted_scores, routed.wanted_weights, routed.missed)
        made = Prepared(
            DecodeStep(model, inputs, self._scratch),
            Together(numbers, inputs.meta[:, LANE], *wish, None),
            Copies(device),
            meta.numpy(),
            {layer: memory.numpy() for layer, memory in on_host.items()},
        )
        self.prepared[rows] = made
        return made

    def _capture(self, step: "DecodeStep") -> Captured:
        pieces: list[tuple[Any, int | None]] = []
        parts = step.parts()
        layer: int | None = -1
        while layer is not None:
            graph, layer = self.graphs.capture(lambda: next(parts, None))
            pieces.append((graph, layer))
        assert step.logits is not None
        return Captured(pieces, step.logits)


def _pass(made: Prepared, contexts: Sequence[Context], counts: Sequence[int], keeps: bool = False) -> Pass:
    """The rows, each a span. `keeps`: whose they are is looked at when the next run has written over `meta`."""
    at = [(lane, lane.position + i) for lane, count in zip(contexts, counts, strict=True) for i in range(count)]
    inputs = made.step.inputs
    lanes = inputs.meta_here[:, LANE].to(inputs.meta.device, copy=True) if keeps else inputs.meta[:, LANE]
    spans = [Span(lane, start, first, 1) for first, (lane, start) in enumerate(at)]
    return Pass(spans, inputs.meta[:, POSITION], lanes, inputs.meta, inputs.meta)


def _scratch(model: "DeepseekV41") -> "Scratch":
    from tided.models.deepseek_v41.decode import Scratch

    device = model.norm.device
    indexers = [block.attention.indexer for block in model.blocks if block.attention.indexer is not None]
    most = max((model.context_tokens // one.ratio for one in indexers), default=1)
    blocks = -(-most // min((one.block_size for one in indexers), default=1))
    most, blocks = (
        -(-width // 16) * 16 for width in (most, blocks)
    )  # of the kind that a chunk's are (`chunk._padded`)
    return Scratch(
        scores=torch.empty(ROWS, most, device=device),
        block_scores=torch.empty(ROWS, blocks, device=device),
        kept=torch.zeros(ROWS, blocks, dtype=torch.uint8, device=device),
        places=torch.empty(ROWS, max((one.top_k for one in indexers), default=1), dtype=torch.int32, device=device),
    )
