"""Decode steps as CUDA graphs, one for each number of rows, at most ROWS of them.

The first step of a number of rows runs eagerly: it is a real step, and it compiles the kernels. Then the same code is
captured, which runs nothing, so no warm-up serves nobody and none leaves demand behind. From then on a step is: a copy
of what its rows are, their lanes' page tables where these have changed, the graph, and the logits. Whatever else
changes between steps is read where it lies: routing tables and expert slots, pages. The host reads nothing.

A step that may wait for experts runs eagerly, by the same code but for the experts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.device import has_kernels
from kernels.experts import has_cuda_form
from kernels.numerics import FP32
from kernels.rows import ROWS
from tided.cache.context import After, Context
from tided.cache.pool import PAGE_TOKENS
from tided.experts.tables import Together
from tided.models.copies import Copies
from tided.models.glm53.decode import FIELDS, FIRST_ROW, LANE, POSITION, TOKEN, DecodeStep, Inputs, Wishes
from tided.models.glm53.step import Pass

if TYPE_CHECKING:
    from tided.models.glm53.model import Glm53


@dataclass(frozen=True)
class Captured:
    """Where the graph leaves what it computes. A step that runs eagerly later leaves its own elsewhere."""

    graph: Any
    logits: Tensor
    states: Tensor


@dataclass
class Prepared:
    """A number of rows: the step, its inputs on the host, whose page table each row has, and its graph."""

    step: DecodeStep
    meta: Tensor
    tables: Tensor
    wish: Together  # where the step leaves what its rows wanted
    copies: Copies
    told: list[Tensor | None]
    captured: Captured | None = None


@dataclass(frozen=True)
class Row:
    lane: Context
    position: int
    first: int  # the lane's first row of this step


@dataclass
class DecodeSteps:
    """Of one model. Used by the engine's thread alone. `captures` False: every step runs eagerly; `everywhere`: also
    where there are no kernels, for comparison. `over_ranks`: those of several ranks are captured too, with their
    collectives, which no two GPUs have shown yet; else their kernels are launched one by one."""

    captures: bool = True
    everywhere: bool = False
    over_ranks: bool = False
    prepared: dict[int, Prepared] = field(default_factory=dict)  # by rows
    _scores: Tensor | None = None
    _memory: Any = None  # of all graphs: they run one after another

    def has_captured(self, rows: int) -> bool:
        made = self.prepared.get(rows)
        return made is not None and made.captured is not None

    def serve(self, model: "Glm53", rows: int) -> bool:
        """Whether steps of so many rows are computed here."""
        return rows <= ROWS and (self.everywhere or self.by_kernels(model))

    def by_kernels(self, model: "Glm53") -> bool:
        """Whether kernels compute steps. Rows of a pool in FP8 must hold their scales at multiples of four bytes."""
        one = model.blocks[0].attention
        aligned = not one.rows.packed or one.latent_dim % 4 == 0
        packed = one.up.dtype is torch.bfloat16 and model.numerics is not FP32
        return has_kernels(model.norm.device) and packed and aligned

    @torch.inference_mode()
    def run(
        self, model: "Glm53", contexts: list[Context], counts: Sequence[int], token_ids: Tensor, alone: bool
    ) -> Tensor:
        """token_ids [R] of the lanes' next tokens, whose pages are there -> logits [R, V]. Moves the lanes on. `alone`:
        the logits are the next step's to write over. Else other rows follow before these are used and their demand is
        added up, so both are copied."""
        made = self.prepared.get(len(token_ids)) or self._prepare(model, len(token_ids))
        rows = _rows(contexts, counts)
        step, tap = made.step, model.bank.tap
        if alone:
            tap.add_up()  # what the step before left lies where this one writes
        made.copies.wait()
        self._describe(made, rows, token_ids)
        meta, urgent = step.inputs.meta, model.bank.urgent
        step.waiting = None
        if urgent is not None and urgent.active:
            # The demand of a step that may wait for experts keeps whose rows these are; the next writes over `meta`.
            lanes = meta[:, LANE] if alone else meta[:, LANE].clone()
            step.waiting = Pass([], meta[:, POSITION], lanes, meta, None, meta)
        if model.drafter is not None:
            _recall(step.inputs.before, rows)
        if made.captured is None or step.waiting is not None:
            logits, states = step.run()
        else:
            made.captured.graph.replay()
            logits, states = made.captured.logits, made.captured.states
        if model.drafter is not None:
            _remember(rows, states)
        if step.waiting is None:
            wish = made.wish._replace(lanes=tuple(row.lane.index for row in rows))
            tap.record_step(wish if alone else wish.copied())
            if made.captured is None and self.captures and self._capturable(model):
                made.captured = self._capture(step)
                made.wish = made.wish._replace(standing=tap.standing(made.wish))
        _move_on(contexts, counts)
        return logits if alone else logits.clone()

    def _capturable(self, model: "Glm53") -> bool:
        """Experts without a kernel are computed by looking at who wants them."""
        shown = model.group.ranks == 1 or self.over_ranks
        known = has_cuda_form(model.bank.record, model.numerics)
        return model.norm.is_cuda and self.by_kernels(model) and known and shown

    def _describe(self, made: Prepared, rows: list[Row], token_ids: Tensor) -> None:
        """Tells the device what the rows are, and what pages their lanes have where it does not know."""
        fields, tables, ids = made.meta.numpy(), made.tables.numpy(), token_ids.tolist()
        changed = False
        for number, (row, token) in enumerate(zip(rows, ids, strict=True)):
            fields[number, [TOKEN, POSITION, LANE, FIRST_ROW]] = token, row.position, row.lane.index, row.first
            if made.told[number] is not row.lane.page_table:  # which is never changed, but replaced
                pages = row.lane.pages
                tables[number] = pages[0]
                tables[number, : len(pages)] = pages
                made.told[number], changed = row.lane.page_table, True
        made.step.inputs.meta.copy_(made.meta, non_blocking=True)
        if changed:
            made.step.inputs.tables.copy_(made.tables, non_blocking=True)
        made.copies.made()

    def _prepare(self, model: "Glm53", rows: int) -> Prepared:
        device, (layers, top_k) = model.norm.device, (model.shape.moe_layers, model.shape.top_k)
        pages = -(-model.context_tokens // PAGE_TOKENS)

        def of(dtype: torch.dtype) -> Tensor:
            return torch.zeros(layers, rows, top_k, dtype=dtype, device=device)

        def host(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, pin_memory=device.type == "cuda")

        real, whole = torch.float32, torch.int64
        wishes = Wishes(of(whole), of(real), of(real), of(torch.bool), of(whole), of(torch.int32), of(real))
        meta, tables = host(rows, FIELDS), host(rows, pages)
        before = torch.zeros(rows, len(model.norm), device=device)
        inputs = Inputs(meta.to(device), tables.to(device), before, wishes)
        numbers = torch.arange(layers, device=device)
        wish = Together(
            numbers, inputs.meta[:, LANE], wishes.wanted, wishes.wanted_scores, wishes.wanted_weights, wishes.missed,
            None,
        )  # fmt: skip
        made = Prepared(self._step(model, inputs), meta, tables, wish, Copies(device), [None] * rows)
        self.prepared[rows] = made
        return made

    def _step(self, model: "Glm53", inputs: Inputs) -> DecodeStep:
        if not self.by_kernels(model):
            return DecodeStep(model, inputs)
        from tided.models.glm53.fused import FusedStep  # a compiler, which a CPU need not have

        if self._scores is None:
            most = inputs.tables.shape[1] * PAGE_TOKENS // model.rotations.share.ranks
            self._scores = torch.empty(ROWS, most, device=model.norm.device)
        return FusedStep(model, inputs, self._scores)

    def _capture(self, step: DecodeStep) -> Captured:
        """Nothing runs. Threads that read experts go on using their own streams meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits, states = step.run()
        self._memory = self._memory or graph.pool()
        return Captured(graph, logits, states)


def _rows(contexts: list[Context], counts: Sequence[int]) -> list[Row]:
    rows = list[Row]()
    for lane, count in zip(contexts, counts, strict=True):
        first = len(rows)
        rows += [Row(lane, lane.position + i, first) for i in range(count)]
    return rows


def _recall(before: Tensor, rows: list[Row]) -> None:
    """before [R, D]: of each lane's first row the trunk's state of the token before it."""
    for number, row in enumerate(rows):
        if number == row.first:
            ring = row.lane.windows[0]
            before[number].copy_(ring[(row.position - 1) % len(ring)])


def _remember(rows: list[Row], states: Tensor) -> None:
    for number, row in enumerate(rows):
        ring = row.lane.windows[0]
        ring[row.position % len(ring)].copy_(states[number])


def _move_on(contexts: list[Context], counts: Sequence[int]) -> None:
    for lane, count in zip(contexts, counts, strict=True):
        lane.position += count
        if lane.undo is not None:
            lane.undo.after.extend(After({}, lane.tail) for _ in range(count))
