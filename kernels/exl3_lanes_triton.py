"""EXL3 weights of a decode step on CUDA: from a trellis's words to the matrix unit without leaving a lane's registers.

A tile's 256 weights are eight for each of a warp's 32 lanes, and the format is made so that they lie as the matrix
unit wants its left operand, transposed: lane 4 * (c % 8) + r % 8 // 2 has columns c and c + 8, rows r, r + 1, r + 8
and r + 9. So tensors here have one value a lane of the program's warps, all in one layout: value n is thread n's.

What costs is integers: shifts, permutes and logic go at half the rate at which a GPU issues. So a weight takes one
permute (a multiplication, which goes elsewhere, brings its 16 bits to a byte of some word), its product and one logic
operation, and its halves are added where they lie. Two weights are never brought into one register: the matrix unit
multiplies the lower half by an activation and the upper, which is a number too, by zero."""

import triton
import triton.language as tl


@triton.constexpr_function
def group_of(half: int) -> int:
    """So many weights' registers lie in two words, at `half` half bits a weight."""
    return 8 if half <= 6 or half == 8 else 2 if half == 14 else 4


@triton.constexpr_function
def end_of(half: int, weight: int) -> int:
    """How many bits of a group are behind those of one of its weights."""
    group = group_of(half)
    return int((group - 1 - weight) * (half // 2) + half % 2 * (group // 2 - (weight + 1) // 2))


@triton.constexpr_function
def beyond(half: int) -> int:
    """From where on a second word of 32 bits is taken from a group's two, so that both have all registers."""
    return int(max(0, end_of(half, 0) - 16))


@triton.constexpr_function
def decoding(half: int, book: int) -> str:
    """PTX. $0 ..: the group's weights; then operands: the word it ends in, the one before, how many bits it leaves in
    the first, and the same plus `beyond`."""
    group, far = group_of(half), beyond(half)
    lines = ["{ .reg .b32 s, u, v, one, scale, offset, low<8>, high<8>; .reg .b16 p, q;"]
    if book == 2:
        number = "mul.lo.u32 s, s, 0x83DCD12D; dp4a.u32.u32 s, s, one, 0x6400; fma.rn.f16x2 $%d, s, scale, offset;"
        lines.append("mov.b32 one, 0x01010101; mov.b32 scale, 0x1EEE1EEE; mov.b32 offset, 0xC931C931;")
    else:
        number = "mul.lo.u32 s, s, 0xCBAC1FED;" if book == 1 else "mad.lo.u32 s, s, 89226354, 64248484;"
        number += """lop3.b32 s, s, 0x8FFF8FFF, 0x3B603B60, 0x6A; mov.b32 {p, q}, s;
        mov.b32 u, {p, p}; mov.b32 v, {q, q}; add.rn.f16x2 $%d, u, v;"""
    lines.append(f"shf.r.wrap.b32 low0, ${group}, ${group + 1}, ${group + 2};")
    lines.append(f"shf.r.wrap.b32 high0, ${group}, ${group + 1}, ${group + 3};" if far else "")
    made = {"low0", "high0"}
    for weight in range(group):
        end = end_of(half, weight)
        word, begin = ("low", end) if end <= 16 else ("high", end - far)
        by = -begin % 8
        if f"{word}{by}" not in made:
            made.add(f"{word}{by}")
            lines.append(f"mul.lo.u32 {word}{by}, {word}0, {1 << by};")
        byte = (begin + by) // 8
        lines.append(f"prmt.b32 s, {word}{by}, 0, 0x44{byte + 1}{byte}; {number % weight}")
    return "\n".join([*lines, "}"])


@triton.jit
def plain_number(state, BOOK: tl.constexpr):
    """state: the 16 bits of a register as uint32 -> its fp16 number (`exl3.table`)."""
    if BOOK == 2:
        x = state * 0x83DCD12D
        pairs = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
        total = 1024 + (pairs & 0xFFFF) + (pairs >> 16)
        return (total.to(tl.float32) * 0.00676727294921875 + -10.3828125).to(tl.float16)
    else:
        x = state * 0xCBAC1FED if BOOK == 1 else state * 89226354 + 64248484
        x = (x & 0x8FFF8FFF) ^ 0x3B603B60
        low = (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        return low + (x >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _plain(last, before, skip, HALF: tl.constexpr, BOOK: tl.constexpr):
    """`_decoded`, [lanes, group]."""
    G: tl.constexpr = group_of(HALF)
    behind = tl.arange(0, G)
    behind = (G - 1 - behind) * (HALF // 2) + HALF % 2 * (G // 2 - (behind + 1) // 2)
    both = (before.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | last.to(tl.uint32, bitcast=True).to(tl.uint64)
    state = ((both[:, None] >> (skip[:, None] + behind[None, :]).to(tl.uint64)) & 0xFFFF).to(tl.uint32)
    return plain_number(state, BOOK).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _apart(weights, G: tl.constexpr):
    """[lanes, G] -> G of [lanes]"""
    if G == 1:
        return (weights.reshape(weights.shape[0]),)
    else:
        half: tl.constexpr = G // 2
        first, second = tl.split(weights.reshape(weights.shape[0], 2, half).permute(0, 2, 1))
        return _apart(first, half) + _apart(second, half)


@triton.jit
def _decoded(last, before, skip, HALF: tl.constexpr, BOOK: tl.constexpr, ASM: tl.constexpr):
    """A group's two words, and how many bits it leaves in the last -> its weights, fp16 in the lower half of int32."""
    G: tl.constexpr = group_of(HALF)
    if not ASM:
        return _apart(_plain(last, before, skip, HALF, BOOK), G)
    elif G == 8:
        return tl.inline_asm_elementwise(
            decoding(HALF, BOOK), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [last, before, skip, skip + beyond(HALF)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    elif G == 4:
        return tl.inline_asm_elementwise(
            decoding(HALF, BOOK), "=&r,=&r,=&r,=&r,r,r,r,r", [last, before, skip, skip + beyond(HALF)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            decoding(HALF, BOOK), "=&r,=&r,r,r,r,r", [last, before, skip, skip + beyond(HALF)],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _half(word):
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _times(a, b, c, d, x, sum0, sum1, sum2, sum3, ASM: tl.constexpr):
    """A matrix unit's step, of 16 columns, 8 rows of activations and as many of weights. Lane 4 g + t: weights a, c of
    column g and b, d of g + 8, of activations t and t + 4, which x has of row g, the first below; sums of columns g, g,
    g + 8, g + 8 of rows 2 t and 2 t + 1."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, y; mov.b64 {x, y}, $8;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {x, y},
            {$9, $10, $11, $12}; }""",
            "=f,=f,=f,=f,r,r,r,r,l,0,1,2,3", [a, b, c, d, x, sum0, sum1, sum2, sum3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        WARPS: tl.constexpr = a.shape[0] // 32
        weights = tl.join(tl.join(_half(a), _half(b)), tl.join(_half(c), _half(d)))
        weights = weights.reshape(WARPS, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(WARPS, 16, 1, 8)
        rows = tl.join(_half(x.to(tl.int32)), _half((x >> 32).to(tl.int32))).reshape(WARPS, 1, 8, 8)
        sums = tl.sum(weights * rows, 3).reshape(WARPS, 2, 8, 4, 2).permute(0, 2, 3, 1, 4)
        even, odd = tl.split(sums.reshape(WARPS * 32, 2, 2))
        even, even_far = tl.split(even)
        odd, odd_far = tl.split(odd)
        return sum0 + even, sum1 + odd, sum2 + even_far, sum3 + odd_far


@triton.jit
def _group_end(lane, GROUP: tl.constexpr, HALF: tl.constexpr):
    """The last bit, among its tile's, of one of a lane's groups."""
    G: tl.constexpr = group_of(HALF)
    return (lane % 32 * (8 // G) + GROUP + 1) * (G * HALF // 2) - 1


@triton.jit
def _words(at, lane, HALF: tl.constexpr, ACROSS: tl.constexpr):
    """at: a lane's first tile of a row -> of each tile and group the word it ends in and the one before."""
    words: tl.tuple = ()
    for tile in tl.static_range(ACROSS):
        for group in tl.static_range(8 // group_of(HALF)):
            last = _group_end(lane, group, HALF) >> 5
            before = tl.where(last == 0, 4 * HALF - 1, last - 1)
            words = words + (tl.load(at + last + tile * (4 * HALF)), tl.load(at + before + tile * (4 * HALF)))
    return words


@triton.jit
def _weights(words, lane, TILE: tl.constexpr, HALF: tl.constexpr, BOOK: tl.constexpr, ASM: tl.constexpr):
    """A lane's eight of a tile."""
    GROUPS: tl.constexpr = 8 // group_of(HALF)
    weights: tl.tuple = ()
    for group in tl.static_range(GROUPS):
        skip = 31 - (_group_end(lane, group, HALF) & 31)
        last, before = words[2 * (TILE * GROUPS + group)], words[2 * (TILE * GROUPS + group) + 1]
        weights = weights + _decoded(last, before, skip, HALF, BOOK, ASM)
    return weights


@triton.jit
def _inputs(x, row, BLOCKS: tl.constexpr):
    """Of each eight rows of activations those of a row of tiles that a lane multiplies, four of 32 bits."""
    inputs: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        inputs = inputs + (tl.load(x[block] + row * 8), tl.load(x[block] + row * 8 + 1))
    return inputs


@triton.jit
def _fetched(
    at, x, row, row_words, lane,
    HALF: tl.constexpr, BLOCKS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """(words, activations) of so many rows of tiles."""
    rows: tl.tuple = ()
    for down in tl.static_range(DOWN):
        words = _words(at + (row + down).to(tl.int64) * row_words, lane, HALF, ACROSS)
        rows = rows + (words, _inputs(x, row + down, BLOCKS))
    return rows


@triton.jit
def _with_tile(
    sums, weights, inputs, TILE: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Four sums of each eight rows, of one tile column."""
    new: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        a, b, c, d = _times(
            weights[0], weights[4], weights[1], weights[5], inputs[2 * block],
            sums[4 * (TILE * BLOCKS + block)], sums[4 * (TILE * BLOCKS + block) + 1],
            sums[4 * (TILE * BLOCKS + block) + 2], sums[4 * (TILE * BLOCKS + block) + 3], ASM,
        )  # fmt: skip
        new = new + _times(weights[2], weights[6], weights[3], weights[7], inputs[2 * block + 1], a, b, c, d, ASM)
    return new


@triton.jit
def _with_row(
    sums, words, inputs, lane,
    HALF: tl.constexpr, BOOK: tl.constexpr, BLOCKS: tl.constexpr, ACROSS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    new: tl.tuple = ()
    for tile in tl.static_range(ACROSS):
        new = new + _with_tile(sums, _weights(words, lane, tile, HALF, BOOK, ASM), inputs, tile, BLOCKS, ASM)
    return new


@triton.jit
def _with_rows(
    sums, rows, lane,
    HALF: tl.constexpr, BOOK: tl.constexpr, BLOCKS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    for down in tl.static_range(DOWN):
        sums = _with_row(sums, rows[2 * down], rows[2 * down + 1], lane, HALF, BOOK, BLOCKS, ACROSS, ASM)
    return sums


@triton.jit
def _walk(
    sums, x, at, first, tiles, row_tiles, lane,
    HALF: tl.constexpr, BOOK: tl.constexpr, BLOCKS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """sums, and what rows first .. first + tiles of tiles add, DOWN at a time. AHEAD: these are loaded while those
    before are multiplied. x: a lane's activations of each eight rows; at: its first tile of the first row."""
    row_words, steps = row_tiles * (4 * HALF), tiles // DOWN
    if AHEAD:
        ahead = _fetched(at, x, first, row_words, lane, HALF, BLOCKS, DOWN, ACROSS)
        for step in range(1, steps + 1):
            now = ahead
            row = first + tl.minimum(step, steps - 1) * DOWN
            ahead = _fetched(at, x, row, row_words, lane, HALF, BLOCKS, DOWN, ACROSS)
            sums = _with_rows(sums, now, lane, HALF, BOOK, BLOCKS, DOWN, ACROSS, ASM)
    else:
        for step in range(0, steps):
            now = _fetched(at, x, first + step * DOWN, row_words, lane, HALF, BLOCKS, DOWN, ACROSS)
            sums = _with_rows(sums, now, lane, HALF, BOOK, BLOCKS, DOWN, ACROSS, ASM)
    return sums


@triton.jit
def _stored(
    out, outputs, picks, x, at, first, tiles, row_tiles, lane,
    HALF: tl.constexpr, BOOK: tl.constexpr, BLOCKS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`_walk`, to out."""
    sums: tl.tuple = ()
    for _ in tl.static_range(4 * BLOCKS * ACROSS):
        sums = sums + (tl.zeros([lane.shape[0]], tl.float32),)
    sums = _walk(sums, x, at, first, tiles, row_tiles, lane, HALF, BOOK, BLOCKS, DOWN, ACROSS, AHEAD, ASM)
    for block in tl.static_range(BLOCKS):
        for odd in tl.static_range(2):
            pick = tl.load(picks + block * 8 + lane % 4 * 2 + odd)
            row = out + tl.maximum(pick, 0).to(tl.int64) * outputs
            for across in tl.static_range(ACROSS):
                for far in tl.static_range(2):
                    one_sum = sums[4 * (across * BLOCKS + block) + 2 * far + odd]
                    tl.store(row + across * 16 + far * 8, one_sum, mask=pick >= 0)


@triton.jit
def matrix(record, tile, hidden, share, vectors, DOWN_SIDE: tl.constexpr):
    """The matrix that a tile column of gate | up, or of down, is in: (0, or 1: up, half bits, codebook, address of its
    trellis, tiles of its rows, tiles of its columns)."""
    gate_half, up_half = tl.load(record + 1).to(tl.int32), tl.load(record + 2).to(tl.int32)
    weights = hidden.to(tl.int64) * share // 16  # bytes of half a bit of each
    if DOWN_SIDE:
        half, book = tl.load(record + 3).to(tl.int32), tl.load(record + 6).to(tl.int32)
        return 0, half, book, record + vectors + weights * (gate_half + up_half), share // 16, hidden // 16
    else:
        side = tile // (share // 16)
        half, book = tl.where(side == 0, gate_half, up_half), tl.load(record + 4 + side).to(tl.int32)
        at = record + vectors + tl.where(side == 0, 0, weights * gate_half)
        return side, half, book, at, hidden // 16, share // 16


@triton.jit(do_not_specialize=["items", "count"])
def product(
    slots, unit, table, x, parts, hidden, share, items, count, vectors,
    DOWN_SIDE: tl.constexpr, MASK: tl.constexpr, BLOCKS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    WARPS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """WARPS * ACROSS tile columns of one expert, a part of K, for up to 8 * BLOCKS picks, if its matrix is of a kind in
    MASK: parts [SPLITS, picks, outputs] fp32, outputs being gate | up, or those of down (DOWN_SIDE). x: rows of every
    pick, [2, picks, hidden] or [picks, share], each value an fp16 in 32 bits."""
    item, part = tl.program_id(1), tl.program_id(2)
    slot = tl.load(table + item)
    if slot < 0:
        return
    lane = tl.arange(0, 32 * WARPS)
    record, outputs = slots + slot.to(tl.int64) * unit, hidden if DOWN_SIDE else 2 * share
    tile = tl.program_id(0) * (WARPS * ACROSS)
    side, half, book, trellis, tiles, row_tiles = matrix(record, tile, hidden, share, vectors, DOWN_SIDE)
    tile += lane // 32 * ACROSS
    words = trellis.to(tl.pointer_type(tl.int32)) + (tile - side * row_tiles) * (4 * half)
    picks = table + items + item * (8 * BLOCKS)
    rows: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        pick = tl.maximum(tl.load(picks + block * 8 + lane % 32 // 4), 0).to(tl.int64)
        row = x + (side * count + pick) * (tiles * 16) + lane % 4 * 4
        rows = rows + (row.to(tl.pointer_type(tl.int64)),)
    kind = book * 32 + half
    tiles = tiles // SPLITS
    out = parts + part.to(tl.int64) * count * outputs + tile * 16 + lane % 32 // 4
    for one in tl.static_range(96):
        if (MASK >> one) & 1:  # noqa: SIM102 (the one is known when compiled, the other is not)
            if kind == one:
                _stored(
                    out, outputs, picks, rows, words, part * tiles, tiles, row_tiles, lane,
                    one % 32, one // 32, BLOCKS, DOWN, ACROSS, AHEAD, ASM,
                )  # fmt: skip
