"""The products of a decode step's MXFP4 experts (`experts_triton`), in two forms of one sum: the matrix unit adds one
scale group of 32 at a time, and each group's sum is multiplied by its power of two in fp32 as it is added.

16 bits: codes become fp16 by shifts alone: the three bits of a magnitude, moved to a half's two lowest exponent bits
and highest mantissa bit, are the value x 2^-14, subnormals included, exactly.

8 bits, for `wgmma` of sm_90: the same three bits in an e4m3 are the value x 2^-6, as exactly, and a word of codes is
two words of them. Its products are exact too; but that unit, as is told of it, aligns the products of a scale group to
the largest and keeps 13 bits below it (`docs/results.md`). Triton takes it at 16 columns and 128 threads, with weights
straight from registers; an activation row's place in shared memory is where the copy of one scale group put it.
"""

import triton
import triton.language as tl

# Of four bytes in $4: the lower codes of the first two bytes, of the others, and the upper ones alike.
CODES: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 s, low, high;
    shl.b32 s, $4, 4; and.b32 s, s, 0x80808080; shl.b32 low, $4, 1; lop3.b32 low, low, 0x0E0E0E0E, s, 0xEA;
    and.b32 s, $4, 0x80808080; shr.b32 high, $4, 3; lop3.b32 high, high, 0x0E0E0E0E, s, 0xEA;
    prmt.b32 $0, low, 0, 0x1404; prmt.b32 $1, low, 0, 0x3424;
    prmt.b32 $2, high, 0, 0x1404; prmt.b32 $3, high, 0, 0x3424;
    }"""
)
# Of four bytes in $2: the lower codes of all, and the upper ones.
EIGHTS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 s, m;
    shl.b32 s, $2, 4; and.b32 s, s, 0x80808080; shl.b32 m, $2, 2; lop3.b32 $0, m, 0x1C1C1C1C, s, 0xEA;
    and.b32 s, $2, 0x80808080; shr.b32 m, $2, 2; lop3.b32 $1, m, 0x1C1C1C1C, s, 0xEA;
    }"""
)


