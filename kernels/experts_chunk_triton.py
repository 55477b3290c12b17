"""MXFP4 experts of a prompt chunk on CUDA: the fast form of `kernels.experts.grouped_experts` beyond 16 rows.

Picks are sorted by slot on the device, and the host waits for nothing. A program multiplies some rows of one expert
with up to TOKENS of the activation rows that want it: weights are decoded to bf16 with their scales, once a tile of
tokens, and are the matrix unit's first operand straight from registers; activations are exact in bf16. One row a pick
comes out, and they are added in the order of k: no atomics, the same bits every time.

A weight's scale is a byte from 59 to 192, 2^-68 to 2^65: beyond, a decoded weight leaves what bf16 holds.

Kernels run in Triton's interpreter too (`ASM` off): same arithmetic, decoded without inline assembly.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.experts_triton import _fp8, _rounded, _up_to, sum_of_picks
from kernels.record import ExpertRecord, Part

# Of two words of 16 bits in $4, four codes each, and their scales in $5: the first codes of both, the second, ...
DECODING: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, h, z;
    mov.b32 z, 0x80008000; shr.b32 h, $4, 8;
    and.b32 a, $4, 0x000F000F; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $0, a, $5, z;
    and.b32 b, $4, 0x00F000F0; mul.lo.u32 b, b, 0x0104; and.b32 b, b, 0x81C081C0; fma.rn.bf16x2 $1, b, $5, z;
    and.b32 c, h, 0x000F000F; mul.lo.u32 c, c, 0x1040; and.b32 c, c, 0x81C081C0; fma.rn.bf16x2 $2, c, $5, z;
    and.b32 d, h, 0x00F000F0; mul.lo.u32 d, d, 0x0104; and.b32 d, d, 0x81C081C0; fma.rn.bf16x2 $3, d, $5, z;
    }"""
)


