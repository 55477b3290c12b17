"""Decode steps as CUDA graphs, one for each number of rows, at most ROWS of them.

Once a number of rows is captured (`models.prepared`) a step is: a copy of what its rows are, their lanes' page tables
where these have changed, the graph, and the logits. Whatever else changes between steps is read where it lies: routing
tables and expert slots, pages. The host reads nothing.

A step that may wait for experts runs eagerly, by the same code but for the experts."""

from collections.abc import Sequence
from dataclasses import dataclass
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
from tided.models import prepared
from tided.models.copies import Copies
from tided.models.glm53.decode import FIELDS, FIRST_ROW, LANE, POSITION, TOKEN, DecodeStep, Inputs, inputs_of
from tided.models.glm53.page_tables import PageTables
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
class Prepared(prepared.Prepared[DecodeStep, Captured]):
    """And what the rows are, on the host, and their page tables."""

    meta: Tensor
    tables: PageTables


@dataclass(frozen=True)
class Row:
    lane: Context
    position: int
    first: int  # the lane's first row of this step


class DecodeSteps(prepared.FixedSteps[Prepared]):
    """`everywhere`: also where there are no kernels, for comparison. `over_ranks`: those of several ranks are captured
    too, with their collectives, which no two GPUs have shown yet; else their kernels are launched one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere = self.over_ranks = False
        self._scores: Tensor | None = None

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
            wanted = made.captured is None and self.captures and self._capturable(model)
            capture = self._capture if wanted else None
            made.recorded(tap, (row.lane for row in rows), alone, capture)
        _move_on(contexts, counts)
        return logits if alone else logits.clone()

    def _capturable(self, model: "Glm53") -> bool:
        """Experts without a kernel are computed by looking at who wants them."""
        shown = model.group.ranks == 1 or self.over_ranks
        known = has_cuda_form(model.bank.record, model.numerics)
        return model.norm.is_cuda and self.by_kernels(model) and known and shown

    def _describe(self, made: Prepared, rows: list[Row], token_ids: Tensor) -> None:
        """Tells the device what the rows are, and what pages their lanes have where it does not know."""
        fields = made.meta.numpy()
        for number, (row, token) in enumerate(zip(rows, token_ids.tolist(), strict=True)):
            fields[number, [TOKEN, POSITION, LANE, FIRST_ROW]] = token, row.position, row.lane.index, row.first
        made.step.inputs.meta.copy_(made.meta, non_blocking=True)
        made.tables.tell([row.lane for row in rows])
        made.copies.made()

    def _prepare(self, model: "Glm53", rows: int) -> Prepared:
        device, (layers, top_k) = model.norm.device, (model.shape.moe_layers, model.shape.top_k)
        tables = PageTables(rows, model.context_pages, device)
        inputs = inputs_of(tables.there, layers, top_k, len(model.norm))
        meta = torch.zeros(rows, FIELDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        numbers, wishes = torch.arange(layers, device=device), inputs.wishes
        wish = Together(
            numbers, inputs.meta[:, LANE], wishes.wanted, wishes.wanted_scores, wishes.wanted_weights, wishes.missed,
            None,
        )  # fmt: skip
        made = self.prepared[rows] = Prepared(self._step(model, inputs), wish, Copies(device), meta, tables)
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
        graph, (logits, states) = self.graphs.capture(step.run)
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
