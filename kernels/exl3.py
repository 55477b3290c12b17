"""EXL3 linear layers (the trellis format of exllamav3): 1 to 8 bits a weight, and half widths between.

    y = ((((x * suh) @ H) @ W) @ H) * svh + bias

`W` [K, N], inputs by outputs, is decoded from tiles of 16 x 16; `H` is block diagonal, the Sylvester Hadamard matrix of
128 over sqrt(128). A tile is a ring of 256 * bits bits: each weight shifts its own into a register of 16, whose value
is looked up in a codebook of 65,536 fp16 numbers. Decoded weights are exact; the rotations are fp32 and round once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels.exl3_record import BLOCK, TILE, Codebook, Exl3Record, stored_of, widths
from kernels.numerics import Rounding
from kernels.quantise import fp16
from kernels.rows import matmul

__all__ = [
    "BLOCK",
    "TILE",
    "Codebook",
    "Exl3Matrix",
    "decoded",
    "dense",
    "hadamard",
    "inner",
    "linear",
    "matrices",
    "signs",
    "states",
    "table",
    "through",
]

Product = Callable[[Tensor, Tensor], Tensor]  # (x [T, K], weight [N, K]) -> [T, N]
STATES = 1 << 16
_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class Exl3Matrix:
    """trellis [K / 16, N / 16, 16 * bits] int16, bits 16 of them a word; suh [K], svh [N] and bias [N] fp16."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that are no such matrix."""
        rows, columns = self.shape
        if self.trellis.dtype != torch.int16 or self.half_bits not in widths(self.codebook):
            raise ValueError(f"a {self.codebook} trellis of {self.half_bits / 2:g} bits, {self.trellis.dtype}")
        if rows % BLOCK or columns % BLOCK:
            raise ValueError(f"an EXL3 matrix of {rows} x {columns}: both must be multiples of {BLOCK}")
        if self.suh.shape != (rows,) or self.svh.shape != (columns,):
            raise ValueError(f"scales of {list(self.suh.shape)} and {list(self.svh.shape)} for {rows} x {columns}")

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs K, outputs N."""
        return TILE * self.trellis.shape[0], TILE * self.trellis.shape[1]

    @property
    def half_bits(self) -> int:
        """Width in halves of a bit a weight."""
        return self.trellis.shape[2] // 8

    def columns(self, part: slice) -> "Exl3Matrix":
        """Outputs `part`, whole blocks: their final values."""
        tiles = _blocks(part)
        bias = None if self.bias is None else self.bias[part]
        return replace(self, trellis=self.trellis[:, tiles], svh=self.svh[part], bias=bias)

    def rows(self, part: slice) -> "Exl3Matrix":
        """Inputs `part`, whole blocks: a part of a sum. The part that begins has the bias."""
        bias = self.bias if part.start == 0 else None
        return replace(self, trellis=self.trellis[_blocks(part)], suh=self.suh[part], bias=bias)


def _blocks(part: slice) -> slice:
    if part.start % BLOCK or part.stop % BLOCK:
        raise ValueError(f"{part.start} to {part.stop} cuts through a block of {BLOCK}")
    return slice(part.start // TILE, part.stop // TILE)


def matrices(record: Exl3Record, data: Tensor) -> tuple[Exl3Matrix, Exl3Matrix, Exl3Matrix]:
    """data [at least a record's bytes] uint8, contiguous -> gate, up, down: views. Raises ValueError for bytes that are
    no record."""
    stored = stored_of(bytes(data[:8].tolist()))
    parts = zip(record.offsets, record.lengths, strict=False)
    vectors = [data[begin : begin + 2 * length].view(torch.float16) for begin, length in parts]
    found, begin = [], record.offsets[-1]
    for number, (half_bits, codebook) in enumerate(zip(*stored, strict=True)):
        end = begin + record.trellis_bytes(half_bits)
        trellis = data[begin:end].view(torch.int16).view(*record.tiles(number), 8 * half_bits)
        suh, svh = (vectors[4], vectors[5]) if number == 2 else (vectors[number], vectors[2 + number])
        found.append(Exl3Matrix(trellis, suh, svh, codebook))
        begin = end
    return found[0], found[1], found[2]


def linear(x: Tensor, matrix: Exl3Matrix, rotated: Rounding = fp16) -> Tensor:
    """x [T, K] fp32 -> [T, N] fp32. `rotated` rounds the rotated input: fp16 is what the matrix is made for."""
    return through(x, matrix, inner(matrix), rotated, matmul)


def through(x: Tensor, matrix: Exl3Matrix, weight: Tensor, rotated: Rounding, product: Product) -> Tensor:
    """`linear` with the weights decoded before: weight [N, K] fp32 of `inner`. The scaled input is fp32, since bf16
    reaches beyond fp16."""
    y = hadamard(product(rotated(hadamard(x * matrix.suh.to(torch.float32))), weight))
    y.mul_(matrix.svh.to(torch.float32))
    return y if matrix.bias is None else y.add_(matrix.bias.to(torch.float32))


def dense(matrix: Exl3Matrix) -> Tensor:
    """The whole matrix as a linear layer has it, [N, K] fp32: without any rounding after decoding."""
    turned = hadamard(hadamard(inner(matrix)).t())  # along the inputs, then along the outputs
    return (matrix.suh.to(torch.float32).unsqueeze(1) * turned * matrix.svh.to(torch.float32)).t().contiguous()


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] of any float type, n a multiple of 128 -> fp32: each block of 128 times H, its own inverse."""
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], -1, BLOCK)
    turned: Tensor = torch.matmul(blocks, _sylvester(x.device)).flatten(-2)
    return turned.mul_(BLOCK**-0.5)


