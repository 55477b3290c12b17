"""The roundings of `kernels.quantise` inside Triton kernels, and what those kernels share.

Values are held as fp32 and rounded by integers: the interpreter's own conversions cut off, and Triton's division is not
the nearest one. Every function here is exact to the bit but for the rounding that it is named after."""

import triton
import triton.language as tl

from kernels import device

INTERPRETED: tl.constexpr = tl.constexpr(device.INTERPRETED)

# What a row of a decode step is told about itself, int64 a field. Addresses are of the lane's own memory.
ROW_FIELDS: tl.constexpr = tl.constexpr(device.ROW_FIELDS)
TOKEN: tl.constexpr = tl.constexpr(0)
POSITION: tl.constexpr = tl.constexpr(1)
LANE: tl.constexpr = tl.constexpr(2)
WINDOWS: tl.constexpr = tl.constexpr(3)  # address of [layers, window, d] bf16
PAGES: tl.constexpr = tl.constexpr(4)  # address of the page table, int64
RECENT: tl.constexpr = tl.constexpr(5)  # address of [sources, RECENT_TOKENS, 2, d] fp32
FIRST_ROW: tl.constexpr = tl.constexpr(6)  # the lane's first row of this pass,
FIRST_POSITION: tl.constexpr = tl.constexpr(7)  # and its position


@triton.jit
def kept(value, LOW: tl.constexpr):
    """fp32 rounded to nearest even at bit LOW of its mantissa."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (LOW - 1)) - 1) + ((bits >> LOW) & 1)) & (-1 << LOW)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(value):
    """`quantise.bf16`: rounded, held as fp32."""
    return kept(value, 16)


@triton.jit
def _power(x):
    """Smallest power of two >= x, for positive normal x, and its inverse."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _to_e4m3(value):
    """|value| <= 448. Below 2^-6 steps are 2^-9: what fp32 keeps beside 1.5 x 2^14."""
    small = (value + 24576.0) - 24576.0
    return tl.where(tl.abs(value) < 0.015625, small, kept(value, 20))


@triton.jit
def _to_e2m1(value):
    """|value| <= 6, ties to the even code: steps of a quarter of the binade's end, at least a half."""
    binade = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(binade * 0.5, 0.5)
    # A power of two has an exact inverse; 1.5 x 2^23 leaves no bit behind the point.
    inverse = (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return ((value * inverse + 12582912.0) - 12582912.0) * step


@triton.jit
def fp8_groups(value):
    """value [G, 32] -> e4m3 with one power of two a group (`quantise.fp8_ue8m0`)."""
    amax = tl.maximum(tl.max(tl.abs(value), 1), 1e-4)
    scale, inverse = _power(amax * 0.002232142857142857)
    return _to_e4m3(value * inverse[:, None]) * scale[:, None]


@triton.jit
def fp4_ue8m0_groups(value):
    """value [G, 32] -> e2m1 with one power of two a group (`quantise.fp4_ue8m0`)."""
    amax = tl.maximum(tl.max(tl.abs(value), 1), 7.052966104933725e-38)
    scale, inverse = _power(tl.div_rn(amax, 6.0))
    return _to_e2m1(tl.minimum(tl.maximum(value * inverse[:, None], -6.0), 6.0)) * scale[:, None]


@triton.jit
def fp4_e4m3_groups(value):
    """value [G, 16] -> e2m1 with one e4m3 scale a group (`quantise.fp4_e4m3`)."""
    amax = tl.maximum(tl.max(tl.abs(value), 1), 0.01171875)
    scale = _to_e4m3(tl.div_rn(amax, 6.0))
    code = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    return _to_e2m1(tl.minimum(tl.maximum(code, -6.0), 6.0)) * scale[:, None]


@triton.jit
def turned(x, cos, sin, at, WIDTH: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr):
    """x [SIZE] fp32, whose first WIDTH numbers are a row: its last ROPE are rotated on adjacent pairs (`rope.rotate_`)
    by row `at` of cos, sin [.., ROPE / 2]."""
    pair = tl.arange(0, SIZE // 2) - (WIDTH - ROPE) // 2
    there = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + at * (ROPE // 2) + pair, mask=there, other=1.0)
    s = tl.load(sin + at * (ROPE // 2) + pair, mask=there, other=0.0)
    even, odd = tl.split(x.reshape(SIZE // 2, 2))
    return tl.join(even * c - odd * s, even * s + odd * c).reshape(SIZE)


@triton.jit
def rms(x, weight, width, eps):
    """x [n] fp32, zero behind `width` -> weight * x / sqrt(mean(x^2) + eps)."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def split_sum(parts, row, column, there, rows, width, SPLIT: tl.constexpr, SIZE: tl.constexpr):
    """parts [SPLIT, rows, width] fp32 -> columns of a row, added in the order of the parts."""
    total = tl.zeros([SIZE], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + (part * rows + row) * width + column, mask=there, other=0.0)
    return total