@triton.jit
def _position(k):
    """Where column k of an activation row lies: within a scale group, word of four, half of two, nibble of four ->
    nibble, word, half. So a thread of the matrix unit gets the codes of one word, two at a time from its halves."""
    return (k // 32) * 32 + (k % 4) * 8 + ((k % 32) // 8) * 2 + (k % 8) // 4


@triton.jit
def _codes(halves, power, ASM: tl.constexpr):
    """Four e2m1 codes of 16 bits and their scale x 2^62 -> four bf16 (fp32 without ASM) of value x scale x 2^-64. A
    code's magnitude, moved to two bits of the exponent and one of the mantissa, is its value x 2^-126, subnormals
    included, exactly; one product moves it there and the sign to its place."""
    if ASM:
        return tl.inline_asm_elementwise(
            DECODING,
            "=&r,=&r,=&r,=&r,r,r",
            [halves, power],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        code = halves.to(tl.int32)
        return _code(code) * power, _code(code >> 4) * power, _code(code >> 8) * power, _code(code >> 12) * power


@triton.jit
def _code(code):
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _operand(halves, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
    """halves [ROWS, GROUPS * 8] int16, scale [ROWS, GROUPS] uint8 -> [ROWS, GROUPS * 32] weights x 2^-64 in the order
    of `_position`."""
    # 2^(byte - 127) x 2^126 x 2^-64: so every scale up to 2^65 fits, and the sum is multiplied by 2^64 at the end.
    if ASM:
        power = ((scale.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)
    else:  # the interpreter has no arithmetic in bf16
        power = ((scale.to(tl.int32) + 62) << 23).to(tl.float32, bitcast=True)
    power = tl.broadcast_to(power[:, :, None], [ROWS, GROUPS, 8]).reshape(ROWS, GROUPS * 8)
    first, second, third, fourth = _codes(halves, power, ASM)
    all_ = tl.join(tl.join(first, second), tl.join(third, fourth)).reshape(ROWS, GROUPS, 8, 2, 2)
    return all_.permute(0, 1, 4, 3, 2).reshape(ROWS, GROUPS * 32)


@triton.jit
def _add(acc, weights, x, ASM: tl.constexpr):
    if ASM:
        # What follows asks for the sum and is no instruction. Left to itself Triton cuts the product up and lets it run
        # on through the loop, where the assembler then waits for each instruction of the matrix unit.
        sum_ = tl.dot(weights, x, acc)
        return tl.inline_asm_elementwise("", "=f,0", [sum_], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.dot(weights, x.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _scales(at, block, row_scales, GROUPS: tl.constexpr):
    group = block * GROUPS + tl.arange(0, GROUPS)
    # Beyond a row codes and activations are zeros, whatever their scale.
    return tl.load(at[:, None] + group[None, :], mask=(group < row_scales)[None, :], other=0)


@triton.jit
def _product(
    codes, slot, row, scales, x, begin, blocks, row_scales, valid,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, COPIED: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """codes: a matrix of every slot, or a PAIR of them; ROWS rows are taken at `slot`, from `row` of each on; scales
    [ROWS]: a row's first scale; x: each activation row [TOKENS], or, to be COPIED from `begin` on, all of them; in the
    order of `_position` -> [ROWS, TOKENS] fp32."""
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    column = tl.arange(0, BLOCK)
    for block in tl.range(0, blocks, num_stages=STAGES):
        if PAIR:
            tile = codes.load([slot, 0, row, block * (BLOCK // 4)]).reshape(ROWS, BLOCK // 4)
        else:
            tile = codes.load([slot, row, block * (BLOCK // 4)]).reshape(ROWS, BLOCK // 4)
        if COPIED:
            rows = x.load([begin, block * BLOCK])
        else:
            rows = tl.load(x[:, None] + (block * BLOCK + column)[None, :], mask=valid[:, None], other=0.0)
        weights = _operand(tile, _scales(scales, block, row_scales, BLOCK // 32), ROWS, BLOCK // 32, ASM)
        acc = _add(acc, weights, rows.trans(1, 0), ASM)
    return acc * 18446744073709551616.0


@triton.jit
def _ordered(x, out, width, padded, SIZE: tl.constexpr):
    """x [T, width] fp32, rounded already -> out [T, padded] bf16 in the order of `_position`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * padded + _position(column), value.to(tl.bfloat16), mask=column < padded)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["count", "most"])
def _find_tiles(ordered, places, order, tiles, count, most, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """One program: `_sorted`'s order and tiles from its sorted slots and their picks, int64, both [count]."""
    start, found = 0, 0  # of the last slot seen; tiles
    for block in range(0, count, SIZE):
        place = block + tl.arange(0, SIZE)
        here = place < count
        slot = tl.load(ordered + place, mask=here, other=-1)
        is_first = slot != tl.load(ordered + place - 1, mask=here & (place > 0), other=-2)
        starts = tl.maximum(tl.associative_scan(tl.where(is_first, place, 0), 0, _larger), start)
        begins = here & (slot >= 0) & ((place - starts) % TOKENS == 0)
        tile = found + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(tiles + tile, place, mask=begins & (tile < most))
        tl.store(order + place, tl.load(places + place, mask=here, other=0).to(tl.int32), mask=here)
        start, found = tl.max(starts, 0), found + tl.sum(begins.to(tl.int32), 0)
    for block in range(0, most, SIZE):
        tile = block + tl.arange(0, SIZE)
        tl.store(tiles + tile, tl.full([SIZE], -1, tl.int32), mask=(tile >= found) & (tile < most))


@triton.jit
def _rows_of(tiles, slots, count, TOKENS: tl.constexpr):
    """Of a tile: its slot (-1: there is no such tile), the places of its picks in the sorted order [TOKENS], and which
    of them there are."""
    begin = tl.load(tiles + tl.program_id(1))
    place = tl.maximum(begin, 0) + tl.arange(0, TOKENS)
    slot = tl.load(slots + tl.maximum(begin, 0))
    valid = (place < count) & (tl.load(slots + tl.minimum(place, count - 1)) == slot)
    return tl.where(begin < 0, -1, slot), place, valid


@triton.jit(do_not_specialize=["count"])
def _gate_up(
    w13, scales, slot_bytes, tiles, slots, order, weights, x, hidden, count, top_k, limit, blocks, row_scales,
    s1_bytes, s3_bytes, x_width, hidden_width,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """ROWS columns of the hidden rows of a tile's picks, [picks in sorted order, hidden_width] bf16. WHOLE: a row's
    scales are whole fours, which are loaded together."""
    slot, place, valid = _rows_of(tiles, slots, count, TOKENS)
    if slot < 0:
        return
    pick = tl.load(order + place, mask=valid, other=0)
    if WHOLE:
        row_scales = row_scales // 4 * 4  # the compiler sees it so
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, 2 * ROWS)  # of w1, and the same of w3
    at = scales + slot.to(tl.int64) * slot_bytes + tl.where(row < ROWS, s1_bytes, s3_bytes)
    both = _product(
        w13, slot, first, at + (first + row % ROWS) * row_scales, x + (pick // top_k).to(tl.int64) * x_width, 0,
        blocks, row_scales, valid, 2 * ROWS, TOKENS, BLOCK, True, False, STAGES, ASM,
    )  # fmt: skip
    gate, up = tl.split(both.reshape(2, ROWS, TOKENS).permute(1, 2, 0))
    gate, up = tl.minimum(_rounded(gate), limit), tl.maximum(tl.minimum(_rounded(up), limit), -limit)
    weight = tl.load(weights + pick, mask=valid, other=0.0)
    value = _rounded(gate / (1.0 + tl.exp(-gate)) * up * weight[None, :])
    out = _fp8(value.reshape(ROWS // 32, 32, TOKENS), 1).reshape(ROWS, TOKENS)
    at = first + tl.arange(0, ROWS)
    tl.store(
        hidden + place.to(tl.int64)[None, :] * hidden_width + _position(at)[:, None], out.to(tl.bfloat16),
        mask=valid[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _down(
    w2, scales, slot_bytes, tiles, slots, order, hidden, out, count, blocks, row_scales, outer, s2_bytes, hidden_width,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, COPIED: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of a tile's picks, [picks, outer] fp32. WHOLE: a row's scales are whole fours, which are loaded
    together. COPIED: hidden rows come by the tensor copy engine, the next expert's with them, whose columns of the
    product nobody takes."""
    slot, place, valid = _rows_of(tiles, slots, count, TOKENS)
    if slot < 0:
        return
    if WHOLE:
        row_scales = row_scales // 4 * 4  # the compiler sees it so
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = scales + slot.to(tl.int64) * slot_bytes + s2_bytes + row * row_scales
    x = hidden if COPIED else hidden + place.to(tl.int64) * hidden_width
    acc = _product(
        w2, slot, tl.program_id(0) * ROWS, at, x, tl.load(tiles + tl.program_id(1)), blocks, row_scales, valid,
        ROWS, TOKENS, BLOCK, False, COPIED, STAGES, ASM,
    )  # fmt: skip
    pick = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    tl.store(out + pick[None, :] * outer + row[:, None], acc, mask=valid[None, :])


@dataclass(frozen=True)
class Tiling:
    """`tokens`: how many rows a program takes; of each kernel, constants and what the compiler is told."""

    tokens: int
    gate_up: dict[str, int]
    down: dict[str, int]


# Of sm_90, whose matrix unit takes a block of 128: as many blocks of threads a multiprocessor as the registers leave
# room for, three of 64 rows and four of 32. Elsewhere loops held to so few would keep registers in memory.
_WIDE = {"BLOCK": 128, "STAGES": 3, "num_warps": 4}
_REGISTERS = {32: 128, 64: 168}
_NARROW = {"BLOCK": 64, "STAGES": 3, "num_warps": 4}


def tiling_of(rows: int, wide: bool) -> Tiling:
    """For a chunk of so many rows: about what one of some hundred experts gets of them. `wide`: sm_90. All within 99 KB
    of shared memory a block of threads."""
    tokens = 32 if rows <= 1024 else 64
    fixed = {**_WIDE, "maxnreg": _REGISTERS[tokens]} if wide else _NARROW
    return Tiling(tokens, {"ROWS": 64, **fixed}, {"ROWS": 128, **fixed})


def _sorted(picks: Tensor, size: int, distinct: int) -> tuple[Tensor, Tensor, Tensor]:
    """picks [T, k] int32 of at most `distinct` slots -> slot of each pick in ascending order, pick of each, both
    [T * k]; where in that order each tile of at most `size` picks of one slot begins, -1 behind the last. All int32,
    and the host waits for none of it: so it does not count the slots, and tiles without a place are left out."""
    ordered, places = torch.sort(picks.flatten(), stable=True)
    count = len(ordered)
    most = count // size + min(count, distinct)
    order, tiles = (torch.empty(each, dtype=torch.int32, device=picks.device) for each in (count, most))
    at_once = 2048 if picks.is_cuda else 256  # the interpreter takes one after the other
    _find_tiles[(1,)](ordered, places, order, tiles, count, most, TOKENS=size, SIZE=at_once, num_warps=8)
    return ordered, order, tiles


def grouped_experts(
    x: Tensor,
    slots: Tensor,
    record: ExpertRecord,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    asm: bool = True,
    distinct: int | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """x [T, D], rounded as activation; slots [S, slot_bytes] uint8; picks [T, k] int32 slots, -1: none; weights [T, k]
    fp32 -> [T, D] fp32: this rank's part, as the reference rounds it. `distinct`: how many slots are picked at most
    (None: all there are), a layer's experts where the slots are of all layers. The caller answers for it, since
    to count would be to wait: of more, some are not computed, and their rows are any number. `tiling`: None: what suits
    the rows and the device. Takes 4 * T * k * D bytes meanwhile."""
    (tokens, top_k), d = picks.shape, record.hidden
    picks = picks.to(torch.int32).contiguous()
    outputs = torch.empty(tokens, top_k, d, dtype=torch.float32, device=x.device)
    pick_outputs(outputs, x, slots, record, picks, weights, limit, asm, distinct, tiling)
    return sum_of_picks(outputs, picks)


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def _fitting(constants: dict[str, int], rows: int) -> dict[str, int]:
    return {**constants, "ROWS": next(size for size in (constants["ROWS"], 64, 32) if rows % size == 0)}


def _matrices(slots: Tensor, record: ExpertRecord, part: Part, pair: bool, constants: dict[str, int]) -> Any:
    """A part of every slot, or a pair of neighbours, to be read in tiles of ROWS x BLOCK weights, four a number."""
    shape, strides = [part.rows, part.row_bytes // 2], [part.row_bytes // 2, 1]
    tile = [constants["ROWS"], constants["BLOCK"] // 4]
    if pair:
        shape, strides, tile = [2, *shape], [part.nbytes // 2, *strides], [2, *tile]
    base = slots.view(torch.int16)[:, part.offset // 2 :]
    return TensorDescriptor(base, [len(slots), *shape], [record.slot_bytes // 2, *strides], [1, *tile])


def pick_outputs(
    outputs: Tensor,
    x: Tensor,
    slots: Tensor,
    record: ExpertRecord,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    asm: bool = True,
    distinct: int | None = None,
    tiling: Tiling | None = None,
) -> None:
    """As `grouped_experts`, but every pick's own output goes to its place of outputs [T, k, D] fp32, contiguous; the
    places of picks without a slot stay as they are."""
    tokens, top_k = picks.shape
    d, n, count = record.hidden, record.share, tokens * top_k
    w1, _, w2, s1, s3, s2 = record.parts
    picks, weights = picks.to(torch.int32).contiguous(), weights.contiguous()
    capability = _capability(x.device)
    tiling = tiling or tiling_of(tokens, capability == 9)
    gate_up, down, size = _fitting(tiling.gate_up, n), _fitting(tiling.down, d), tiling.tokens
    x_width, hidden_width = _up_to(d, gate_up["BLOCK"]), _up_to(n, down["BLOCK"])
    ordered, order, tiles = _sorted(picks, size, distinct or len(slots))
    rows = torch.empty(tokens, x_width, dtype=torch.bfloat16, device=x.device)
    hidden = torch.empty(count, hidden_width, dtype=torch.bfloat16, device=x.device)
    if hidden_width != n:
        hidden.zero_()
    _ordered[(tokens, -(-x_width // 1024))](x.contiguous(), rows, d, x_width, SIZE=1024)
    _gate_up[(n // gate_up["ROWS"], len(tiles))](
        _matrices(slots, record, w1, True, gate_up), slots, record.slot_bytes, tiles, ordered, order, weights, rows,
        hidden, count, top_k, limit, x_width // gate_up["BLOCK"], d // 32, s1.offset, s3.offset, x_width, hidden_width,
        TOKENS=size, WHOLE=d % 128 == 0, ASM=asm, **gate_up,
    )  # fmt: skip
    copied = capability >= 9  # elsewhere Triton would make loads of it, and worse ones than these rows'
    given = TensorDescriptor(hidden, [count, hidden_width], [hidden_width, 1], [size, down["BLOCK"]])
    _down[(d // down["ROWS"], len(tiles))](
        _matrices(slots, record, w2, False, down), slots, record.slot_bytes, tiles, ordered, order,
        given if copied else hidden, outputs, count, hidden_width // down["BLOCK"], n // 32, d, s2.offset, hidden_width,
        TOKENS=size, WHOLE=n % 128 == 0, COPIED=copied, ASM=asm, **down,
    )  # fmt: skip