@cache
def _sylvester(device: torch.device) -> Tensor:
    """[128, 128] of 1 and -1"""
    one = torch.ones(1, 1)
    while len(one) < BLOCK:
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    return one.to(device)


def decoded(matrix: Exl3Matrix) -> Tensor:
    """[K, N] fp16: the weights between the two rotations, exactly."""
    return inner(matrix).t().to(torch.float16).contiguous()


def inner(matrix: Exl3Matrix) -> Tensor:
    """The same as a linear layer has it, [N, K] fp32."""
    number = states(matrix.trellis)
    values = table(matrix.codebook, number.device).index_select(0, number.flatten())
    down, across, _ = number.shape
    # The order of a tile's weights, from the highest bit of their number: c[2:0], r[2:1], c[3], r[3], r[0]. What the
    # last bit tells apart stays side by side: pairs are moved.
    pairs = values.view(torch.int64).view(down, across, 8, 4, 2, 2).permute(1, 4, 2, 0, 5, 3)
    return pairs.reshape(TILE * across, TILE * down // 2).view(torch.float32)


def states(trellis: Tensor) -> Tensor:
    """trellis [.., .., 16 * bits] int16 -> [.., .., 256] int64: each weight's register, in the order of the stream.

    The ring's bits are those of its 32-bit words, the most significant first; a weight's bits end its register. A few
    neighbours lie in the same two words."""
    before, last, shifts = _windows(trellis.shape[-1] // 8, trellis.device)
    words = trellis.contiguous().view(torch.int32)  # pairs of halves, the first of a pair below
    upper, lower = (words.index_select(-1, one).to(torch.int64) for one in (before, last))
    window = (upper << 32) | (lower & 0xFFFFFFFF)
    return (window.unsqueeze(-1) >> shifts).bitwise_and_(STATES - 1).flatten(-2)


@cache
def _windows(half_bits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of the groups whose registers lie in two words: the first and the second of these [groups], and how far each
    register is shifted [groups, 256 / groups]."""
    size = 8 if half_bits <= 6 or half_bits == 8 else 2 if half_bits == 14 else 4
    ends = _ends(half_bits).view(-1, size)
    last = (ends[:, -1:] - 1) >> 5
    before, shifts = (last - 1) % (4 * half_bits), 32 * last + 32 - ends
    return before.flatten().to(device), last.flatten().to(device), shifts.to(device)


def _ends(half_bits: int) -> Tensor:
    """[256]: where each weight's bits end in the ring. At half widths every second weight has a bit more."""
    numbers = torch.arange(256)
    each = half_bits // 2 + (numbers & 1 if half_bits % 2 else 0 * numbers)
    return each.cumsum(0)


@cache
def table(codebook: Codebook, device: torch.device) -> Tensor:
    """[65536] fp32, each an fp16 number: the value of every state. fp32 holds each sum exactly: one rounding only."""
    state = torch.arange(STATES)
    if codebook == "mul1":
        product = state * 0x83DCD12D & _MASK
        total = (product & 0xFF) + (product >> 8 & 0xFF) + (product >> 16 & 0xFF) + (product >> 24 & 0xFF)
        scale, offset = (_fp16(bits) for bits in (0x1EEE, 0xC931))
        return ((1024 + total).to(torch.float32) * scale + offset).to(torch.float16).to(device, torch.float32)
    product = state * 0xCBAC1FED if codebook == "mcg" else state * 89226354 + 64248484
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = ((mixed >> shift & 0xFFFF).to(torch.uint16).view(torch.float16) for shift in (0, 16))
    return (low.to(torch.float32) + high.to(torch.float32)).to(torch.float16).to(device, torch.float32)


def _fp16(bits: int) -> float:
    return float(torch.tensor([bits], dtype=torch.uint16).view(torch.float16))


def signs(packed: Tensor) -> Tensor:
    """packed [n / 16] int16, of old checkpoints -> [n] fp16 of 1 and -1: a set bit, the lowest first, is -1."""
    bits = packed.to(torch.int64).unsqueeze(1) >> torch.arange(16, device=packed.device) & 1
    return (1 - 2 * bits).flatten().to(torch.float16)
