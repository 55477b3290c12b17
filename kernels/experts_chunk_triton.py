"""MXFP4 experts of a prompt chunk on CUDA: the fast form of `kernels.experts.grouped_experts` beyond 16 rows.

Picks are sorted by slot on the device, and the host waits for nothing. A program multiplies some rows of one expert
with up to TOKENS of the activation rows that want it: weights are decoded to bf16 with their scales, once a tile of
tokens, and are the matrix unit's first operand straight from registers; activations are exact in bf16. One row a pick
comes out, and they are added in the order of k: no atomics, the same bits every time.

Kernels run in Triton's interpreter too (`ASM` off): same arithmetic, decoded without inline assembly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts_triton import _fp8, _rounded, _tiles, _up_to, sum_of_picks
from kernels.record import ExpertRecord


@triton.jit
def _position(k):
    """Where column k of an activation row lies: within a scale group, word of four, byte of four, nibble of two ->
    nibble, byte // 2, word, byte % 2. So a thread of the matrix unit gets the codes of one word."""
    word, byte = (k % 32) // 8, (k % 8) // 2
    return (k // 32) * 32 + (k % 2) * 16 + (byte // 2) * 8 + word * 2 + byte % 2


@triton.jit
def _codes(byte, ASM: tl.constexpr):
    """Two e2m1 codes of a byte -> two bf16 (fp32 without ASM) of value x 2^-126, subnormals included, exactly."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, a, s;
            prmt.b32 w, $4, 0, 0x3120;
            shl.b32 a, w, 6; shl.b32 s, w, 12; and.b32 s, s, 0x80008000; lop3.b32 $0, a, 0x01C001C0, s, 0xEA;
            shr.b32 a, w, 2; shl.b32 s, w, 4; and.b32 s, s, 0x80008000; lop3.b32 $1, a, 0x01C001C0, s, 0xEA;
            shl.b32 a, w, 2; shl.b32 s, w, 8; and.b32 s, s, 0x80008000; lop3.b32 $2, a, 0x01C001C0, s, 0xEA;
            shr.b32 a, w, 6; and.b32 s, w, 0x80008000; lop3.b32 $3, a, 0x01C001C0, s, 0xEA;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        code = byte.to(tl.int32)
        return _code(code), _code(code >> 4)


@triton.jit
def _code(code):
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _operand(bytes_, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
    """bytes_ [ROWS, GROUPS * 16], scale [ROWS, GROUPS] uint8 -> [ROWS, GROUPS * 32] weights x 2^-64 in the order of
    `_position`."""
    # 2^(byte - 127) x 2^126 x 2^-64: so every scale up to 2^65 fits, and the sum is multiplied by 2^64 at the end.
    if ASM:
        power = ((scale.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)
    else:  # the interpreter has no arithmetic in bf16
        power = ((scale.to(tl.int32) + 62) << 23).to(tl.float32, bitcast=True)
    low, high = _codes(bytes_, ASM)
    both = tl.join(low, high).reshape(ROWS, GROUPS, 4, 2, 2, 2) * power[:, :, None, None, None, None]
    return both.permute(0, 1, 5, 3, 2, 4).reshape(ROWS, GROUPS * 32)


@triton.jit
def _dot(weights, x, acc, ASM: tl.constexpr):
    if ASM:
        return tl.dot(weights, x, acc)
    else:
        return tl.dot(weights, x.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _scales(at, block, row_scales, GROUPS: tl.constexpr):
    group = block * GROUPS + tl.arange(0, GROUPS)
    return tl.load(at[:, None] + group[None, :], mask=(group < row_scales)[None, :], other=127)


@triton.jit
def _product(
    first, second, slot, row, scales, scales2, x, blocks, row_scales, valid,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `experts_triton._product`, scales folded into the weights -> one or two [ROWS, TOKENS] fp32."""
    acc, acc2 = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    column = tl.arange(0, BLOCK)
    GROUPS: tl.constexpr = BLOCK // 32
    for block in tl.range(0, blocks, num_stages=STAGES):
        tile = first.load([slot, row, block * (BLOCK // 2)]).reshape(ROWS, BLOCK // 2)
        scale = _scales(scales, block, row_scales, GROUPS)
        rows = tl.load(x[:, None] + (block * BLOCK + column)[None, :], mask=valid[:, None], other=0.0).trans(1, 0)
        acc = _dot(_operand(tile, scale, ROWS, GROUPS, ASM), rows, acc, ASM)
        if PAIR:
            tile2 = second.load([slot, row, block * (BLOCK // 2)]).reshape(ROWS, BLOCK // 2)
            scale2 = _scales(scales2, block, row_scales, GROUPS)
            acc2 = _dot(_operand(tile2, scale2, ROWS, GROUPS, ASM), rows, acc2, ASM)
    return acc * 18446744073709551616.0, acc2 * 18446744073709551616.0


@triton.jit
def _ordered(x, out, width, padded, SIZE: tl.constexpr):
    """x [T, width] fp32, rounded already -> out [T, padded] bf16 in the order of `_position`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * padded + _position(column), value.to(tl.bfloat16), mask=column < padded)


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
    w1, w3, scales, slot_bytes, tiles, slots, order, weights, x, hidden, count, top_k, limit, blocks, row_scales,
    s1_bytes, s3_bytes, x_width, hidden_width,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """ROWS columns of the hidden rows of a tile's picks, [picks in sorted order, hidden_width] bf16."""
    slot, place, valid = _rows_of(tiles, slots, count, TOKENS)
    if slot < 0:
        return
    pick = tl.load(order + place, mask=valid, other=0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = scales + slot.to(tl.int64) * slot_bytes + row * row_scales
    gate, up = _product(
        w1, w3, slot, tl.program_id(0) * ROWS, at + s1_bytes, at + s3_bytes, x + (pick // top_k).to(tl.int64) * x_width,
        blocks, row_scales, valid, ROWS, TOKENS, BLOCK, True, STAGES, ASM,
    )  # fmt: skip
    gate, up = tl.minimum(_rounded(gate), limit), tl.maximum(tl.minimum(_rounded(up), limit), -limit)
    weight = tl.load(weights + pick, mask=valid, other=0.0)
    value = _rounded(gate / (1.0 + tl.exp(-gate)) * up * weight[None, :])
    out = _fp8(value.reshape(ROWS // 32, 32, TOKENS), 1).reshape(ROWS, TOKENS)
    tl.store(
        hidden + place.to(tl.int64)[None, :] * hidden_width + _position(row)[:, None], out.to(tl.bfloat16),
        mask=valid[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _down(
    w2, scales, slot_bytes, tiles, slots, order, hidden, out, count, blocks, row_scales, outer, s2_bytes, hidden_width,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of a tile's picks, [picks, outer] fp32."""
    slot, place, valid = _rows_of(tiles, slots, count, TOKENS)
    if slot < 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = scales + slot.to(tl.int64) * slot_bytes + s2_bytes + row * row_scales
    acc, _ = _product(
        w2, w2, slot, tl.program_id(0) * ROWS, at, at, hidden + place.to(tl.int64) * hidden_width,
        blocks, row_scales, valid, ROWS, TOKENS, BLOCK, False, STAGES, ASM,
    )  # fmt: skip
    pick = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    tl.store(out + pick[None, :] * outer + row[:, None], acc, mask=valid[None, :])


# Within 99 KB of shared memory a block of threads.
GATE_UP = {"ROWS": 64, "BLOCK": 128, "STAGES": 2, "num_warps": 4}
DOWN = {"ROWS": 128, "BLOCK": 64, "STAGES": 3, "num_warps": 8}


def tokens_of_tile(rows: int, wide: bool) -> int:
    """How many rows a program takes, for a chunk of so many: about what one of some hundred experts gets of them.
    `wide`: the matrix unit multiplies whole tiles on its own (sm_90); elsewhere sums of 128 columns spill."""
    return 32 if rows <= 1024 else 64 if rows <= 4096 or not wide else 128


def _sorted(picks: Tensor, size: int, distinct: int) -> tuple[Tensor, Tensor, Tensor]:
    """picks [T, k] of at most `distinct` slots -> slot of each pick in ascending order, pick of each, both [T * k];
    where in that order each tile of at most `size` picks of one slot begins, -1 behind the last. All int32, and the
    host waits for none of it."""
    ordered, order = torch.sort(picks.flatten(), stable=True)
    count = len(ordered)
    place = torch.arange(count, device=picks.device)
    is_first = torch.ones(count, dtype=torch.bool, device=picks.device)
    is_first[1:] = ordered[1:] != ordered[:-1]
    rank = place - torch.cummax(torch.where(is_first, place, 0), 0).values
    begins = (rank % size == 0) & (ordered >= 0)
    most = count // size + min(count, distinct)
    tile = torch.where(begins, torch.cumsum(begins, 0) - 1, most)
    tiles = torch.full((most + 1,), -1, dtype=torch.int32, device=picks.device)
    tiles.scatter_(0, tile, place.to(torch.int32))
    return ordered, order.to(torch.int32), tiles[:most]


def grouped_experts(
    x: Tensor,
    slots: Tensor,
    record: ExpertRecord,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    asm: bool = True,
    distinct: int | None = None,
) -> Tensor:
    """x [T, D], rounded as activation; slots [S, slot_bytes] uint8; picks [T, k] int32 slots, -1: none; weights [T, k]
    fp32 -> [T, D] fp32: this rank's part, as the reference rounds it. `distinct`: how many slots are picked at most
    (None: all there are), a layer's experts where the slots are of all layers; more are never computed. Takes
    4 * T * k * D bytes meanwhile."""
    (tokens, top_k), d = picks.shape, record.hidden
    picks = picks.to(torch.int32).contiguous()
    outputs = torch.empty(tokens, top_k, d, dtype=torch.float32, device=x.device)
    pick_outputs(outputs, x, slots, record, picks, weights, limit, asm, distinct)
    return sum_of_picks(outputs, picks)


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
) -> None:
    """As `grouped_experts`, but every pick's own output goes to its place of outputs [T, k, D] fp32, contiguous; the
    places of picks without a slot stay as they are."""
    tokens, top_k = picks.shape
    d, n, count = record.hidden, record.share, tokens * top_k
    w1, w3, w2, s1, s3, s2 = record.parts
    picks, weights = picks.to(torch.int32).contiguous(), weights.contiguous()
    size = tokens_of_tile(tokens, asm and torch.cuda.get_device_capability(x.device)[0] == 9)
    gate_up = {**GATE_UP, "ROWS": next(rows for rows in (GATE_UP["ROWS"], 32) if n % rows == 0)}
    down = {**DOWN, "ROWS": next(rows for rows in (DOWN["ROWS"], 64, 32) if d % rows == 0)}
    x_width, hidden_width = _up_to(d, gate_up["BLOCK"]), _up_to(n, down["BLOCK"])
    ordered, order, tiles = _sorted(picks, size, distinct or len(slots))
    rows = torch.empty(tokens, x_width, dtype=torch.bfloat16, device=x.device)
    hidden = torch.empty(count, hidden_width, dtype=torch.bfloat16, device=x.device)
    if hidden_width != n:
        hidden.zero_()
    _ordered[(tokens, -(-x_width // 1024))](x.contiguous(), rows, d, x_width, SIZE=1024)
    _gate_up[(n // gate_up["ROWS"], len(tiles))](
        _tiles(slots, record, w1, gate_up["ROWS"], gate_up["BLOCK"]),
        _tiles(slots, record, w3, gate_up["ROWS"], gate_up["BLOCK"]), slots, record.slot_bytes, tiles, ordered, order,
        weights, rows, hidden, count, top_k, limit, x_width // gate_up["BLOCK"], d // 32, s1.offset, s3.offset, x_width,
        hidden_width, TOKENS=size, ASM=asm, **gate_up,
    )  # fmt: skip
    _down[(d // down["ROWS"], len(tiles))](
        _tiles(slots, record, w2, down["ROWS"], down["BLOCK"]), slots, record.slot_bytes, tiles, ordered, order, hidden,
        outputs, count, hidden_width // down["BLOCK"], n // 32, d, s2.offset, hidden_width, TOKENS=size, ASM=asm,
        **down,
    )  # fmt: skip
