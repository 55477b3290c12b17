"""Rounding against plain enumeration of each format's values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import quantise
from kernels.formats import E2M1_PAIRS, e8m0, fp4_rows, fp8_blocks, fp8_rows

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def nearest(x, values):
    """Nearest of `values`, ties to the even place, sign kept: slow and plain."""
    found = []
    for v in x.abs().flatten().tolist():
        distance = (values.double() - v).abs()
        ties = (distance == distance.min()).nonzero().flatten().tolist()
        found.append(min(ties, key=lambda i: i % 2))
    return values[found].view(x.shape) * x.sign()


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_ceil_power_of_two(value):
    x = torch.tensor([value])
    power = quantise.ceil_power_of_two(x)
    mantissa, _ = torch.frexp(power)
    assert mantissa == 0.5
    assert power >= x > power / 2


def test_e2m1_rounds_to_nearest_even():
    midpoints = (E2M1[1:] + E2M1[:-1]) / 2
    x = torch.cat([torch.linspace(-6, 6, 2001), midpoints, -midpoints, E2M1])
    assert torch.equal(quantise.round_e2m1(x), nearest(x, E2M1))


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_fp8_activations(size):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * size
    for got, group in zip(quantise.fp8_ue8m0(x).view(-1, 32), x.view(-1, 32), strict=True):
        amax = max(group.abs().max().item(), 1e-4)
        scale = 2.0 ** torch.tensor(amax / 448).log2().ceil()
        assert torch.equal(got, nearest(group / scale, E4M3) * scale)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 100.0])
def test_fp4_with_e4m3_scales(size):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * size
    for got, group in zip(quantise.fp4_e4m3(x).view(-1, 16), x.view(-1, 16), strict=True):
        amax = torch.tensor([max(group.abs().max().item(), 6 * 2.0**-9)])
        scale = nearest(amax / 6, E4M3)
        assert torch.equal(got, nearest((group / scale).clamp(-6, 6), E2M1) * scale)


def test_fp4_with_power_of_two_scales():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for got, group in zip(quantise.fp4_ue8m0(x).view(-1, 32), x.view(-1, 32), strict=True):
        scale = 2.0 ** (group.abs().max() / 6).log2().ceil()
        assert torch.equal(got, nearest(group / scale, E2M1) * scale)


@pytest.mark.parametrize("form", [quantise.fp8_ue8m0, quantise.fp4_ue8m0, quantise.fp4_e4m3])
def test_rounded_rows_fit_bf16_and_stay(form):
    x = form(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(quantise.bf16(x), x)
    assert torch.equal(form(x), x)
    assert not form(torch.zeros(1, 32)).any()


def test_every_byte_of_packed_fp4():
    signed = torch.cat([E2M1, -E2M1])
    for byte in range(256):
        assert E2M1_PAIRS[byte].real == signed[byte & 15], "the low nibble is the even weight"
        assert E2M1_PAIRS[byte].imag == signed[byte >> 4]


def test_e8m0():
    scale = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    assert e8m0(scale).tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]


def test_fp4_rows():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(120, 134, (3, 2), dtype=torch.uint8, generator=generator)
    signed = torch.cat([E2M1, -E2M1])
    for row in range(3):
        for column in range(64):
            nibble = (codes[row, column // 2].item() >> (4 * (column % 2))) & 15
            value = signed[nibble] * 2.0 ** (scale[row, column // 32].item() - 127)
            assert fp4_rows(codes, scale)[row, column] == value


def test_fp8_blocks_that_are_not_whole():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 40, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 134, (3, 2), dtype=torch.uint8, generator=generator)
    got = fp8_blocks(weight, scale)
    for row, column in ((0, 0), (31, 31), (32, 32), (69, 39), (64, 0)):
        assert got[row, column] == weight[row, column].float() * 2.0 ** (scale[row // 32, column // 32].item() - 127)


def test_fp8_rows():
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [126, 127]], dtype=torch.uint8)
    assert fp8_rows(weight, scale)[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [0.5, 0.5, 1, 1]]