@triton.jit
def position(k, EIGHT: tl.constexpr):
    """Where column k of an activation row lies within its scale group of 32. 16 bits: word of four, byte of four,
    nibble of two -> word, nibble, byte; 8 bits: nibble, word, byte. A thread of the matrix unit so gets the codes of
    one word, in the order `_codes` and `_eights` make them."""
    if EIGHT:
        return (k // 32) * 32 + (k % 2) * 16 + (k % 32) // 2
    else:
        return (k // 8) * 8 + (k % 2) * 4 + (k // 2) % 4


@triton.jit
def _codes(byte, ASM: tl.constexpr):
    """Two e2m1 codes of a byte -> two fp16 of value x 2^-14."""
    if ASM:
        return tl.inline_asm_elementwise(
            CODES,
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return _code(byte.to(tl.int32)), _code(byte.to(tl.int32) >> 4)


@triton.jit
def _code(code):
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _eights(byte, ASM: tl.constexpr):
    """Two e2m1 codes of a byte -> the bytes of two e4m3 of value x 2^-6."""
    if ASM:
        return tl.inline_asm_elementwise(
            EIGHTS,
            "=&r,=&r,r",
            [byte],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        return ((byte & 7) << 2) | ((byte & 8) << 4), ((byte >> 2) & 28) | (byte & 128)


@triton.jit
def _operand(bytes_, ROWS: tl.constexpr, EIGHT: tl.constexpr, ASM: tl.constexpr):
    """bytes_ [ROWS, 16], a scale group a row -> [ROWS, 32] fp16 or e4m3 in the order of `position`."""
    if EIGHT:
        low, high = _eights(bytes_, ASM)
        return tl.join(low, high).permute(0, 2, 1).reshape(ROWS, 32).to(tl.float8e4nv, bitcast=True)
    else:
        low, high = _codes(bytes_, ASM)
        return tl.join(low, high).reshape(ROWS, 4, 4, 2).permute(0, 1, 3, 2).reshape(ROWS, 32)


@triton.jit
def _dot(weights, x, ASM: tl.constexpr):
    if ASM:
        return tl.dot(weights, x)
    else:
        return tl.dot(weights.to(tl.float32), x.to(tl.float32), input_precision="ieee")


@triton.jit
def _scale_words(at, block, row_scales, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """at [ROWS]: a row's scale bytes -> those of a block, four in each of [ROWS, BLOCK / 128] int32."""
    word = block * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    if WHOLE:
        return tl.load(at.to(tl.pointer_type(tl.int32))[:, None] + word[None, :])
    else:
        words = tl.zeros([at.shape[0], BLOCK // 128], tl.int32)
        for byte in tl.static_range(4):
            group = (word * 4 + byte)[None, :]
            words |= tl.load(at[:, None] + group, mask=group < row_scales, other=0).to(tl.int32) << (8 * byte)
        return words


@triton.jit
def _part(tile, PART: tl.constexpr, PARTS: tl.constexpr):
    """tile [ROWS, PARTS * width] -> its part of so many, [ROWS, width]."""
    if PARTS == 1:
        return tile
    else:
        half: tl.constexpr = PARTS // 2
        first, second = tl.split(tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1))
        if PART < half:  # noqa: SIM300
            return _part(first, PART, half)
        else:
            return _part(second, PART - half, half)


@triton.jit
def wanted(table, FIRST: tl.constexpr, COLUMNS: tl.constexpr, PICKS: tl.constexpr, M: tl.constexpr):
    """table as `experts_triton._prepare` leaves it -> the picks that want the program's expert, from the FIRST on, one
    a column, 0 where there is none; and whether there is."""
    column = FIRST + tl.arange(0, COLUMNS)
    at = table + PICKS + tl.program_id(1) * M + column
    found = tl.load(at, mask=column < M, other=-1) if COLUMNS > M else tl.load(at)
    return tl.maximum(found, 0), found >= 0


@triton.jit
def _load(x, column, valid):
    return tl.load(x[:, None] + column[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def scaled_product(
    codes, slot, row, scales, x, x_width, picks_each, table, blocks, row_scales,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PICKS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    PAIR: tl.constexpr, WHOLE: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr, EIGHT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """codes: a matrix of every slot, or a PAIR of them; ROWS rows are taken at `slot`, from `row` of each on, BLOCK
    weights at a time; scales [ROWS]: a row's first scale; x: rows in the order of `position`, one for so many picks ->
    fp32 x 2^-14, or 2^-6 if EIGHT, [ROWS, COLUMNS], a column a pick of the expert. WHOLE: a row is whole blocks.
    HALVES: 16 columns are multiplied as two times eight, which `wgmma` does not take: in 16 bits it sums otherwise."""
    columns: tl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    found, valid = wanted(table, 0, columns, PICKS, M)
    first, acc = x + found // picks_each * x_width, tl.zeros([ROWS, columns], tl.float32)
    if HALVES:
        found, valid_second = wanted(table, columns, columns, PICKS, M)
        second, acc_second = x + found // picks_each * x_width, tl.zeros([ROWS, columns], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        if PAIR:
            tile = codes.load([slot, 0, row, block * (BLOCK // 2)]).reshape(ROWS, BLOCK // 2)
        else:
            tile = codes.load([slot, row, block * (BLOCK // 2)]).reshape(ROWS, BLOCK // 2)
        words = _scale_words(scales, block, row_scales, BLOCK, WHOLE)
        if not EIGHT:
            rows = _load(first, block * BLOCK + tl.arange(0, BLOCK), valid)
        if HALVES:
            rows_second = _load(second, block * BLOCK + tl.arange(0, BLOCK), valid_second)
        for group in tl.static_range(BLOCK // 32):
            if group % 4 == 0:
                bytes_ = tl.sum(_part(words, group // 4, BLOCK // 128), 1)
            power = (((bytes_ >> (8 * (group % 4))) & 0xFF) << 23).to(tl.float32, bitcast=True)[:, None]
            weights = _operand(_part(tile, group, BLOCK // 32), ROWS, EIGHT, ASM)
            if EIGHT:  # each group's copy is the unit's second operand as it lies; a part of a larger one is not
                acts = _load(first, block * BLOCK + group * 32 + tl.arange(0, 32), valid)
            else:
                acts = _part(rows, group, BLOCK // 32)
            acc += _dot(weights, acts.trans(1, 0), ASM) * power
            if HALVES:
                acts = _part(rows_second, group, BLOCK // 32)
                acc_second += _dot(weights, acts.trans(1, 0), ASM) * power
    if HALVES:
        return tl.join(acc, acc_second).permute(0, 2, 1).reshape(ROWS, COLUMNS)
    else:
        return acc
