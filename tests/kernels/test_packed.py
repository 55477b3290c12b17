"""Products by matrices as they are stored: those of the numbers that they mean, tile by tile, row by row."""

import pytest
import torch

from kernels import exl3, packed
from kernels.numerics import FP32, WEIGHTS_ONLY

N, K = 384, 256


def random(seed: int = 0):
    return torch.Generator().manual_seed(seed)


def bytes_of(*shape, low=0, high=256):
    return torch.randint(low, high, shape, generator=random(1)).to(torch.uint8)


def fp8(skipped=(0, 0)):
    codes = torch.randn(N, K, generator=random()).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = [-(-(length + skip) // 128) for length, skip in zip((N, K), skipped, strict=True)]
    return packed.Fp8(codes, 0.01 + torch.rand(*blocks, generator=random(2)), skipped)


def trellis(bits: int = 5, outputs: int = N):
    words = torch.randint(-(1 << 15), 1 << 15, (K // 16, N // 16, 16 * bits), generator=random()).to(torch.int16)
    suh, svh = ((torch.randn(size, generator=random(size)) / 8).half() for size in (K, N))
    return packed.Exl3(exl3.Exl3Matrix(words, suh, svh, "mcg"), outputs)


KINDS = {
    "fp32": lambda: packed.Plain(torch.randn(N, K, generator=random())),
    "bf16": lambda: packed.Plain(torch.randn(N, K, generator=random()).bfloat16()),
    "fp8": fp8,
    "fp8 cut inside a block": lambda: fp8((40, 96)),
    "mxfp4": lambda: packed.Mxfp4(bytes_of(N, K // 2), bytes_of(N, K // 32, low=120, high=130)),
    "fp16": lambda: packed.Plain(torch.randn(N, K, generator=random()).half()),
    "exl3": trellis,
    "exl3, padded": lambda: trellis(outputs=N - 40),
    "stacked": lambda: packed.stacked(fp8(), packed.Plain(torch.randn(128, K, generator=random()))),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def inputs(count: int):
    return torch.randn(count, K, generator=random(7)).bfloat16().float()


@kinds
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_product_is_that_of_the_numbers_it_means(kind, count):
    weight, x = KINDS[kind](), inputs(count)
    assert packed.dense(weight).shape == weight.shape
    wanted = x @ packed.dense(weight).t()
    torch.testing.assert_close(
        packed.product(x, weight, FP32), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
    )


def test_a_block_has_its_scale_wherever_it_is_cut():
    whole = fp8()
    rows, columns = slice(100, 300), slice(72, 200)
    part = packed.Fp8(whole.codes[rows, columns], whole.scale[0:3, 0:2], (100, 72))
    assert torch.equal(packed.dense(part), packed.dense(whole)[rows, columns])
    spread = whole.scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    assert torch.equal(packed.dense(whole), whole.codes.view(torch.float8_e4m3fn).float() * spread)


@kinds
def test_tiles_leave_the_numbers_as_they_are(kind, monkeypatch):
    weight, x = KINDS[kind](), inputs(5)
    whole = packed.product(x, weight, FP32)
    monkeypatch.setattr(packed, "_TILE_ELEMENTS", 1)
    assert len(list(packed._tiles(N, K))) == 3
    torch.testing.assert_close(packed.product(x, weight, FP32), whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


@kinds
def test_a_row_has_the_bits_it_has_alone(kind):
    weight, x = KINDS[kind](), inputs(7)
    together = packed.product(x, weight, WEIGHTS_ONLY)
    alone = torch.cat([packed.product(row.unsqueeze(0), weight, WEIGHTS_ONLY) for row in x])
    assert torch.equal(together, alone)


def test_what_pads_a_trellis_is_no_output():
    whole, padded, x = trellis(), trellis(outputs=N - 40), inputs(3)
    for n in (WEIGHTS_ONLY, FP32):
        assert torch.equal(packed.product(x, padded, n), packed.product(x, whole, n)[:, : N - 40])
    assert torch.equal(packed.dense(padded), packed.dense(whole)[: N - 40])
    assert packed.nbytes(padded) == packed.nbytes(whole)


def test_the_rotated_input_of_a_trellis_is_rounded_as_it_is_made_for():
    weight, x = trellis(), inputs(2)
    native, exact = (packed.product(x, weight, n) for n in (WEIGHTS_ONLY, FP32))
    assert not torch.equal(native, exact)
    assert torch.equal(native[0], exl3.linear(x[:1], weight.matrix)[0])


@pytest.mark.parametrize("kind", ["fp8", "fp8 cut inside a block", "mxfp4", "exl3"])
def test_bytes_are_told_before_they_are_held(kind):
    weight = KINDS[kind]()
    told = packed.stored_bytes(kind.split()[0], (N, K), getattr(weight, "skipped", (0, 0)), bits=5)
    assert told == packed.nbytes(weight) < 2 * N * K
