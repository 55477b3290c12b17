"""The layers that write global context: compressed rows and their index keys, at one row per `ratio` tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.compressor import pool_groups
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.rope import rotate_
from kernels.rows import matmul
from tided.cache.context import Remainder
from tided.cache.pool import Pool, physical_rows
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.step import Pass, Rotations, Span
from tided.models.deepseek_v41.weights import Weights


@dataclass(frozen=True)
class Compressor:
    layer: int
    ratio: int
    eps: float
    inputs: Tensor  # [d, D], wkv; over it, but for ratio 1, wgate
    norm: Tensor  # [d]
    wk: Tensor  # [index dim, d]
    k_norm: Tensor  # [index dim]
    pool: Pool
    rotations: Rotations
    numerics: Numerics

    def write(self, step: Pass, x: Tensor) -> None:
        """x [T, D], the attention's input: appends the rows of every group that it completes, once a pass.

        Every owner writes its own keys on every step, also when a group stays open."""
        if self.layer in step.written:
            return
        width = self.norm.numel()
        rows = matmul(x, self.inputs[:width])
        self.write_products(step, rows, rows if self.ratio == 1 else matmul(x, self.inputs[width:]))

    def write_products(self, step: Pass, rows: Tensor, gates: Tensor) -> None:
        """As `write`; rows, gates [T, d] fp32, x times both halves of `inputs`. Ratio 1 reads no gates."""
        step.written.add(self.layer)
        for span in step.spans:
            self._write_span(span, rows[span.rows], gates[span.rows])

    def _write_span(self, span: Span, rows: Tensor, gates: Tensor) -> None:
        first, pooled = span.start // self.ratio, rows
        if self.ratio > 1:
            rows, gates = self._with_remainder(span, rows, gates)
            if len(rows) == 0:
                return
            groups = (-1, self.ratio, rows.shape[1])
            pooled = pool_groups(rows.view(groups), gates.view(groups))
        latent = rms_norm(self.numerics.store(pooled), self.norm, self.eps)
        self._append(span, first, self.numerics.store(latent))

    def _with_remainder(self, span: Span, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the rows of the open group in front, and keeps those of the group left open behind."""
        held = span.lane.remainders.pop(self.layer, None)
        if held is not None:
            rows, gates = torch.cat([held.rows, rows]), torch.cat([held.gates, gates])
        whole = len(rows) - len(rows) % self.ratio
        if whole < len(rows):
            left = Remainder(rows[whole:].clone(), gates[whole:].clone())
            span.lane.remainders[self.layer] = left
            if span.after is not None:
                span.after.remainders[self.layer] = left
        return rows[:whole], gates[:whole]

    def _append(self, span: Span, first: int, latent: Tensor) -> None:
        """latent [G, d], normed, as rows `first` and on of the lane; the key is made before rotation and rounding."""
        numbers = torch.arange(first, first + len(latent), device=latent.device)
        turn = self.rotations.at(numbers * self.ratio)
        places = physical_rows(span.lane, self.ratio, numbers)
        key = rms_norm(self.numerics.store(matmul(latent, self.wk)), self.k_norm, self.eps)
        key = self.numerics.store(rotate_(self.numerics.store(key), turn))
        self.pool.keys[self.layer][places] = self.numerics.index(key).to(self.numerics.cache)
        row = self.numerics.store(rotate_(latent.clone(), turn))
        self.pool.rows[self.layer][places] = self.numerics.latent(row).to(self.numerics.cache)


def load_compressor(
    weights: Weights, t: TextConfig, layer: int, pool: Pool, rotations: Rotations, numerics: Numerics
) -> Compressor:
    """`weights` at `layers.L.attn`."""
    ratio = t.compress_ratios[layer]
    inputs = ("wkv", "wgate") if ratio > 1 else ("wkv",)
    return Compressor(
        layer,
        ratio,
        t.rms_norm_eps,
        inputs=torch.cat([weights.matrix(f"compressor.{name}.weight") for name in inputs]),
        norm=weights.plain("compressor.norm.weight"),
        wk=weights.matrix("indexer.wk.weight"),
        k_norm=weights.plain("indexer.k_norm.weight"),
        pool=pool,
        rotations=rotations,
        numerics=numerics,
    )
