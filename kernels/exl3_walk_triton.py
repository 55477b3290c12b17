"""Tiles of a trellis on CUDA: decoded, and multiplied with rows by the matrix unit. What chunks of experts and of plain
matrices share; a decode step's rows go by `exl3_lanes_triton`.

In `_walk` a tile's 256 weights come in groups of G that share two words: the word in which the group ends and the one
before, of which each register is 16 bits. In the order of the stream a tile is [c 8, r 4, c 2, r 2, r 2]
(`exl3.inner`): only columns are turned, when they are stored.
"""

import triton
import triton.language as tl

from kernels.exl3_lanes_triton import plain_number

RSQRT_BLOCK = tl.constexpr(128**-0.5)


@triton.jit
def _place(row):
    """Where row r of a tile's 16 lies among the activations: r[2:1], r[3], r[0]."""
    return (row & ~15) + ((row >> 1) & 3) * 4 + ((row >> 3) & 1) * 2 + (row & 1)


@triton.jit
def _kept(value, at):
    """value fp32 -> what `at` points to: fp16, or int32 with it in the lower half and zero in the upper."""
    value = value.to(tl.float16)
    if at.dtype.element_ty == tl.int32:
        return value.to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        return value


@triton.jit
def _hadamard(x, ROWS_: tl.constexpr):
    """x [ROWS_, 128] fp32 -> each row times the Sylvester matrix over sqrt(128). A stage adds and subtracts along the
    highest bit of the index and makes it the lowest: after seven all are where they were."""
    for _ in tl.static_range(7):
        a, b = tl.split(x.reshape(ROWS_, 2, 64).permute(0, 2, 1))
        x = tl.join(a + b, a - b).reshape(ROWS_, 128)
    return x * RSQRT_BLOCK


@triton.jit
def _value(state, BOOK: tl.constexpr, ASM: tl.constexpr):
    """state: the 16 bits of a register as uint32 -> its fp16 number (`exl3.table`)."""
    if ASM:
        return _two_values(state, BOOK)
    else:
        return plain_number(state, BOOK)


