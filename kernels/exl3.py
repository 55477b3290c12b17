"""EXL3 linear layers (the trellis format of exllamav3): 1 to 8 bits a weight, and half widths between.

    y = ((((x * suh) @ H) @ W) @ H) * svh + bias

`W` [K, N], inputs by outputs, is decoded from tiles of 16 x 16; `H` is block diagonal, the Sylvester Hadamard matrix of
128 over sqrt(128). A tile is a ring of 256 * bits bits: each weight shifts its own into a register of 16, whose value
is looked up in a codebook of 65,536 fp16 numbers. Decoded weights are exact; the rotations are fp32 and round once.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kernels.rows import matmul

Codebook = Literal["3inst", "mcg", "mul1"]
BLOCK = 128  # of the Hadamard transform; what a rank cuts must be whole blocks
TILE = 16
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
        if self.trellis.dtype != torch.int16 or self.half_bits not in _widths(self.codebook):
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


def _widths(codebook: Codebook) -> tuple[int, ...]:
    """In halves of a bit."""
    return (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16) if codebook == "mul1" else (2, 4, 6, 8, 10, 12, 14, 16)


def _blocks(part: slice) -> slice:
    if part.start % BLOCK or part.stop % BLOCK:
        raise ValueError(f"{part.start} to {part.stop} cuts through a block of {BLOCK}")
    return slice(part.start // TILE, part.stop // TILE)


def linear(x: Tensor, matrix: Exl3Matrix) -> Tensor:
    """x [T, K] fp32 -> [T, N] fp32. The rotated input is rounded to fp16, as the matrix is made for."""
    turned = hadamard(x.to(torch.float16) * matrix.suh).to(torch.float16)
    product = matmul(turned.to(torch.float32), decoded(matrix).t().to(torch.float32))
    y = hadamard(product) * matrix.svh.to(torch.float32)
    return y if matrix.bias is None else y + matrix.bias.to(torch.float32)


def dense(matrix: Exl3Matrix) -> Tensor:
    """The whole matrix as a linear layer has it, [N, K] fp32: without any rounding after decoding."""
    inner = decoded(matrix).to(torch.float32)
    turned = hadamard(hadamard(inner.t()).t())  # along the inputs, then along the outputs
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
    values = table(matrix.codebook, matrix.trellis.device)[states(matrix.trellis)]
    down, across, _ = values.shape
    # The order of a tile's weights, from the highest bit of their number: c[2:0], r[2:1], c[3], r[3], r[0].
    parts = values.view(down, across, 8, 4, 2, 2, 2)
    return parts.permute(0, 5, 3, 6, 1, 4, 2).reshape(TILE * down, TILE * across)


def states(trellis: Tensor) -> Tensor:
    """trellis [.., .., 16 * bits] int16 -> [.., .., 256] int64: each weight's register, in the order of the stream.

    The ring's bits are those of its 32-bit words, the most significant first; a weight's bits end its register."""
    halves = trellis.to(torch.int64) & 0xFFFF
    words = halves[..., 0::2] | halves[..., 1::2] << 16
    ring = 32 * words.shape[-1]
    ends = _ends(trellis.shape[-1] // 8).to(trellis.device)
    last, first = (ends - 1) >> 5, ((ends - STATES.bit_length() + 1) % ring) >> 5
    window = words[..., first] << 32 | words[..., last]
    return window >> (31 - ((ends - 1) & 31)) & (STATES - 1)


def _ends(half_bits: int) -> Tensor:
    """[256]: where each weight's bits end in the ring. At half widths every second weight has a bit more."""
    numbers = torch.arange(256)
    widths = half_bits // 2 + (numbers & 1 if half_bits % 2 else 0 * numbers)
    return widths.cumsum(0)


@cache
def table(codebook: Codebook, device: torch.device) -> Tensor:
    """[65536] fp16: the value of every state. fp32 holds each sum exactly, so that one rounding is left."""
    state = torch.arange(STATES)
    if codebook == "mul1":
        product = state * 0x83DCD12D & _MASK
        total = (product & 0xFF) + (product >> 8 & 0xFF) + (product >> 16 & 0xFF) + (product >> 24 & 0xFF)
        scale, offset = (_fp16(bits) for bits in (0x1EEE, 0xC931))
        return ((1024 + total).to(torch.float32) * scale + offset).to(torch.float16).to(device)
    product = state * 0xCBAC1FED if codebook == "mcg" else state * 89226354 + 64248484
    mixed = (product & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = ((mixed >> shift & 0xFFFF).to(torch.uint16).view(torch.float16) for shift in (0, 16))
    return (low.to(torch.float32) + high.to(torch.float32)).to(torch.float16).to(device)


def _fp16(bits: int) -> float:
    return float(torch.tensor([bits], dtype=torch.uint16).view(torch.float16))


def signs(packed: Tensor) -> Tensor:
    """packed [n / 16] int16, of old checkpoints -> [n] fp16 of 1 and -1: a set bit, the lowest first, is -1."""
    bits = packed.to(torch.int64).unsqueeze(1) >> torch.arange(16, device=packed.device) & 1
    return (1 - 2 * bits).flatten().to(torch.float16)
