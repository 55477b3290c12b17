"""Experts computed from the slots of an arena: each distinct expert is decoded once a call, one at a time.

The output of w2 is not rounded before the sum over experts, as a single-device reference would: a rank holds a part of
each sum, and the ranks' parts are added before the one rounding, so any number of ranks computes the same thing."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from kernels import exl3
from kernels.exl3_record import Exl3Record
from kernels.formats import fp4_rows
from kernels.kept import Kept
from kernels.numerics import FP32, NATIVE, Numerics
from kernels.record import ExpertRecord
from kernels.rows import ROWS, matmul, singly
from kernels.swiglu import clamped_swiglu

Product = Callable[[Tensor, Tensor], Tensor]  # (x [m, K], weight [N, K]) -> [m, N]
# An expert's matrices: (rows, how to multiply) -> gate | up [m, 2n] of rows [m, D]; [m, D] of rows [m, n].
Layer = Callable[[Tensor, Product], Tensor]
Record = ExpertRecord | Exl3Record
_DECODED = Kept()


def decode(slot: Tensor, record: ExpertRecord) -> tuple[Tensor, Tensor]:
    """slot [slot_bytes] uint8 -> w1 | w3 [2n, D] and w2 [D, n], fp32. w1 and w3 lie next to each other."""
    d, n = record.hidden, record.share
    if record.codec == "bf16":
        return _bf16(slot, 0, 2 * n, d), _bf16(slot, record.parts[2].offset, d, n)
    w1, _, w2, s1, _, s2 = record.parts
    w13 = fp4_rows(_cut(slot, w1.offset, 2 * n, d // 2), _cut(slot, s1.offset, 2 * n, d // 32))
    return w13, fp4_rows(_cut(slot, w2.offset, d, n // 2), _cut(slot, s2.offset, d, n // 32))


def _bf16(slot: Tensor, offset: int, rows: int, columns: int) -> Tensor:
    return _cut(slot, offset, rows, 2 * columns).view(torch.bfloat16).to(torch.float32)


def _cut(slot: Tensor, offset: int, rows: int, row_bytes: int) -> Tensor:
    return slot[offset : offset + rows * row_bytes].view(rows, row_bytes)


def grouped_experts(
    x: Tensor, slots: Tensor, record: Record, picks: Tensor, weights: Tensor, limit: float, numerics: Numerics
) -> Tensor:
    """x [T, D] fp32, already rounded as activation; slots [S, unit] uint8, contiguous: a record begins at the start of
    its slot's unit, and takes one (ExpertRecord: unit is slot_bytes) or several (Exl3Record); picks [T, k] slot of each
    chosen expert; weights [T, k] fp32 -> [T, D] fp32: this rank's part of the sum over k, added in the order of k.

    Raises ValueError for a pick without a slot; on a GPU, where looking would cost a wait, such a pick adds nothing."""
    if x.is_cuda and has_cuda_form(record, numerics):
        out: Tensor = _form(record, len(picks), limit).grouped_experts(x, slots, record, picks, weights, limit)
        return out
    if int(picks.min()) < 0:
        raise ValueError("a chosen expert has no slot")
    outputs = x.new_empty(*picks.shape, record.hidden)
    pick_outputs(outputs, x, slots, record, picks, weights, limit, numerics)
    return sum_of_picks(outputs)


def has_cuda_form(record: Record, numerics: Numerics) -> bool:
    """Whether a GPU computes these experts by kernels; else by the reference, which waits for the picks and expands
    expert after expert."""
    if isinstance(record, Exl3Record):
        return numerics is not FP32
    return numerics is NATIVE and record.codec == "mxfp4"


def _form(record: Record, rows: int, limit: float) -> ModuleType:
    """The file of the CUDA form. They need a compiler that a CPU need not have."""
    if isinstance(record, Exl3Record):
        from kernels import exl3_triton

        return exl3_triton
    from kernels import experts_chunk_triton, experts_triton

    return experts_triton if rows <= ROWS and limit <= experts_triton.MAX_LIMIT else experts_chunk_triton


def pick_outputs(
    outputs: Tensor,
    x: Tensor,
    slots: Tensor,
    record: Record,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    numerics: Numerics,
) -> None:
    """Writes the weighted output of every pick that has a slot into its place of outputs [T, k, D] and leaves the
    others as they are (picks -1). Experts may so be computed in several calls, as their records arrive: all rows of an
    expert in one call, and the bits are those of one call for all."""
    if x.is_cuda and has_cuda_form(record, numerics):
        _form(record, len(picks), limit).pick_outputs(outputs, x, slots, record, picks, weights, limit)
        return
    reference_outputs(outputs, x, slots, record, picks, weights, limit, numerics)


def reference_outputs(
    outputs: Tensor,
    x: Tensor,
    slots: Tensor,
    record: Record,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    numerics: Numerics,
) -> None:
    """What `pick_outputs` means, on any device; on a GPU it waits for the picks."""
    count, top_k = picks.shape
    single = count == 1 or singly(count)
    rows_of: dict[int, list[int]] = {}
    for i, slot in enumerate(picks.flatten().tolist()):
        if slot >= 0:
            rows_of.setdefault(slot, []).append(i)
    flat, flat_weights = outputs.view(count * top_k, -1), weights.reshape(-1, 1)
    for slot, places in rows_of.items():
        where = torch.tensor(places, device=x.device)
        layers = _layers(slots, slot, record, numerics)
        flat[where] = _expert(x[where // top_k], flat_weights[where], *layers, limit, numerics, single)


def _layers(slots: Tensor, slot: int, record: Record, numerics: Numerics) -> tuple[Layer, Layer]:
    if isinstance(record, Exl3Record):
        gate, up, down = (
            _exl3(one, numerics) for one in exl3.matrices(record, slots.view(-1)[slot * slots.shape[1] :])
        )
        return lambda x, product: torch.cat([gate(x, product), up(x, product)], 1), down
    w13, w2 = decode(slots[slot], record)
    return (lambda x, product: product(x, w13)), (lambda x, product: product(numerics.activation(x), w2))


def _exl3(matrix: exl3.Exl3Matrix, numerics: Numerics) -> Layer:
    trellis, kind = matrix.trellis, (matrix.shape, matrix.codebook)
    weight = exl3.inner(matrix) if trellis.is_cuda else _DECODED.of(trellis, kind, lambda: exl3.inner(matrix))
    return lambda x, product: exl3.through(x, matrix, weight, numerics.rotated, product)


def sum_of_picks(outputs: Tensor) -> Tensor:
    """outputs [T, k, D] -> [T, D], added in the order of k: the order in which they were computed leaves no trace."""
    total = outputs[:, 0].clone()
    for k in range(1, outputs.shape[1]):
        total += outputs[:, k]
    return total


def _expert(
    x: Tensor, weight: Tensor, gate_up: Layer, down: Layer, limit: float, numerics: Numerics, single: bool
) -> Tensor:
    """x [m, D], weight [m, 1] -> w2 (weight * swiglu(w1 x, w3 x)), [m, D]. `single`: each row by itself."""
    if single and x.shape[0] > 1:
        rows = [(x[i : i + 1], weight[i : i + 1]) for i in range(x.shape[0])]
        return torch.cat([_expert(row, w, gate_up, down, limit, numerics, True) for row, w in rows])
    product = matmul if single else _chunk_matmul
    hidden = clamped_swiglu(numerics.store(gate_up(x, product)), limit) * weight
    return down(numerics.store(hidden), product)


def _chunk_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()