@triton.jit
def _two_values(state, BOOK: tl.constexpr):
    """Two at a time: halves of two words are added at once; or the bytes of a word are summed by one instruction, into
    the number that a half with this pattern is, and scaled with one rounding."""
    if BOOK == 2:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one, scale, offset;
            mul.lo.u32 a, $1, 0x83DCD12D; mul.lo.u32 b, $2, 0x83DCD12D;
            mov.b32 one, 0x01010101; mov.b32 scale, 0x1EEE1EEE; mov.b32 offset, 0xC931C931;
            dp4a.u32.u32 a, a, one, 0x6400; dp4a.u32.u32 b, b, one, 0x6400;
            prmt.b32 a, a, b, 0x5410; fma.rn.f16x2 $0, a, scale, offset;
            }""",
            "=r,r,r", [state], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif BOOK == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            mul.lo.u32 a, $1, 0xCBAC1FED; mul.lo.u32 b, $2, 0xCBAC1FED;
            lop3.b32 a, a, 0x8FFF8FFF, 0x3B603B60, 0x6A; lop3.b32 b, b, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            prmt.b32 c, a, b, 0x5410; prmt.b32 a, a, b, 0x7632; add.rn.f16x2 $0, c, a;
            }""",
            "=r,r,r", [state], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            mad.lo.u32 a, $1, 89226354, 64248484; mad.lo.u32 b, $2, 89226354, 64248484;
            lop3.b32 a, a, 0x8FFF8FFF, 0x3B603B60, 0x6A; lop3.b32 b, b, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            prmt.b32 c, a, b, 0x5410; prmt.b32 a, a, b, 0x7632; add.rn.f16x2 $0, c, a;
            }""",
            "=r,r,r", [state], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _register(low, high, J: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BOOK: tl.constexpr, ASM: tl.constexpr):
    """Weight J of a group of G. `low` ends with the group, `high` with its first half."""
    after: tl.constexpr = (G - 1 - J) * (HALF // 2) + (HALF % 2) * (G // 2 - (J + 1) // 2)
    middle: tl.constexpr = (G - G // 2) * (HALF // 2) + (HALF % 2) * (G // 2 - (G // 2) // 2)
    if J < G // 2:
        return _value((high >> (after - middle)) & 0xFFFF, BOOK, ASM)
    else:
        return _value((low >> after) & 0xFFFF, BOOK, ASM)


@triton.jit
def _joined(low, high, FIRST: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BOOK: tl.constexpr, ASM: tl.constexpr):
    """Weights FIRST, FIRST + 2, .. of a group, the highest bit of their number first."""
    if G == 2:
        return _register(low, high, FIRST, G, HALF, BOOK, ASM)
    elif G == 4:
        return tl.join(
            _register(low, high, FIRST, G, HALF, BOOK, ASM), _register(low, high, FIRST + 2, G, HALF, BOOK, ASM)
        )
    else:
        return tl.join(
            tl.join(
                _register(low, high, FIRST, G, HALF, BOOK, ASM), _register(low, high, FIRST + 4, G, HALF, BOOK, ASM)
            ),
            tl.join(
                _register(low, high, FIRST + 2, G, HALF, BOOK, ASM), _register(low, high, FIRST + 6, G, HALF, BOOK, ASM)
            ),
        )


@triton.jit
def _walk(
    acc, x, words, first, tiles, row_tiles, valid,
    HALF: tl.constexpr, BOOK: tl.constexpr, M: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [M, ACROSS * 16] and the product of activation rows x [M] (pointers to their first value) with tile columns
    `words` (pointer to the first tile of the first row) over tile rows first .. first + tiles."""
    # How many weights share two words: their span and what the shift takes off must fit into 64 bits.
    G: tl.constexpr = 8 if (HALF <= 6 or HALF == 8) else (2 if HALF == 14 else 4)
    GROUPS: tl.constexpr = 256 // G
    BITS: tl.constexpr = G * HALF // 2
    WORDS: tl.constexpr = 4 * HALF
    MIDDLE: tl.constexpr = (G - G // 2) * (HALF // 2) + (HALF % 2) * (G // 2 - (G // 2) // 2)
    end = (tl.arange(0, GROUPS) + 1) * BITS - 1
    last = end >> 5
    before = tl.where(last == 0, WORDS - 1, last - 1)
    skip = (31 - (end & 31)).to(tl.uint64)[None, None, :]
    down, across = tl.arange(0, DOWN), tl.arange(0, ACROSS)
    tile = (down[:, None] * row_tiles + across[None, :]) * WORDS
    column = tl.arange(0, DOWN * 16)
    for step in tl.range(0, tiles // DOWN, num_stages=STAGES):
        at = words + (first + step * DOWN).to(tl.int64) * row_tiles * WORDS
        low = tl.load(at + tile[:, :, None] + last[None, None, :]).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(at + tile[:, :, None] + before[None, None, :]).to(tl.uint32, bitcast=True).to(tl.uint64)
        both = (high << 32) | low
        low, high = (both >> skip).to(tl.uint32), (both >> (skip + MIDDLE)).to(tl.uint32)
        even, odd = _joined(low, high, 0, G, HALF, BOOK, ASM), _joined(low, high, 1, G, HALF, BOOK, ASM)
        weight = tl.join(even, odd).reshape(DOWN, ACROSS, 8, 4, 2, 2, 2)
        weight = weight.permute(0, 3, 5, 6, 1, 2, 4).reshape(DOWN * 16, ACROSS * 16)
        rows = tl.load(x[:, None] + ((first + step * DOWN) * 16 + column)[None, :], mask=valid[:, None], other=0.0)
        if ASM:
            acc = tl.dot(rows, weight, acc)
        else:
            acc += tl.dot(rows.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
    return acc
